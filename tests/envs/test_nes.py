"""The emulator of nes.cpp plays what nes-py plays: made-up cartridges, frame by frame. Mario's levels are in test_mario."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.core.native import find_compiler
from redline.envs import nes

# nes-py 8 is a library of C functions; 9, for Python 3.13, is another emulator.
needs_compiler = pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
known = pytest.mark.skipif(
    importlib.util.find_spec("nes_py") is None or importlib.util.find_spec("nes_py._native") is not None,
    reason="nes-py 8 is not installed",
)
PROGRAM = 0x8000  # where the two banks of a cartridge begin
SUBROUTINE, BREAK = 0xFF02, 0xFF10  # what JSR and BRK call
FRAME = 0xC000  # what a vertical blank calls
POINTER = 0xFEFF  # its second byte is read from the beginning of the page
IMPLIED = (0x08, 0x18, 0x28, 0x38, 0x48, 0x58, 0x68, 0x78, 0x88, 0x8A, 0x98, 0xA8, 0xAA, 0xB8, 0xBA, 0xC8, 0xCA, 0xD8)
IMPLIED += (0xE8, 0xEA, 0xF8, 0x0A, 0x2A, 0x4A, 0x6A)
# A game may ask for colours that there are not: nes-py then shows what follows its table in memory, often zeros.
COLOURS = {int(number, 16) for number in re.findall(r"\b0x([0-9A-F]{6})\b", nes._SOURCE.read_text())} - {0}
STACK = (0x08, 0x28, 0x48, 0x68)
IMMEDIATE = (0x09, 0x29, 0x49, 0x69, 0xA9, 0xC9, 0xE9, 0xA2, 0xA0, 0xC0, 0xE0)
ZERO_PAGE = (0x05, 0x25, 0x45, 0x65, 0x85, 0xA5, 0xC5, 0xE5, 0x06, 0x26, 0x46, 0x66, 0x86, 0xA6, 0xC6, 0xE6, 0x24, 0x84)
ZERO_PAGE += (0xA4, 0xC4, 0xE4, 0x15, 0x35, 0x55, 0x75, 0x95, 0xB5, 0xD5, 0xF5, 0x16, 0x36, 0x56, 0x76, 0x96, 0xB6)
ZERO_PAGE += (0xD6, 0xF6, 0x94, 0xB4)
INDIRECT = (0x01, 0x21, 0x41, 0x61, 0xA1, 0xC1, 0xE1, 0x11, 0x31, 0x51, 0x71, 0xB1, 0xD1, 0xF1)  # reads
READ = (0x0D, 0x2D, 0x4D, 0x6D, 0xAD, 0xCD, 0xED, 0xAE, 0xAC, 0xCC, 0xEC, 0x2C)
READ += (0x1D, 0x3D, 0x5D, 0x7D, 0xBD, 0xDD, 0xFD, 0x19, 0x39, 0x59, 0x79, 0xB9, 0xD9, 0xF9, 0xBE, 0xBC)
WRITE = (0x8D, 0x8E, 0x8C, 0x9D, 0x99, 0x0E, 0x2E, 0x4E, 0x6E, 0xCE, 0xEE, 0x1E, 0x3E, 0x5E, 0x7E, 0xDE, 0xFE)
STORE = (0x8D, 0x8E, 0x8C)
BRANCHES = (0x10, 0x30, 0x50, 0x70, 0x90, 0xB0, 0xD0, 0xF0)


def instruction(rng: random.Random, stack: bool = True) -> list[int]:
    """Return any instruction that neither leaves the program nor copies sprites from where there is no memory.

    stack: it may push and pull.
    """
    kind = rng.choices(
        ("implied", "immediate", "zero page", "indirect", "read", "write", "register", "branch", "sprites", "jump"),
        (10, 10, 10, 4, 8, 6, 10, 4, 1, 2),
    )[0]
    if kind == "implied":
        return [rng.choice([code for code in IMPLIED if stack or code not in STACK])]
    if kind == "immediate":
        return [rng.choice(IMMEDIATE), rng.randrange(256)]
    if kind in ("zero page", "indirect"):
        return [rng.choice(ZERO_PAGE if kind == "zero page" else INDIRECT), rng.randrange(256)]
    if kind == "read":
        address = rng.choice(
            (rng.randrange(0x700), rng.randrange(0x2000, 0x2008), rng.randrange(PROGRAM, 0xFF00), 0x4016)
        )
        return [rng.choice(READ), address & 255, address >> 8]
    if kind == "write":
        address = rng.randrange(0x200, 0x700)
        return [rng.choice(WRITE), address & 255, address >> 8]
    if kind == "register":  # of the picture, or the pads
        address = rng.choice((*range(0x2000, 0x2008), 0x2008 + rng.randrange(0x1FF8), 0x4016))
        return [0xA9, rng.randrange(256), rng.choice(STORE), address & 255, address >> 8]
    if kind == "branch":  # over one byte without an effect
        return [rng.choice(BRANCHES), 1, 0xEA]
    if kind == "sprites":
        return [0xA9, rng.randrange(0x20), 0x8D, 0x14, 0x40]
    if not stack:
        return [0xEA]
    return rng.choice(([0x20, SUBROUTINE & 255, SUBROUTINE >> 8], [0xBA, 0x9A], [0x00, 0xEA]))


def cartridge(seed: int, waits: bool) -> bytes:
    """Return a made-up game with any patterns. It ends each turn where it began, or, if it `waits`, after the first."""
    rng = random.Random(seed)
    # Two reads fill the buffer of the picture unit, which nes-py leaves as it finds it. 0x2001 decides what is shown.
    start = [0xA9, 0x1E, 0x8D, 0x01, 0x20, 0x8D, 0x06, 0x20, 0x8D, 0x06, 0x20, 0xAD, 0x07, 0x20, 0xAD, 0x07, 0x20]
    for address, count in ((0x2000, 200), (0x23C0, 64), (0x2800, 100), (0x3F00, 32)):  # tiles, colours
        start += [0xA9, address >> 8, 0x8D, 0x06, 0x20, 0xA9, address & 255, 0x8D, 0x06, 0x20]
        start += [byte for _ in range(count) for byte in (0xA9, rng.randrange(64), 0x8D, 0x07, 0x20)]
    start += [0xA9, 0x90, 0x8D, 0x00, 0x20]  # interrupts from now on
    body: list[int] = []
    while len(body) < 3000:
        body += instruction(rng)
    body += [0xA9, 0x90, 0x8D, 0x00, 0x20]
    turn = PROGRAM + len(start) + (len(body) if waits else 0)
    program = bytearray(rng.randbytes(0x8000))
    jump = [0x4C, turn & 255, turn >> 8] if waits else [0x6C, POINTER & 255, POINTER >> 8]

    def put(address: int, *values: int) -> None:
        program[address - PROGRAM : address - PROGRAM + len(values)] = bytes(values)

    put(PROGRAM, *start, *body, *jump)
    put(POINTER, turn & 255)
    put(POINTER & 0xFF00, turn >> 8)
    put(SUBROUTINE, 0xC8, 0x60)
    put(BREAK, 0xC8, 0x40)
    frame = [0x48] + [byte for _ in range(1500) for byte in instruction(rng, stack=False)]
    frame += [0xA9, 0x90 | seed & 0x2F, 0x8D, 0x00, 0x20, 0x68, 0x40]  # interrupts go on
    put(FRAME, *frame)
    for vector, target in ((0xFFFA, FRAME), (0xFFFC, PROGRAM), (0xFFFE, BREAK)):
        put(vector, target & 255, target >> 8)
    header = bytes([0x4E, 0x45, 0x53, 0x1A, 2, 1, seed & 1, 0, *[0] * 8])
    return header + bytes(program) + rng.randbytes(0x2000)


class Known:
    """A console of nes-py's library."""

    def __init__(self, path: str) -> None:
        from nes_py import nes_env

        self.library: Any = nes_env._LIB
        self.pointer = self.library.Initialize(path)
        views = ((self.library.Screen, 4 * 240 * 256), (self.library.Memory, 2048), (self.library.Controller, 1))
        self.screen, self.ram, self.pad = (
            np.frombuffer((ctypes.c_ubyte * size).from_address(find(self.pointer, *[0] * (size == 1))), np.uint8)
            for find, size in views
        )
        self.library.Reset(self.pointer)

    def step(self, buttons: int) -> None:
        self.pad[:] = buttons
        self.library.Step(self.pointer)

    def backup(self) -> None:
        self.library.Backup(self.pointer)

    def restore(self) -> None:
        self.library.Restore(self.pointer)


@known
@needs_compiler
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_made_up_games_play_as_in_nes_py(seed: int, waits: bool, tmp_path: Path) -> None:
    path = tmp_path / "game.nes"
    path.write_bytes(cartridge(seed, waits))
    ours, theirs, rng = nes.Console(str(path)), Known(str(path)), random.Random(seed)
    seen = set()
    for frame in range(40):
        buttons = rng.randrange(256)
        for console in (ours, theirs):
            if frame == 10:
                console.backup()
            if frame == 20:
                console.restore()
            console.step(buttons)
        assert bytes(ours.ram) == theirs.ram.tobytes(), f"memory, frame {frame}"
        expected = theirs.screen.view(np.uint32).reshape(240, 256)
        shown = ours.screen.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
        if frame >= 2:  # nes-py's screen is what it finds in memory until it is drawn
            assert ((shown == expected) | ~np.isin(expected, list(COLOURS))).all(), f"screen, frame {frame}"
        seen.add((shown.tobytes(), bytes(ours.ram)))
    assert len(seen) > 20, "something happens"
    ours.close()


@needs_compiler
@pytest.mark.parametrize("patterns", ["read-only", "writable"])
@pytest.mark.parametrize("seed", range(6))
def test_frames_that_were_not_drawn_can_be_looked_at(seed: int, patterns: str, tmp_path: Path) -> None:
    path, game = tmp_path / "game.nes", cartridge(seed, seed % 2 == 0)
    path.write_bytes(game if patterns == "read-only" else game[:5] + bytes([0]) + game[6:-0x2000])
    drawn, hidden, rng = nes.Console(str(path)), nes.Console(str(path)), random.Random(seed)
    looks = 0
    for frame in range(80):
        buttons, cell = rng.randrange(256), rng.randrange(0x800)
        for console in (drawn, hidden):
            if frame % 8 == 3:
                console.backup()
            if frame % 20 == 19:
                console.restore()
            if frame % 40 == 25:
                console.reset()
            if frame % 10 == 0:
                console.ram[cell] = buttons
        drawn.step(buttons)
        hidden.step(buttons, draw=rng.random() < 0.2)
        assert bytes(drawn.ram) == bytes(hidden.ram), f"memory, frame {frame}"
        if rng.random() < 0.4:
            looks += 1
            assert np.array_equal(drawn.screen, hidden.screen), f"screen, frame {frame}"
            assert bytes(drawn.ram) == bytes(hidden.ram), f"memory after looking, frame {frame}"
    assert looks > 20


@needs_compiler
def test_what_is_no_cartridge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "game.nes"
    game = cartridge(0, True)
    with_mapper, with_trainer = (game[:6] + bytes([flags]) + game[7:] for flags in (0x10, 4))
    for spoiled in (b"", game[:100], b"PES" + game[3:], with_mapper, with_trainer):
        path.write_bytes(spoiled)
        with pytest.raises(OSError, match=r"game\.nes is not a cartridge without a mapper"):
            nes.Console(str(path))
    with pytest.raises(OSError, match="cannot be read"):
        nes.Console(str(tmp_path / "none.nes"))


@needs_compiler
def test_a_console_is_closed_for_good(tmp_path: Path) -> None:
    path = tmp_path / "jeu à voir.nes"
    path.write_bytes(cartridge(0, True))
    console = nes.Console(str(path))
    console.step(0)
    console.close()
    console.close()
    with pytest.raises(TypeError):
        console.step(0)
    assert console.screen is None

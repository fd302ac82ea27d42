"""Blocks of a replay ring in a memory-mapped file, for a ring larger than the memory.

    header   magic, version, length, sha256, then geometry and schema as JSON, blanks to the end of the page
    table    16 bytes a block: generation, CRC of the block, CRC of the entry; zeros: nothing valid
    data     the blocks, each from the start of a page

A block is declared empty (`begin`), overwritten, made durable and only then declared valid (`commit`): whatever happens
in between, the file holds whole blocks and empty ones.

Only data goes through the mapping; header and table are read and written, where a fault is an error. A mapped file that
someone else truncates is a SIGBUS at the next touch, which nothing can catch. So the size is checked before the file is
mapped, its space is allocated up front, it is locked, and `check` finds a truncation that happened nevertheless.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.core.errors import StorageError
from redline.core.faults import reach
from redline.core.fsync import sync_folder

FORMAT_VERSION = 1

_MAGIC = b"RLBLOCKS"
_PAGE = 4096  # of the file; the machine's may be larger
_HEAD = struct.Struct("<8sII32s")  # magic, version, bytes of the header, sha256 of the header with zeros in this place
_ENTRY = struct.Struct("<QII")
_MAX_HEADER = 1 << 20
_PIECE = 1 << 20  # bytes a thread reads at once


class _BlockLayout:
    """Where everything is in a file of these settings, and the header it begins with."""

    def __init__(self, blocks: int, block_bytes: int, schema: Mapping[str, Any]) -> None:
        if blocks < 1 or block_bytes < 1:
            raise ValueError(f"{blocks} blocks of {block_bytes} bytes; expected at least 1 of each")
        self.blocks, self.block_bytes = blocks, block_bytes
        text = _canonical({"blocks": blocks, "block_bytes": block_bytes, "schema": dict(schema)}).encode()
        self.table = _to_page(_HEAD.size + len(text))  # where the table starts
        if self.table > _MAX_HEADER:
            raise ValueError(f"the schema has {len(text)} bytes as JSON; expected less than {_MAX_HEADER}")
        body = text.ljust(self.table - _HEAD.size)
        self.header = _HEAD.pack(_MAGIC, FORMAT_VERSION, self.table, _digest(FORMAT_VERSION, self.table, body)) + body
        self.data = _to_page(self.table + blocks * _ENTRY.size)  # where the first block starts
        self.stride = _to_page(block_bytes)
        self.size = self.data + blocks * self.stride


class BlockFile:
    """Blocks of bytes in a memory-mapped file, each with the generation it was last written in. Held by one process.

    `data` is the mapping itself: what is written to it is in the file, and what is read may come from the disk. A
    tensor kept beyond `close` keeps the mapping, but no longer the lock.
    """

    def __init__(self, path: Path, fd: int, layout: _BlockLayout, generations: list[int], damaged: list[int]) -> None:
        """Use `create` or `open`. `fd` is open and locked; `close` closes it."""
        self.path = path
        self.generations = generations  # of each block what was last committed, 0: nothing valid in it
        self.damaged = damaged  # blocks found damaged when it was opened
        self._layout = layout
        # A mapping keeps a descriptor until its last tensor is gone, and in forked workers too. It gets one of another
        # opening of the file, because a lock lasts as long as any descriptor of the opening that took it.
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(other, layout.size)
        finally:
            os.close(other)
        # The tensor holds the mapping, which is never closed (tensors would point to nothing): it ends with them.
        pages = torch.frombuffer(mapping, dtype=torch.uint8, offset=layout.data).view(layout.blocks, layout.stride)
        self.data: Tensor = pages[:, : layout.block_bytes]  # (blocks, block_bytes) uint8
        self._fd = fd  # -1: closed

    @classmethod
    def create(cls, path: Path | str, *, blocks: int, block_bytes: int, schema: Mapping[str, Any]) -> BlockFile:
        """A new file with nothing valid in it and its space allocated. Under `path` it appears whole or not at all."""
        path, layout = Path(path).absolute(), _BlockLayout(blocks, block_bytes, schema)
        temporary = path.with_name(f".tmp-{path.name}")  # always this one: what a crash left of it is used again
        with _told(path, "created"):
            fd = _acquire(temporary, os.O_CREAT)
            try:
                if os.path.lexists(path):
                    raise StorageError(f"The replay file {path} exists: open it, delete it, or choose another folder.")
                os.ftruncate(fd, 0)
                _allocate(path, fd, layout.size)
                os.pwrite(fd, layout.header, 0)
                os.fsync(fd)
                reach("blocks.create")
                file = cls(path, fd, layout, [0] * blocks, [])
                os.rename(temporary, path)
                sync_folder(path.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                os.close(fd)
                raise
        _held.add(file)
        return file

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        blocks: int,
        block_bytes: int,
        schema: Mapping[str, Any],
        verify: bool = True,
        progress: Callable[[int], None] = lambda _: None,
    ) -> BlockFile:
        """The file as it was left. A damaged block becomes an empty one, on disk too, and is listed in `damaged`.

        With `verify` all valid data is read and compared; `progress` is told how many of the blocks are done.
        """
        path, layout = Path(path).absolute(), _BlockLayout(blocks, block_bytes, schema)
        with _told(path, "opened"):
            fd = _acquire(path)
            try:
                _recognise(path, fd, layout)
                generations = _generations(fd, layout, verify, progress)
                damaged = [block for block, generation in enumerate(generations) if generation < 0]
                for block in damaged:
                    os.pwrite(fd, bytes(_ENTRY.size), layout.table + block * _ENTRY.size)
                    generations[block] = 0
                os.fdatasync(fd)
                if os.fstat(fd).st_blocks * 512 < layout.size:  # a copy with holes: on a full disk each is a SIGBUS
                    _allocate(path, fd, layout.size)
                file = cls(path, fd, layout, generations, damaged)
            except BaseException:
                os.close(fd)
                raise
        _held.add(file)
        return file

    def begin(self, block: int) -> None:
        """Declare a block empty, durably: to be called before the first of its bytes is overwritten."""
        self._may_write(block)
        reach("blocks.begin")
        self._write_entry(block, bytes(_ENTRY.size))
        self.generations[block] = 0

    def commit(self, block: int, generation: int) -> None:
        """Make a block durable and declare it valid. Nobody may write to it meanwhile."""
        if generation < 1:
            raise ValueError(f"generation is {generation}; expected 1 or more")
        self._may_write(block)  # before the mapping is touched
        reach("blocks.data")
        crc = zlib.crc32(self.data[block].numpy().data)
        with _told(self.path, "written"):
            os.fdatasync(self._fd)  # not mmap.flush, which would keep all other threads waiting
        reach("blocks.entry")
        self._write_entry(block, _ENTRY.pack(generation, crc, _entry_crc(block, generation, crc)))
        self.generations[block] = generation

    def check(self) -> None:
        """Raise StorageError unless the file is still there, in full size. Cheap: to be called at each checkpoint."""
        if self._fd < 0:
            raise ValueError(f"the replay file {self.path} is closed")
        with _told(self.path, "found again"):
            held, named = os.fstat(self._fd), os.stat(self.path)
        if not os.path.samestat(held, named):
            raise StorageError(f"The replay file {self.path} was replaced while in use: start again with a new one.")
        _check_size(self.path, held.st_size, self._layout)

    def close(self) -> None:
        """Let go of the file; calling again does nothing."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1
            self.data = torch.empty(0, self._layout.block_bytes, dtype=torch.uint8)
            _held.discard(self)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _may_write(self, block: int) -> None:
        if not 0 <= block < self._layout.blocks:
            raise IndexError(f"block is {block}; expected 0 to {self._layout.blocks - 1}")
        self.check()

    def _write_entry(self, block: int, entry: bytes) -> None:
        with _told(self.path, "written"):
            os.pwrite(self._fd, entry, self._layout.table + block * _ENTRY.size)
            os.fdatasync(self._fd)


def _to_page(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(version: int, size: int, body: bytes) -> bytes:
    return hashlib.sha256(_HEAD.pack(_MAGIC, version, size, bytes(32)) + body).digest()


def _entry_crc(block: int, generation: int, crc: int) -> int:
    return zlib.crc32(struct.pack("<QQI", block, generation, crc))  # with the block: an entry counts only in its place


@contextmanager
def _told(path: Path, done: str) -> Iterator[None]:
    """The system's errors as a sentence for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"The replay file {path} cannot be {done}: {reason[:1].lower() + reason[1:]}; check its folder and disk, or "
            "choose another folder."
        ) from error


def _acquire(path: Path, flags: int = 0) -> int:
    """A descriptor that holds the kernel's lock on the file: it ends with the process, however that ends."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StorageError(
            f"The replay file {path} is in use: wait for the run that holds it, stop it, or choose another folder."
        ) from None
    except OSError as error:  # on a file system without locks the run folder's has told the user
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            os.close(fd)
            raise
    return fd


def _allocate(path: Path, fd: int, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    missing = size - os.fstat(fd).st_blocks * 512
    try:
        if missing > free:  # trying would fill the disk for everyone before it fails
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise StorageError(
            f"The replay file {path} needs {size:,} bytes and {free:,} are free ({os.strerror(error.errno).lower()}): "
            "take a smaller replay capacity, free some space, or choose another folder."
        ) from error


def _recognise(path: Path, fd: int, layout: _BlockLayout) -> None:
    """Raise StorageError, with the reason, unless the file is one of this layout and of full size."""
    if os.pread(fd, len(layout.header), 0) == layout.header:
        return _check_size(path, os.fstat(fd).st_size, layout)
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise StorageError(f"{path} is not a replay file: move it away, or choose another folder.")
    _, version, size, digest = _HEAD.unpack(head)
    if version > FORMAT_VERSION:
        raise StorageError(
            f"The replay file {path} has format version {version}, this is for {FORMAT_VERSION}: upgrade redline, delete "
            "the file, or choose another folder."
        )
    body = os.pread(fd, min(max(size, _HEAD.size), _MAX_HEADER) - _HEAD.size, _HEAD.size)
    if _digest(version, size, body) != digest:
        raise StorageError(f"The header of the replay file {path} is damaged: delete it, or choose another folder.")
    found, wanted = _flat(json.loads(body)), _flat(json.loads(layout.header[_HEAD.size :]))
    differing = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    listed = [f"{name} is {found.get(name, 'not')} there and {wanted.get(name, 'not')} here" for name in differing[:3]]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise StorageError(
        f"The replay file {path} is of other settings ({'; '.join(listed)}{more}): use the same ones, delete the file, or "
        "choose another folder."
    )


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Every leaf of nested objects as JSON, by its dotted name."""
    if not isinstance(value, dict) or not value:
        return {name: _canonical(value)}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{name}.{key}" if name else key).items()}


def _check_size(path: Path, size: int, layout: _BlockLayout) -> None:
    if size != layout.size:
        raise StorageError(
            f"The replay file {path} has {size:,} bytes and should have {layout.size:,}: restore it, delete it, or choose "
            "another folder."
        )


def _generations(fd: int, layout: _BlockLayout, verify: bool, progress: Callable[[int], None]) -> list[int]:
    """The generation of each block, -1 where its entry or its data is not what was written."""

    def generation_of(item: tuple[int, tuple[int, int, int]]) -> int:
        block, (generation, crc, check) = item
        if generation == crc == check == 0:
            return 0
        if check != _entry_crc(block, generation, crc):
            return -1
        place = layout.data + block * layout.stride
        return generation if not verify or _crc(fd, place, layout.block_bytes) == crc else -1

    table = os.pread(fd, layout.blocks * _ENTRY.size, layout.table)
    found: list[int] = []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for generation in pool.map(generation_of, enumerate(_ENTRY.iter_unpack(table))):
            found.append(generation)
            progress(len(found))
    return found


def _crc(fd: int, start: int, size: int) -> int:
    """CRC of a part of the file. Read, not mapped: a disk that fails is then an error."""
    piece = memoryview(bytearray(min(size, _PIECE)))
    crc = done = 0
    while done < size:
        count = os.preadv(fd, [piece[: size - done]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "It became shorter")
        crc = zlib.crc32(piece[:count], crc)
        done += count
    return crc


_held: weakref.WeakSet[BlockFile] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked worker would keep the lock after the trainer was killed, so it lets go of its copy.
    for file in list(_held):
        os.close(file._fd)
        file._fd = -1
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)

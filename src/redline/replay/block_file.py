"""Block files: checksummed blocks in a memory-mapped file, for replay memories larger than the host's memory.

    header   magic, version, length, sha256; then geometry and schema as JSON, padded with spaces to the end of the page
    table    16 bytes per block: generation, CRC of the block, CRC of the entry; zeros: the block is empty
    data     the blocks, each aligned to a page

A block is declared empty (`begin`), overwritten, made durable, and only then declared valid (`commit`). Whenever the
process or the machine stops, every block in the file is either complete or empty.

Only data goes through the mapping. Header and table are read and written by system calls, whose failures can be handled,
whereas accessing a mapped file that another process has truncated raises SIGBUS, which cannot be caught. Therefore the size
is checked before the file is mapped, its space is allocated in advance, the file is locked, and `check` detects
truncations that happen nevertheless.
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
_PAGE = 4096  # bytes, of the file; the machine's pages may be larger
_HEAD = struct.Struct("<8sII32s")  # magic, version, bytes of the header, sha256 of the header with zeros here
_ENTRY = struct.Struct("<QII")
_MAX_HEADER = 1 << 20
_PIECE = 1 << 20  # bytes that a thread reads at a time


class _BlockLayout:
    """Offsets, sizes and header of a file with these settings."""

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
    """Blocks of bytes in a memory-mapped file, each with the generation of its last commit. The file is locked while open.

    `data` is the mapping itself: writing to it changes the file, and reading may access the disk. A tensor kept after
    `close` keeps the mapping, but not the lock.
    """

    def __init__(self, path: Path, fd: int, layout: _BlockLayout, generations: list[int], damaged: list[int]) -> None:
        """Called by `create` and `open`. `fd` is open and locked; `close` closes it."""
        self.path = path
        self.generations = generations  # last committed in each block; 0: the block is empty
        self.damaged = damaged  # blocks that were damaged when the file was opened
        self._layout = layout
        # A mapping keeps its descriptor until the last tensor is freed, also in forked workers, and a lock lasts as long as
        # any descriptor of the same open file description. Hence the file is opened separately for the mapping.
        mapped_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(mapped_fd, layout.size)
        finally:
            os.close(mapped_fd)
        # The mapping is never closed explicitly, since tensors would point to unmapped memory: it ends with the last tensor.
        pages = torch.frombuffer(mapping, dtype=torch.uint8, offset=layout.data).view(layout.blocks, layout.stride)
        self.data: Tensor = pages[:, : layout.block_bytes]  # (blocks, block_bytes) uint8
        self._fd = fd  # -1: closed

    @classmethod
    def create(cls, path: Path | str, *, blocks: int, block_bytes: int, schema: Mapping[str, Any]) -> BlockFile:
        """Create a file of empty blocks, with its space allocated, atomically at `path`, and open it."""
        path, layout = Path(path).absolute(), _BlockLayout(blocks, block_bytes, schema)
        temporary = path.with_name(f".tmp-{path.name}")  # always the same name, so that a leftover of a crash is reused
        with _explain(path, "created"):
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
        _open_files.add(file)
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
        """Open an existing file. Damaged blocks are emptied, also on disk, and listed in `damaged`.

        verify: read all valid blocks and compare their checksums. progress: called with the number of blocks checked.
        """
        path, layout = Path(path).absolute(), _BlockLayout(blocks, block_bytes, schema)
        with _explain(path, "opened"):
            fd = _acquire(path)
            try:
                _recognise(path, fd, layout)
                generations = _generations(fd, layout, verify, progress)
                damaged = [block for block, generation in enumerate(generations) if generation < 0]
                for block in damaged:
                    os.pwrite(fd, bytes(_ENTRY.size), layout.table + block * _ENTRY.size)
                    generations[block] = 0
                os.fdatasync(fd)
                if (
                    os.fstat(fd).st_blocks * 512 < layout.size
                ):  # a sparse copy: writing to one of its holes on a full disk would raise SIGBUS
                    _allocate(path, fd, layout.size)
                file = cls(path, fd, layout, generations, damaged)
            except BaseException:
                os.close(fd)
                raise
        _open_files.add(file)
        return file

    def begin(self, block: int) -> None:
        """Declare a block empty, durably. Call it before overwriting the block."""
        self._may_write(block)
        reach("blocks.begin")
        self._write_entry(block, bytes(_ENTRY.size))
        self.generations[block] = 0

    def commit(self, block: int, generation: int) -> None:
        """Make a block durable and declare it valid. No thread may write to it in the meantime."""
        if generation < 1:
            raise ValueError(f"generation is {generation}; expected 1 or more")
        self._may_write(block)  # before the mapping is touched
        reach("blocks.data")
        crc = zlib.crc32(self.data[block].numpy().data)
        with _explain(self.path, "written"):
            os.fdatasync(self._fd)  # not mmap.flush, which blocks all other threads
        reach("blocks.entry")
        self._write_entry(block, _ENTRY.pack(generation, crc, _entry_crc(block, generation, crc)))
        self.generations[block] = generation

    def check(self) -> None:
        """Raise StorageError if the file was removed, replaced or resized. Cheap enough for every checkpoint."""
        if self._fd < 0:
            raise ValueError(f"the replay file {self.path} is closed")
        with _explain(self.path, "found"):
            opened, present = os.fstat(self._fd), os.stat(self.path)
        if not os.path.samestat(opened, present):
            raise StorageError(f"The replay file {self.path} was replaced while in use: restart the run.")
        _check_size(self.path, opened.st_size, self._layout)

    def close(self) -> None:
        """Unlock and close the file; idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1
            self.data = torch.empty(0, self._layout.block_bytes, dtype=torch.uint8)
            _open_files.discard(self)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _may_write(self, block: int) -> None:
        if not 0 <= block < self._layout.blocks:
            raise IndexError(f"block is {block}; expected 0 to {self._layout.blocks - 1}")
        self.check()

    def _write_entry(self, block: int, entry: bytes) -> None:
        with _explain(self.path, "written"):
            os.pwrite(self._fd, entry, self._layout.table + block * _ENTRY.size)
            os.fdatasync(self._fd)


def _to_page(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(version: int, size: int, body: bytes) -> bytes:
    return hashlib.sha256(_HEAD.pack(_MAGIC, version, size, bytes(32)) + body).digest()


def _entry_crc(block: int, generation: int, crc: int) -> int:
    return zlib.crc32(
        struct.pack("<QQI", block, generation, crc)
    )  # includes the block number: an entry is only valid in its place


@contextmanager
def _explain(path: Path, done: str) -> Iterator[None]:
    """Convert OSError to StorageError with a message for the user. done: a past participle such as "opened"."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"The replay file {path} cannot be {done}: {reason[:1].lower() + reason[1:]}; check its folder and disk, or "
            "choose another folder."
        ) from error


def _acquire(path: Path, flags: int = 0) -> int:
    """Open the file and lock it (flock), at most until the process ends; return the descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StorageError(
            f"The replay file {path} is in use: wait for the run that uses it, stop it, or choose another folder."
        ) from None
    except OSError as error:  # a file system without locks, about which locking the run folder has already warned
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            os.close(fd)
            raise
    return fd


def _allocate(path: Path, fd: int, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    missing = size - os.fstat(fd).st_blocks * 512
    try:
        if missing > free:  # trying would fill the disk before failing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise StorageError(
            f"The replay file {path} needs {size:,} bytes and {free:,} are free ({os.strerror(error.errno).lower()}): "
            "reduce the replay capacity, free some space, or choose another folder."
        ) from error


def _recognise(path: Path, fd: int, layout: _BlockLayout) -> None:
    """Raise StorageError, with the reason, unless the file has this layout and its full size."""
    if os.pread(fd, len(layout.header), 0) == layout.header:
        _check_size(path, os.fstat(fd).st_size, layout)
        end = layout.table + layout.blocks * _ENTRY.size
        if any(os.pread(fd, layout.data - end, end)):  # the unused rest was overwritten, and perhaps entries, too
            raise StorageError(f"The table of the replay file {path} is damaged: delete it, or choose another folder.")
        return
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise StorageError(f"{path} is not a replay file: move it, or choose another folder.")
    _, version, size, digest = _HEAD.unpack(head)
    if version > FORMAT_VERSION:
        raise StorageError(
            f"The replay file {path} has format version {version}, newer than {FORMAT_VERSION}: upgrade redline, delete "
            "the file, or choose another folder."
        )
    body = os.pread(fd, min(max(size, _HEAD.size), _MAX_HEADER) - _HEAD.size, _HEAD.size)
    if _digest(version, size, body) != digest:
        raise StorageError(f"The header of the replay file {path} is damaged: delete it, or choose another folder.")
    stored, expected = _flatten(json.loads(body)), _flatten(json.loads(layout.header[_HEAD.size :]))
    differing = [name for name in sorted({*stored, *expected}) if stored.get(name) != expected.get(name)]
    listed = [
        f"{name} is {stored.get(name, 'missing')}, expected {expected.get(name, 'none')}" for name in differing[:3]
    ]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise StorageError(
        f"The replay file {path} has other settings ({'; '.join(listed)}{more}): use the same settings, delete the file, "
        "or choose another folder."
    )


def _flatten(value: Any, name: str = "") -> dict[str, str]:
    """Return the leaves of nested JSON objects, as JSON by dotted name."""
    if not isinstance(value, dict) or not value:
        return {name: _canonical(value)}
    return {k: v for key, part in value.items() for k, v in _flatten(part, f"{name}.{key}" if name else key).items()}


def _check_size(path: Path, size: int, layout: _BlockLayout) -> None:
    if size != layout.size:
        raise StorageError(
            f"The replay file {path} has {size:,} bytes, expected {layout.size:,}: restore it, delete it, or choose "
            "another folder."
        )


def _generations(fd: int, layout: _BlockLayout, verify: bool, progress: Callable[[int], None]) -> list[int]:
    """Return the generation of each block; -1 if its entry or data is damaged."""

    def generation_of(item: tuple[int, tuple[int, int, int]]) -> int:
        block, (generation, crc, check) = item
        if generation == crc == check == 0:
            return 0
        if check != _entry_crc(block, generation, crc):
            return -1
        offset = layout.data + block * layout.stride
        return generation if not verify or _crc(fd, offset, layout.block_bytes) == crc else -1

    table = os.pread(fd, layout.blocks * _ENTRY.size, layout.table)
    generations: list[int] = []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for generation in pool.map(generation_of, enumerate(_ENTRY.iter_unpack(table))):
            generations.append(generation)
            progress(len(generations))
    return generations


def _crc(fd: int, start: int, size: int) -> int:
    """Return the CRC-32 of `size` bytes from `start` on, read by system calls so that a failing disk raises an error."""
    piece = memoryview(bytearray(min(size, _PIECE)))
    crc = done = 0
    while done < size:
        count = os.preadv(fd, [piece[: size - done]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "The file was truncated")
        crc = zlib.crc32(piece[:count], crc)
        done += count
    return crc


_open_files: weakref.WeakSet[BlockFile] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked worker would keep the lock after the trainer is killed, so it closes its copy of the descriptor.
    for file in list(_open_files):
        os.close(file._fd)
        file._fd = -1
    _open_files.clear()


os.register_at_fork(after_in_child=_close_in_child)

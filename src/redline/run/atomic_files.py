"""Durable, verified files: on disk when a writer returns, and hashed on every write and read.

Tensors are stored in the safetensors format, and the safetensors library can read these files. It is not used here: it loads a
flipped byte without an error, some versions of its writer block other threads and report a full disk as an unrelated error, and
its reader maps the file into memory, so that a truncated file causes a SIGBUS, which cannot be caught.

    8 bytes: header length n | n bytes of JSON: name -> dtype, shape, data_offsets; blanks up to a multiple of 8 | data
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch
from torch import Tensor

from redline.core.errors import StorageError
from redline.run.run_folder import reason

_NAME_OF = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPE_OF = {name: dtype for dtype, name in _NAME_OF.items()}
DTYPES = frozenset(_NAME_OF)
MAX_HEADER = 16 << 20  # bytes; the header of 100,000 tensors has about ten million
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_CHUNK = 4 << 20  # bytes; small enough that the hash reads from the CPU cache
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO)


class Damaged(Exception):
    """A file differs from the one written; the message names the file and the difference."""


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Create `path` with `data`, durable on return, and return its manifest entry."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], half_way: Callable[[], object]) -> dict[str, Any]:
    """Create `path` with contiguous CPU `tensors`, durable on return, and return its manifest entry.

    `half_way` is called once, after the header is written and before the data.
    """
    # Wide elements first, as in the safetensors library, so that every tensor is aligned in the file.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAME_OF[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        raise ValueError(f"{path.name} has a header of {len(header)} bytes; expected at most {MAX_HEADER}")
    head = struct.pack("<Q", len(header)) + header
    digest = hashlib.sha256(head)
    with open(path, "xb") as file:
        file.write(head)
        file.flush()
        half_way()
        for _, tensor in ordered:
            view = raw(tensor)
            for start in range(0, len(view), _CHUNK):
                piece = view[start : start + _CHUNK]
                file.write(piece)
                digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(head) + end, "sha256": digest.hexdigest()}


def replace(path: Path, data: bytes) -> None:
    """Write `path` atomically: a reader sees the old content or the new content, never a mixture."""
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        write_bytes(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Delete a file or folder as far as possible; leftovers have a name no reader uses and are removed at the next start."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def read_bytes(path: Path, entry: Mapping[str, Any] | None, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes, verified against its manifest entry if given."""
    with _open(path) as file:
        size = _size(file, path, entry)
        if size > limit:
            raise Damaged(f"{path.name} has {size} bytes, more than the {limit} such a file can have")
        data = _read(file, size, path)
    if entry is not None and hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Damaged(f"the sha256 digest of {path.name} differs from the manifest's")
    return data


def read_tensors(path: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU in separate memory, verified against the file's manifest entry."""
    digest = hashlib.sha256()
    tensors: dict[str, Tensor] = {}
    with _open(path) as file:
        size = _size(file, path, entry)
        if size > _MEMORY:  # a sparse file of a few blocks can claim any size
            raise StorageError(f"{path} has {size} bytes, more than the memory of this machine ({_MEMORY} bytes).")
        first = _read(file, 8, path)
        length = struct.unpack("<Q", first)[0]
        if length > min(MAX_HEADER, size - 8):
            raise Damaged(f"{path.name} announces a header of {length} bytes in a file of {size}")
        header = _read(file, length, path)
        digest.update(first + header)
        for name, dtype, shape in _layout(path.name, header, size - 8 - length):
            try:
                tensor = torch.empty(shape, dtype=dtype)
            except RuntimeError as error:  # running out of memory does not mean that the file is damaged
                raise StorageError(
                    f"'{name}' of {path} with shape {shape} does not fit in this machine's memory: free some, or use a "
                    "machine that has more."
                ) from error
            view = raw(tensor)
            for start in range(0, len(view), _CHUNK):
                piece = view[start : start + _CHUNK]
                if _fill(file, piece, path) != len(piece):
                    raise Damaged(f"{path.name} ended early")
                digest.update(piece)
            tensors[name] = tensor
    if digest.hexdigest() != entry["sha256"]:
        raise Damaged(f"the sha256 digest of {path.name} differs from the manifest's")
    return tensors


def verify(path: Path, entry: Mapping[str, Any]) -> None:
    """Read a whole file and raise Damaged if it differs from its manifest entry."""
    digest = hashlib.sha256()
    with _open(path) as file:
        left = _size(file, path, entry)
        while left:
            piece = _read(file, min(_CHUNK, left), path)
            digest.update(piece)
            left -= len(piece)
    if digest.hexdigest() != entry["sha256"]:
        raise Damaged(f"the sha256 digest of {path.name} differs from the manifest's")


def _layout(file_name: str, header: bytes, data_bytes: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return name, dtype and shape of each tensor in file order. Every size is checked before anything is allocated."""
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the header of {file_name} is not JSON") from error
    if not isinstance(entries, dict):
        raise Damaged(f"the header of {file_name} is not an object")
    entries.pop("__metadata__", None)
    layout: list[tuple[list[int], str, torch.dtype, list[int]]] = []
    for name, entry in entries.items():
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _DTYPE_OF or not _are_sizes(shape) or not _are_sizes(offsets):
            raise Damaged(f"the header of {file_name} describes '{name}' wrongly")
        layout.append((offsets, name, _DTYPE_OF[dtype], shape))
    layout.sort(key=lambda item: (item[0], item[1]))
    end = 0
    for offsets, name, kind, shape in layout:
        if offsets != [end, end + math.prod(shape) * kind.itemsize]:
            raise Damaged(f"the header of {file_name} places '{name}' at {offsets}, which is not its place")
        end = offsets[1]
    if end != data_bytes:
        raise Damaged(f"{file_name} has {data_bytes} bytes of data, its header says {end}")
    return [(name, kind, shape) for _, name, kind, shape in layout]


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= 32
        and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
    )


def _open(path: Path) -> IO[bytes]:
    try:
        # Do not follow links or wait for pipes: a checkpoint from elsewhere may contain either.
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    except OSError as error:
        raise _reading(path, error) from error


def _size(file: IO[bytes], path: Path, entry: Mapping[str, Any] | None) -> int:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path.name} is not a regular file")
    if entry is not None and status.st_size != entry["bytes"]:
        raise Damaged(f"{path.name} has {status.st_size} bytes, the manifest says {entry['bytes']}")
    return status.st_size


def _read(file: IO[bytes], size: int, path: Path) -> bytes:
    data = bytearray(size)
    if _fill(file, memoryview(data), path) != size:
        raise Damaged(f"{path.name} ended early")
    return bytes(data)


def _fill(file: IO[bytes], view: memoryview, path: Path) -> int:
    """Read until `view` is full or the file ends; return the number of bytes read."""
    done = 0
    try:
        while done < len(view):
            count = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                break
            done += count
    except OSError as error:
        raise _reading(path, error) from error
    return done


def _reading(path: Path, error: OSError) -> Exception:
    if error.errno in _GONE:
        return Damaged(f"{path.name} cannot be read ({reason(error)})")
    # No permission or too many open files: the data may be good, so it must not be quarantined.
    return StorageError(f"{path} cannot be read: {reason(error)}.")

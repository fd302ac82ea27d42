"""Read the files of one checkpoint; every file is verified before its content is used.

    ckpt-000001234567/
        model.safetensors optim.safetensors …  one file per group of tensors
        state.json                             everything that is not a tensor
        manifest.json                          versions, hashes, score; bytes and sha256 of every file; its own digest

Nothing is unpickled. A file with a name that no checkpoint contains is refused without opening it.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.core.errors import StorageError, UserError
from redline.run.atomic_files import Damaged, read_bytes, read_tensors
from redline.run.packed_weights import unpack
from redline.run.run_folder import FORMAT_VERSION, earlier_version, newer_version

FOLDER = re.compile(r"ckpt-(\d{12,18})(?:\.(\d{1,9}))?")  # step, revision
GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_STATE = 256 << 20  # bytes
_MAX_MANIFEST = 1 << 20
_MANIFEST_TYPES: dict[str, type | tuple[type, ...]] = {
    "format_version": int,
    "step": int,
    "created": str,
    "score": (float, int, type(None)),
    "resume_level": str,
    "config_hash": str,
    "env_hash": str,
    "world_size": int,
    "versions": dict,
    "files": dict,
    "digest": str,  # of all other fields
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]  # group -> name -> CPU tensor
    state: dict[str, Any]  # JSON
    manifest: dict[str, Any]


# From format version v to v + 1. Versions without a migration are refused.
MIGRATIONS: dict[int, Callable[[Checkpoint], Checkpoint]] = {}


def read_checkpoint(
    path: Path | str,
    groups: Collection[str] | None = None,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,  # noqa: ARG005
) -> Checkpoint:
    """Return the verified checkpoint in the folder `path`; raise StorageError if it is damaged or not a checkpoint."""
    path = Path(path)
    try:
        checkpoint = read(path, groups)
        check(checkpoint)
        return checkpoint
    except Damaged as error:
        raise StorageError(
            f"{path} is not a good checkpoint: {error}; expected a folder such as RUN/checkpoints/ckpt-000001234567."
        ) from error


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the names of the plain network, without torch.compile's `_orig_mod.` and DDP's `module.`"""
    names = {name: re.sub(r"(^|(?<=\.))_orig_mod\.", "", name) for name in tensors}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: short.removeprefix("module.") for name, short in names.items()}
    if len(set(names.values())) != len(names):
        raise ValueError("two weights have one name once the prefixes '_orig_mod.' and 'module.' are removed")
    return {names[name]: tensor for name, tensor in tensors.items()}


def check_weights(checkpoint: Checkpoint) -> None:
    """Raise Damaged if a checkpoint has no weights, or NaN or infinite ones."""
    if not checkpoint.tensors.get("model"):
        raise Damaged("it has no weights (the group model)")
    for group in ("model", "optim"):
        for name, tensor in checkpoint.tensors.get(group, {}).items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise Damaged(f"'{name}' of {group}.safetensors has NaN or infinite values")


def copy_into(target: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str = "model") -> None:
    """Copy `saved` into the static buffers of `target`; if names, shapes or dtypes differ, raise and copy nothing."""
    target, saved = strip_prefixes(target), strip_prefixes(saved)
    saved = {name: _in_words(x, target[name]) if name in target else x for name, x in saved.items()}
    differences = [f"'{name}' is missing in the checkpoint" for name in target.keys() - saved.keys()]
    differences += [f"'{name}' is unknown here" for name in saved.keys() - target.keys()]
    for name in target.keys() & saved.keys():
        here, there = target[name], saved[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            differences.append(f"'{name}' is {_describe(there)} in the checkpoint, {_describe(here)} here")
    if differences:
        raise UserError(
            f"The checkpoint does not fit this {what} ({len(differences)} differences; {min(differences)}): use the "
            "settings in its run's config.json, another --run-dir, or --resume never."
        )
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(saved[name])


def _in_words(saved: Tensor, target: Tensor) -> Tensor:
    """Return boards (N, H, W) of small integers, packed into the int32 words of `target` (N, V), several per word."""
    if (
        saved.dtype not in (torch.int8, torch.int16)
        or target.dtype != torch.int32
        or (saved.dim(), target.dim()) != (3, 2)
    ):
        return saved
    cells = saved.flatten(1)
    filling = target.shape[1] * 4 // saved.element_size() - cells.shape[1]
    if saved.shape[0] != target.shape[0] or not 0 <= filling < 4 // saved.element_size():
        return saved
    return torch.nn.functional.pad(cells, (0, filling)).view(torch.int32)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def read(path: Path, groups: Collection[str] | None) -> Checkpoint:
    """Return the checkpoint in `path`; raise Damaged if a file differs from the one written."""
    manifest = read_manifest(path)
    files = manifest["files"]
    name = FOLDER.fullmatch(path.name)
    if name is not None and int(name[1]) != manifest["step"]:
        raise Damaged(f"manifest.json says step {manifest['step']}, the folder's name {int(name[1])}")
    try:
        state = json.loads(read_bytes(path / "state.json", files["state.json"], MAX_STATE))
    except (ValueError, RecursionError) as error:
        raise Damaged("state.json is not JSON") from error
    if not isinstance(state, dict):
        raise Damaged("state.json is not an object")
    tensors = {
        group: read_tensors(path / f"{group}.safetensors", files[f"{group}.safetensors"])
        for group in (file.removesuffix(".safetensors") for file in files if file != "state.json")
        if groups is None or group in groups
    }
    if "model" in tensors:
        try:
            tensors["model"] = unpack(strip_prefixes(tensors["model"]))
        except ValueError as error:
            raise Damaged(f"model.safetensors: {error}") from error
    checkpoint = Checkpoint(path, manifest["step"], tensors, state, manifest)
    for version in range(manifest["format_version"], FORMAT_VERSION):
        checkpoint = MIGRATIONS[version](checkpoint)
    return checkpoint


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checked manifest; raise Damaged for a value of the wrong type, UserError for another version of Redline."""
    try:
        manifest = json.loads(read_bytes(path / "manifest.json", None, _MAX_MANIFEST))
        if not isinstance(manifest, dict) or type(version := manifest.get("format_version")) is not int:
            raise Damaged("manifest.json has no format_version")
        if version > FORMAT_VERSION:  # checked first: the other fields may have changed
            raise newer_version(f"Checkpoint {path}", version)
        for key, kind in _MANIFEST_TYPES.items():
            if key not in manifest or not isinstance(manifest[key], kind) or isinstance(manifest[key], bool):
                raise Damaged(f"manifest.json has no valid '{key}'")
        if manifest["digest"] != digest({key: value for key, value in manifest.items() if key != "digest"}):
            raise Damaged("manifest.json does not match its own digest")
        if 1 <= version < FORMAT_VERSION and version not in MIGRATIONS:
            raise earlier_version(f"Checkpoint {path}", version)
    except (ValueError, RecursionError) as error:
        raise Damaged("manifest.json is not JSON") from error
    if version < 1 or manifest["step"] < 0 or (manifest["score"] is not None and not math.isfinite(manifest["score"])):
        raise Damaged("manifest.json has a format_version, step or score that no checkpoint has")
    if manifest.keys() - _MANIFEST_TYPES.keys():
        raise newer_version(f"Checkpoint {path}", version)
    for name, entry in manifest["files"].items():
        group = name.removesuffix(".safetensors")
        if name != "state.json" and (group == name or not GROUP.fullmatch(group)):
            raise Damaged(f"manifest.json names a file {name!r}, which no checkpoint has")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            raise Damaged(f"manifest.json describes {name} wrongly")
    if "state.json" not in manifest["files"]:
        raise Damaged("manifest.json does not list state.json")
    return manifest


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without its own digest, computed the same way in every format version."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def make_manifest(fields: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete manifest: `fields` of the checkpoint, entries of its `files`, versions, time and digest."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **fields,
        "versions": _versions(),
        "files": files,
    }
    return manifest | {"digest": digest(manifest)}


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("gymnasium", "redline"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions

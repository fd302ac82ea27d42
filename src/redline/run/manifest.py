"""What a checkpoint folder holds, and reading it: every file is checked before anything of it is believed.

    ckpt-000001234567/
        model.safetensors optim.safetensors …  one file a group of tensors
        state.json                             what is not tensors
        manifest.json                          versions, hashes, score; bytes and sha256 of every file; its own digest

Nothing is unpickled. A file that a checkpoint cannot have is refused by its name, before it is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.core.errors import StorageError, UserError
from redline.run.atomic_files import Damaged, read_bytes, read_tensors

FORMAT_VERSION = 1
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
    "digest": str,  # of all the rest
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]  # group -> name -> CPU tensor
    state: dict[str, Any]  # JSON
    manifest: dict[str, Any]


# From format version v to v + 1. Version 1 is the first, so nothing is older yet.
MIGRATIONS: dict[int, Callable[[Checkpoint], Checkpoint]] = {}


def read_checkpoint(path: Path | str, groups: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint in the folder `path`, verified; StorageError if it is damaged or none."""
    path = Path(path)
    try:
        return read(path, groups)
    except Damaged as error:
        raise StorageError(
            f"{path} is not a good checkpoint: {error}; expected a folder such as RUN/checkpoints/ckpt-000001234567."
        ) from error


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of the bare network: without torch.compile's `_orig_mod.` and a wrapping DDP's `module.`"""
    names = {name: re.sub(r"(^|(?<=\.))_orig_mod\.", "", name) for name in tensors}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: short.removeprefix("module.") for name, short in names.items()}
    if len(set(names.values())) != len(names):
        raise ValueError("two weights have one name once the prefixes '_orig_mod.' and 'module.' are taken off")
    return {names[name]: tensor for name, tensor in tensors.items()}


def copy_into(target: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str = "model") -> None:
    """Copy `saved` into the static buffers of `target`; if names, shapes or dtypes differ, raise and copy nothing."""
    target, saved = strip_prefixes(target), strip_prefixes(saved)
    wrong = [f"'{name}' is missing in the checkpoint" for name in target.keys() - saved.keys()]
    wrong += [f"'{name}' is unknown here" for name in saved.keys() - target.keys()]
    for name in target.keys() & saved.keys():
        here, there = target[name], saved[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            wrong.append(f"'{name}' is {_describe(there)} in the checkpoint, {_describe(here)} here")
    if wrong:
        raise UserError(
            f"The checkpoint does not fit this {what} ({len(wrong)} differences; {min(wrong)}): use the settings in "
            "its run's config.json, another --run-dir, or --resume never."
        )
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(saved[name])


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def read(path: Path, groups: Collection[str] | None) -> Checkpoint:
    """The checkpoint in `path`; Damaged if a file that is read is not what was written."""
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
            tensors["model"] = strip_prefixes(tensors["model"])
        except ValueError as error:
            raise Damaged(f"model.safetensors: {error}") from error
    checkpoint = Checkpoint(path, manifest["step"], tensors, state, manifest)
    for version in range(manifest["format_version"], FORMAT_VERSION):
        checkpoint = MIGRATIONS[version](checkpoint)
    return checkpoint


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest in which every value has its type; Damaged if it has not, UserError if a newer Redline wrote it."""
    try:
        manifest = json.loads(read_bytes(path / "manifest.json", None, _MAX_MANIFEST))
        if not isinstance(manifest, dict) or type(version := manifest.get("format_version")) is not int:
            raise Damaged("manifest.json has no format_version")
        if version > FORMAT_VERSION:  # asked first: nothing else is known of such a manifest
            raise _newer(path, version)
        for key, kind in _MANIFEST_TYPES.items():
            if key not in manifest or not isinstance(manifest[key], kind) or isinstance(manifest[key], bool):
                raise Damaged(f"manifest.json has no right '{key}'")
        if manifest["digest"] != digest({key: value for key, value in manifest.items() if key != "digest"}):
            raise Damaged("manifest.json does not match its own digest")
    except (ValueError, RecursionError) as error:
        raise Damaged("manifest.json is not JSON") from error
    if version < 1 or manifest["step"] < 0 or (manifest["score"] is not None and not math.isfinite(manifest["score"])):
        raise Damaged("manifest.json has a format_version, step or score that no checkpoint has")
    if manifest.keys() - _MANIFEST_TYPES.keys():
        raise _newer(path, version)
    for name, entry in manifest["files"].items():
        group = name.removesuffix(".safetensors")
        if name != "state.json" and (group == name or not GROUP.fullmatch(group)):
            raise Damaged(f"manifest.json names a file {name!r}, which no checkpoint has")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            raise Damaged(f"manifest.json describes {name} wrongly")
    if "state.json" not in manifest["files"]:
        raise Damaged("manifest.json does not list state.json")
    return manifest


def _newer(path: Path, version: int) -> UserError:
    return UserError(
        f"Checkpoint {path} was written by a newer Redline (format {version}, this one reads {FORMAT_VERSION}): "
        "upgrade with pip install -U redline, or choose another --run-dir."
    )


def digest(manifest: Mapping[str, Any]) -> str:
    """The sha256 of a manifest without its own digest, the same for every format version."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

"""The manifest of a checkpoint: every file's size and SHA-256, written last, checked before anything is loaded."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import read_json, sha256_file, sha256_text

FORMAT = 2
READABLE = (1, 2)  # 1 had no hash of the manifest itself
MANIFEST = "MANIFEST.json"
WEIGHTS, OPTIMIZERS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"^step-(\d{8,})$")
_PLAIN_NAME = re.compile(r"^[\w.-]+$")
_SELF_HASH = "manifest_sha256"


def folder_name(step: int) -> str:
    """The name of a step's folder, padded with zeros so that names sort by step."""
    return f"step-{step:08d}"


def part_name(name: str, number: int, count: int) -> str:
    """The file of a rank that writes its part: model-00002-of-00004.safetensors."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number + 1:05d}-of-{count:05d}.{suffix}"


def tensor_files(present: Collection[str], name: str) -> list[str]:
    """The files of weights or optimizers among those of a checkpoint: one, or one of each rank; empty: not all."""
    if name in present:
        return [name]
    count = sum(other.startswith(name.rpartition(".")[0] + "-") for other in present)
    parts = [part_name(name, number, count) for number in range(count)]
    return parts if all(part in present for part in parts) else []


def manifest_text(about: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> str:
    """The manifest of files with known sizes and hashes, plus a hash of the manifest. `about` must contain `step`."""
    return _text_of({"format": FORMAT, **about, "files": {name: dict(files[name]) for name in sorted(files)}})


def _text_of(content: Mapping[str, Any]) -> str:
    """The file's text. There is one way to write a manifest, so any change is detected."""
    hashed = {name: value for name, value in content.items() if name != _SELF_HASH}
    digest = sha256_text(json.dumps(hashed, ensure_ascii=False, sort_keys=True))
    return json.dumps({**hashed, _SELF_HASH: digest}, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises UserError if it is damaged or belongs to another folder."""
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict):
        raise UserError(f"{MANIFEST} is damaged: not a table")
    if manifest["format"] not in READABLE:
        raise UserError(f"{MANIFEST} is of format {manifest['format']}, wanted {FORMAT}")
    if manifest["format"] >= 2 and (folder / MANIFEST).read_bytes() != _text_of(manifest).encode():
        raise UserError(f"{MANIFEST} is damaged (checksum differs)")
    if folder.name != folder_name(manifest["step"]):
        raise UserError(f"{MANIFEST} is of step {manifest['step']}")
    return manifest


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None if every file is as it was written."""
    try:
        manifest = read_manifest(folder)
        for name in (WEIGHTS, OPTIMIZERS, STATE):
            if not tensor_files(manifest["files"], name):
                return f"{MANIFEST} does not list {name}"
        for name, entry in manifest["files"].items():
            if not _PLAIN_NAME.match(name):
                return f"{MANIFEST} lists a file outside the folder: {name[:60]!r}"
            path = folder / name
            if path.is_symlink() or not path.is_file():
                return f"{name} is missing" if not path.exists() else f"{name} is not an ordinary file"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if sha256_file(path) != entry["sha256"]:
                return f"{name} is damaged (checksum differs)"
    except UserError as error:
        return error.what if error.what.startswith(MANIFEST) else f"{MANIFEST}: {error.what}"
    except OSError as error:  # a bad block, or no permission
        return f"cannot be read: {error}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"{MANIFEST} is damaged: {type(error).__name__} {error}"
    return None


def steps(folder: Path) -> list[int]:
    """The step numbers of the checkpoints in `folder`, newest first; partly written ones are not listed."""
    if not folder.is_dir():
        return []
    matches = [_NAME.match(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)

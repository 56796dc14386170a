"""The manifest of a checkpoint: every file's size and SHA-256, written last, checked before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import read_json, sha256_file, write_json

FORMAT = 1
MANIFEST = "MANIFEST.json"
WEIGHTS, OPTIMIZERS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"^step-(\d{8,})$")


def folder_name(step: int) -> str:
    """The name of a step's folder, with zeros before it so that names sort as steps do."""
    return f"step-{step:08d}"


def write_manifest(folder: Path, about: dict[str, Any]) -> None:
    """List every file of `folder` with size and hash; `about` must hold the step."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    write_json(folder / MANIFEST, {"format": FORMAT, **about, "files": files})


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None if every file is what was written there."""
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} is of format {manifest['format']}, wanted {FORMAT}"
        if folder.name != folder_name(manifest["step"]):
            return f"{MANIFEST} is of step {manifest['step']}"
        for name in (WEIGHTS, OPTIMIZERS, STATE):
            if name not in manifest["files"]:
                return f"{MANIFEST} does not list {name}"
        for name, facts in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}"
            if sha256_file(path) != facts["sha256"]:
                return f"{name} is damaged (checksum differs)"
    except UserError as error:
        return f"{MANIFEST}: {error.what}"
    except OSError as error:  # a bad block, or no permission
        return f"cannot be read: {error}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"{MANIFEST} is damaged: {type(error).__name__} {error}"
    return None


def steps(folder: Path) -> list[int]:
    """The step numbers of the checkpoints in `folder`, newest first; half-written ones do not count."""
    if not folder.is_dir():
        return []
    found = [_NAME.match(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)

"""A catalogue of public corpora with their licences; `get` downloads one and checks its hash.

`get("sanguo", folder)` writes data files and a SOURCE.json to `folder/sanguo/`: origin, licence, and
the SHA-256 of each file. A complete folder is not downloaded again. The folder appears by one rename at the end, so an
interrupted download leaves no partial folder (hub downloads resume from a hidden folder beside it).
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from penjing import __version__
from penjing.base.config import read_toml
from penjing.base.errors import UserError, suggest
from penjing.base.files import disk_error, read_json, sha256_file, write_json
from penjing.base.formatting import gibibytes
from penjing.data.catalog.sources import DatasetSource, Report
from penjing.data.catalog.sources.hub import HubSource
from penjing.data.catalog.sources.packages import PackageSource

SOURCE_FILE = "SOURCE.json"
NON_COMMERCIAL = "Not for commercial use; nor, by the usual reading, is a model trained on it."


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    name: str
    title: str
    kind: Literal["documents", "chats", "preferences", "benchmark"]
    language: str  # en, zh, en+zh or python
    num_tokens: int  # estimate: bytes that are not Chinese / 4 + Chinese characters / 1.6, or the publisher's count
    licence: str
    caveat: str = ""
    description: str
    source: DatasetSource

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for SOURCE.json and for lists."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "source"}


def _dataset(row: dict[str, Any]) -> Dataset:
    """An entry of catalog.toml."""
    source: DatasetSource = PackageSource(**row.pop("package")) if "package" in row else HubSource(**row.pop("hub"))
    caveats = [row.pop("caveat", ""), NON_COMMERCIAL if row.pop("non_commercial", False) else ""]
    return Dataset(**row, caveat=" ".join(filter(None, caveats)), source=source)


CATALOGUE = {row["name"]: _dataset(row) for row in read_toml(Path(__file__).with_name("catalog.toml"))["dataset"]}


def get(name: str, folder: Path, *, progress: Report | None = None) -> Path:
    """The folder `folder/name` with the corpus, downloaded unless it exists and every hash is right.

    progress: called with status messages. Raises `UserError`: an unknown name, no network, a wrong hash, a version
    that is gone, a full disk, a folder of that name that is not ours.
    """
    if name not in CATALOGUE:
        raise UserError(f"no text is called {name!r}", next_step=suggest(name, CATALOGUE))
    entry = CATALOGUE[name]
    report = progress or (lambda message: None)
    target = Path(folder) / name
    if is_complete(target, entry):
        report(f"{name} is there already")
        return target
    if target.exists() and not (target / SOURCE_FILE).exists() and any(target.iterdir()):
        raise UserError("a folder that is not ours is in the way", where=target, next_step="Move it away.")
    partial = target.with_name(f".{name}.partial")
    try:
        if not entry.source.resumes:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True, exist_ok=True)
        _check_space(entry, partial)
        provenance = entry.source.fetch(partial, report)
        write_json(partial / SOURCE_FILE, _manifest(entry, provenance, partial))
        _back_up(target, report)
        os.replace(partial, target)
    except OSError as error:
        raise disk_error(error, target) from error
    finally:
        if not entry.source.resumes:
            shutil.rmtree(partial, ignore_errors=True)
    report(f"{name}: {entry.licence}. {entry.caveat}".strip())
    return target


def is_complete(target: Path, entry: Dataset) -> bool:
    """Whether `target` holds the present version of `entry`, and every file has the hash in SOURCE.json."""
    if not (target / SOURCE_FILE).is_file():
        return False
    try:
        manifest = read_json(target / SOURCE_FILE)
        files = manifest["files"]
        if manifest["identity"] != entry.source.identity() or not files:
            return False
        return all((target / path).is_file() and _entry(target / path) == saved for path, saved in files.items())
    except (UserError, KeyError, TypeError, AttributeError):
        return False


def _entry(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _back_up(target: Path, report: Report) -> None:
    """Rename an older or changed folder, since it may hold the user's work."""
    if not target.is_dir() or not any(target.iterdir()):
        return
    number = 1
    while (backup := target.with_name(f"{target.name}.before-{number}")).exists():
        number += 1
    target.rename(backup)
    report(f"{target} was changed, or of another version: it is {backup.name} now")


def _check_space(entry: Dataset, folder: Path) -> None:
    """Raise UserError if the disk is too small; a partial download in `folder` counts as free."""
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if free < entry.source.num_bytes:
        got = f"{gibibytes(free)} free"
        raise UserError("not enough disk space", where=folder.parent, got=got, wanted=gibibytes(entry.source.num_bytes))


def _manifest(entry: Dataset, provenance: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SOURCE_FILE)
    return {
        **entry.to_dict(),
        "identity": entry.source.identity(),
        "provenance": provenance,
        "files": {path.relative_to(folder).as_posix(): _entry(path) for path in paths},
        "fetched_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fetched_by": f"penjing {__version__}",
    }

"""Data sets of the Hugging Face hub, read over the network and not stored: `hf://owner/name`."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from penjing.base.errors import UserError, import_extra
from penjing.data.formats.compression import PACKED_ERRORS

_BUFFER_BYTES = 1 << 20
# Owner and name, revision (also the hub's own: refs/convert/parquet, refs/pr/3), and what is inside
_NAME = re.compile(r"([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]*))?(?:/(.*))?")
_contents: dict[Path, list[Any]] = {}  # of files that were listed: size and hash


def is_hub(path: Path) -> bool:
    """Whether it names a data set of the hub. A `Path` has lost one of the two slashes."""
    return path.parts[:1] == ("hf:",)


def hub_files(path: Path) -> list[Path]:
    """The files below hf://[datasets/]owner/name[@revision][/folder or file, or a name with wildcards].

    Their names hold the commit, so that all passes read the same bytes.
    """
    if path in _contents:
        return [path]
    with _hub_errors(path) as filesystem:
        import huggingface_hub

        name = _NAME.fullmatch(str(path).removeprefix("hf:").strip("/").removeprefix("datasets/"))
        if name is None:
            raise UserError("not a name of the hub", where=_shown(path), wanted="hf://OWNER/NAME, or a file in it")
        repository, revision, inside = name[1], name[2], name[3] or ""
        commit = huggingface_hub.HfApi().dataset_info(repository, revision=revision or None).sha
        look_up = filesystem.glob if any(mark in inside for mark in "*?[") else filesystem.find
        found = look_up(f"datasets/{repository}@{commit}/{inside}", detail=True)
    files = {Path("hf:", file): facts for file, facts in sorted(found.items()) if facts["type"] == "file"}
    _contents.update(
        (file, [facts["size"], facts["lfs"]["sha256"] if facts.get("lfs") else facts["blob_id"]])
        for file, facts in files.items()
    )
    return list(files)


def hub_content(path: Path) -> list[Any]:
    """Size and hash of a file of `hub_files`, as the hub knows them."""
    return _contents[path]


@contextmanager
def open_hub(path: Path) -> Iterator[IO[bytes]]:
    """A file of `hub_files`; what is read of it is fetched."""
    with _hub_errors(path) as filesystem, filesystem.open(str(path).removeprefix("hf:/"), "rb") as stream:
        yield cast(IO[bytes], io.BufferedReader(stream, _BUFFER_BYTES))


def _shown(path: Path) -> str:
    return str(path).replace("hf:/", "hf://", 1)


@contextmanager
def _hub_errors(path: Path) -> Iterator[Any]:
    """The hub's file system. What goes wrong with it is one line: no package, no network, no such name, no access."""
    try:
        yield import_extra("huggingface_hub", "hub", _shown(path)).HfFileSystem()
    except (UserError, *PACKED_ERRORS):
        raise
    except Exception as error:  # of any HTTP library, in any version
        hint = "Check the name and the network; private and gated data need `hf auth login`."
        message = " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
        raise UserError(f"cannot be read from the hub: {message}", where=_shown(path), next_step=hint) from None

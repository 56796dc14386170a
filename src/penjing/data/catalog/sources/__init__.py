"""Where the catalogue's texts come from: one file per kind of source, all with the same two methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

Say = Callable[[str], None]
"""Told, in words, what is being done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What a source put into the folder besides the files themselves."""

    num_records: int | None = None  # None where files are kept as they came
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> how many
    provenance: Mapping[str, Any] = field(default_factory=dict)


class DatasetSource(Protocol):
    """A kind of source. `resumes`: what a broken fetch leaves in the folder is worth keeping for the next one."""

    resumes: ClassVar[bool]

    @property
    def num_bytes(self) -> int:
        """Of the download; an estimate for a file of the hub whose hash we do not know."""
        ...

    def identity(self) -> dict[str, Any]:
        """What pins the text: name, version, hashes. A folder made from another identity is fetched again."""
        ...

    def fetch(self, folder: Path, say: Say) -> Fetched:
        """Put files that our readers take into `folder`. Raises `UserError`."""
        ...


def chat_record(turns: Iterable[str]) -> dict[str, Any]:
    """Alternate turns, the user's first, as a record that `records.read_chats` takes."""
    roles = ("user", "assistant")
    return {"conversations": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}

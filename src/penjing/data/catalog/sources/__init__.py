"""The sources of the catalogue: one file per kind of source, all with the same two methods."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

Report = Callable[[str], None]
"""Called with status messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Metadata of a download."""

    num_records: int | None = None  # None if files are not converted
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> how many
    provenance: Mapping[str, Any] = field(default_factory=dict)


class DatasetSource(Protocol):
    """A kind of source. resumes: an interrupted download can be resumed from its partial folder."""

    resumes: ClassVar[bool]

    @property
    def num_bytes(self) -> int:
        """Size of the download; an estimate for a hub file without a known hash."""

    def identity(self) -> dict[str, Any]:
        """Name, version and hashes. A folder with another identity is downloaded again."""

    def fetch(self, folder: Path, report: Report) -> Fetched:
        """Download data files into `folder`. Raises `UserError`."""


def chat_record(turns: Iterable[str]) -> dict[str, Any]:
    """Alternate turns, the user's first, as a record that `records.read_chats` takes."""
    roles = ("user", "assistant")
    return {"conversations": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}

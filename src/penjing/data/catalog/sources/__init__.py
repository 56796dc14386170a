"""The sources of the catalogue: one file per kind of source, all with the same two methods."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

Report = Callable[[str], None]
"""Called with status messages."""


class DatasetSource(Protocol):
    """A kind of source. resumes: an interrupted download can be resumed from its partial folder."""

    resumes: ClassVar[bool]

    @property
    def num_bytes(self) -> int:
        """Size of the download; an estimate for a hub file without a known hash."""

    def identity(self) -> dict[str, Any]:
        """Name, version and hashes. A folder with another identity is downloaded again."""

    def fetch(self, folder: Path, report: Report) -> dict[str, Any]:
        """Download data files into `folder`; returns where they are from. Raises `UserError`."""

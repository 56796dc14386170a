"""Python's standard library as a code corpus: on every machine, without a download; generated code can be parsed."""

import platform
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penjing.base.errors import UserError
from penjing.data.catalog.sources import Fetched, Report
from penjing.data.formats.write import write_jsonl

LARGEST_FILE_BYTES = 200_000
_LEFT_OUT = "test tests idlelib lib2to3 turtledemo site-packages dist-packages _bundled pydoc_data"
FOLDERS_LEFT_OUT = frozenset(_LEFT_OUT.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class StdlibSource:
    """The `.py` files of the running Python's standard library. `root` is another folder, for tests."""

    resumes: ClassVar = False
    num_bytes: ClassVar = 0

    root: Path | None = None

    def identity(self) -> dict[str, Any]:
        return {"python": platform.python_version(), "largest_file_bytes": LARGEST_FILE_BYTES}

    def fetch(self, folder: Path, report: Report) -> Fetched:
        """Copy the sources into `stdlib.jsonl`. Raises `UserError` if Python has no source files."""
        root = self.root or Path(sysconfig.get_paths()["stdlib"])
        if next(root.glob("*.py"), None) is None:
            step = "Use another Python or another text."
            raise UserError("this Python has no sources of its standard library", where=root, next_step=step)
        report(f"copying the standard library of Python {platform.python_version()}")
        dropped: Counter[str] = Counter()
        num_records = write_jsonl(folder / "stdlib.jsonl", _modules(root, dropped))
        return Fetched(num_records=num_records, dropped=dict(dropped), provenance=self.identity())


def _modules(root: Path, dropped: Counter[str]) -> Iterator[dict[str, str]]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if FOLDERS_LEFT_OUT.intersection(name.parts[:-1]) or name.parts[0].startswith("config-"):
            continue
        if path.stat().st_size > LARGEST_FILE_BYTES:
            dropped[f"files larger than {LARGEST_FILE_BYTES // 1000} kB"] += 1
            continue
        try:
            with tokenize.open(path) as stream:  # honours the file's own coding line
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):
            dropped["files that cannot be decoded"] += 1
            continue
        if text.strip():
            yield {"text": text, "file": name.as_posix()}

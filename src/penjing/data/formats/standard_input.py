"""Standard input as data: copied to a temporary file, since data are read more than once."""

import re
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path, PosixPath

from penjing.base.errors import UserError
from penjing.base.files import disk_errors

STANDARD_INPUT = "-"
LARGEST_INPUT_BYTES = 1 << 32
_CHUNK_BYTES = 1 << 20
_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the program ends
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\{\s*[\"}]|\[\s*\{)")


class StandardInput(PosixPath):
    """The temporary file, which messages and results call `-`."""

    def __str__(self) -> str:
        return STANDARD_INPUT

    def __fspath__(self) -> str:
        return super().__str__()


@lru_cache(maxsize=1)
def standard_input() -> Path:
    """The file with all of standard input: JSON if it begins as records do, else text.

    Raises UserError for a terminal, and for more than 4 GiB or half of the space left for temporary files.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        wanted = "a pipe, as in `zcat a.jsonl.gz | penjing ... -`"
        raise UserError("standard input is no data", where="-", wanted=wanted)
    folder = tempfile.TemporaryDirectory(prefix="penjing-")
    _folders.append(folder)
    limit = min(LARGEST_INPUT_BYTES, shutil.disk_usage(folder.name).free // 2)
    stream = sys.stdin.buffer
    chunk = stream.read(_CHUNK_BYTES)
    path = StandardInput(folder.name) / ("stdin.json" if _JSON.match(chunk) else "stdin.txt")
    size = 0
    with disk_errors(path), open(path, "wb") as file:
        while chunk:
            size += len(chunk)
            if size > limit:
                what, wanted = "standard input is too long to copy to a temporary file", f"at most {limit:,} bytes"
                raise UserError(what, where="-", wanted=wanted, next_step="Write it to a file, and name that.")
            file.write(chunk)
            chunk = stream.read(_CHUNK_BYTES)
    return path

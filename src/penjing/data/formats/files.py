"""Files and bytes: which files are meant, opening them safely, lines and blocks of bounded size, encodings."""

from __future__ import annotations

import gzip
import re
import warnings
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE, getincrementaldecoder
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from penjing.base.errors import UserError
from penjing.base.files import open_regular
from penjing.data.formats.schema import FORMATS
from penjing.data.formats.source_location import NotTextError, rest_lost

BLOCK_BYTES = 1 << 18
HEAD_BYTES = 1 << 16
LARGEST_LINE_BYTES = 1 << 26  # 64 MiB; a longer line is no record but a mistake, and is never held in memory
# An archive of text shrinks to a third or a tenth, and of the most repetitive tables to a hundredth.
LARGEST_RATIO = 200
_DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error)
_UNSUSPECTED_BYTES = 1 << 26  # unpacked, before the ratio counts
_ENDINGS_SHOWN = 6
_NOT_DATA = re.compile(r"(readme|licen[cs]e|copying|notice)\b.*|source\.json|dataset_infos?\.json", re.IGNORECASE)


def list_files(paths: Sequence[Path]) -> list[Path]:
    """The files behind `paths`: a file is itself, a folder is its data files at any depth, sorted by path.

    In a folder hidden names, README, LICENSE and the catalogue's SOURCE.json are not data, nor is what is not an
    ordinary file; files of unknown formats are counted in a warning. Raises `UserError` for a missing path, a pipe or
    device, a folder without data files and a file of an unknown format.
    """
    if isinstance(paths, (str, Path)):
        paths = [Path(paths)]
    if not paths:
        raise UserError("no data is named", wanted="at least one file or folder")
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = _files_in(path)
            if not inside:
                raise UserError("the folder has no data file", where=path, wanted=wanted_formats())
            found += inside
        elif path.exists():
            format_of(path)
            if not path.is_file():
                raise UserError("a pipe or a device, not a file", where=path, wanted="an ordinary file")
            found.append(path)
        else:
            raise UserError("no such file or folder", where=path)
    return found


def format_of(path: Path) -> str:
    """One of FORMATS, by the name. Raises UserError for any other."""
    name = path.name.lower()
    packed = name.endswith(".gz")
    suffix = name.removesuffix(".gz").rpartition(".")[2]
    if suffix not in FORMATS or (packed and suffix == "parquet"):
        raise UserError("unknown file format", where=path, got=path.suffix or "no suffix", wanted=wanted_formats())
    return suffix


def wanted_formats() -> str:
    return ", ".join(f".{name}" for name in FORMATS) + " or one of the text formats as .gz"


def _files_in(folder: Path) -> list[Path]:
    found = []
    unknown: Counter[str] = Counter()
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or _NOT_DATA.fullmatch(path.name) or not path.is_file():
            continue
        try:
            format_of(path)
        except UserError:
            unknown[_ending(path)] += 1
            continue
        found.append(path)
    if unknown and found:  # a folder with nothing else in it is an error of its own
        listed = ", ".join(f"{ending} ({count:,})" for ending, count in unknown.most_common(_ENDINGS_SHOWN))
        more = ", ..." if len(unknown) > _ENDINGS_SHOWN else ""
        warnings.warn(f"{folder}: files of unknown formats are not read: {listed}{more}", stacklevel=3)
    return found


def _ending(path: Path) -> str:
    """The end of a name that says what is in the file: `.bin`, but `.jsonl.zst`."""
    before = Path(path.stem).suffix
    return (before if before[1:].lower() in FORMATS else "") + path.suffix or "no suffix"


class Opened:
    """A data file, unpacked where it is packed. Reads are bounded; an archive that swells past reason is refused."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        self.path, self._raw = path, raw
        packed = path.suffix.lower() == ".gz"
        self._stream = cast(BufferedReader, gzip.GzipFile(fileobj=raw, mode="rb") if packed else raw)
        self._packed, self._given = packed, 0
        self._damage: Exception | None = None

    def read(self, size: int) -> bytes:
        """So many bytes; fewer at the end, or before damage, which the next read raises."""
        if self._damage is not None:
            raise self._damage
        data = b""
        try:
            while len(data) < size and (more := self._stream.read1(size - len(data))):
                data += more
        except _DAMAGE as error:
            if not data:
                raise
            self._damage = error
        return self._checked(data)

    def readline(self, size: int) -> bytes:
        return self._checked(self._stream.readline(size))

    def _checked(self, data: bytes) -> bytes:
        self._given += len(data)
        if self._packed and self._given > max(_UNSUSPECTED_BYTES, LARGEST_RATIO * self._raw.tell()):
            raise UserError(
                f"an archive that unpacks to more than {LARGEST_RATIO} times its size",
                where=self.path,
                next_step="Unpack it yourself if you know what it is.",
            )
        return data


@contextmanager
def open_data(path: Path) -> Iterator[Opened]:
    """Open a data file; damage found while it is open, and what is no ordinary file, is a UserError that names it."""
    try:
        with open_regular(path) as stream:
            yield Opened(path, stream)
    except _DAMAGE as error:
        raise UserError(f"broken gzip file: {error}", where=path, next_step="Download or pack it again.") from None
    except FileNotFoundError:
        raise UserError("no such file", where=path) from None
    except IsADirectoryError:
        raise UserError("a folder, not a file", where=path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=path) from None


def raw_lines(path: Path) -> Iterator[tuple[int, int, bytes | None]]:
    """(number, offset, bytes) of each line, its end included; None for one of more than LARGEST_LINE_BYTES.

    Raises UserError if the file cannot be read on.
    """
    offset = 0
    with open_data(path) as stream:
        number = 0
        while raw := stream.readline(LARGEST_LINE_BYTES + 1):
            number += 1
            length = len(raw)
            if length > LARGEST_LINE_BYTES and not raw.endswith(b"\n"):
                rest = raw
                while rest and not rest.endswith(b"\n"):
                    rest = stream.readline(1 << 20)
                    length += len(rest)
                yield number, offset, None
            else:
                yield number, offset, raw
            offset += length


def lines(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """Lines with their numbers, decoded one by one so that a bad byte is named exactly. Only LF ends a line.

    A line that is not text is an error in its place, and so is, as the last one, a file that cannot be read on.
    """
    number = 0
    try:
        for number, offset, raw in raw_lines(path):
            if raw is None:
                yield number, UserError(f"a line of more than {LARGEST_LINE_BYTES >> 20} MiB", where=f"{path}:{number}")
                continue
            wrong = -1
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                wrong, text = error.start, raw.decode("utf-8", errors="replace")
            if number == 1:
                text = text.removeprefix("\ufeff")
            text = text.rstrip("\r\n")
            yield number, text if wrong < 0 else encoding_error(path, number, offset + wrong, raw[wrong], text)
    except UserError as error:
        yield number + 1, rest_lost(error, f"{path}:{number + 1}" if number else None)


def blocks(path: Path) -> Iterator[str]:
    """The file's text in pieces of bounded size, without a BOM. Raises UserError where it is not text."""
    decoder = getincrementaldecoder("utf-8")()
    offset, line = 0, 1
    with open_data(path) as stream:
        while True:
            raw = stream.read(BLOCK_BYTES)
            if not offset:
                raw = raw.removeprefix(BOM_UTF8)
            pending = decoder.getstate()[0]
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line += (pending + raw).count(b"\n", 0, error.start)
                bad = (pending + raw)[error.start]
                raise encoding_error(path, line, offset - len(pending) + error.start, bad) from None
            offset += len(raw)
            line += text.count("\n")
            if text:
                yield text
            if not raw:
                return


def head(path: Path) -> bytes:
    """The first bytes of a file, or those before damage."""
    with open_data(path) as stream:
        return stream.read(HEAD_BYTES)


def encoding_error(path: Path, line: int, offset: int, byte: int, readable: str = "") -> NotTextError:
    """readable: the line as far as it can be read."""
    got = f"byte 0x{byte:02x} at offset {offset}"
    error = NotTextError("not valid UTF-8", where=f"{path}:{line}", got=got, next_step=encoding_hint(path))
    error.readable = readable
    return error


def encoding_hint(path: Path) -> str | None:
    """How to convert a file that is not UTF-8; None where nothing is likely."""
    try:
        facts = path.stat()
    except OSError:  # gone in the meantime
        return None
    guess = _guess_once(path, facts.st_size, facts.st_mtime_ns)
    if guess is None:
        return None
    convert = f"iconv -f {guess} -t UTF-8"
    packed = path.suffix.lower() == ".gz"
    command = f"zcat {path.name} | {convert} | gzip >" if packed else f"{convert} {path.name} >"
    return f"It reads as {guess}: convert it with  {command} utf8-{path.name}"


@lru_cache(maxsize=64)
def _guess_once(path: Path, size: int, changed_ns: int) -> str | None:
    """The guess of a file as it is now: every line of one in GBK is wrong, and a guess takes some milliseconds."""
    return guess_encoding(head(path))


def nothing_in(path: Path) -> UserError:
    """Why a file without a record has none."""
    start = head(path)
    if not start:
        return UserError("the file is empty", where=path)
    blank = not start.removeprefix(BOM_UTF8).strip()
    return UserError("the file has only blank lines" if blank else "the file has no record", where=path)


def guess_encoding(head: bytes) -> str | None:
    """The likely name, for iconv, of an encoding other than UTF-8 that `head` (a file's first bytes) is written in.

    Byte order marks and zero bytes tell UTF-16 and UTF-32; a Chinese encoding is named when at least one Han character
    in thirty comes out as one of the twenty most common. None when nothing is likely.
    """
    if head.startswith((BOM_UTF32_LE, BOM_UTF32_BE)):
        return "UTF-32"
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return "UTF-16"
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if even + odd > len(head) // 5:
        return "UTF-16LE" if odd > even else "UTF-16BE"
    score, name = max((_chinese_score(head, name), name) for name in ("GB18030", "BIG5", "UTF-16LE", "UTF-16BE"))
    return name if score > 1 / 30 else None


def _chinese_score(head: bytes, encoding: str) -> float:
    text = head.decode(encoding, errors="replace")
    han = [char for char in text if "\u4e00" <= char <= "\u9fff"]
    if len(han) < 4 or text.count("\ufffd") > 1 + len(text) // 100:
        return 0.0
    return sum(char in "的一是不了在人有我他这這个個们們中来來上大为為和国國" for char in han) / len(han)

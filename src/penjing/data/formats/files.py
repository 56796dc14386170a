"""Data files: list them, open them safely, read lines and blocks of bounded size, detect encodings."""

import glob
import os
import re
import warnings
from codecs import BOM_UTF8, getincrementaldecoder, utf_8_decode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from penjing.base.errors import UserError
from penjing.base.files import open_regular, read_errors, sha256_file
from penjing.base.formatting import listing
from penjing.data.formats.compression import PACKED, PACKED_ERRORS, unpacked
from penjing.data.formats.encodings import ChunkReader, Utf8Reader, decodes, guess_encoding, is_sure, marked_encoding
from penjing.data.formats.hub import hub_content, hub_files, is_hub, open_hub
from penjing.data.formats.schema import BINARY_FORMATS, FORMATS, SEPARATOR, SUFFIXES
from penjing.data.formats.source_location import NotTextError, unrecoverable
from penjing.data.formats.standard_input import STANDARD_INPUT, standard_input

BLOCK_BYTES = 1 << 18
HEAD_BYTES = 1 << 16
LARGEST_LINE_BYTES = 1 << 26  # 64 MiB; a longer line is an error and is never held in memory
# Text compresses by a factor of 3 to 10, the most repetitive tables by 100.
LARGEST_RATIO = 200
CLEANING = "_cleaning"  # beside cleaned data: the report on them
_UNCHECKED_BYTES = 1 << 26  # unpacked, before the ratio is checked
_SUFFIXES_SHOWN = 6
# The last three: what `datasets` writes beside its tables.
_NOT_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice)\b.*|source\.json|dataset_(infos?|dict)\.json|cache-.*\.arrow", re.IGNORECASE
)
# Names of splits, as on the Hugging Face hub
_TRAIN_SPLIT, _TEST_SPLIT = (
    re.compile(rf"(?:^|[-._/ ])(?:{names})(?=[-._/ \d]|$)", re.IGNORECASE)
    for names in ("train|training", "test|testing|eval|evaluation|val|valid|validation|dev")
)


def list_files(paths: Sequence[Path | str]) -> list[Path]:
    """The files of `paths`; a folder stands for its data files at any depth, sorted by path.

    A name with `*`, `?` or `[` that does not exist stands for the files that it matches, `-` for standard input, which
    is copied to a temporary file, and `hf://owner/name` for a data set of the hub. In a folder hidden names, README,
    LICENSE, the catalogue's SOURCE.json and special files are skipped; a warning counts files of unknown formats, and
    lists those of test and validation splits beside a train split.
    Raises `UserError` for a path that is missing or holds no data.
    """
    if isinstance(paths, (str, Path)):
        paths = [Path(paths)]
    if not paths:
        raise UserError("no data is given", wanted="at least one file or folder")
    files: list[Path] = []
    for path in (Path(path) if isinstance(path, str) else path for path in paths):
        if os.fspath(path) == STANDARD_INPUT:
            files.append(standard_input())
        elif (path / "train" / "tokens.bin").is_file():
            hint = "Give the files that they were made from, or them alone as data.train."
            raise UserError("a folder of tokens, not of records", where=path, next_step=hint)
        elif path.is_dir() or is_hub(path):
            found = hub_files(path) if is_hub(path) else (file for file in sorted(path.rglob("*")) if file.is_file())
            folder_files = _data_files(path, found)
            if not folder_files:
                raise UserError("the folder has no data file", where=path, wanted=supported_formats())
            files += folder_files
        elif not path.exists() and glob.has_magic(str(path)):
            matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
            if not matches:
                raise UserError("no file has such a name", where=path)
            files += list_files(matches)
        elif path.is_file():
            format_of(path)
            files.append(path)
        elif path.exists():
            hint = "To read standard input, name it -, as in `cat FILE | penjing ... -`."
            raise UserError("a pipe or a device, not a file", where=path, wanted="an ordinary file", next_step=hint)
        else:
            raise UserError("no such file or folder", where=path)
    return files


def is_data_name(path: Path) -> bool:
    """Whether `list_files` can find data by this name."""
    return str(path) == STANDARD_INPUT or is_hub(path) or path.exists() or bool(glob.glob(str(path), recursive=True))


def format_of(path: Path) -> str:
    """The format from the file name, one of FORMATS. Raises UserError for any other."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    suffix = name.removesuffix(packed).rpartition(".")[2]
    suffix = SUFFIXES.get(suffix, suffix)
    if suffix not in FORMATS or (packed and suffix in BINARY_FORMATS):
        raise UserError("unknown file format", where=path, got=path.suffix or "no suffix", wanted=supported_formats())
    return suffix


def supported_formats() -> str:
    return ", ".join(f".{name}" for name in FORMATS) + ", and all but .parquet, .arrow and .epub also as .gz or .zst"


def _data_files(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """Those of the files in a folder that hold data."""
    files = []
    unknown: Counter[str] = Counter()
    for path in paths:
        is_hidden = any(part.startswith(".") or part == CLEANING for part in _inside(path, folder).parts)
        is_state = path.name == "state.json" and (path.parent / "dataset_info.json").is_file()  # of `datasets`
        if is_hidden or is_state or _NOT_DATA.fullmatch(path.name):
            continue
        try:
            format_of(path)
        except UserError:
            unknown[_suffix(path)] += 1
            continue
        files.append(path)
    if unknown and files:  # a folder without any known file is an error elsewhere
        names = [f"{ending} ({count:,})" for ending, count in unknown.most_common()]
        listed = listing(names, _SUFFIXES_SHOWN)
        warnings.warn(f"{folder}: files of unknown formats are not read: {listed}", stacklevel=3)
    return _without_test_splits(folder, files)


def _without_test_splits(folder: Path, files: list[Path]) -> list[Path]:
    """The files without those of test and validation splits, if others belong to a train split."""
    names = [_inside(path, folder).as_posix() for path in files]
    if not any(_TRAIN_SPLIT.search(name) for name in names):
        return files
    held_out = [name for name in names if _TEST_SPLIT.search(name) and not _TRAIN_SPLIT.search(name)]
    if held_out:
        listed = listing(held_out, _SUFFIXES_SHOWN)
        warnings.warn(f"{folder}: test and validation splits are not read unless named: {listed}", stacklevel=4)
    return [path for path, name in zip(files, names, strict=True) if name not in held_out]


def _inside(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else Path(*path.parts[4:])  # of a hub, in its set


def content_of(path: Path) -> list[Any]:
    """Size and hash of a file."""
    return hub_content(path) if is_hub(path) else [path.stat().st_size, sha256_file(path)]


def size_of(path: Path) -> int:
    return int(hub_content(path)[0]) if is_hub(path) else path.stat().st_size


def open_raw(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Open an ordinary file, or one of the hub."""
    return open_hub(path) if is_hub(path) else open_regular(path)


def _suffix(path: Path) -> str:
    """The suffix that tells the format: `.bin`, but `.jsonl.zst`."""
    inner = Path(path.stem).suffix
    return (inner if inner[1:].lower() in FORMATS else "") + path.suffix or "no suffix"


class DataFile:
    """A data file, decompressed. Reads are bounded; a suspicious compression ratio is refused.

    encoding: of a text that is converted to UTF-8.
    """

    def __init__(self, path: Path, raw: IO[bytes], encoding: str | None = None) -> None:
        self.path, self._raw = path, raw
        stream = unpacked(path, raw)
        self._is_packed, self._num_unpacked = stream is not raw, 0
        if encoding is not None:
            stream = cast(IO[bytes], BufferedReader(Utf8Reader(stream, encoding)))
        self._stream = cast(BufferedReader, stream)
        self._damage: Exception | None = None

    def read(self, size: int) -> bytes:
        """Read `size` bytes; fewer at the end, or before damage, which the next read raises."""
        if self._damage is not None:
            raise self._damage
        data = b""
        try:
            while len(data) < size and (chunk := self._stream.read1(size - len(data))):
                data += chunk
        except PACKED_ERRORS as error:
            if not data:
                raise
            self._damage = error
        return self._checked(data)

    @property
    def num_packed(self) -> int:
        """Bytes of the file that were read."""
        return self._raw.tell()

    def readline(self, size: int) -> bytes:
        return self._checked(self._stream.readline(size))

    def _checked(self, data: bytes) -> bytes:
        self._num_unpacked += len(data)
        if self._is_packed:
            check_ratio(self.path, self._num_unpacked, self.num_packed)
        return data


def check_ratio(path: Path, num_unpacked: int, num_packed: int) -> None:
    """Raise UserError for an archive that unpacks to suspiciously much."""
    if num_unpacked > max(_UNCHECKED_BYTES, LARGEST_RATIO * num_packed):
        what = f"an archive that unpacks to more than {LARGEST_RATIO} times its size"
        raise UserError(what, where=path, next_step="Unpack it yourself if you know what it is.")


@dataclass(frozen=True)
class LineRange:
    """Whole lines of a file in UTF-8: its bytes from start to end, of which the first is in line `first_line`.

    Of a compressed file they are bytes of its content. content: a file that holds them; without it they are all to the
    end, and what comes before is unpacked in vain.
    """

    path: Path
    start: int
    end: int
    first_line: int
    content: Path | None = None


class _Window(ChunkReader):
    """The bytes of a range, as a file."""

    def __init__(self, stream: IO[bytes], lines: LineRange) -> None:
        super().__init__(stream)
        stream.seek(lines.start)
        self._left = lines.end - lines.start

    def _chunk(self) -> bytes:
        data: bytes = self._stream.read(min(BLOCK_BYTES, self._left))
        self._left -= len(data)
        return data


_range: ContextVar[LineRange | None] = ContextVar("range", default=None)


@contextmanager
def only(lines: LineRange) -> Iterator[None]:
    """Inside, the file consists of these lines for its readers, which count them from the file's beginning."""
    token = _range.set(lines)
    try:
        yield
    finally:
        _range.reset(token)


@contextmanager
def open_data(path: Path, *, convert: bool = True) -> Iterator[DataFile]:
    """Open a data file. Damage found while it is open, or a special file, is a UserError that names it.

    convert: to UTF-8, a text that is surely in another encoding.
    """
    part = _range.get()
    part = part if part and part.path == path else None
    encoding = encoding_of(path) if convert and not part else None
    is_packed = path.suffix.lower() in PACKED
    content = part.content if part and part.content else path
    with read_errors(path), _damage_named(path), open_raw(content) as stream:
        if part and not is_packed:
            stream = BufferedReader(_Window(stream, part), BLOCK_BYTES)
        file = DataFile(content, stream, encoding)
        left = part.start if part and is_packed and not part.content else 0
        while left:
            left -= len(file.read(min(left, BLOCK_BYTES)))
        yield file


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except PACKED_ERRORS as error:
        name = "zst" if path.suffix.lower() == ".zst" else "gzip"
        raise UserError(f"broken {name} file: {error}", where=path, next_step="Download or pack it again.") from None


# Where a long line is best cut: at a CR, a sentence or a word.
_PART_ENDS = (b"\r",), tuple(mark.encode() for mark in (". ", "! ", "? ", "。", "！", "？")), (b" ",)


def raw_lines(path: Path, cut_at: int = 0) -> Iterator[tuple[int, int, bytes | None]]:
    """(number, offset, bytes) of each line, its end included; None for one of more than LARGEST_LINE_BYTES.

    cut_at: a longer line, of any length, comes in parts of at most so many bytes.
    Raises UserError if the rest of the file cannot be read.
    """
    part = _range.get()
    number, offset, rest = part.first_line if part and part.path == path else 1, 0, b""
    limit = cut_at or LARGEST_LINE_BYTES + 1
    with open_data(path) as stream:
        while raw := rest + stream.readline(limit - len(rest)):
            length = end = len(raw)
            if end == limit and not raw.endswith(b"\n"):
                if cut_at:
                    length = end = _cut(raw)
                else:
                    while raw and not raw.endswith(b"\n"):
                        raw = stream.readline(1 << 20)
                        length += len(raw)
                    end = 0
            yield number, offset, raw[:end] or None
            offset, rest = offset + length, raw[end:] if cut_at else b""
            number += raw[:end].endswith(b"\n") or not cut_at


def _cut(raw: bytes) -> int:
    """Where a part of a line ends: after one of _PART_ENDS, else anywhere but inside a character or `<|endoftext|>`."""
    for marks in _PART_ENDS:
        if ends := [raw.rfind(mark) + len(mark) for mark in marks if mark in raw]:
            return max(ends)
    return max(0, raw.find(b"<", len(raw) - len(SEPARATOR) + 1)) or utf_8_decode(raw, "replace", False)[1]


def lines(path: Path, cut_at: int = 0) -> Iterator[tuple[int, str | UserError]]:
    """(number, line), decoded one by one so that a bad byte is located exactly. Only LF ends a line; cut_at: see above.

    A line that is not UTF-8 is yielded as an error; if the rest of the file cannot be read, an error is the last item.
    """
    number = 0
    try:
        for number, offset, raw in raw_lines(path, cut_at):
            if raw is None:
                yield number, UserError(f"a line of more than {LARGEST_LINE_BYTES >> 20} MiB", where=f"{path}:{number}")
                continue
            bad = -1
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad, text = error.start, raw.decode("utf-8", errors="replace")
            if not offset:
                text = text.removeprefix("\ufeff")
            text = text.rstrip("\r\n")
            yield number, text if bad < 0 else encoding_error(path, number, offset + bad, raw[bad], text)
    except UserError as error:
        yield number + 1, unrecoverable(error, f"{path}:{number + 1}" if number else None)


def blocks(path: Path) -> Iterator[str]:
    """The file's text in blocks of bounded size, without a BOM. Raises UserError if it is not UTF-8."""
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


def head(path: Path, *, convert: bool = True) -> bytes:
    """The first bytes of a file, fewer before damage."""
    with open_data(path, convert=convert) as stream:
        return stream.read(HEAD_BYTES)


def encoding_error(path: Path, line: int, offset: int, byte: int, readable: str = "") -> NotTextError:
    """The error for a bad byte. readable: the line with its bad bytes replaced."""
    if (encoding := encoding_of(path)) is not None:  # offset and byte are those of the converted text
        error = NotTextError(f"not valid {encoding}", where=f"{path}:{line}")
    else:
        got = f"byte 0x{byte:02x} at offset {offset}"
        error = NotTextError("not valid UTF-8", where=f"{path}:{line}", got=got, next_step=encoding_hint(path))
    error.readable = readable
    return error


def encoding_of(path: Path) -> str | None:
    """The encoding of a text that surely is not in UTF-8. Said once for each file, as it is converted."""
    name, sure = _likely_encoding(path)
    return name if sure else None


def encoding_hint(path: Path) -> str | None:
    """How to convert a file that is likely in another encoding; None if none is likely."""
    name, _ = _likely_encoding(path)
    return name and f"It reads as {name}: convert it with iconv -f {name} -t UTF-8."


def _likely_encoding(path: Path) -> tuple[str | None, bool]:
    """The encoding other than UTF-8, and whether it is sure."""
    try:
        stat = path.stat()
    except OSError:  # opening it raises a better error
        return None, False
    return _cached_encoding(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _cached_encoding(path: Path, size: int, changed_ns: int) -> tuple[str | None, bool]:
    try:
        start = head(path, convert=False)
        name = guess_encoding(start)
        if name is None or not is_sure(start, name):
            return name, False
        with open_data(path, convert=False) as stream:
            all_bytes = iter(partial(stream.read, BLOCK_BYTES), b"")
            if name != marked_encoding(start) and not decodes(all_bytes, name):
                return name, False
    except UserError:  # damaged; reading raises it in its place
        return None, False
    warnings.warn(f"{path}: read as {name}, not UTF-8", stacklevel=5)
    return name, True


def no_record_error(path: Path) -> UserError:
    """The error for a file without a record, with the reason."""
    start = head(path)
    if not start:
        return UserError("the file is empty", where=path)
    is_blank = not start.removeprefix(BOM_UTF8).strip()
    return UserError("the file has only blank lines" if is_blank else "the file has no record", where=path)

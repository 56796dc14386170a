"""From any file people have to records: documents to read, chats to answer, and line-exact errors.

Files (each also as `.gz`, except parquet): `.txt` `.md` (cut into documents), `.py` (one document), `.jsonl`, `.json`
(an array, lines, or one object), `.csv` `.tsv` (first row names the columns) and `.parquet`.

A document record has its text in `text`, else `content`, else `raw_content`; the text is handed over unchanged.
A chat record may have any of these shapes, told apart record by record:

- MiniMind   {"conversations": [{"role", "content", "reasoning_content"?, "tools"?, "tool_calls"?}]}
- OpenAI     {"messages": [{"role", "content", "tool_calls"?}], "tools"?}
- ShareGPT   {"conversations": [{"from": "human|gpt|system|function_call|observation", "value"}], "system"?, "tools"?}
- Firefly    {"conversation": [{"human", "assistant"}]}
- Alpaca     {"instruction", "input"?, "output", "system"?, "history"?}; with `en_` and `zh_` fields it is two chats
- plain      {"prompt" | "question", "response" | "answer" | "completion" | "std_answer", "system"?}

A record of preferences is a pair or one judged answer; where an answer is a list of messages it may hold the prompt:

- pair       {"chosen": [messages], "rejected": [messages]}, or with "prompt" (text or messages) and answers of text
- judged     {"prompt", "completion", "label": true | false}, or a chat in any field of messages with "label"

Everything is read lazily: memory holds one record (a JSON array is decoded value by value), never a file.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE, getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from penjing.base.errors import UserError

Kind = Literal["documents", "chats", "preferences", "prompts"]
OnSkip = Callable[[str, int, str], None]
"""Called with the file, the line and the reason for each record that is left out."""

SEPARATOR = "<|endoftext|>"
TEXT_FIELDS = ("text", "content", "raw_content")
CHAT_FIELDS = ("conversations", "messages", "conversation")
QUESTION_FIELDS = ("prompt", "question")
ANSWER_FIELDS = ("response", "answer", "completion", "std_answer")
PLAIN_FORMATS = ("txt", "md", "py")
FORMATS = (*PLAIN_FORMATS, "jsonl", "json", "csv", "tsv", "parquet")
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip

_BLOCK_BYTES = 1 << 18
_HEAD_BYTES = 1 << 16
_LARGEST_RECORD_CHARACTERS = 1 << 28
_NOT_DATA = re.compile(r"(readme|licen[cs]e|copying|notice)\b.*|source\.json|dataset_infos?\.json", re.IGNORECASE)
_INDENT = re.compile(r"[ \t\u3000]*\u3000[ \t\u3000]*|[ \t]+(?=[\u3001-\u303f\u3400-\u9fff\uff01-\uff60‘’“”—…])")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text to learn from. `line` is where it starts in `source`, from 1 (in parquet: the row)."""

    text: str
    source: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. `role` is system, user, assistant or tool; a tool call is {"name": str, "arguments": dict}."""

    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One conversation with at least one answer. `tools` are the functions on offer, each with a `name`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    source: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Whole conversations and whether each one's answer is wanted: (chosen, rejected) with (True, False), or one alone.

    margin: by how much the first is better, in the units of a reward; 0 where nobody said.
    """

    chats: tuple[Chat, ...]
    wanted: tuple[bool, ...]
    margin: float = 0.0


# ---------------------------------------------------------------------------------------------------- the five readers


def list_files(paths: Sequence[Path]) -> list[Path]:
    """The files behind `paths`: a file is itself, a folder is its data files at any depth, sorted by path.

    In a folder hidden names, README, LICENSE and the catalogue's SOURCE.json are not data.
    Raises `UserError` for a missing path, a folder without data files and a file of an unknown format.
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
                raise UserError("the folder has no data file", where=path, wanted=_wanted_formats())
            found += inside
        elif path.exists():
            _format(path)
            found.append(path)
        else:
            raise UserError("no such file or folder", where=path)
    return found


def read_documents(
    paths: Sequence[Path], *, document_characters: int = 2000, on_skip: OnSkip | None = None
) -> Iterator[Document]:
    """Documents of `paths`, in order, one at a time.

    Plain text: BOM dropped, CRLF -> LF, trailing spaces and the full-width (or, before Chinese, any) indents of novels
    dropped; documents are parted by lines `<|endoftext|>` where the file has one, else the file is cut after a blank
    line, or at the latest after some line, into documents of about `document_characters`, so that whole documents can
    be held out of a novel too. No line is ever cut and none is lost.
    A record whose text is empty is left out and reported to `on_skip(file, line, reason)`. Raises `UserError`.
    """
    for path in list_files(paths):
        tally = _Tally(path, on_skip)
        plain = _format(path) in PLAIN_FORMATS
        for line, text in _plain_documents(path, document_characters) if plain else _record_texts(path):
            if not text or text.isspace():
                tally.skip(line, "the text is empty")
            else:
                tally.num_kept += 1
                yield Document(text=text, source=str(path), line=line)
        tally.check()


def read_chats(paths: Sequence[Path], *, on_skip: OnSkip | None = None) -> Iterator[Chat]:
    """Chats of `paths`, in order, one at a time, whatever their shape (see the module's docstring).

    A chat in which some answer is empty is left out and reported to `on_skip(file, line, reason)`.
    Raises `UserError` for everything that is not a chat: the line, the field, what was got and what was wanted.
    """
    for path in list_files(paths):
        if _format(path) in PLAIN_FORMATS:
            raise UserError("plain text holds documents, not chats", where=path, wanted="jsonl, json, csv or parquet")
        tally = _Tally(path, on_skip)
        for line, record in _records(path):
            for chat in _chats(record, _Place(path, line)):
                if any(_says_nothing(message) for message in chat.messages if message.role == "assistant"):
                    tally.skip(line, "an answer is empty")
                else:
                    tally.num_kept += 1
                    yield chat
        tally.check()


def read_prompts(paths: Sequence[Path]) -> Iterator[tuple[Chat, Mapping[str, Any]]]:
    """Conversations that wait for an answer, each with its whole record (reference answers stand in further fields).

    The chat ends with a user or tool turn: an empty assistant turn at its end is dropped. Raises `UserError`.
    """
    for path in list_files(paths):
        tally = _Tally(path, None)
        for line, record in _records(path):
            place = _Place(path, line)
            if not _present(record, CHAT_FIELDS):
                raise UserError("no conversation", where=place, got=_names(list(record)), wanted=_or(CHAT_FIELDS))
            messages, tools = _turns(record, place)
            if messages and messages[-1].role == "assistant" and _says_nothing(messages[-1]):
                messages.pop()
            if not messages or messages[-1].role not in ("user", "tool"):
                got = messages[-1].role if messages else "no message at all"
                raise UserError("the last turn asks nothing", where=place, got=got, wanted="a user turn")
            tally.num_kept += 1
            yield Chat(messages=tuple(messages), tools=tools, source=str(path), line=line), record
        tally.check()


def read_preferences(paths: Sequence[Path], *, on_skip: OnSkip | None = None) -> Iterator[Judged]:
    """Pairs of answers, and single answers with a label, one at a time, whatever their shape (see the module).

    A pair of equal answers, and a record with an empty answer, is left out and reported to `on_skip`.
    Raises `UserError` for everything else: the line, the field, what was got and what was wanted.
    """
    for path in list_files(paths):
        if _format(path) in PLAIN_FORMATS:
            raise UserError("plain text holds no preferences", where=path, wanted="jsonl, json, csv or parquet")
        tally = _Tally(path, on_skip)
        for line, record in _records(path):
            judged = _judged(record, _Place(path, line))
            if any(_says_nothing(chat.messages[-1]) for chat in judged.chats):
                tally.skip(line, "an answer is empty")
            elif len(judged.chats) == 2 and judged.chats[0].messages == judged.chats[1].messages:
                tally.skip(line, "both answers are the same")
            else:
                tally.num_kept += 1
                yield judged
        tally.check()


def sniff(path: Path) -> Kind:
    """What a file (or the first file of a folder) holds, judged by its first record. Raises `UserError`."""
    first = list_files([path])[0]
    if _format(first) in PLAIN_FORMATS:
        return "documents"
    for line, record in _records(first):
        kind = _kind(record)
        if kind is None:
            raise _unknown_record(record, _Place(first, line))
        return kind
    raise _nothing_in(first)


# ------------------------------------------------------------------------------------------------------ files and bytes


def _format(path: Path) -> str:
    name = path.name.lower()
    packed = name.endswith(".gz")
    suffix = name.removesuffix(".gz").rpartition(".")[2]
    if suffix not in FORMATS or (packed and suffix == "parquet"):
        raise UserError("unknown file format", where=path, got=path.suffix or "no suffix", wanted=_wanted_formats())
    return suffix


def _wanted_formats() -> str:
    return ", ".join(f".{name}" for name in FORMATS) + " or one of the text formats as .gz"


def _files_in(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or _NOT_DATA.fullmatch(path.name) or not path.is_file():
            continue
        try:
            _format(path)
        except UserError:
            continue
        found.append(path)
    return found


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    try:
        packed = path.suffix.lower() == ".gz"
        with gzip.open(path, "rb") if packed else open(path, "rb") as stream:
            yield cast(IO[bytes], stream)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"broken gzip file: {error}", where=path, next_step="Download or pack it again.") from None
    except FileNotFoundError:
        raise UserError("no such file", where=path) from None
    except IsADirectoryError:
        raise UserError("a folder, not a file", where=path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=path) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, decoded one by one so that a bad byte is named exactly. Only LF ends a line."""
    offset = 0
    with _open(path) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _encoding_error(path, number, offset + error.start, raw[error.start]) from None
            if number == 1:
                text = text.removeprefix("\ufeff")
            offset += len(raw)
            yield number, text.rstrip("\r\n")


def _blocks(path: Path) -> Iterator[str]:
    """The file's text in pieces of bounded size, without a BOM."""
    decoder = getincrementaldecoder("utf-8")()
    offset, line = 0, 1
    with _open(path) as stream:
        while True:
            raw = stream.read(_BLOCK_BYTES)
            if not offset:
                raw = raw.removeprefix(BOM_UTF8)
            pending = decoder.getstate()[0]
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line += (pending + raw).count(b"\n", 0, error.start)
                bad = (pending + raw)[error.start]
                raise _encoding_error(path, line, offset - len(pending) + error.start, bad) from None
            offset += len(raw)
            line += text.count("\n")
            if text:
                yield text
            if not raw:
                return


def _encoding_error(path: Path, line: int, offset: int, byte: int) -> UserError:
    with _open(path) as stream:
        guess = guess_encoding(stream.read(_HEAD_BYTES))
    hint = None
    if guess is not None:
        hint = f"It reads as {guess}: convert it with  iconv -f {guess} -t UTF-8 {path.name} > utf8-{path.name}"
    return UserError(
        "not valid UTF-8", where=f"{path}:{line}", got=f"byte 0x{byte:02x} at offset {offset}", next_step=hint
    )


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


class _Tally:
    """Counts what one file gave, so that a file that gives nothing is an error and nothing is dropped in silence."""

    def __init__(self, path: Path, on_skip: OnSkip | None) -> None:
        self.path = path
        self.on_skip = on_skip
        self.num_kept = 0
        self.num_skipped = 0
        self.first = ""

    def skip(self, line: int, reason: str) -> None:
        if not self.num_skipped:
            self.first = f"line {line}: {reason}"
        self.num_skipped += 1
        if self.on_skip is not None:
            self.on_skip(str(self.path), line, reason)

    def check(self) -> None:
        if self.num_kept:
            return
        if self.num_skipped:
            raise UserError(f"no usable record: all {self.num_skipped} are left out, {self.first}", where=self.path)
        raise _nothing_in(self.path)


def _nothing_in(path: Path) -> UserError:
    with _open(path) as stream:
        head = stream.read(_HEAD_BYTES)
    if not head:
        return UserError("the file is empty", where=path)
    blank = not head.removeprefix(BOM_UTF8).strip()
    return UserError("the file has only blank lines" if blank else "the file has no record", where=path)


# ----------------------------------------------------------------------------------------------------------- plain text


def _plain_documents(path: Path, document_characters: int) -> Iterator[tuple[int, str]]:
    if _format(path) == "py":
        text = "\n".join(line for _, line in _clean_lines(path, prose=False))
        return iter([(1, text + "\n")] if text else [])
    return _separated(path) if _has_separator(path) else _cut(path, document_characters)


def _clean_lines(path: Path, *, prose: bool = True) -> Iterator[tuple[int, str]]:
    for number, line in _lines(path):
        if "\0" in line:
            raise _zero_byte(path, number)
        for part in line.split("\r") if "\r" in line else (line,):
            if prose:
                part = part.rstrip(" \t\u3000")
                if part and part[0] in " \t\u3000":
                    part = _INDENT.sub("", part, count=1) if _INDENT.match(part) else part
            yield number, part


def _zero_byte(path: Path, line: int) -> UserError:
    with _open(path) as stream:
        guess = guess_encoding(stream.read(_HEAD_BYTES))
    hint = f"It reads as {guess}: convert it with  iconv -f {guess} -t UTF-8." if guess else "This is a binary file."
    return UserError("a zero byte in a text file", where=f"{path}:{line}", next_step=hint)


def _has_separator(path: Path) -> bool:
    """Whether some line is `<|endoftext|>` alone. A scan of bytes that stops at the first one."""
    mark = SEPARATOR.encode()
    with _open(path) as stream:
        return any(mark in raw and raw.strip() == mark for raw in stream)


def _separated(path: Path) -> Iterator[tuple[int, str]]:
    lines: list[str] = []
    start = number = 1
    for number, line in _clean_lines(path):
        if line.strip() == SEPARATOR:
            yield _document_at(start, lines)
            lines, start = [], number + 1
        else:
            lines.append(line)
    if any(lines):
        yield _document_at(start, lines)


def _cut(path: Path, document_characters: int) -> Iterator[tuple[int, str]]:
    """After a blank line once there is enough text; after any line once there is half as much again."""
    lines: list[str] = []
    start, num_characters = 1, 0
    for number, line in _clean_lines(path):
        if not lines:
            if not line:
                continue
            start = number
        lines.append(line)
        num_characters += len(line) + 1
        enough = num_characters >= document_characters and not line
        if enough or num_characters >= 1.5 * document_characters:
            yield _document_at(start, lines)
            lines, num_characters = [], 0
    if any(lines):
        yield _document_at(start, lines)


def _document_at(start: int, lines: list[str]) -> tuple[int, str]:
    """The lines without the blank ones at both ends, and the number of the first that is left."""
    blank = 0
    while blank < len(lines) and not lines[blank]:
        blank += 1
    return (start + blank if blank < len(lines) else start), "\n".join(lines).strip("\n")


# ----------------------------------------------------------------------------------------------------- rows and objects


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def _records(path: Path, text_only: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    match _format(path):
        case "csv":
            return _csv_records(path, ",")
        case "tsv":
            return _csv_records(path, "\t")
        case "parquet":
            return _parquet_records(path, text_only)
        case _:
            return _json_records(path)


def _json_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    values = _json_lines(path) if _is_json_lines(path) else _JsonStream(path).values()
    for line, value in values:
        if not isinstance(value, dict):
            raise UserError("not a record", where=f"{path}:{line}", got=_type_name(value), wanted="a JSON object {...}")
        yield line, value


def _is_json_lines(path: Path) -> bool:
    with _open(path) as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(BOM_UTF8).lstrip()
    first, newline, _ = head.partition(b"\n")
    if first.startswith(b"[") or first.strip() == b"{":
        return False
    if _format(path) == "jsonl":
        return True
    try:
        return bool(newline) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path):
        if not line or line.isspace():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise _broken_json(f"{path}:{number}", error.msg, error.pos + 1, line[error.pos :]) from None
        except RecursionError:
            raise UserError("JSON nested too deeply", where=f"{path}:{number}") from None


def _broken_json(where: str, message: str, column: int, rest: str) -> UserError:
    found = repr(rest[:20]) if rest else "the end"
    return UserError(f"broken JSON at column {column}: {message}", where=where, got=found)


class _JsonStream:
    """A JSON array, or values one after another, decoded value by value in memory of a few blocks and one record."""

    _decoder = json.JSONDecoder()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks = _blocks(path)
        self.buffer = ""
        self.position = 0  # in the buffer
        self.line = 1  # of the position
        self.line_start = 0  # where that line starts in the buffer; negative once it has been let go

    def values(self) -> Iterator[tuple[int, Any]]:
        in_array = self._next() == "["
        if in_array:
            self._move(self.position + 1)
            if self._next() == "]":
                return
        while True:
            char = self._next()
            if not char:
                if in_array:
                    raise UserError("the JSON array is never closed: the file is cut short", where=self._where())
                return
            line = self.line
            yield line, self._value()
            if in_array and not self._step_to_next_item():
                return

    def _step_to_next_item(self) -> bool:
        char = self._next()
        if char not in ("", ",", "]"):
            raise _broken_json(self._where(), "wanted , or ]", self._column(self.position), self._rest())
        if char:
            self._move(self.position + 1)
        if char == "]" and self._next():
            raise _broken_json(self._where(), "text after the array", self._column(self.position), self._rest())
        return char != "]"

    def _where(self) -> str:
        return f"{self.path}:{self.line}"

    def _rest(self) -> str:
        return self.buffer[self.position : self.position + 20]

    def _column(self, position: int) -> int:
        last = self.buffer.rfind("\n", self.position, position)
        return position - (last if last >= 0 else self.line_start - 1)

    def _move(self, position: int) -> None:
        last = self.buffer.rfind("\n", self.position, position)
        if last >= 0:
            self.line += self.buffer.count("\n", self.position, position)
            self.line_start = last + 1
        self.position = position

    def _fill(self) -> bool:
        """Let go of what is done with and read at least as much as is left; False at the end of the file."""
        rest = self.buffer[self.position :]
        self.line_start -= self.position
        self.position = 0
        pieces, num_new = [rest], 0
        for block in self.blocks:
            pieces.append(block)
            num_new += len(block)
            if num_new >= len(rest):
                break
        self.buffer = "".join(pieces)
        if len(rest) > _LARGEST_RECORD_CHARACTERS:
            raise UserError("a record longer than 268 million characters", where=self._where())
        return num_new > 0

    def _next(self) -> str:
        """The next character that is not white space, without taking it; empty at the end."""
        while True:
            match = _JSON_SPACE.match(self.buffer, self.position)
            assert match is not None
            self._move(match.end())
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError as error:
                # 16: the longest literal or escape that a block's end can cut in two
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.buffer) - 16
                after = error.pos - self.position
                if cut and self._fill():
                    continue
                place = self.position + after
                line = self.line + self.buffer.count("\n", self.position, place)
                rest = self.buffer[place : place + 20]
                raise _broken_json(f"{self.path}:{line}", error.msg, self._column(place), rest) from None
            except RecursionError:
                raise UserError("JSON nested too deeply", where=self._where()) from None
            self._move(end)
            return value


def _csv_records(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(_LARGEST_RECORD_CHARACTERS)  # the default of 131,072 refuses a chapter
    rows = csv.reader((line + "\n" for _, line in _lines(path)), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    line = 1
    try:
        for row in rows:
            if row and names is None:
                names = [name.strip() for name in row]
            elif row and names is not None:
                if len(row) != len(names):
                    raise UserError(
                        "a row of another width", where=f"{path}:{line}", got=f"{len(row)} fields", wanted=len(names)
                    )
                yield line, dict(zip(names, row, strict=True))
            line = rows.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"broken CSV: {error}", where=f"{path}:{line}", next_step='A " inside a quoted field is written "".'
        ) from None


def _parquet_records(path: Path, text_only: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading parquet needs pyarrow", where=path, next_step="pip install pyarrow") from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            columns = None
            if text_only:
                columns = [name for name in TEXT_FIELDS if name in table.schema_arrow.names][:1]
                if not columns:
                    raise _missing_text(table.schema_arrow.names, _Place(path, 1))
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield row, record
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"broken parquet file: {error}", where=path, got=f"{row} rows before it") from None


# ------------------------------------------------------------------------------------------------------------ documents


def _record_texts(path: Path) -> Iterator[tuple[int, str]]:
    for line, record in _records(path, text_only=True):
        place = _Place(path, line)
        name = next((name for name in TEXT_FIELDS if name in record), None)
        if name is None or (name == "content" and "role" in record):
            raise _missing_text(list(record), place, record)
        yield line, _text(record[name], name, place)


def _missing_text(names: Sequence[str], place: _Place, record: Mapping[str, Any] | None = None) -> UserError:
    kind = _kind(record) if record is not None else None
    hint = f"This looks like {kind}, not documents." if kind not in (None, "documents") else None
    return UserError("no field text", where=place, got=_names(names), wanted=" or ".join(TEXT_FIELDS), next_step=hint)


def _names(names: Sequence[object]) -> str:
    """Field names for an error line: at most ten, none longer than thirty characters."""
    shown = [text if len(text) <= 30 else text[:27] + "..." for text in map(str, names[:10])]
    return "the fields " + ", ".join(shown) + (", ..." if len(names) > 10 else "") if names else "no field at all"


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    return {dict: "an object", list: "a list", str: "text", bool: "true or false"}.get(type(value), "a number")


def _text(value: object, field: str, place: _Place) -> str:
    """`value` as text that can be written as UTF-8; null is empty. `field` names it in the error."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"field {field} is not text", where=place, got=_type_name(value), wanted="text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"field {field} has half a character",
                where=place,
                got=f"\\u{ord(value[error.start]):04x} without its pair at character {error.start + 1}",
            ) from None
    return value


# ---------------------------------------------------------------------------------------------------------------- chats


def _present(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _kind(record: Mapping[str, Any]) -> Kind | None:
    has_text = any(isinstance(record.get(name), str) for name in TEXT_FIELDS)
    turns = record.get(_present(record, CHAT_FIELDS) or "")
    if ("chosen" in record and "rejected" in record) or (turns and isinstance(record.get("label"), bool)):
        return "preferences"
    if isinstance(turns, list) and turns:
        return "prompts" if "gt" in record or _ends_unanswered(turns[-1]) else "chats"
    if _present(record, ("instruction", "en_instruction", "zh_instruction")):
        return "chats"
    if _present(record, QUESTION_FIELDS):
        answered = _present(record, ANSWER_FIELDS) is not None
        return "chats" if answered else "documents" if has_text else "prompts"
    return "documents" if has_text else None


def _ends_unanswered(last: object) -> bool:
    if not isinstance(last, dict):
        return False
    role = last.get("role") or last.get("from")
    if role is None:
        return not last.get("assistant")
    said = last.get("content") or last.get("value") or last.get("tool_calls")
    return ROLES.get(str(role).lower()) != "assistant" or not said


def _unknown_record(record: Mapping[str, Any], place: _Place) -> UserError:
    return UserError(
        "not a known kind of record",
        where=place,
        got=_names(list(record)),
        wanted="text, conversations, messages, instruction + output, or prompt + response",
    )


def _says_nothing(message: Message) -> bool:
    return not message.tool_calls and not message.content.strip()


def _chats(record: Mapping[str, Any], place: _Place) -> Iterator[Chat]:
    kind = _kind(record)
    if kind == "preferences":
        raise UserError(
            "preference data, not chats", where=place, got=_names(list(record)), next_step="Use it for DPO or KTO."
        )
    if _present(record, CHAT_FIELDS):
        yield _from_turns(record, place)
    elif "instruction" in record:
        yield _from_alpaca(record, "", place)
    elif "en_instruction" in record or "zh_instruction" in record:
        for prefix in ("en_", "zh_"):
            if prefix + "instruction" in record:
                yield _from_alpaca(record, prefix, place)
    elif _present(record, QUESTION_FIELDS):
        yield _from_pair(record, place)
    elif kind == "documents":
        got = _names(list(record))
        raise UserError("a document, not a chat", where=place, got=got, next_step="Use it to pretrain.")
    else:
        raise _unknown_record(record, place)


def _chat(messages: list[Message], tools: tuple[dict[str, Any], ...], place: _Place) -> Chat:
    if not any(message.role == "assistant" for message in messages):
        roles = ", ".join(message.role for message in messages[:8]) or "no message at all"
        raise UserError("no assistant turn", where=place, got=roles, wanted="at least one answer to learn from")
    return Chat(messages=tuple(messages), tools=tools, source=str(place.path), line=place.line)


def _system(record: Mapping[str, Any], place: _Place) -> list[Message]:
    text = _text(record.get("system"), "system", place)
    return [Message(role="system", content=text)] if text.strip() else []


def _from_alpaca(record: Mapping[str, Any], prefix: str, place: _Place) -> Chat:
    if prefix + "output" not in record:
        raise UserError(f"no field {prefix}output", where=place, got=_names(list(record)))
    messages = _system(record, place)
    for pair in record.get("history") or []:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            got = _type_name(pair)
            raise UserError("field history is not pairs", where=place, got=got, wanted="[question, answer]")
        messages.append(Message(role="user", content=_text(pair[0], "history", place)))
        messages.append(Message(role="assistant", content=_text(pair[1], "history", place)))
    asked = [_text(record.get(prefix + name), prefix + name, place) for name in ("instruction", "input")]
    messages.append(Message(role="user", content="\n".join(part for part in asked if part.strip())))
    messages.append(Message(role="assistant", content=_text(record[prefix + "output"], prefix + "output", place)))
    return _chat(messages, (), place)


def _from_pair(record: Mapping[str, Any], place: _Place) -> Chat:
    question = _present(record, QUESTION_FIELDS)
    answer = next((name for name in ANSWER_FIELDS if name in record), None)
    assert question is not None
    if answer is None:
        got = _names(list(record))
        raise UserError("a question without an answer", where=place, got=got, wanted=_or(ANSWER_FIELDS))
    messages = _system(record, place)
    messages.append(Message(role="user", content=_text(record[question], question, place)))
    messages.append(Message(role="assistant", content=_text(record[answer], answer, place)))
    return _chat(messages, (), place)


def _judged(record: Mapping[str, Any], place: _Place) -> Judged:
    if "chosen" in record or "rejected" in record:
        chats = tuple(_answered(record, name, place) for name in ("chosen", "rejected"))
        margin = record.get("margin") or 0.0
        if isinstance(margin, bool) or not isinstance(margin, (int, float)):
            raise UserError("field margin is not a number", where=place, got=_type_name(margin), wanted="a number")
        return Judged(chats=chats, wanted=(True, False), margin=float(margin))
    label = record.get("label")
    if label is None:
        raise UserError(
            "not a preference",
            where=place,
            got=_names(list(record)),
            wanted="chosen and rejected, or an answer and label",
        )
    if label not in (True, False):
        raise UserError("field label is not a judgement", where=place, got=repr(label)[:40], wanted="true or false")
    if _present(record, CHAT_FIELDS):
        chat = _ending_in_answer(*_turns(record, place), _present(record, CHAT_FIELDS) or "", place)
    else:
        chat = _answered(record, next((name for name in ANSWER_FIELDS if name in record), "completion"), place)
    return Judged(chats=(chat,), wanted=(bool(label),))


def _answered(record: Mapping[str, Any], name: str, place: _Place) -> Chat:
    """The conversation that ends with the answer in field `name`: text, messages after the prompt, or all messages."""
    answer = record.get(name)
    if answer is None:
        raise UserError(f"no field {name}", where=place, got=_names(list(record)), wanted=name)
    asked, tools = _asked(record, place)
    if isinstance(answer, list):
        messages, more = _turns({CHAT_FIELDS[0]: answer}, place, called=name)
        tools = more or tools
        if messages and messages[0].role not in ("assistant", "tool"):
            return _ending_in_answer(_system(record, place) + messages, tools, name, place)
    else:
        messages = [Message(role="assistant", content=_text(answer, name, place))]
    if not asked:
        got = _names(list(record))
        raise UserError(f"field {name} is an answer without a prompt", where=place, got=got, wanted="prompt")
    return _ending_in_answer(_system(record, place) + asked + messages, tools, name, place)


def _asked(record: Mapping[str, Any], place: _Place) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    name = _present(record, QUESTION_FIELDS)
    if name is None or not isinstance(record[name], list):
        text = _text(record[name], name, place) if name else ""
        return [Message(role="user", content=text)] if text.strip() else [], _tools(record.get("tools"), place)
    messages, tools = _turns({CHAT_FIELDS[0]: record[name], "tools": record.get("tools")}, place, called=name)
    return messages, tools


def _ending_in_answer(messages: list[Message], tools: tuple[dict[str, Any], ...], name: str, place: _Place) -> Chat:
    if len(messages) < 2 or messages[-1].role != "assistant":
        got = ", ".join(message.role for message in messages[-8:]) or "no message at all"
        raise UserError(
            f"field {name} does not end with an answer", where=place, got=got, wanted="an assistant turn last"
        )
    return Chat(messages=tuple(messages), tools=tools, source=str(place.path), line=place.line)


def _or(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1]


def _from_turns(record: Mapping[str, Any], place: _Place) -> Chat:
    return _chat(*_turns(record, place), place)


def _turns(
    record: Mapping[str, Any], place: _Place, called: str = ""
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """called: the name of the field in errors, where it is not the record's own."""
    field = _present(record, CHAT_FIELDS)
    assert field is not None
    turns = record[field]
    field = called or field
    if not isinstance(turns, list):
        raise UserError(f"field {field} is not a list", where=place, got=_type_name(turns), wanted="a list of messages")
    messages = _system(record, place)
    tools = _tools(record.get("tools"), place)
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise UserError(f"{field}[{index}] is not a message", where=place, got=_type_name(turn), wanted="an object")
        if "human" in turn and "assistant" in turn:  # Firefly: both sides in one object
            messages.append(Message(role="user", content=_text(turn["human"], "human", place)))
            messages.append(Message(role="assistant", content=_text(turn["assistant"], "assistant", place)))
            continue
        tools = _tools(turn.get("tools"), place) or tools
        message = _message(turn, f"{field}[{index}]", place)
        if message.role != "system" or message.content.strip():  # a system turn that only carries tools says nothing
            messages.append(message)
    return messages, tools


def _message(turn: Mapping[str, Any], name: str, place: _Place) -> Message:
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        got = repr(said) if said is not None else _names(list(turn))
        raise UserError(f"{name} has no known role", where=place, got=got, wanted="system, user, assistant or tool")
    calls = _tool_calls(turn.get("tool_calls") or turn.get("function_call"), name, place)
    field = "content" if "content" in turn else "value"
    if field not in turn and not calls:
        raise UserError(f"{name} has no content", where=place, got=_names(list(turn)), wanted="content")
    if isinstance(said, str) and said.lower() == "function_call":
        return Message(role=role, content="", tool_calls=_tool_calls(turn.get(field), name, place))
    return Message(
        role=role,
        content=_content(turn.get(field), f"{name}.{field}", place),
        reasoning_content=_text(turn.get("reasoning_content"), f"{name}.reasoning_content", place),
        tool_calls=calls,
    )


def _content(value: object, name: str, place: _Place) -> str:
    """Text, or OpenAI's list of parts when all of them are text."""
    if not isinstance(value, list):
        return _text(value, name, place)
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            got = part.get("type") if isinstance(part, dict) else _type_name(part)
            raise UserError(f"{name} has a part that is not text", where=place, got=got, wanted="text parts only")
        parts.append(_text(part.get("text"), name, place))
    return "\n".join(parts)


def _parsed(value: object, name: str, place: _Place) -> Any:
    """A value that may be written as a JSON string (MiniMind and ShareGPT do); an empty one is None."""
    if isinstance(value, str):
        if not value.strip():
            return None
        start = repr(value[:40])
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} is not JSON: {error}", where=place, got=start) from None
    _text(json.dumps(value, ensure_ascii=False), name, place)
    return value


def _functions(value: object, name: str, place: _Place) -> list[dict[str, Any]]:
    """A list of objects with a `name`; OpenAI's {"type": "function", "function": {...}} is unwrapped."""
    value = _parsed(value, name, place)
    if not value:
        return []
    found = []
    for item in value if isinstance(value, list) else [value]:
        item = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise UserError(f"{name} is not a function", where=place, got=str(item)[:60], wanted='{"name": ...}')
        found.append(item)
    return found


def _tools(value: object, place: _Place) -> tuple[dict[str, Any], ...]:
    return tuple(_functions(value, "tools", place)) if value else ()


def _tool_calls(value: object, name: str, place: _Place) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    calls = []
    for item in _functions(value, f"{name}: the tool call", place):
        arguments = _parsed(item.get("arguments", item.get("parameters")), f"{name}: arguments", place) or {}
        if not isinstance(arguments, dict):
            raise UserError(f"{name}: arguments", where=place, got=_type_name(arguments), wanted="an object")
        calls.append({"name": item["name"], "arguments": arguments})
    return tuple(calls)

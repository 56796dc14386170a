"""The input of `penjing data clean` in pieces of about the same size, which any process may clean on its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penjing.base.errors import UserError
from penjing.base.files import disk_errors
from penjing.data.formats.compression import PACKED
from penjing.data.formats.files import BLOCK_BYTES, LineRange, encoding_of, format_of, head, open_data, size_of
from penjing.data.formats.hub import is_hub
from penjing.data.formats.loose_json import strict_json

PIECE_BYTES = 1 << 25  # of an input: what a killed run repeats, and what a shard holds before cleaning
_PACKED_RATIO = 8  # of text
_MOST_PIECES = 4  # so many without the end of a line are not cut


@dataclass(frozen=True)
class Part:
    """A file, or lines of it. source: the number of the argument that named it."""

    path: Path
    source: int
    lines: LineRange | None = None


@dataclass(frozen=True)
class Piece:
    number: int
    parts: tuple[Part, ...]
    num_bytes: int


def make_pieces(files: Sequence[tuple[Path, int]], folder: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Large files of JSON lines are cut; small files share a piece. Other large files, as they can be read only from
    their beginning, are a piece each. The pieces depend on nothing but the files.

    folder: of the results of pieces, by number. Of a compressed file that is cut, the content of the next piece is
    written there, unless its result is there.
    """
    parts: list[Part] = []
    size = number = 0
    for path, source in files:
        for lines, num_bytes, content in _ranges(path, piece_bytes):
            if parts and (size + num_bytes > piece_bytes or content):
                yield Piece(number, tuple(parts), size)
                parts, size, number = [], 0, number + 1
            if content and lines:
                beside = piece_folder(folder, number).with_suffix(".jsonl")
                if not piece_folder(folder, number).is_dir():
                    with disk_errors(beside):
                        beside.parent.mkdir(parents=True, exist_ok=True)
                        beside.write_bytes(content)
                yield Piece(number, (Part(path, source, replace(lines, content=beside)),), num_bytes)
                number += 1
                continue
            parts.append(Part(path, source, lines))
            size += num_bytes
    if parts:
        yield Piece(number, tuple(parts), size)


def piece_folder(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}"


def _ranges(path: Path, piece_bytes: int) -> Iterator[tuple[LineRange | None, int, bytes]]:
    """(lines, bytes of the file, their content if the file is compressed) of each part of a file.

    Each begins with a line that is an object: no reader takes it for a file of another kind. The last one has no
    content if there is damage in it, or no such line for long: its reader tells.
    """
    size, is_packed = size_of(path), path.suffix.lower() in PACKED
    if size * (_PACKED_RATIO if is_packed else 1) <= piece_bytes or not _is_cuttable(path):
        yield None, size, b""
        return
    start, line, before, buffer = 0, 1, 0, bytearray()
    try:
        with open_data(path) as stream:
            while (block := stream.read(BLOCK_BYTES)) and len(buffer) <= _MOST_PIECES * piece_bytes:
                buffer += block
                while cut := buffer.find(b"\n{", max(piece_bytes, len(buffer) - len(block) - 1)) + 1:
                    read = stream.num_packed if is_packed else start + cut
                    lines = LineRange(path, start, start + cut, line)
                    yield lines, read - before, bytes(buffer[:cut]) if is_packed else b""
                    start, line, before = lines.end, line + buffer.count(b"\n", 0, cut), read
                    del buffer[:cut]
            is_whole = not block
    except UserError:
        is_whole = False
    yield LineRange(path, start, size, line), size - before, bytes(buffer) if is_packed and is_whole else b""


def _is_cuttable(path: Path) -> bool:
    """Whether the file has a JSON object in each line. Its readers tell by the first line too."""
    if is_hub(path) or format_of(path) != "jsonl" or encoding_of(path):
        return False
    first, newline, _ = head(path).partition(b"\n")
    return bool(newline) and isinstance(strict_json(first), dict)

"""The input of `penjing data clean` in pieces of about the same size, which any process may clean on its own."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penjing.data.formats.files import LineRange, encoding_of, head, size_of
from penjing.data.formats.hub import is_hub

PIECE_BYTES = 1 << 25  # of an input: what a killed run repeats, and what a shard holds before cleaning
_BLOCK_BYTES = 1 << 22


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


def make_pieces(files: Sequence[tuple[Path, int]], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Large files of JSON lines are cut; small files share a piece. Other large files, as they can be read only from
    their beginning, are a piece each. The pieces depend on nothing but the files.
    """
    pieces: list[Piece] = []
    parts: list[Part] = []
    size = 0
    for path, source in files:
        for part, num_bytes in _parts(path, source, piece_bytes):
            if parts and size + num_bytes > piece_bytes:
                pieces.append(Piece(len(pieces), tuple(parts), size))
                parts, size = [], 0
            parts.append(part)
            size += num_bytes
    return [*pieces, Piece(len(pieces), tuple(parts), size)] if parts else pieces


def _parts(path: Path, source: int, piece_bytes: int) -> Iterator[tuple[Part, int]]:
    size = size_of(path)
    if size <= piece_bytes or not _is_cuttable(path):
        yield Part(path, source), size
        return
    for lines in _line_ranges(path, piece_bytes):
        yield Part(path, source, lines), lines.end - lines.start


def _is_cuttable(path: Path) -> bool:
    """Whether the file has a JSON object in each line. Its readers tell by the first line too."""
    if path.suffix.lower() != ".jsonl" or is_hub(path) or encoding_of(path):
        return False
    first, newline, _ = head(path).partition(b"\n")
    try:
        return bool(newline) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _line_ranges(path: Path, piece_bytes: int) -> Iterator[LineRange]:
    """Each begins with a line that is an object: no reader takes it for a file of another kind."""
    with open(path, "rb") as stream:
        start, line, at, newlines = 0, 1, 0, 0
        while block := stream.read(_BLOCK_BYTES):
            cut = block.find(b"\n{", max(0, start + piece_bytes - at)) if at + len(block) - start > piece_bytes else -1
            while cut >= 0:
                newlines += block.count(b"\n", 0, cut + 1)
                yield LineRange(path, start, at + cut + 1, line)
                start, line, newlines = at + cut + 1, line + newlines, 0
                block, at = block[cut + 1 :], start
                cut = block.find(b"\n{", piece_bytes) if len(block) > piece_bytes else -1
            newlines += block.count(b"\n")
            at += len(block)
        yield LineRange(path, start, at, line)

"""Which records of all pieces a rule leaves out because they repeat earlier ones, in bounded memory.

Only records that share a key can be alike. Sorting one key of all records at a time finds groups of records that
sharing connects; the rule then decides within each group, in the order of the records, and forgets it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penjing.base.files import read_json
from penjing.data.clean.rule import CorpusRule, Dropped

Numbers = NDArray[np.int64]
DroppedNumbers = dict[int, Dropped]  # of a piece: by number of the record, why it is left out

_BYTES_PER_KEY = 64  # of memory, while the keys are sorted
_OPEN_PIECES = 32


def compare_pieces(
    name: str, rule: CorpusRule, folders: Sequence[Path], dropped: Sequence[DroppedNumbers], memory: int
) -> None:
    """Add to `dropped` of each piece what the rule leaves out. memory: bytes for sorting."""
    numbers, alive = [], []  # of each piece: the sketched records, and which of them no earlier rule has left out
    for folder, gone in zip(folders, dropped, strict=True):
        numbers.append(np.load(folder / f"{name}.npz")["numbers"])
        alive.append(~np.isin(numbers[-1], np.fromiter(gone, np.int64, len(gone))))
    first_of_piece = np.cumsum([0, *map(len, numbers)])
    key_files = [folder / f"{name}.keys.npy" for folder in folders]
    groups = _groups(key_files, alive, first_of_piece, rule.num_keys, memory)
    read = _reader(name, folders)
    for group in groups:
        fresh = type(rule)(rule.settings)
        pieces = np.searchsorted(first_of_piece, group, side="right") - 1
        for piece, place in zip(pieces.tolist(), (group - first_of_piece[pieces]).tolist(), strict=True):
            sketch, where = read(piece, place)
            if reason := fresh.compare(sketch, where):
                dropped[piece][int(numbers[piece][place])] = Dropped(f"{name}: {reason}", reason.detail)


def _groups(
    files: Sequence[Path], alive: Sequence[NDArray[np.bool_]], first: Numbers, num_keys: int, memory: int
) -> Iterator[Numbers]:
    """Ascending numbers of records, over all pieces, that sharing a key connects; none of a single record."""
    num_records = int(first[-1])
    label = np.arange(num_records)
    num_parts = 1 + num_records * _BYTES_PER_KEY // memory
    edges = np.zeros(0, np.int64)  # pairs of records, as one number
    for key in range(num_keys):
        for part in range(num_parts):
            pairs = zip(files, alive, strict=True)
            found = [_keys(file, key, each, part, num_parts) for file, each in pairs]
            keys = np.concatenate([each for each, _ in found])
            records = np.concatenate([places + start for (_, places), start in zip(found, first[:-1], strict=True)])
            repeats, firsts = _shared(keys, records)
            edges = np.unique(np.concatenate((edges, repeats * num_records + firsts)))
    one, other = edges // max(1, num_records), edges % max(1, num_records)
    _connect(label, one, other)
    in_group = np.unique(np.concatenate((one, other)))
    order = in_group[np.argsort(label[in_group], kind="stable")]
    yield from np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else ()


def _keys(
    file: Path, key: int, alive: NDArray[np.bool_], part: int, num_parts: int
) -> tuple[NDArray[np.uint64], Numbers]:
    """One key of the records of a piece, if it is in this part of all keys, and the places of these records."""
    if not len(alive):
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    keys = np.load(file, mmap_mode="r")[key]
    places = np.flatnonzero(alive & (keys % np.uint64(num_parts) == part) if num_parts > 1 else alive)
    return keys[places], places


def _shared(keys: NDArray[np.uint64], records: Numbers) -> tuple[Numbers, Numbers]:
    """Each record with an equal key before it, and the first record with that key."""
    order = np.argsort(keys, kind="stable")
    keys, records = keys[order], records[order]
    is_repeat = np.append(False, keys[1:] == keys[:-1])[: len(keys)]
    first = np.maximum.accumulate(np.where(is_repeat, 0, np.arange(len(keys)))) if len(keys) else order
    return records[is_repeat], records[first[is_repeat]]


def _connect(label: Numbers, one: Numbers, other: Numbers) -> None:
    """Give all records that pairs connect the number of the first of them."""
    while len(one):
        smaller = np.minimum(label[one], label[other])
        if (label[one] == smaller).all() and (label[other] == smaller).all():
            return
        for ends in (label[one], label[other], one, other):
            np.minimum.at(label, ends, smaller)
        while (label != (shorter := label[label])).any():
            label[:] = shorter


def _reader(name: str, folders: Sequence[Path]) -> Callable[[int, int], tuple[bytes, tuple[str, int]]]:
    """A function that reads the sketch and the place of a record, with the arrays of a few pieces in memory."""

    @lru_cache(maxsize=_OPEN_PIECES)
    def piece_arrays(piece: int) -> tuple[Numbers, Numbers, Mapping[str, Numbers], list[str]]:
        sketched, facts = np.load(folders[piece] / f"{name}.npz"), np.load(folders[piece] / "facts.npz")
        files = read_json(folders[piece] / "counts.json")["files"]
        return sketched["numbers"], sketched["ends"], {each: facts[each] for each in ("part", "line")}, files

    def read(piece: int, place: int) -> tuple[bytes, tuple[str, int]]:
        numbers, ends, facts, files = piece_arrays(piece)
        number, start, end = numbers[place], int(ends[place]), int(ends[place + 1])
        with open(folders[piece] / f"{name}.sketches", "rb") as stream:
            sketch = os.pread(stream.fileno(), end - start, start)
        return sketch, (files[facts["part"][number]], int(facts["line"][number]))

    return read

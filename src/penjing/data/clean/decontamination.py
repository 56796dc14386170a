"""Leave out a record that has words in sequence in common with an evaluation set."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from penjing.base.errors import UserError
from penjing.data.clean.ngrams import Hashes, ngram_hashes, word_hashes
from penjing.data.clean.rule import Dropped, Record, Rule, RuleSettings, texts_of
from penjing.data.formats.dispatch import rows_of
from penjing.data.formats.files import list_files

_SHORT = 8 / 13  # an evaluation text that is too short is compared by so much less, or not at all (arXiv:2005.14165)
_SIEVE_BITS = 22


@dataclass(frozen=True, kw_only=True)
class DecontaminationSettings(RuleSettings):
    against: tuple[str, ...] = ()  # files or folders of evaluation sets; all texts of their records count
    words: Annotated[int, Ge(2)] = 13  # in sequence, from which on texts overlap
    characters: Annotated[int, Ge(2)] = 20  # the same for texts that are mostly Chinese

    def files(self) -> tuple[str, ...]:
        return tuple(map(os.fspath, list_files([Path(name) for name in self.against]))) if self.against else ()


class Decontamination(Rule):
    """Case, spaces and punctuation do not count. The report counts the hits of each file."""

    settings_type = DecontaminationSettings
    settings: DecontaminationSettings

    def __init__(self, settings: RuleSettings | None = None) -> None:
        super().__init__(settings)
        if not self.settings.against:
            raise UserError("no evaluation set", where="rules.decontamination.against", wanted="files or folders")
        self._places: list[tuple[str, int]] = []
        found: dict[int, list[tuple[Hashes, int]]] = {}
        for file in self.settings.files():
            for line, text in ((line, text) for line, row in rows_of(Path(file)) for text in _texts(row)):
                words = word_hashes(text, marks=False)
                if n := self._length(text, len(words)):
                    found.setdefault(n, []).append((ngram_hashes(words, n), len(self._places)))
                    self._places.append((file, line))
        self._tables = {n: _Table(hashes) for n, hashes in found.items()}

    def _length(self, text: str, num_words: int) -> int:
        """How many words in sequence of an evaluation text are compared; 0: it is too short."""
        is_unspaced = 2 * sum(char >= "\u2e80" for char in text) > num_words
        n = self.settings.characters if is_unspaced else self.settings.words
        short = max(2, round(n * _SHORT))
        return n if num_words >= n else short if num_words >= short else 0

    def __call__(self, record: Record) -> Record | str:
        words = word_hashes("\n".join(texts_of(record)), marks=False)
        for n, table in self._tables.items():
            if (owner := table.first_hit(ngram_hashes(words, n))) is not None:
                file, line = self._places[owner]
                return Dropped(f"overlaps {Path(file).name}", f"{n} words of {file}:{line}")
        return record


class _Table:
    """Hashes with the number of the text of each."""

    def __init__(self, hashes: list[tuple[Hashes, int]]) -> None:
        flat = np.concatenate([each for each, _ in hashes])
        owners = np.repeat([owner for _, owner in hashes], [len(each) for each, _ in hashes])
        order = np.argsort(flat, kind="stable")
        self._hashes, self._owners = flat[order], owners[order]
        self._sieve = np.zeros(1 << _SIEVE_BITS, bool)  # almost all hashes of a text end here
        self._sieve[_low(flat)] = True

    def first_hit(self, hashes: Hashes) -> int | None:
        maybe = hashes[self._sieve[_low(hashes)]]
        places = np.minimum(np.searchsorted(self._hashes, maybe), len(self._hashes) - 1)
        hits = np.flatnonzero(self._hashes[places] == maybe)
        return int(self._owners[places[hits[0]]]) if len(hits) else None


def _low(hashes: Hashes) -> NDArray[np.intp]:
    return (hashes >> np.uint64(64 - _SIEVE_BITS)).astype(np.intp)


def _texts(value: Any) -> Iterator[str]:
    """All that is text in a record. Raises UserError for a broken one."""
    if isinstance(value, UserError):
        raise value
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)

"""Leave out a record that is nearly an earlier one: MinHash finds candidates, their shingles are compared exactly.

A pair of similarity s has one of 32 bands of 8 in common with probability 1 - (1 - s^8)^32: 0.997 at 0.8, 0.12 at 0.5.
Conversations about one long text are nearly equal as a whole, so what is asked and answered must be similar too.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Annotated
from zlib import crc32

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from penjing.base.config import PositiveInt
from penjing.data.clean.ngrams import NUM_BANDS, sketch
from penjing.data.clean.rule import CorpusRule, Place, Record, RuleSettings, turns_of
from penjing.data.formats.schema import Chat, Document

_KEY_BYTES = 8 * NUM_BANDS
_MOST_OF_KEY = 32  # records that are remembered for a key: of a template that a million records share, the first ones


@dataclass(frozen=True, kw_only=True)
class NearDuplicatesSettings(RuleSettings):
    # Jaccard similarity of the shingles, from which on a record is left out
    similarity: Annotated[float, Ge(0.75), Le(1)] = 0.8
    shingle: PositiveInt = 5  # words in sequence, of Chinese characters


class NearDuplicates(CorpusRule):
    """Keeps the first of nearly equal records. References and labels count; case, spaces, system messages do not."""

    settings_type = NearDuplicatesSettings
    settings: NearDuplicatesSettings
    num_keys = NUM_BANDS
    reason = "nearly an earlier record"

    def __init__(self, settings: RuleSettings | None = None) -> None:
        super().__init__(settings)
        self._table: dict[int, list[int]] = {}
        self._kept: list[tuple[Place, NDArray[np.uint32], NDArray[np.uint32]]] = []

    def sketch(self, record: Record) -> bytes:
        """The keys of its bands, its distinct shingles, those of the core of a conversation, and the number of these.
        Of a record without words nothing: it equals no other.
        """
        made, core = sketch(compared_text(record), self.settings.shingle), b""
        if made and not isinstance(record, Document):
            core = sketch(_core(record), self.settings.shingle)[_KEY_BYTES:]
            apart = record.reference if isinstance(record, Chat) else record.is_chosen
            if apart:  # so that none is shared with another reference or label
                made = (np.frombuffer(made, np.uint32) ^ np.uint32(crc32(repr(apart).encode()))).tobytes()
        return made and made + core + np.uint32(len(core) // 4).tobytes()

    def first_seen(self, sketch: bytes, place: Place) -> Place | None:
        if not sketch:
            return None
        keys = np.frombuffer(sketch, np.uint64, NUM_BANDS).tolist()
        own = np.frombuffer(sketch, np.uint32, offset=_KEY_BYTES)
        own, core = np.split(own[:-1], [len(own) - 1 - own[-1]])
        candidates = Counter(chain.from_iterable(self._table.get(key, ()) for key in keys))
        for index, _ in candidates.most_common():
            earlier, *others = self._kept[index]
            if all(map(self._is_similar, (own, core), others)):
                return earlier
        for key in keys:
            same_key = self._table.setdefault(key, [])
            if len(same_key) < _MOST_OF_KEY:
                same_key.append(len(self._kept))
        self._kept.append((place, own, core))
        return None

    def _is_similar(self, one: NDArray[np.uint32], other: NDArray[np.uint32]) -> bool:
        """Whether the Jaccard similarity of two sets is high enough."""
        shared = len(np.intersect1d(one, other, assume_unique=True))
        return shared >= self.settings.similarity * (len(one) + len(other) - shared)


def compared_text(record: Record) -> str:
    """What is compared of a record. Long system messages would make all conversations of an assistant nearly equal."""
    if isinstance(record, Document):
        return record.text
    return "\n".join(turn.text for turn in turns_of(record) if turn.role != "system")


def _core(record: Record) -> str:
    """The answers, and of questions of several lines the shorter of the first and the last: what is asked of a text."""
    answers = [turn.text for turn in turns_of(record) if turn.role == "assistant"]
    asked = [turn.text.strip().split("\n") for turn in turns_of(record) if turn.role == "user"]
    return "\n".join(answers + [min(lines[0], lines[-1], key=len) for lines in asked if len(lines) > 1])

"""The text that a tokenizer is trained on: a sample of bounded size, spread evenly over a corpus of any size."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penjing.base import formatting as units

MAX_BYTES = 64 << 20  # of text; more changes few merges
# Training takes about 3 s and 180 MB for a million characters in distinct words. Of Chinese they are 25 % of the bytes.
MAX_WORD_CHARACTERS = 5 << 20
MAX_TEXT_CHARACTERS = 1 << 20  # a longer text is sampled in parts
# DNA, base64 and packed code have runs of ASCII without a space. None repeats, and they would use up the sample.
_WORD = re.compile(r"\w+")
_RUN = re.compile(r"[!-~]{48,}")
MAX_RUN_CHARACTERS = 1 << 20
_GOLDEN = 0.6180339887498949  # multiples modulo 1 lie evenly in [0, 1), wherever one stops
_THINNED = 0.75


@dataclass(frozen=True, slots=True)
class Sample:
    """Texts to train a tokenizer on. note: what was left out; empty if nothing was."""

    texts: list[str]
    note: str = ""


def spread(texts: Sequence[str], fraction: float) -> Iterator[str]:
    """About this fraction of the texts, evenly spread."""
    return (text for number, text in enumerate(texts) if number * _GOLDEN % 1 < fraction)


def sample_texts(texts: Iterable[str]) -> Sample:
    """All texts, if they are few; else as many as the limits above allow, evenly spread over all of them."""
    kept: list[tuple[float, str]] = []
    words: set[str] = set()
    num_characters = 0  # in `words`
    share, num_bytes, num_read, num_run, run_left = 1.0, 0, 0, 0, MAX_RUN_CHARACTERS

    def shorten(match: re.Match[str]) -> str:
        nonlocal num_run, run_left
        run = match[0][:run_left]
        run_left -= len(run)
        num_run += len(match[0]) - len(run)
        return run

    most = MAX_TEXT_CHARACTERS
    parts = (text[start : start + most] for text in texts for start in range(0, len(text), most))
    for number, text in enumerate(parts):
        num_read += len(text.encode())
        place = number * _GOLDEN % 1
        if place >= share:
            continue
        kept.append((place, _RUN.sub(shorten, text)))
        num_bytes += len(kept[-1][1].encode())
        new_words = set(_WORD.findall(kept[-1][1])) - words
        words |= new_words
        num_characters += sum(map(len, new_words))
        while len(kept) > 1 and (num_bytes > MAX_BYTES or num_characters > MAX_WORD_CHARACTERS):
            share *= _THINNED
            kept = [item for item in kept if item[0] < share]
            num_bytes = sum(len(text.encode()) for _, text in kept)
            words = {word for _, text in kept for word in _WORD.findall(text)}
            num_characters = sum(map(len, words))
    notes = []
    if share < 1:
        notes.append(f"{units.megabytes(num_bytes)} of {units.megabytes(num_read)} of text, evenly spread, are enough")
    if num_run:
        notes.append(f"{units.count(num_run)} characters in runs without a space are left out")
    return Sample([text for _, text in kept if text.strip()], "; ".join(notes))

"""Bits per byte of a text, comparable between tokenizers, models and compressors; and perplexity by position."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray

from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.eval.task import perplexity
from penjing.infer.requests import NotFiniteError
from penjing.model.score import LogProbs
from penjing.model.transformer import Transformer


class TextScore(NamedTuple):
    """bits: per UTF-8 byte. nats_T, tokens_T: of all tokens at each position of a window, the first one is 0."""

    bits: float
    num_bytes: int
    nats_T: NDArray[np.float64]
    tokens_T: NDArray[np.int64]

    def perplexities(self) -> list[dict[str, float]]:
        """Perplexity by how many tokens are read before: 1, 2 to 3, 4 to 7, and so on."""
        rows = []
        for first in (1 << power for power in range(len(self.tokens_T).bit_length())):
            part = slice(first - 1, 2 * first - 1)
            if tokens := int(self.tokens_T[part].sum()):
                last = min(2 * first - 1, len(self.tokens_T))
                mean = perplexity(self.nats_T[part].sum() / tokens)
                rows.append({"first": first, "last": last, "tokens": tokens, "perplexity": mean})
        return rows


@torch.no_grad()
def score_texts(
    model: Transformer, tokenizer: Tokenizer, texts: Iterable[str], *, seq_len: int, batch_size: int = 16
) -> TextScore:
    """Each text starts with the end-of-text token and is cut into windows of T. A window starts where the last one
    ended and does not attend to it, so the context is at most T tokens. Raises NotFiniteError."""
    nats_T, tokens_T, num_bytes = np.zeros(seq_len), np.zeros(seq_len, dtype=np.int64), 0
    device = model.embed.weight.device

    def windows() -> Iterator[list[int]]:
        nonlocal num_bytes
        for text in texts:
            num_bytes += len(text.encode())
            ids = [tokenizer.begin, *tokenizer.encode(text), tokenizer.end_of_text]
            yield from (ids[first : first + seq_len + 1] for first in range(0, len(ids) - 1, seq_len))

    stream = windows()
    while batch := list(islice(stream, batch_size)):
        longest = max(map(len, batch)) - 1
        ids_BT = torch.tensor([[*window[:-1], *[0] * (longest + 1 - len(window))] for window in batch])
        flat = [row * longest + place for row, window in enumerate(batch) for place in range(len(window) - 1)]
        scored_N, target_N = (
            torch.tensor(each).to(device) for each in (flat, [one for window in batch for one in window[1:]])
        )
        logp_2N = model(ids_BT.to(device), scored_N=scored_N, score=LogProbs(target_N))
        place_N = np.array(flat) % longest
        if not logp_2N[0].isfinite().all():
            raise NotFiniteError
        nats_T += np.bincount(place_N, -logp_2N[0].double().cpu().numpy(), seq_len)
        tokens_T += np.bincount(place_N, minlength=seq_len)
    return TextScore(float(nats_T.sum()) / math.log(2) / max(1, num_bytes), num_bytes, nats_T, tokens_T)


def zstd_bits_per_byte(text: str) -> float:
    """Bits per byte of the text compressed by `zstd -19`, as a baseline."""
    raw = text.encode()
    compressed = pyarrow.Codec("zstd", compression_level=19).compress(raw)
    return 8 * len(compressed) / max(1, len(raw))

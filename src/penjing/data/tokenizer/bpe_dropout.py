"""A text in other tokens each epoch: BPE-dropout (arXiv:1910.13267, algorithm 1).

A merge is left out now and then, so a word is read in several ways: `house`, `h|ouse`, `ho|us|e`. In many epochs of
little text that hinders learning it by heart. What the draw depends on is seed and epoch alone.
"""

import copy
import json
from functools import cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.token_shards import TokenShards
from penjing.data.tokenizer.tokenizer import Tokenizer

IntArray = npt.NDArray[np.int64]
SETTING = "regularization.bpe_dropout"
MAX_TOKENS = 1 << 25  # an epoch's tokens are made at once, in memory
MAX_SYMBOLS = 64  # of a word that is merged at once: without a pre-tokenizer a whole text is one
_NONE = np.iinfo(np.int64).max


class BpeDropout:
    """The documents of shards, tokenized anew for each of the first `num_epochs` epochs."""

    def __init__(self, shards: TokenShards, tokenizer: Tokenizer, dropout: float, num_epochs: float, seed: int) -> None:
        """dropout: probability with which each possible merge is left out at each step.

        Raises UserError for a tokenizer without merges, and for more than `MAX_TOKENS` tokens.
        """
        if shards.num_tokens > MAX_TOKENS:
            what, wanted = "so long a text is not tokenized in each epoch", f"at most {MAX_TOKENS:,} tokens, or 0"
            raise UserError(what, where=SETTING, got=f"{shards.num_tokens:,} tokens", wanted=wanted)
        model = json.loads(tokenizer.plain_definition)["model"]
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model.get("merges", ())]
        if not merges:
            raise UserError("this tokenizer has no merges", where=SETTING, got=model["type"], wanted="a BPE tokenizer")
        self.shards, self.dropout, self.num_epochs, self.seed = shards, dropout, num_epochs, seed
        vocabulary = tokenizer.vocabulary
        pair_M2 = np.array([[vocabulary[part] for part in pair] for pair in merges])
        self._made_M = np.array([vocabulary["".join(pair)] for pair in merges])
        self._size = tokenizer.size
        key_M = pair_M2[:, 0] * self._size + pair_M2[:, 1]
        self._rank_K = np.argsort(key_M)
        self._key_K = key_M[self._rank_K]
        parts = {"".join(pair): pair for pair in reversed(merges)}

        @cache
        def symbols(token: str) -> list[int]:
            """What its merges began with. A character stays whole: pieces of its bytes teach nothing."""
            whole = token not in parts or len(tokenizer.token(vocabulary[token])) == 1
            return [vocabulary[token]] if whole else [*chain(*map(symbols, parts[token]))]

        ids, words, ends = list[IntArray](), list[IntArray](), [0]
        for begin, end in zip(shards.start_D, shards.end_D, strict=True):
            text = tokenizer.decode(shards.token_N[begin:end].tolist())
            found = [[]] if tokenizer.begin == tokenizer.end_of_text else [[tokenizer.begin]]
            last: int | None = -1
            for token, word in tokenizer.tokens_with_words(text):
                if word != last or len(found[-1]) >= MAX_SYMBOLS:
                    found.append([])
                found[-1] += symbols(token)
                last = word
            ids.append(np.array([*chain(*found)], dtype=np.int64))
            words.append(np.repeat(np.arange(len(found)) + ends[-1], [len(word) for word in found]))
            ends.append(ends[-1] + len(found))
        self._symbol_N, self._word_N = np.concatenate(ids), np.concatenate(words)
        self._end_D = np.array(ends[1:])

    def epoch(self, number: int) -> TokenShards:
        """The documents as this epoch reads them."""
        if number >= self.num_epochs:
            return self.shards
        generator = np.random.Generator(np.random.PCG64(derive(self.seed, "bpe_dropout", number)))
        id_N, word_N = self._merge(generator)
        made = copy.copy(self.shards)
        made.token_N = id_N.astype(self.shards.token_N.dtype)
        made.end_D = np.searchsorted(word_N, self._end_D)
        made.start_D = np.concatenate(([0], made.end_D[:-1]))
        return made

    def _merge(self, generator: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Token ids, and the word of each. In each round every word takes its first merge of those not left out, and
        is done if there is none."""
        id_N, word_N, done = self._symbol_N.copy(), self._word_N, list[tuple[IntArray, IntArray]]()
        while len(id_N):
            key_P = id_N[:-1] * self._size + id_N[1:]
            place_P = np.searchsorted(self._key_K, key_P).clip(max=len(self._key_K) - 1)
            is_merge_P = (self._key_K[place_P] == key_P) & (word_N[:-1] == word_N[1:])
            (place,) = np.nonzero(is_merge_P & (generator.random(len(key_P)) >= self.dropout))
            order_N = np.full(len(id_N), _NONE)
            order_N[place] = self._rank_K[place_P[place]] << 32 | place  # rank first, then from the left
            begin_W = np.flatnonzero(np.diff(word_N, prepend=-1))
            first_W = np.minimum.reduceat(order_N, begin_W)
            is_left_N = np.repeat(first_W < _NONE, np.diff(begin_W, append=len(id_N)))
            done.append((id_N[~is_left_N], word_N[~is_left_N]))
            first_W = first_W[first_W < _NONE]
            left, rank = first_W & 0xFFFFFFFF, first_W >> 32
            id_N[left] = self._made_M[rank]
            is_left_N[left + 1] = False
            id_N, word_N = id_N[is_left_N], word_N[is_left_N]
        id_N, word_N = (np.concatenate(parts) for parts in zip(*done, strict=True))
        order = np.argsort(word_N, kind="stable")
        return id_N[order], word_N[order]

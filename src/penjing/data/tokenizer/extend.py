"""Add tokens to a tokenizer. All old tokens keep their ids, so a model of the old one only needs more rows."""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import BYTE_OF, Tokenizer, is_control
from penjing.data.tokenizer.train import MAX_TOKEN_BYTES, is_allowed_token
from penjing.data.tokenizer.training_sample import sample_texts, spread

LEARN_CHARACTERS = 8 << 20  # of the sample, in which merges are counted
MAX_WORD_TOKENS = 64
MIN_COUNT = 2  # of a pair that becomes a token
Pair = tuple[str, str]


def add_words(tokenizer: Tokenizer, words: Iterable[str]) -> Tokenizer:
    """With a token for each word, which is found wherever its text occurs. Words that are one token already stay so."""
    definition = json.loads(tokenizer.definition)
    known = {token["content"] for token in definition["added_tokens"]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    next_id = tokenizer.size
    for word in dict.fromkeys(words):
        is_mark = is_control({"content": word, **flags})
        ids = tokenizer.encode(word)
        if word in known or (not is_mark and len(ids) == 1 and tokenizer.decode(ids).strip() == word.strip()):
            continue
        definition["added_tokens"].append({"id": next_id, "content": word, **flags})
        next_id += 1
    return _rebuilt(tokenizer, definition)


def learn_merges(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    vocab_size: int,
    max_han_per_token: int,
    sampled: Callable[[], None] = lambda: None,
) -> Tokenizer:
    """With the merges, up to `vocab_size` ids, that BPE finds in the texts after all of its own.

    sampled: called when all texts are read. Raises UserError if it is no BPE, or there is nothing to add.
    """
    definition = json.loads(tokenizer.definition)
    model = definition["model"]
    if model["type"] != "BPE":
        raise UserError("only a BPE tokenizer learns more merges", where="--train", got=model["type"])
    if vocab_size <= tokenizer.size:
        wanted = f"more than its {tokenizer.size:,} ids"
        raise UserError("the tokenizer is not smaller", where="--vocabulary", got=vocab_size, wanted=wanted)
    is_byte_level = '"ByteLevel"' in json.dumps(definition["decoder"])
    taken = set(model["vocab"])

    def is_allowed(token: str) -> bool:
        raw = bytes(BYTE_OF[char] for char in token) if is_byte_level else token.encode()
        return token not in taken and len(raw) <= MAX_TOKEN_BYTES and _is_text(raw, max_han_per_token)

    sample = sample_texts(texts).texts
    sampled()
    words = _words(tokenizer, sample)
    merges = _continue_bpe(words, vocab_size - tokenizer.size, is_allowed)
    if not merges:
        raise UserError("no pair of tokens occurs often enough", where="--train", wanted="more text")
    # An added token outside the vocabulary would be numbered anew when the file is read.
    model["vocab"] |= {token["content"]: token["id"] for token in definition["added_tokens"]}
    model["vocab"] |= {left + right: tokenizer.size + number for number, (left, right) in enumerate(merges)}
    is_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
    model["merges"] += [" ".join(pair) if is_text else list(pair) for pair in merges]
    return _rebuilt(tokenizer, definition)


def _rebuilt(tokenizer: Tokenizer, definition: dict[str, Any]) -> Tokenizer:
    extended = tokenizer.with_definition(json.dumps(definition, ensure_ascii=False))
    new_pieces(tokenizer, extended)
    return extended


def _is_text(raw: bytes, max_han_per_token: int) -> bool:
    """Whether these bytes may be a token: whole characters, or the beginning of one."""
    try:
        return is_allowed_token(raw.decode(), max_han_per_token)
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"


def _words(tokenizer: Tokenizer, texts: list[str]) -> Counter[tuple[str, ...]]:
    """How often each word of the texts occurs, as its tokens."""
    words: Counter[tuple[str, ...]] = Counter()
    for text in spread(texts, LEARN_CHARACTERS / max(1, sum(map(len, texts)))):
        for _, tokens in groupby(tokenizer.tokens_with_words(text), key=itemgetter(1)):
            words.update(_short([token for token, _ in tokens]))
    return words


def _short(word: list[str]) -> Iterator[tuple[str, ...]]:
    """The word in parts: a tokenizer without a pre-tokenizer takes a whole text as one word."""
    start = 0
    for end in range(1, len(word) + 1):
        if end == len(word) or end - start == MAX_WORD_TOKENS or word[end].startswith("\u2581"):
            if end - start > 1:
                yield tuple(word[start:end])
            start = end


def _continue_bpe(words: Counter[tuple[str, ...]], num_merges: int, is_allowed: Callable[[str], bool]) -> list[Pair]:
    """The most frequent pair that may be a token is merged, again and again (arXiv:1508.07909)."""
    split, counts = [list(word) for word in words], list(words.values())
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(split):
        for pair in pairwise(word):
            pairs[pair] += counts[number]
            where[pair].add(number)
    allowed = {pair: is_allowed("".join(pair)) for pair in pairs}
    heap = [(-count, pair) for pair, count in pairs.items() if allowed[pair]]
    heapq.heapify(heap)
    merges: list[Pair] = []
    made = set[str]()
    while heap and len(merges) < num_merges:
        negative, best = heapq.heappop(heap)
        if pairs[best] != -negative:
            if pairs[best] >= MIN_COUNT:
                heapq.heappush(heap, (-pairs[best], best))
            continue
        if -negative < MIN_COUNT:
            break
        token = "".join(best)
        if token in made:
            continue
        made.add(token)
        merges.append(best)
        grown: set[Pair] = set()
        for number in where.pop(best):
            for pair, times in Counter(pairwise(split[number])).items():
                pairs[pair] -= times * counts[number]
            split[number] = _merged(split[number], best)
            for pair, times in Counter(pairwise(split[number])).items():
                pairs[pair] += times * counts[number]
                if token in pair:
                    where[pair].add(number)
                    grown.add(pair)
        for pair in grown:
            if allowed.setdefault(pair, is_allowed("".join(pair))):
                heapq.heappush(heap, (-pairs[pair], pair))
    return merges


def _merged(word: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    tokens = iter(range(len(word)))
    for place in tokens:
        if tuple(word[place : place + 2]) == pair:
            merged.append("".join(pair))
            next(tokens)
        else:
            merged.append(word[place])
    return merged


def new_pieces(old: Tokenizer, new: Tokenizer) -> dict[int, list[int]]:
    """The ids that only `new` has, each with the ids of `old` that its text consists of; none for control tokens.

    Raises UserError if `new` does not extend `old`: all tokens of `old` must have the same ids.
    """
    before, after = old.vocabulary, new.vocabulary
    moved = next((token for token, index in before.items() if after.get(token) != index), None)
    if moved is not None:
        what = "the tokenizer is another one than the model's, and does not extend it"
        got = f"{moved!r} is {'no token' if moved not in after else f'id {after[moved]}'}"
        hint = "Leave tokenizer.path out, or make one with `penjing tokenizer extend`."
        raise UserError(what, where="tokenizer.path", got=got, wanted=f"id {before[moved]}", next_step=hint)
    added = {token: index for token, index in after.items() if token not in before}
    if not added:
        return {}
    merges = json.loads(new.definition)["model"].get("merges", [])
    parts: dict[str, Sequence[str]] = {}
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if "".join(pair) in added:
            parts.setdefault("".join(pair), pair)

    def expand(token: str) -> list[int]:
        if token in before:
            return [before[token]]
        return [index for part in parts[token] for index in expand(part)] if token in parts else old.encode(token)

    return {index: [] if new.has(token) else expand(token) for token, index in added.items()}

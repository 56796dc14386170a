"""Generation: all prompts are read at once, then one token per sequence and step; finished sequences leave."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from penjing.base.errors import UserError
from penjing.infer.sample import Sampling, pick
from penjing.model.cache import Cache
from penjing.model.cast_cache import cache_casted_weights
from penjing.model.lora import adapter_scope
from penjing.model.transformer import Transformer


@torch.no_grad()
def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
    seed: int = 0,
    adapters: Sequence[str | None] | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Yield after every step the (sequence, id) pairs it produced; a stop id ends its sequence and is not yielded.

    A sequence also ends after `max_new_tokens`, and when prompt and answer together hold `max_position_embeddings`;
    each has its own end, whatever its neighbours do. adapters: the name of each prompt's (None: the base alone), read
    and written in one batch; without it, what `lora.set_adapter` has set.
    Raises UserError if a prompt is empty, or leaves no space in the model's longest sequence for one more token.
    """
    if not prompts or max_new_tokens < 1:
        return
    device = model.embed.weight.device
    longest = max(map(len, prompts))
    if min(map(len, prompts)) == 0:
        raise UserError("nothing to go on from", where="prompt", wanted="at least one token")
    if longest >= model.config.max_position_embeddings:
        raise UserError(
            "too long", where="prompt", got=f"{longest} tokens", wanted=f"under {model.config.max_position_embeddings}"
        )
    room = min(longest + max_new_tokens, model.config.max_position_embeddings)
    cache = Cache(model.config, len(prompts), room, device=device, dtype=model.compute_dtype or torch.float32)
    generator = torch.Generator(device=device).manual_seed(seed)
    ids_BT = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BT[row, : len(prompt)] = torch.tensor(prompt)
    with _speaking(model, adapters, range(len(prompts))):
        hidden_BTD = model.hidden(ids_BT.to(device), cache=cache)
    cache.length_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    last_BD = hidden_BTD[torch.arange(len(prompts), device=device), cache.length_B - 1]
    active = list(range(len(prompts)))  # which sequence each row of the cache is
    for written in range(1, max_new_tokens + 1):
        next_B = pick(model.logits(last_BD), sampling, generator)
        drawn = next_B.tolist()
        said = [row for row, index in enumerate(drawn) if index not in stop]
        if said:
            yield [(active[row], drawn[row]) for row in said]
        going = [row for row in said if len(prompts[active[row]]) + written < model.config.max_position_embeddings]
        if not going or written == max_new_tokens:
            return
        if len(going) < len(active):
            going_N = torch.tensor(going, device=device)
            cache.keep(going_N)
            next_B = next_B[going_N]
            active = [active[row] for row in going]
        with _speaking(model, adapters, active):
            last_BD = model.hidden(next_B[:, None], cache=cache)[:, -1]


def _speaking(
    model: Transformer, adapters: Sequence[str | None] | None, rows: Iterable[int]
) -> AbstractContextManager[None]:
    """The rows' own adapters for one forward pass: between two passes the model may be asked by others."""
    return nullcontext() if adapters is None else adapter_scope(model, [adapters[row] for row in rows])


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling = Sampling(),
    seed: int = 0,
    rows: int = 64,
    adapters: Sequence[str | None] | None = None,
) -> list[list[int]]:
    """The continuation of each prompt, without the stop id; it ends and fails, and uses adapters, as `stream` does.

    Prompts of like length are read together, `rows` at a time. Drawn (not greedy) text depends on that grouping.
    """
    written: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    with cache_casted_weights(model):
        for first in range(0, len(order), rows):
            part = order[first : first + rows]
            for pairs in stream(
                model,
                [prompts[index] for index in part],
                max_new_tokens=max_new_tokens,
                stop=stop,
                sampling=sampling,
                seed=seed + first,
                adapters=None if adapters is None else [adapters[index] for index in part],
            ):
                for row, index in pairs:
                    written[part[row]].append(index)
    return written

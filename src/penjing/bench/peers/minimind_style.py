"""A trial of a plain loop as MiniMind's: `python -m penjing.bench.peers.minimind_style SPEC.json`.

Written from a description of its habits, not from its code: every row padded to the longest length there is, texts
tokenized in the loader when their turn comes (on a GPU by eight processes), all positions through the head, a plain
AdamW. bfloat16 autocast and torch.compile are the spec's (bench/tune.py finds the fastest way). The model is
transformers' Qwen3 of the same shape, which does the same work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as functional

from penjing.bench.meter import read_spec
from penjing.bench.peers.hf_model import (
    GPU_WORKERS,
    bits_per_byte,
    has_tf32,
    product_dtype,
    read_texts,
    settings_of,
    stock_model,
    stock_tokenizer,
)
from penjing.bench.race import Race, RaceSpec, packed_rows


class PaddedTexts(torch.utils.data.Dataset[tuple[Any, Any, Any]]):
    """Tokenizes a text when it is asked for."""

    def __init__(self, texts: list[str], tokenizer: Any, row_tokens: int) -> None:
        self.texts, self.tokenizer, self.row_tokens = texts, tokenizer, row_tokens

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        mark, size = self.tokenizer.bos_token_id, self.row_tokens + 1
        ids = self.tokenizer(self.texts[index], add_special_tokens=False, truncation=True, max_length=size - 2)
        row = [mark, *ids["input_ids"], mark]
        ids_T = torch.tensor(row + [self.tokenizer.pad_token_id] * (size - len(row)))
        counts_T = torch.zeros(size, dtype=torch.long)
        counts_T[: len(row)] = 1
        return ids_T[:-1], ids_T[1:], counts_T[1:]


def batches(spec: RaceSpec, tokenizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    if spec.kind == "step":
        for ids, _ in packed_rows(spec):
            ids_BT = torch.from_numpy(ids)
            yield ids_BT[:, :-1], ids_BT[:, 1:], torch.ones_like(ids_BT[:, 1:])
    data = PaddedTexts(read_texts(spec), tokenizer, spec.row_tokens)
    on_gpu, processes = spec.device != "cpu", GPU_WORKERS if spec.device != "cpu" else 0
    loader = torch.utils.data.DataLoader(
        *(data, spec.batch),
        shuffle=True,
        drop_last=True,
        num_workers=processes,
        persistent_workers=on_gpu,
        pin_memory=on_gpu,
    )
    while True:
        yield from loader


def main() -> None:
    import transformers

    spec = read_spec(RaceSpec)
    torch.set_num_threads(spec.threads)
    _ = transformers.Qwen3ForCausalLM
    race = Race(spec, lambda: bits_per_byte(spec, model))
    race.imported()
    tokenizer, model = stock_tokenizer(spec), stock_model(spec)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=spec.betas, weight_decay=spec.weight_decay
    )
    half, on_gpu = spec.dtype == "bfloat16", spec.device != "cpu"
    autocast = torch.autocast(spec.device, torch.bfloat16) if half else nullcontext()
    if has_tf32(spec):
        torch.set_float32_matmul_precision("high")
    stepped = torch.compile(model) if spec.compiled else model
    race.ready()
    for ids_BT, target_BT, counts_BT in batches(spec, tokenizer):
        tokens = int(counts_BT.sum())
        ids_BT, target_BT, counts_BT = (x.to(spec.device, non_blocking=True) for x in (ids_BT, target_BT, counts_BT))
        with autocast:
            logits_BTV = stepped(input_ids=ids_BT).logits
            nats_N = functional.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), reduction="none")
            loss = (nats_N * counts_BT.flatten()).sum() / counts_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not race.step(tokens):
            break
    result = race.result(
        options=[
            "bfloat16 autocast" if half else "float32",
            "torch.compile" if spec.compiled else "eager",
            "rows packed" if spec.kind == "step" else f"rows padded to {spec.row_tokens}",
            f"tokenized in the loader by {GPU_WORKERS} processes" if on_gpu else "tokenized in the loader",
        ]
    )
    told = settings_of(
        optimizer,
        max_grad_norm=spec.clip_norm,
        dtype=product_dtype(model, autocast),
        compiled=stepped is not model,
        tf32=has_tf32(spec),
    )
    print(json.dumps({**result, "settings": told}))


if __name__ == "__main__":
    main()

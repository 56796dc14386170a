"""A trial of a plain loop like MiniMind's: `python -m compare.baselines.minimind_style SPEC.json`.

Written from a description of MiniMind, not from its code: every row is padded to the maximum length, texts are
tokenized on the fly in the loader (on a GPU by eight processes), all positions go through the head, plain AdamW.
bfloat16 autocast and torch.compile follow the spec (bench/tuning.py finds the fastest configuration). The model is
transformers' Qwen3 of the same shape, which does the same work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as functional

from compare.baselines import stock
from compare.held_out import packed_rows, read_texts
from compare.trial_spec import PretrainSpec, read_spec
from compare.trial_timer import TrialTimer


class PaddedTexts(torch.utils.data.Dataset[tuple[Any, Any, Any]]):
    """Tokenizes a text on access."""

    def __init__(self, texts: list[str], tokenizer: Any, seq_len: int) -> None:
        self.texts, self.tokenizer, self.seq_len = texts, tokenizer, seq_len

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        bos, size = self.tokenizer.bos_token_id, self.seq_len + 1
        ids = self.tokenizer(self.texts[index], add_special_tokens=False, truncation=True, max_length=size - 2)
        row = [bos, *ids["input_ids"], bos]
        ids_T = torch.tensor(row + [self.tokenizer.pad_token_id] * (size - len(row)))
        mask_T = torch.zeros(size, dtype=torch.long)
        mask_T[: len(row)] = 1
        return ids_T[:-1], ids_T[1:], mask_T[1:]


def batches(spec: PretrainSpec, tokenizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    if spec.setting == "step":
        for ids, _ in packed_rows(spec):
            ids_BT = torch.from_numpy(ids)
            yield ids_BT[:, :-1], ids_BT[:, 1:], torch.ones_like(ids_BT[:, 1:])
    data = PaddedTexts(read_texts(spec), tokenizer, spec.seq_len)
    loader = torch.utils.data.DataLoader(data, spec.batch, shuffle=True, drop_last=True, **stock.loading(spec))
    while True:
        yield from loader


def main() -> None:
    import transformers

    spec = read_spec(PretrainSpec)
    torch.set_num_threads(spec.threads)
    _ = transformers.Qwen3ForCausalLM
    timer = TrialTimer(spec, lambda: stock.bits_per_byte(spec, model))
    timer.imported()
    tokenizer, model = stock.stock_tokenizer(spec), stock.stock_model(spec)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=spec.betas, weight_decay=spec.weight_decay
    )
    half = spec.dtype == "bfloat16"
    autocast = torch.autocast(spec.device, torch.bfloat16) if half else nullcontext()
    if stock.has_tf32(spec):
        torch.set_float32_matmul_precision("high")
    forward = torch.compile(model) if spec.compiled else model
    timer.ready()
    for ids_BT, target_BT, mask_BT in batches(spec, tokenizer):
        tokens = int(mask_BT.sum())
        ids_BT, target_BT, mask_BT = (x.to(spec.device, non_blocking=True) for x in (ids_BT, target_BT, mask_BT))
        with autocast:
            logits_BTV = forward(input_ids=ids_BT).logits
            nats_N = functional.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), reduction="none")
            loss = (nats_N * mask_BT.flatten()).sum() / mask_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not timer.step(tokens):
            break
    workers = stock.loading(spec)["num_workers"]
    options = [
        "bfloat16 autocast" if half else "float32",
        "torch.compile" if spec.compiled else "eager",
        "rows packed" if spec.setting == "step" else f"rows padded to {spec.seq_len}",
        "tokenized in the loader" + (f" by {workers} processes" if workers else ""),
    ]
    stock.finish(
        timer,
        options,
        **stock.optimizer_settings(optimizer),
        max_grad_norm=spec.max_grad_norm,
        dtype=stock.matmul_dtype(model, autocast),
        compiled=forward is not model,
        tf32=stock.has_tf32(spec),
    )


if __name__ == "__main__":
    main()

"""What the pretraining peers share: a stock model of the asked shape, its loss on held-out text, and the text."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as functional

from penjing.bench.race import IGNORED, HeldOut, RaceSpec


def stock_model(spec: RaceSpec) -> Any:
    """Qwen3 in float32, newly initialised, on the race's device."""
    import transformers

    torch.manual_seed(spec.seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**spec.shape)).to(spec.device)


def stock_tokenizer(spec: RaceSpec) -> Any:
    """Its `bos` opens and closes a text; rows are filled up with its `eos`, which stands in no text."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(spec.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_texts(spec: RaceSpec) -> list[str]:
    with open(spec.text, encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]


def bits_per_byte(spec: RaceSpec, model: Any) -> float:
    """Of the held-out text, in the dtype that the weights have."""

    @torch.no_grad()
    def nats(ids_BT: Any, target_BT: Any) -> float:
        logits_BTV = model(input_ids=torch.from_numpy(ids_BT).to(spec.device)).logits
        target_N = torch.from_numpy(target_BT).flatten().to(spec.device)
        logits_NV = logits_BTV.flatten(0, 1).float()
        return float(functional.cross_entropy(logits_NV, target_N, ignore_index=IGNORED, reduction="sum"))

    was_training = model.training
    model.eval()
    found = HeldOut(spec.held_out).bits_per_byte(nats)
    model.train(was_training)
    return found

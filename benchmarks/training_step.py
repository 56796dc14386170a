"""Training steps of one model on random rows, for benchmarks/*.py: forward and backward passes, clipping, optimizer.

Rows are full: documents of mixed lengths packed end to end, no padding, so every position counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare.trial_process import run_json

DOCUMENT_TOKENS = 300  # on average


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    name: str
    model: dict[str, Any]
    seq_len: int
    rows: int  # of one forward pass
    passes: int = 1  # of one step
    optimizer: str = "muon"
    state: str = "float32"  # of the optimizer
    compile: str = "blocks"
    dtype: str = "auto"
    lora: dict[str, Any] | None = None
    recompute: str = "none"
    goal_tokens_per_second: float = 0.0  # on one H200
    device: str = "auto"

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.rows * self.seq_len * self.passes


def shape(width: int, layers: int, heads: int, kv: int, mlp: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": width // heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
    }


@dataclass
class Ready:
    """A case built: `step` takes one step, and what it needs to be judged."""

    step: Callable[[int], None]
    device: Any
    dtype: Any
    config: Any
    model: Any
    lengths: list[int]  # of the documents
    total: Any  # of all losses so far


def prepare(case: Case) -> Ready:
    import torch
    from steps.full_rows import full_rows

    from penjing.base import config as settings
    from penjing.devices.choose import local_device
    from penjing.model.config import ModelConfig
    from penjing.model.init import initialise
    from penjing.model.lora import Lora, add_adapter
    from penjing.model.transformer import Transformer, recompute_activations
    from penjing.objective.next_token import NextToken
    from penjing.optim.adamw import AdamW
    from penjing.optim.muon import Muon
    from penjing.optim.router_bias_update import RouterBalance
    from penjing.parallel.single import Single
    from penjing.train.compile_policy import compile_model, compile_optimizers
    from penjing.train.config import ComputeSettings
    from penjing.train.precision import Precision

    device = local_device(case.device)
    precision = Precision.resolve(ComputeSettings(dtype=case.dtype), device)  # type: ignore[arg-type]
    dtype = precision.dtype
    config = ModelConfig(**case.model)
    model = Transformer(config)
    initialise(model, 1)
    if case.lora:
        add_adapter(model, settings.resolve(Lora, case.lora), seed=1)
        precision.cast_frozen(model)
    recompute_activations(model, case.recompute)  # type: ignore[arg-type]
    model.to(device)
    precision.apply(model)
    strategy, objective = Single(device), NextToken()
    strategy.scaler = precision.loss_scaler(device)
    strategy.wrap(model)
    made = (Muon if case.optimizer == "muon" else AdamW)(state_dtype=case.state)  # type: ignore[arg-type]
    optimizers: list[Any] = list(made.build(model))
    if config.is_mixture:
        optimizers.append(RouterBalance(model, 0.0, lambda value: value))
    if case.compile != "off":
        compile_model(model, case.compile)  # type: ignore[arg-type]
        compile_optimizers(optimizers, device)
    generator = torch.Generator().manual_seed(1)
    batches, lengths = [], list[int]()
    for _ in range(4):
        ids_BT = torch.randint(config.vocab_size, (case.rows, case.seq_len + 1), generator=generator)
        cuts_BT = torch.rand(case.rows, case.seq_len, generator=generator) < 1 / DOCUMENT_TOKENS
        document_BT = cuts_BT.long().cumsum(1)
        for row_T in document_BT:
            lengths += torch.unique_consecutive(row_T, return_counts=True)[1].tolist()
        batches.append(full_rows(ids_BT, document_BT).to(device))
    total = torch.zeros((), device=device)

    def step(number: int) -> None:
        for index in range(case.passes):
            loss = objective(model, batches[(number * case.passes + index) % len(batches)])
            strategy.backward(loss.total / case.tokens)
            total.add_(loss.total.detach())
        strategy.clip(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Ready(step, device, dtype, config, model, lengths, total)


def arguments(page: str | None) -> argparse.ArgumentParser:
    """With what all of them have: --threads, and --out."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = physical cores")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser


def step_arguments(page: str | None, *, steps: int, warmup: int) -> argparse.ArgumentParser:
    """With --steps and --warmup too, and --one: the case that a child of `timed` measures."""
    parser = arguments(page)
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before (default: %(default)s)")
    parser.add_argument("--one", type=lambda text: Case(**json.loads(text)), default=None, help=argparse.SUPPRESS)
    return parser


def settings_of(asked: argparse.Namespace) -> dict[str, Any]:
    """What a record says of the command."""
    return {name: value for name, value in vars(asked).items() if name not in ("out", "one")}


def timed(case: Case, result: dict[str, Any], **how: Any) -> dict[str, Any]:
    """What a process of its own measures of a case: this command with --one. Date, machine and versions go into
    `result`. how: see `run_json`."""
    found = run_json([sys.executable, *sys.argv, "--one", json.dumps(asdict(case))], where=case.name, **how)
    result |= {key: found.pop(key) for key in ("date", "machine", "versions")}
    return found

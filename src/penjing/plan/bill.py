"""The plan of one run: what it will compute, how long it will take, how much memory it needs. Written before step 1."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """A prediction, with how it was come by. Seconds are wall time of the whole run, validation and saving included."""

    parameters: int
    parameters_without_embedding: int
    trainable_parameters: int
    rows_per_epoch: int
    tokens_per_epoch: int
    epochs: float
    steps: int
    rows_per_step: int
    tokens_per_step: int
    tokens: int
    flops_per_token: float
    flops: float
    predicted_seconds: float
    predicted_seconds_low: float
    predicted_seconds_high: float
    predicted_peak_memory_bytes: int
    tokens_per_second: float
    level: str  # "probe": timed on this machine with this model; "estimate": from a data sheet

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a short probe of the real training step found, in seconds. `spread` is (slowest - fastest) / median."""

    step_seconds: float
    validation_seconds: float  # one validation pass
    checkpoint_seconds: float
    spread: float


def estimate_memory_bytes(config: ModelConfig, micro_tokens: int, optimizer_bytes_per_parameter: int) -> int:
    """A closed-form estimate of training memory: weights, gradients, optimizer, activations kept for the backward pass.

    Activations per token and layer, in values: inputs and outputs of the norms, q, k, v, attention, gate, up and their
    product, counted once in float32 and once as the cast input of a product. Logits are made in blocks and not kept.
    """
    size = parameters(config).total
    width, inner = config.hidden_size, config.mlp_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
    per_token = config.num_layers * (8 * width + 3 * heads + 5 * inner) * 4
    interpreter = 450 * 2**20  # an allowance (estimate): 0.22 GiB after import, and what preparing data leaves
    return size * (8 + optimizer_bytes_per_parameter) + micro_tokens * (per_token + 8 * width) + interpreter


def make_bill(
    config: ModelConfig,
    *,
    trainable: int,
    flops_per_token: float,
    units_per_epoch: int,
    tokens_per_unit: float,
    units_per_step: int,
    micro_tokens: int,
    steps: int,
    pace: Pace,
    validations: int,
    checkpoints: int,
    optimizer_bytes_per_parameter: int,
) -> Bill:
    """Put the bill together. Units are what batch.rows counts (rows, pairs, prompts)."""
    count = parameters(config)
    tokens_per_step = round(units_per_step * tokens_per_unit)
    seconds = steps * pace.step_seconds + validations * pace.validation_seconds + checkpoints * pace.checkpoint_seconds
    margin = max(0.05, pace.spread / 2)
    return Bill(
        parameters=count.total,
        parameters_without_embedding=count.without_embedding,
        trainable_parameters=trainable,
        rows_per_epoch=units_per_epoch,
        tokens_per_epoch=round(units_per_epoch * tokens_per_unit),
        epochs=steps * units_per_step / units_per_epoch,
        steps=steps,
        rows_per_step=units_per_step,
        tokens_per_step=tokens_per_step,
        tokens=steps * tokens_per_step,
        flops_per_token=flops_per_token,
        flops=flops_per_token * steps * tokens_per_step,
        predicted_seconds=seconds,
        predicted_seconds_low=seconds * (1 - margin),
        predicted_seconds_high=seconds * (1 + margin),
        predicted_peak_memory_bytes=estimate_memory_bytes(config, micro_tokens, optimizer_bytes_per_parameter),
        tokens_per_second=tokens_per_step / pace.step_seconds,
        level="probe",
    )

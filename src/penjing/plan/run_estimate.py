"""The plan of one run: what it will compute, how long it will take, how much memory it needs. Written before step 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters
from penjing.plan.step_time import LinearFit
from penjing.plan.time_interval import ProbeNoise, time_interval

PARTS = ("training", "validation", "checkpoint", "sample")  # of a run's time, as the meter counts them


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
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
    flops_per_token: float  # causal: keys really seen
    flops_per_token_full_square: float  # T keys for every query
    flops: float  # causal
    predicted_seconds: float  # sum of `parts_seconds`
    predicted_seconds_low: float  # four of five runs should fall between
    predicted_seconds_high: float
    parts_seconds: dict[str, float]  # training, validation, checkpoint, sample
    step_seconds: float
    step_parts_seconds: dict[str, float]  # what a step is spent on
    startup_seconds: float  # that passed before the plan was made, the probe among them; not in predicted_seconds
    predicted_peak_memory_bytes: int
    memory_source: str
    tokens_per_second: float
    level: str  # L0 spec sheet, L1 machine profile, L2 probe of the real step
    machine: str = ""  # what it was made for
    # L2: seconds of a step = fixed_seconds + pass_seconds x passes; and what was seen of the machine's unrest.
    probe: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # why the run may learn little

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> RunEstimate:
        """A plan that was written."""
        return cls(**{each.name: known[each.name] for each in fields(cls) if each.name in known})


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTimings:
    """What a short probe of the real training step found, in seconds."""

    step_seconds: float  # mean
    wait_seconds: float = 0.0  # of them, for the next batch: reading, or sampling answers
    waits_for: str = "data_wait"  # what that wait is called
    validation_seconds: float  # one validation pass
    checkpoint_seconds: float  # that training stands still for one on the way, which is written beside it
    last_checkpoint_seconds: float  # for the one at the end, which is waited for
    sample_seconds: float = 0.0
    startup_seconds: float = 0.0
    noise: ProbeNoise = field(default_factory=ProbeNoise)
    line: LinearFit | None = None  # seconds by passes of a step
    peak_memory_bytes: int
    start_loss: float | None = None  # nats per token of held-out rows under the weights the run begins with


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """How much a run does. Units are what batch.size counts: rows, pairs, prompts."""

    units_per_epoch: int
    tokens_per_unit: float
    units_per_step: int
    steps: int
    validations: int
    checkpoints: int
    samples: int = 0


def estimate_run(
    config: ModelConfig,
    *,
    trainable: int,
    flops_per_token: float,
    flops_per_token_full_square: float,
    size: RunSize,
    timings: ProbeTimings,
    machine: str = "",
    errors: Sequence[float] = (),
    versions: Mapping[str, str] | None = None,
) -> RunEstimate:
    """Put an L2 estimate together. errors: log(actual / predicted) of earlier runs' time on this machine."""
    count = parameters(config)
    tokens_per_step = round(size.units_per_step * size.tokens_per_unit)
    parts = {
        "training": size.steps * timings.step_seconds,
        "validation": size.validations * timings.validation_seconds,
        "checkpoint": max(0, size.checkpoints - 1) * timings.checkpoint_seconds + timings.last_checkpoint_seconds,
        "sample": size.samples * timings.sample_seconds,
    }
    seconds = sum(parts.values())
    low, high = time_interval(seconds, timings.noise, errors)
    line, wait = timings.line, timings.wait_seconds
    return RunEstimate(
        parameters=count.total,
        parameters_without_embedding=count.without_embedding,
        trainable_parameters=trainable,
        rows_per_epoch=size.units_per_epoch,
        tokens_per_epoch=round(size.units_per_epoch * size.tokens_per_unit),
        epochs=size.steps * size.units_per_step / size.units_per_epoch,
        steps=size.steps,
        rows_per_step=size.units_per_step,
        tokens_per_step=tokens_per_step,
        tokens=size.steps * tokens_per_step,
        flops_per_token=flops_per_token,
        flops_per_token_full_square=flops_per_token_full_square,
        flops=flops_per_token * size.steps * tokens_per_step,
        predicted_seconds=seconds,
        predicted_seconds_low=low,
        predicted_seconds_high=high,
        parts_seconds=parts,
        step_seconds=timings.step_seconds,
        step_parts_seconds={"compute": timings.step_seconds - wait, timings.waits_for: wait},
        startup_seconds=timings.startup_seconds,
        predicted_peak_memory_bytes=timings.peak_memory_bytes,
        memory_source="measured in the probe",
        tokens_per_second=tokens_per_step / timings.step_seconds,
        level="L2",
        machine=machine,
        probe={
            **asdict(timings.noise),
            "deviation": timings.noise.deviation,
            "fixed_seconds": line.fixed if line else None,
            "pass_seconds": line.each if line else None,
        },
        versions=dict(versions or {}),
    )

"""The estimate of one run: compute, time and memory. Written before step 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters
from penjing.plan.step_time import LinearFit
from penjing.plan.time_interval import ProbeNoise, time_interval

PARTS = ("training", "validation", "checkpoint", "sample")  # of a run's time, as the throughput meter counts it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
    """A prediction and its basis. Seconds are wall time of the complete run, including validation and checkpoints."""

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
    flops_per_token: float  # causal: keys attended to
    flops_per_token_full_square: float  # T keys for every query
    flops: float  # causal
    predicted_seconds: float  # sum of `parts_seconds`
    predicted_seconds_low: float  # low and high: 80 % interval
    predicted_seconds_high: float
    parts_seconds: dict[str, float]  # training, validation, checkpoint, sample
    step_seconds: float
    step_parts_seconds: dict[str, float]  # of one step
    startup_seconds: float  # before the plan was made, including the probe; not in predicted_seconds
    predicted_peak_memory_bytes: int
    memory_source: str
    tokens_per_second: float
    level: str  # L0 spec sheet, L1 machine profile, L2 probe of the real step
    machine: str = ""  # device name
    # L2: seconds of a step = fixed_seconds + pass_seconds x passes; and the measured timing noise.
    probe: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # why the run may learn little
    # Of each source of the data, if there are several: name, tokens, share of the training, epochs.
    sources: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunEstimate:
        """Read an estimate from a plan file."""
        return cls(**{entry.name: data[entry.name] for entry in fields(cls) if entry.name in data})


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTimings:
    """Timings of a short probe of the real training step, in seconds."""

    step_seconds: float  # mean
    wait_seconds: float = 0.0  # the part spent waiting for the next batch: reading, or sampling answers
    waits_for: str = "data_wait"  # name of that part
    validation_seconds: float  # one validation pass
    checkpoint_seconds: float  # training is blocked by an intermediate checkpoint, which is written asynchronously
    last_checkpoint_seconds: float  # of the final checkpoint, which is written synchronously
    sample_seconds: float = 0.0
    startup_seconds: float = 0.0
    noise: ProbeNoise = field(default_factory=ProbeNoise)
    line: LinearFit | None = None  # seconds of a step as a function of its passes
    peak_memory_bytes: int
    start_loss: float | None = None  # nats per token on held-out rows, with the initial weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """The size of a run. Units are what batch.size counts: rows, pairs, prompts."""

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
    """Build an L2 estimate. errors: log(actual / predicted) of the time of earlier runs on this machine."""
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
            "pass_seconds": line.slope if line else None,
        },
        versions=dict(versions or {}),
    )

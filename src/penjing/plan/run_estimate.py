"""The estimate of one run: compute, time and memory. Written before step 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penjing.plan.step_time import LinearFit
from penjing.plan.time_interval import ProbeNoise

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

    @property
    def wait_seconds(self) -> float:
        """The wait for data, or for sampled answers, within a step."""
        return sum(seconds for name, seconds in self.step_parts_seconds.items() if name != "compute")

    @property
    def other_seconds(self) -> float:
        """Everything that is not training."""
        return self.predicted_seconds - self.parts_seconds.get("training", self.predicted_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTimings:
    """Timings of a short probe of the real training step, in seconds."""

    step_seconds: float  # mean
    wait_seconds: float = 0.0  # the part spent waiting for the next batch: reading, or sampling answers
    waits_for: str = "data_wait"  # name of that part
    sampled_tokens: float = 0.0  # of a step's prompts and sampled answers; 0: the data's answers are learned
    validation_seconds: float  # one validation pass
    checkpoint_seconds: float  # training is blocked by an intermediate checkpoint, which is written asynchronously
    last_checkpoint_seconds: float  # of the final checkpoint, which is written synchronously
    sample_seconds: float = 0.0
    startup_seconds: float = 0.0
    noise: ProbeNoise = field(default_factory=ProbeNoise)
    line: LinearFit | None = None  # seconds of a step as a function of its passes
    peak_memory_bytes: int
    start_loss: float | None = None  # nats per token on held-out rows, with the initial weights

"""Times a few micro-batches of the real training step, leaving model, optimizer and data exactly as they were.

A step is `accumulate` forward and backward passes, and clipping and the optimizer once. The probe takes short steps of
at most two passes and estimates the others. If one pass takes seconds on a CPU, it takes passes of a few rows: time and
memory grow linearly with the rows (26M parameters, 4 -> 32 rows: both within 1 %).
"""

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from penjing import devices
from penjing.base.process_info import thread_seconds
from penjing.data.token_shards import id_dtype
from penjing.devices import host
from penjing.loader.batch_source import DeviceSource, Source
from penjing.optim.schedule import Constant
from penjing.parallel.base import Strategy
from penjing.plan.flops import parameters
from penjing.plan.run_estimate import ProbeTimings
from penjing.plan.step_time import LinearFit, fit_two_points
from penjing.plan.time_interval import ProbeNoise, crowding, slowdown
from penjing.plan.trainable import trainable_from_settings
from penjing.train.batch_geometry import BatchGeometry, batch_geometry
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, step
from penjing.train.stages.base import DatasetSize, Stage
from penjing.train.throughput import Meter

BUDGET_SECONDS, BUDGET_SHARE = 10.0, 0.05  # limits of the probe: seconds, and fraction of the run
MIN_BUDGET = 1.0  # seconds that the probe of even a short run may take
STEPS_SHARE = 0.8  # fraction of the budget for steps; the rest is for validation, a checkpoint and a sample
# Passes of a short step: the first stores its gradients; the last adds to them and sends them to other ranks.
MAX_PASSES = 2
LEAST_STEPS, SHORT_RUN_SHARE = 4, 0.5  # timed steps: at most the larger of these (steps, fraction of the run's)
SLOW_STEP_SECONDS = 0.5  # compiling new GEMM shapes, 0.4 ms each, is negligible in a longer step
# Passes of few rows: their number in the probe, including optimizer steps and cold caches; the least ratio of the run's
# rows per pass to theirs; the slowdown of the first one (26M parameters: 1.42 s, then 0.80 s).
SMALL_PASSES, MIN_RATIO, COLD_FACTOR = 12, 3, 1.5
FORWARD_SHARE = 1 / 3  # forward part of a pass, to estimate a validation that takes too long
RISE = 0.045  # of a CPU run's resident memory after the probe, because block sizes vary (4 to 5 % in three runs)
# Bytes of code for GEMM shapes that occur only later: once routers prefer some experts, or as answers change in length.
# 59 to 86 MiB in four runs of two small models; of pairs 54 MiB after 40 steps, 72 after 250.
LATE_SHAPES_BYTES = 70 << 20
MAX_SAVED_BYTES = 2 << 30  # largest checkpoint that is timed; larger ones are estimated from WRITE_RATE
SAVE_SECONDS = 0.02  # of a checkpoint, independent of its size
WRITE_RATE = 300e6  # bytes per second of a checkpoint, including hashing and syncing


@dataclass(frozen=True, kw_only=True)
class ProbeHooks:
    """What the probe times besides steps. Each call does the work once, without lasting effects."""

    save: Callable[[Path], float]  # writes a checkpoint into this folder; returns the seconds that training was blocked
    sample: Callable[[], object]  # samples from the model
    start_time: float  # time.perf_counter() at the start of the command; 0 = unknown


class ZeroLR(Constant):
    """A schedule of rate 0: the optimizer does its full work, but no weight changes."""

    def factor(self, step: int, num_steps: int) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """One optimizer step of the probe, or the mean of the steps of a round of sampling. Seconds."""

    seconds: float
    data_wait: float = 0.0
    threads: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # see process_info.thread_seconds
    passes: tuple[float, ...] = ()  # each forward and backward pass, if they were timed separately
    tokens: float = 0.0  # of this rank

    @property
    def pass_seconds(self) -> float:
        """Seconds of one further pass. Excludes the last pass, which with several ranks also sends the gradients."""
        counted = self.passes[:-1] or self.passes
        return sum(counted) / len(counted) if counted else 0.0

    def full_seconds(self, passes: float) -> float:
        """Estimated seconds of a step with this many passes; the measured seconds if passes were not timed."""
        further = passes - len(self.passes) if self.passes else 0
        return self.seconds + further * self.pass_seconds + self.full_wait(passes) - self.data_wait

    def full_wait(self, passes: float) -> float:
        """The wait for data within `full_seconds`."""
        return self.data_wait * passes / len(self.passes) if self.passes else self.data_wait


class PassTimer:
    """The run's strategy, which also times each forward and backward pass."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.passes: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        start = time.perf_counter()
        with self._strategy.micro_step(last=last):
            yield
        devices.of(self._strategy.device).synchronize(self._strategy.device)
        self.passes.append(time.perf_counter() - start)


@dataclass
class ProbeSteps:
    """Short steps at rate 0 on the run's first batches, from a separate source."""

    context: TrainingContext
    source: Source
    passes: int  # of a short step
    round_steps: int = 1
    times_passes: bool = True
    meter: Meter = field(default_factory=lambda: Meter(0.0, None))

    def take(self) -> StepTiming:
        """One round of steps, including the wait for the device."""
        timer = PassTimer(self.context.strategy)
        trial = replace(
            self.context,
            source=self.source,
            strategy=cast(Strategy, timer) if self.times_passes else self.context.strategy,
            meter=self.meter,
            schedule=ZeroLR(),
            accumulate=self.passes,
        )
        before, waited, start, tokens = thread_seconds(), self.meter.data_wait_seconds, time.perf_counter(), 0
        for _ in range(self.round_steps):
            taken = step(trial, 0)
            float(taken.loss)
            tokens += taken.tokens
        count, seconds = self.round_steps, time.perf_counter() - start
        return StepTiming(
            seconds=seconds / count,
            data_wait=(self.meter.data_wait_seconds - waited) / count,
            threads=thread_seconds(since=before),
            passes=tuple(timer.passes),
            tokens=tokens / count,
        )


def probe(
    stage: Stage[Any], size: DatasetSize, model: nn.Module, context: TrainingContext, hooks: ProbeHooks
) -> ProbeTimings:
    """Time a step, a validation, a checkpoint and a sample of this run on this machine, and measure peak memory.

    The steps run at rate 0, so no copy of the weights is needed and peak memory is the run's. Full rounds are timed.
    """
    start, run, strategy = time.perf_counter(), stage.run, context.strategy
    geometry = batch_geometry(run, strategy.world, strategy.device)
    units, peak = geometry.micro_size, 0
    small = units
    if stage.runs_ahead and not any(module._compiled_call_impl for module in model.modules()):
        small = _small_pass_units(size, context, geometry)
    with _state_restored(model, context):
        if small < units:
            timings, peak, small = _time_small_passes(stage, context, geometry, small)
        else:
            timings = _time_passes(stage, size, context)
        passes = context.accumulate * units / small
        noise = _noise(strategy, timings)
        lasting = noise.lasting_slowdown / noise.slowdown
        seconds = [timing.full_seconds(passes) * lasting for timing in timings]
        if strategy.world > 1:  # all ranks plan with the same values
            seconds = [one / strategy.world for one in strategy.all_reduce(torch.tensor(seconds)).tolist()]
        mean = _mean(seconds)
        sampled = float(strategy.all_reduce(torch.tensor(_mean([timing.tokens for timing in timings]))))
        budget = _budget(mean * context.num_steps) - (time.perf_counter() - start)
        pass_seconds = _mean([timing.pass_seconds for timing in timings]) * lasting * units / small
        validation, start_loss = _time_validation(size, context, pass_seconds / units, budget)
        saving, last_saving, sampling = _time_save_and_sample(run, model, strategy, hooks, budget)
    start_up = start - hooks.start_time if hooks.start_time else 0.0
    return ProbeTimings(
        step_seconds=mean,
        wait_seconds=_mean([timing.full_wait(passes) for timing in timings]),
        waits_for="data_wait" if stage.runs_ahead else "generation",
        sampled_tokens=0.0 if stage.runs_ahead else sampled,
        validation_seconds=validation,
        checkpoint_seconds=saving,
        last_checkpoint_seconds=last_saving,
        sample_seconds=sampling,
        startup_seconds=start_up + time.perf_counter() - start,
        noise=noise,
        line=LinearFit(mean - context.accumulate * pass_seconds, pass_seconds) if pass_seconds else None,
        start_loss=start_loss,
        peak_memory_bytes=_with_growth(run, size, context, peak, late_shapes=_late_shapes(stage, size, len(seconds))),
    )


def _noise(strategy: Strategy, timings: list[StepTiming]) -> ProbeNoise:
    """The spread of the timings, and the load of the machine."""
    timed = [seconds for timing in timings for seconds in timing.passes] or [timing.seconds for timing in timings]
    low, high = np.quantile(timed, (0.1, 0.9)).tolist()
    spread = (high - low) / 2 * len(timed) / sum(timed)
    noise = ProbeNoise(spread=spread, num_timed=len(timed))
    if not devices.of(strategy.device).is_host:
        return noise
    threads = torch.get_num_threads() * strategy.world
    return replace(
        noise,
        slowdown=slowdown([timing.threads for timing in timings]),
        crowding=crowding(host.load_averages(), threads, os.cpu_count() or 1),
        all_cores=threads >= host.physical_cores(),
    )


def _budget(run_seconds: float) -> float:
    """Seconds that the probe of a run may take."""
    return max(MIN_BUDGET, min(BUDGET_SECONDS, BUDGET_SHARE * run_seconds))


def _time_passes(stage: Stage[Any], size: DatasetSize, context: TrainingContext) -> list[StepTiming]:
    """Timed steps with passes as large as the run's."""
    passes = min(context.accumulate, MAX_PASSES) if stage.runs_ahead else context.accumulate
    steps = ProbeSteps(
        context,
        context.source.fresh(),
        passes,
        round_steps=size.round_steps,
        # Waiting for the device after each pass costs a little, so only if passes must be estimated.
        times_passes=stage.runs_ahead and (devices.of(context.strategy.device).is_host or passes < context.accumulate),
    )
    timed = _time_steps if stage.runs_ahead else _time_sampled_steps
    try:
        return timed(steps, size)
    finally:
        steps.source.close()


def _time_steps(steps: ProbeSteps, size: DatasetSize) -> list[StepTiming]:
    """Steps whose batches need no sampling.

    Quick steps run twice on the same batches: the first time compiles new GEMM shapes, which a run soon stops doing;
    the second time is used.
    """
    context, strategy, start = steps.context, steps.context.strategy, steps.source.position()
    first = steps.take()
    max_steps = max(LEAST_STEPS, round(SHORT_RUN_SHARE * context.num_steps))
    timings: list[StepTiming] = []

    def enough() -> bool:
        spent = sum(timing.seconds for timing in timings)
        mean = spent / len(timings)
        allowed = STEPS_SHARE * _budget(
            _mean([timing.full_seconds(context.accumulate) for timing in timings]) * context.num_steps
        )
        if mean >= SLOW_STEP_SECONDS:
            return min(first.seconds, mean) + spent + mean > allowed
        return len(timings) >= 2 and (spent + mean > allowed / 2 or len(timings) >= max_steps)

    while not timings or not strategy.any(enough()):
        timings.append(steps.take())
    if strategy.any(_mean([timing.seconds for timing in timings]) < SLOW_STEP_SECONDS):
        steps.source.restore(start)
        steps.take()  # only the first batch has to be waited for
        timings = [steps.take() for _ in timings]
    return timings


def _time_sampled_steps(steps: ProbeSteps, size: DatasetSize) -> list[StepTiming]:
    """Steps on sampled answers. Rounds of sampling differ and the first ones compile, so half are not used."""
    context, round_steps, min_rounds = steps.context, size.round_steps, max(1, size.probe_steps // size.round_steps)
    max_steps = max(LEAST_STEPS, min(20, round(SHORT_RUN_SHARE * context.num_steps)))
    steps.take()
    timings: list[StepTiming] = []

    def enough() -> bool:
        spent = sum(timing.seconds for timing in timings) * round_steps
        allowed = STEPS_SHARE * _budget(timings[-1].seconds * context.num_steps)
        return spent > allowed or len(timings) * round_steps >= max_steps

    while len(timings) < min_rounds or not context.strategy.any(enough()):
        timings.append(steps.take())
    skipped = max(0, min(len(timings) // 2, len(timings) - min_rounds))
    return timings[skipped:]


def _small_pass_units(size: DatasetSize, context: TrainingContext, geometry: BatchGeometry) -> int:
    """Units of the timed passes: as in the run, or fewer if one pass takes long on a CPU."""
    rate, units = context.meter.peak_flops_per_second, geometry.micro_size
    kind = devices.of(context.strategy.device)
    if not kind.is_host or geometry.world > 1 or not rate:
        return units
    unit_seconds = size.tokens_per_unit * context.meter.flops_per_token / (kind.eager_share * rate)
    small = _affordable(_budget(unit_seconds * geometry.global_size * context.num_steps), unit_seconds, geometry)
    return small if small <= units // MIN_RATIO else units


def _affordable(seconds: float, unit_seconds: float, geometry: BatchGeometry) -> int:
    """Units of a pass with which the probe takes at most `seconds`."""
    indivisible = geometry.indivisible
    return max(1, int(STEPS_SHARE * seconds / SMALL_PASSES / unit_seconds) // indivisible) * indivisible


def _time_small_passes(
    stage: Stage[Any], context: TrainingContext, geometry: BatchGeometry, small: int
) -> tuple[list[StepTiming], int, int]:
    """A timed step with small passes, the predicted peak memory of the run's passes, and the units of a small pass.

    small: first guess of these units; the first step corrects it. Peak memory is extrapolated linearly from passes of
    that size and twice that size. The timing is the last step's, when memory is allocated and code compiled.
    """
    device, units, passes = context.strategy.device, geometry.micro_size, min(context.accumulate, MAX_PASSES)

    def take(units: int) -> tuple[StepTiming, int]:
        source = DeviceSource(stage.source(units, 0, 1), device)
        return ProbeSteps(context, source, passes).take(), devices.of(device).peak_memory_bytes(device)

    first, _ = take(small)
    unit_seconds = first.pass_seconds / small / COLD_FACTOR
    budget = _budget(unit_seconds * geometry.global_size * context.num_steps) - first.seconds
    largest = units // MIN_RATIO // geometry.indivisible * geometry.indivisible
    small = max(small, min(largest, _affordable(budget, unit_seconds, geometry)))
    _, low = take(small)
    _, high = take(2 * small)
    return [take(small)[0]], round(fit_two_points((small, low), (2 * small, high)).at(units)), small


def _mean(seconds: list[float]) -> float:
    """The mean without the slowest and fastest tenth, so that one outlier among few steps has no effect."""
    ordered = sorted(seconds)
    cut = len(ordered) // 10
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


@contextmanager
def _state_restored(model: nn.Module, context: TrainingContext) -> Iterator[None]:
    """On exit, restore what a step at rate 0 changes: buffers, optimizer state, random state.

    This includes the modules' own counters, such as the masks that an adapter has drawn: the number of timed steps
    depends on the clock, and the result of a run must not.
    """
    saved = model.state_dict().keys()
    buffers: dict[str, Tensor] = {name: value.clone() for name, value in model.named_buffers() if name in saved}
    counting = [module for module in model.modules() if type(module).get_extra_state is not nn.Module.get_extra_state]
    counts = [copy.deepcopy(module.get_extra_state()) for module in counting]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in context.optimizers]  # empty before step 1
    random_state = torch.get_rng_state()
    scaler = context.strategy.scaler
    scale = scaler.state() if scaler is not None else {}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in model.named_buffers():
                if name in buffers:
                    value.copy_(buffers[name])
        for module, count in zip(counting, counts, strict=True):
            module.set_extra_state(count)
        for optimizer, state in zip(context.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        if scaler is not None:
            scaler.restore(scale)
        torch.set_rng_state(random_state)


def _time_validation(
    size: DatasetSize, context: TrainingContext, unit_seconds: float, budget: float
) -> tuple[float, float | None]:
    """(seconds of a validation, its loss); estimated seconds and None if it would exceed the budget."""
    estimated = size.held_out_units * unit_seconds * FORWARD_SHARE / context.strategy.world
    if context.strategy.any(estimated > max(MIN_BUDGET, budget)):
        return estimated, None
    start = time.perf_counter()
    metrics = context.validate()
    return time.perf_counter() - start, metrics.get("val_loss")


def _time_save_and_sample(
    run: Run, model: nn.Module, strategy: Strategy, hooks: ProbeHooks, budget: float
) -> tuple[float, float, float]:
    """Seconds that a checkpoint blocks training, during the run and at its end; seconds of one sample."""
    trained = trainable_from_settings(run.model, run.lora, run.freeze)  # ZeRO-3 leaves no numbers in the model
    saved_bytes = 12 * (trained.num_trainable if trained else parameters(run.model).total)
    estimated = SAVE_SECONDS + saved_bytes / WRITE_RATE
    start = time.perf_counter()
    if run.sample.every:
        with strategy.gathered(model):
            hooks.sample()
    sampling = time.perf_counter() - start
    if saved_bytes > MAX_SAVED_BYTES or strategy.any(estimated > max(MIN_BUDGET, budget - sampling)):
        return estimated, estimated, sampling
    folder = Path(run.out) / ".probe"
    start = time.perf_counter()
    try:
        blocked = hooks.save(folder)
        return blocked, time.perf_counter() - start, sampling
    finally:
        if strategy.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _late_shapes(stage: Stage[Any], size: DatasetSize, rounds: int) -> bool:
    """Whether a run meets many GEMM shapes that so many timed rounds did not. Pairs go on changing their shape."""
    few = stage.runs_ahead or rounds * size.round_steps <= size.probe_steps
    return stage.run.model.is_mixture or (stage.run.objective.varying_shapes and few)


def _with_growth(run: Run, size: DatasetSize, context: TrainingContext, peak: int, *, late_shapes: bool) -> int:
    """Peak memory so far, which covers all work of a run; on a CPU plus later growth and the pages of token files.

    peak: estimated from small passes; 0: there were none. late_shapes: whether many further GEMM shapes are expected.
    """
    peak = max(devices.of(context.strategy.device).peak_memory_bytes(context.strategy.device), peak)
    if not devices.of(context.strategy.device).is_host:
        return peak
    peak += round(peak * RISE)
    if late_shapes:
        peak += LATE_SHAPES_BYTES
    if size.unit != "rows":
        return peak
    tokens = min(run.batch.size * context.num_steps, size.units_per_epoch) * size.seq_len
    return peak + tokens * id_dtype(run.model.vocab_size).itemsize

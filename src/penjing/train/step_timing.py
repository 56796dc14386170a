"""Times a few micro-batches of the real training step, leaving model, optimizer and data exactly as they were.

A step is `accumulate` forward and backward passes and what comes once: clipping, the optimizer. The probe takes short
steps of at most two passes and estimates the others. Where even one pass of a CPU takes seconds, it takes passes of a
few rows: time and memory grow with the rows in a straight line (26M parameters, 4 -> 32 rows: both within 1 %).
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from penjing.loader.batch_source import DeviceSource, Source
from penjing.optim.schedule import Constant
from penjing.parallel.base import Strategy
from penjing.plan import hardware
from penjing.plan.compute_optimal import token_bytes
from penjing.plan.run_estimate import ProbeTimings
from penjing.plan.step_time import LinearFit, quantile, two_points
from penjing.plan.time_interval import ProbeNoise, crowding, slowdown
from penjing.train.batch_geometry import BatchGeometry, batch_geometry
from penjing.train.compile_policy import EAGER_SHARE
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, step
from penjing.train.stages.base import DatasetSize, Stage
from penjing.train.throughput import Meter

BUDGET_SECONDS, BUDGET_SHARE = 10.0, 0.05  # a probe takes at most so long, and at most this share of the run
LEAST_BUDGET = 1.0  # seconds that even the probe of a short run may take
STEPS_SHARE = 0.8  # of it, for steps; validation, a checkpoint and a sample are tried in the rest
# of a short step: the first leaves its gradients, and the last adds to them and sends them to other ranks
MAX_PASSES = 2
LEAST_STEPS, SHORT_RUN_SHARE = 4, 0.5  # steps that are timed at most, where a run has few
SLOW_SECONDS = 0.5  # of a step beside which compiling new GEMM shapes, 0.4 ms each, is nothing
# Passes of few rows: how many of them the probe takes, optimizer steps and cold caches included; how many times as many
# rows the run's passes must have; how much longer the first one takes (26M parameters: 1.42 s, then 0.80 s).
SMALL_PASSES, MANY_TIMES, COLD_FACTOR = 12, 3, 1.5
FORWARD_SHARE = 1 / 3  # of a pass, where validation takes too long to be tried
# Of a CPU run's resident memory after the probe, as blocks of other sizes come and go (4 to 5 % in three runs): what is
# always added, and the most that growth within the probe may add.
RISE, MOST_GROWTH = 0.03, 0.03
# Bytes that code for further GEMM shapes takes where those come up only later: once routers prefer some experts, as
# answers become shorter or longer. 59 to 86 MiB in four runs of two small models.
LATE_SHAPES_BYTES = 70 << 20
SLOWEST_DECAY = 0.75  # of memory's growth from one half of the probe to the next, beyond which it is not believed
MAX_SAVED_BYTES = 2 << 30  # of a checkpoint that is tried; larger ones are estimated from WRITE_RATE
SAVE_SECONDS = 0.02  # of a checkpoint, whatever its size
WRITE_RATE = 300e6  # bytes per second of a checkpoint, hashes and syncing included


@dataclass(frozen=True, kw_only=True)
class ProbeHooks:
    """What the probe can try besides steps. Each does once what the run does many times, and leaves nothing behind."""

    save: Callable[[Path], float]  # a checkpoint into this folder; the seconds that training stood still for it
    sample: Callable[[], object]  # what the model writes
    began: float  # time.time() when the run's process took it up; 0 = not known


class ZeroLR(Constant):
    """A schedule of rate 0: the optimizer does all its work, and no weight moves."""

    def factor(self, step: int, num_steps: int) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """One optimizer step of the probe, or the mean of the steps that a round of sampling serves. Seconds."""

    seconds: float
    data_wait: float = 0.0
    threads: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # see hardware.thread_seconds
    passes: tuple[float, ...] = ()  # each forward and backward pass, where they were timed apart

    @property
    def pass_seconds(self) -> float:
        """One more pass: not the last, which with several ranks sends the gradients too."""
        counted = self.passes[:-1] or self.passes
        return sum(counted) / len(counted) if counted else 0.0

    def full_seconds(self, passes: float) -> float:
        """The step, had it so many passes; as it was where they were not timed apart."""
        more = passes - len(self.passes) if self.passes else 0
        return self.seconds + more * self.pass_seconds + self.full_wait(passes) - self.data_wait

    def full_wait(self, passes: float) -> float:
        """Of it, the wait for data."""
        return self.data_wait * passes / len(self.passes) if self.passes else self.data_wait


class PassTimer:
    """The run's strategy, which notes how long each forward and backward pass takes."""

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
        if self._strategy.device.type != "cpu":
            torch.accelerator.synchronize(self._strategy.device)
        self.passes.append(time.perf_counter() - start)


@dataclass
class ProbeSteps:
    """Short steps at rate 0 on the run's own first batches, from a source of their own."""

    context: TrainingContext
    source: Source
    passes: int  # of a short step
    round_steps: int = 1
    times_passes: bool = True
    meter: Meter = field(default_factory=lambda: Meter(0.0, None))

    def take(self) -> StepTiming:
        """One round of steps, waited for."""
        timer = PassTimer(self.context.strategy)
        trial = replace(
            self.context,
            source=self.source,
            strategy=cast(Strategy, timer) if self.times_passes else self.context.strategy,
            meter=self.meter,
            schedule=ZeroLR(),
            accumulate=self.passes,
        )
        before, waited, start = hardware.thread_seconds(), self.meter.data_wait_seconds, time.perf_counter()
        for _ in range(self.round_steps):
            float(step(trial, 0).loss)
        count, seconds = self.round_steps, time.perf_counter() - start
        return StepTiming(
            seconds=seconds / count,
            data_wait=(self.meter.data_wait_seconds - waited) / count,
            threads=hardware.thread_seconds(since=before),
            passes=tuple(timer.passes),
        )


def probe(
    stage: Stage[Any], size: DatasetSize, model: nn.Module, context: TrainingContext, hooks: ProbeHooks
) -> ProbeTimings:
    """What a step, a validation, a checkpoint and a sample of this run take on this machine, and the peak of memory.

    The steps run at rate 0, so no copy of the weights is needed and the peak of memory is the run's own. A round of
    sampling serves `size.round_steps` steps: whole rounds are timed.
    """
    began, start, run, strategy = time.time(), time.perf_counter(), stage.run, context.strategy
    geometry = batch_geometry(run, strategy.world, strategy.device)
    units = small = geometry.micro_size
    if stage.runs_ahead and not any(module._compiled_call_impl for module in model.modules()):
        small = _small_pass_units(size, context, geometry)
    with _at_rest(model, context):
        if small < units:
            timings, peak, small = _time_small_passes(stage, context, geometry, small)
        else:
            timings, peak = _time_passes(stage, size, context)
        passes = context.accumulate * units / small
        noise = _noise(strategy, timings)
        lasting = noise.lasting_slowdown / noise.slowdown
        seconds = [each.full_seconds(passes) * lasting for each in timings]
        if strategy.world > 1:  # all ranks plan with the same figures
            seconds = [one / strategy.world for one in strategy.all_reduce(torch.tensor(seconds)).tolist()]
        mean = _mean(seconds)
        left = _budget(mean * context.num_steps) - (time.perf_counter() - start)
        pass_seconds = _mean([each.pass_seconds for each in timings]) * lasting * units / small
        validation, start_loss = _try_validation(size, context, pass_seconds / units, left)
        saving, last_saving, sampling = _try(run, model, strategy, hooks, left)
    late_shapes = run.model.is_mixture or (not stage.runs_ahead and len(seconds) * size.round_steps <= size.probe_steps)
    start_up = began - hooks.began if hooks.began else 0.0
    return ProbeTimings(
        step_seconds=mean,
        wait_seconds=_mean([each.full_wait(passes) for each in timings]),
        waits_for="data_wait" if stage.runs_ahead else "generation",
        validation_seconds=validation,
        checkpoint_seconds=saving,
        last_checkpoint_seconds=last_saving,
        sample_seconds=sampling,
        startup_seconds=start_up + time.time() - began,
        noise=noise,
        line=LinearFit(mean - context.accumulate * pass_seconds, pass_seconds) if pass_seconds else None,
        start_loss=start_loss,
        peak_memory_bytes=_with_growth(run, size, context, peak, late_shapes=late_shapes),
    )


def _noise(strategy: Strategy, timings: list[StepTiming]) -> ProbeNoise:
    """How unsteady the timings were, and how busy the machine is."""
    timed = [one for each in timings for one in each.passes] or [each.seconds for each in timings]
    spread = (quantile(timed, 0.9) - quantile(timed, 0.1)) / 2 * len(timed) / sum(timed)
    noise = ProbeNoise(spread=spread, num_timed=len(timed))
    if strategy.device.type != "cpu":
        return noise
    threads = torch.get_num_threads() * strategy.world
    return replace(
        noise,
        slowdown=slowdown([each.threads for each in timings]),
        crowding=crowding(hardware.load_averages(), threads, os.cpu_count() or 1),
        all_cores=threads >= hardware.physical_cores(),
    )


def _budget(run_seconds: float) -> float:
    """Seconds that the probe of a run may take."""
    return max(LEAST_BUDGET, min(BUDGET_SECONDS, BUDGET_SHARE * run_seconds))


# --- steps ------------------------------------------------------------------------------------------------------------


def _time_passes(stage: Stage[Any], size: DatasetSize, context: TrainingContext) -> tuple[list[StepTiming], list[int]]:
    """Timed steps with passes as large as the run's, and the peak of memory after each step of the first round."""
    passes = min(context.accumulate, MAX_PASSES) if stage.runs_ahead else context.accumulate
    steps = ProbeSteps(
        context,
        context.source.fresh(),
        passes,
        round_steps=size.round_steps,
        # Waiting for a device after each pass costs a little: only where passes are to be estimated.
        times_passes=stage.runs_ahead and (context.strategy.device.type == "cpu" or passes < context.accumulate),
    )
    timed = _time_ready if stage.runs_ahead else _time_sampled
    try:
        return timed(steps, size)
    finally:
        steps.source.close()


def _time_ready(steps: ProbeSteps, size: DatasetSize) -> tuple[list[StepTiming], list[int]]:
    """Steps whose batches need no sampling.

    The same batches come twice where steps are quick: the first time each new GEMM shape is compiled, which is soon
    over in a run; the second time is timed.
    """
    context, strategy, begin = steps.context, steps.context.strategy, steps.source.position()
    first = steps.take()
    most = max(LEAST_STEPS, round(SHORT_RUN_SHARE * context.num_steps))
    held: list[int] = []
    taken: list[StepTiming] = []

    def enough() -> bool:
        spent = sum(each.seconds for each in taken)
        mean = spent / len(taken)
        allowed = STEPS_SHARE * _budget(
            _mean([each.full_seconds(context.accumulate) for each in taken]) * context.num_steps
        )
        if mean >= SLOW_SECONDS:
            return min(first.seconds, mean) + spent + mean > allowed
        return len(taken) >= 2 and (spent + mean > allowed / 2 or len(taken) >= most)

    while not taken or not strategy.any(enough()):
        taken.append(steps.take())
        held.append(hardware.peak_memory_bytes(strategy.device))
    if strategy.any(_mean([each.seconds for each in taken]) < SLOW_SECONDS):
        steps.source.restore(begin)
        steps.take()  # waits for the first batch, which later ones do not
        taken = [steps.take() for _ in taken]
    return taken, held


def _time_sampled(steps: ProbeSteps, size: DatasetSize) -> tuple[list[StepTiming], list[int]]:
    """Steps on answers: no two rounds of sampling are the same, and the first ones compile; half are not counted."""
    context, each, least = steps.context, size.round_steps, max(1, size.probe_steps // size.round_steps)
    most = max(LEAST_STEPS, min(20, round(SHORT_RUN_SHARE * context.num_steps)))
    steps.take()
    taken: list[StepTiming] = []

    def enough() -> bool:
        spent = sum(one.seconds for one in taken) * each
        allowed = STEPS_SHARE * _budget(taken[-1].seconds * context.num_steps)
        return spent > allowed or len(taken) * each >= most

    while len(taken) < least or not context.strategy.any(enough()):
        taken.append(steps.take())
    skipped = max(0, min(len(taken) // 2, len(taken) - least))
    return taken[skipped:], []


def _small_pass_units(size: DatasetSize, context: TrainingContext, geometry: BatchGeometry) -> int:
    """Units of the passes that are timed: those of the run's, but on a CPU fewer, where even one takes long."""
    rate, units = context.meter.peak_flops_per_second, geometry.micro_size
    if context.strategy.device.type != "cpu" or geometry.world > 1 or not rate:
        return units
    unit_seconds = size.tokens_per_unit * context.meter.flops_per_token / (EAGER_SHARE["cpu"] * rate)
    few = _affordable(_budget(unit_seconds * geometry.global_size * context.num_steps), unit_seconds, geometry)
    return few if few <= units // MANY_TIMES else units


def _affordable(seconds: float, unit_seconds: float, geometry: BatchGeometry) -> int:
    """Units of a pass with which the probe keeps within `seconds`."""
    together = geometry.indivisible
    return max(1, int(STEPS_SHARE * seconds / SMALL_PASSES / unit_seconds) // together) * together


def _time_small_passes(
    stage: Stage[Any], context: TrainingContext, geometry: BatchGeometry, few: int
) -> tuple[list[StepTiming], list[int], int]:
    """A timed step of few units, the peak of memory that the run's passes will have, and how many the few are.

    The first step, on a guess, says how many units may be timed. Peaks of so many and of twice as many lie on a line;
    the times are those of the last step, when all memory was touched and all code compiled.
    """
    device, units, passes = context.strategy.device, geometry.micro_size, min(context.accumulate, MAX_PASSES)

    def take(units: int) -> tuple[StepTiming, int]:
        source = DeviceSource(stage.source(units, 0, 1), device)
        return ProbeSteps(context, source, passes).take(), hardware.peak_memory_bytes(device)

    first, _ = take(few)
    unit_seconds = first.pass_seconds / few / COLD_FACTOR
    budget = _budget(unit_seconds * geometry.global_size * context.num_steps) - first.seconds
    most = units // MANY_TIMES // geometry.indivisible * geometry.indivisible
    few = max(few, min(most, _affordable(budget, unit_seconds, geometry)))
    _, low = take(few)
    _, high = take(2 * few)
    return [take(few)[0]], [round(two_points((few, low), (2 * few, high)).at(units))], few


def extrapolate_growth(held: list[int]) -> int:
    """Bytes that memory will grow by after the probe, from how its growth slowed down within.

    On a CPU each new GEMM shape is compiled and kept, so memory grows with every length of document first seen, ever
    more slowly. Growth of the second half over the first is taken for the ratio of a geometric series.
    """
    if len(held) < 4:
        return 0
    middle = len(held) // 2
    early, late = held[middle] - held[0], held[-1] - held[middle]
    if late <= 0 or early <= 0:
        return max(0, late)
    ratio = min(SLOWEST_DECAY, late / early)
    return round(late * ratio / (1 - ratio))


def _mean(seconds: list[float]) -> float:
    """The mean without the slowest and fastest tenth: a run has hiccups too, but one in five steps is too many."""
    ordered = sorted(seconds)
    cut = len(ordered) // 10
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


@contextmanager
def _at_rest(model: nn.Module, context: TrainingContext) -> Iterator[None]:
    """Whatever a step at rate 0 changes is put back: buffers, the optimizers' state, the random numbers.

    So is what modules count for themselves, such as how many masks an adapter has drawn: how many steps are timed
    depends on the clock, and what a run learns must not.
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


# --- what is not a step -----------------------------------------------------------------------------------------------


def _try_validation(
    size: DatasetSize, context: TrainingContext, unit_seconds: float, left: float
) -> tuple[float, float | None]:
    """Seconds of a validation, estimated where it takes too long to be tried; and the loss it found."""
    estimated = size.held_out_units * unit_seconds * FORWARD_SHARE / context.strategy.world
    if context.strategy.any(estimated > max(LEAST_BUDGET, left)):
        return estimated, None
    start = time.perf_counter()
    figures = context.validate()
    return time.perf_counter() - start, figures.get("val_loss")


def _try(run: Run, model: nn.Module, strategy: Strategy, hooks: ProbeHooks, left: float) -> tuple[float, float, float]:
    """Seconds that a checkpoint holds up training, on the way and at the end; seconds of one sample."""
    saved_bytes = 12 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    estimated = SAVE_SECONDS + saved_bytes / WRITE_RATE
    start = time.perf_counter()
    if run.sample.every:
        hooks.sample()
    sampling = time.perf_counter() - start
    if saved_bytes > MAX_SAVED_BYTES or strategy.any(estimated > max(LEAST_BUDGET, left - sampling)):
        return estimated, estimated, sampling
    place = Path(run.out) / ".probe"
    start = time.perf_counter()
    try:
        held = hooks.save(place)
        return held, time.perf_counter() - start, sampling
    finally:
        if strategy.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def _with_growth(run: Run, size: DatasetSize, context: TrainingContext, held: list[int], *, late_shapes: bool) -> int:
    """The most memory so far, which holds all a run does; on a CPU, and the pages of token files still to be read.

    held: peaks seen or estimated in the probe's steps. late_shapes: whether many more GEMM shapes are to come.
    """
    peak = max([hardware.peak_memory_bytes(context.strategy.device), *held])
    if context.strategy.device.type != "cpu":
        return peak
    peak += round(peak * RISE) + min(extrapolate_growth(held), round(peak * MOST_GROWTH))
    if late_shapes:
        peak += LATE_SHAPES_BYTES
    if size.unit != "rows":
        return peak
    tokens = min(run.batch.size * context.num_steps, size.units_per_epoch) * size.seq_len
    return peak + tokens * token_bytes(run.model.vocab_size)

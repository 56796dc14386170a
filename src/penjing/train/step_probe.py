"""The plan of a run before step 1, from a few timed steps of the real thing (level L2)."""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing import __version__
from penjing.base.files import read_json, write_json
from penjing.loader.batch_source import Source
from penjing.optim.schedule import Constant
from penjing.parallel.base import Strategy
from penjing.plan import hardware
from penjing.plan import prediction_history as ledger
from penjing.plan.compute_optimal import token_bytes
from penjing.plan.flops import training_flops_per_token
from penjing.plan.run_estimate import Bill, Pace, make_bill
from penjing.plan.step_time import Line, quantile, two_points
from penjing.plan.trainable import trainable_of
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, step
from penjing.train.run_dir import RunFolder
from penjing.train.small_data import doubts, start_doubts
from penjing.train.stages.base import Size, Stage
from penjing.train.throughput import Expected, Meter

FORECAST = "scale.json"  # in the run's folder: the loss that `penjing plan forecast` foresaw
FORECAST_TOLERANCE = 0.05  # of the tokens: those of full rows are foreseen, and rows have some padding
LEAST_STEPS, ALWAYS_ALLOWED = 4, 20  # timed; of slow steps two are the least
PROBE_SECONDS = 2.0  # of timed steps at least
MOST_SECONDS = 10.0  # of timed steps at most, once two are there
SLOW_SECONDS = 0.5  # of a step beside which compiling new sizes of product, 0.4 ms each, is nothing
RUN_SHARE = 0.03  # of the run's steps that may be spent on timing, but ALWAYS_ALLOWED where they are quick
TIME_SHARE = 0.005  # of the run's time that is spent on timing, where that is more than PROBE_SECONDS
# Of a CPU run's resident memory after the probe, as blocks of other sizes come and go (4 to 5 % in three runs): what is
# always added, and the most that growth within the probe may add.
RISE, MOST_GROWTH = 0.03, 0.03
# Bytes that code for products of further sizes takes where those come up only later: once routers prefer some experts,
# as answers become shorter or longer. 59 to 86 MiB in four runs of two small models.
MORE_SIZES = 70 << 20
SLOWEST_DECAY = 0.75  # of memory's growth from one half of the probe to the next, beyond which it is not believed
SAVED_AT_MOST = 2 << 30  # bytes that are saved for a trial; larger checkpoints are reckoned from WRITE_RATE
WRITE_RATE = 300e6  # bytes per second of a checkpoint, hashes and syncing included


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What the probe can try besides steps. Each does once what the run does many times, and leaves nothing behind."""

    save: Callable[[Path], float]  # a checkpoint into this folder; the seconds that training stood still for it
    sample: Callable[[], object] = lambda: None  # what the model writes
    began: float = 0.0  # time.time() when the run's process took it up; 0 = not known


class AtRest(Constant):
    """A schedule of rate 0: the optimizer does all its work, and no weight moves."""

    def factor(self, step: int, num_steps: int) -> float:
        return 0.0


def plan(
    run: Run,
    stage: Stage[Any],
    size: Size,
    strategy: Strategy,
    model: nn.Module,
    parts: TrainingContext,
    *,
    begun: bool,
    trials: Trials | None = None,
) -> Bill:
    """Read back if the run was begun before, else made from a probe and written, once for so many steps and rows."""
    folder = RunFolder(Path(run.out))
    if begun and folder.plan.is_file():
        known = Bill.from_dict(read_json(folder.plan))
        sizes = known.steps, known.rows_per_step, known.rows_per_epoch
        if sizes == (parts.num_steps, run.batch.rows, size.units_per_epoch):
            return known
    micro_size = batch_geometry(run, strategy.world, strategy.device).micro_size
    pace = probe(run, stage, size, strategy, model, parts, trials)
    machine = _machine(strategy)
    bill = make_bill(
        run.model,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        flops_per_token=parts.meter.flops_per_token,
        flops_per_token_full_square=_full_square(run, size, model),
        units_per_epoch=size.units_per_epoch,
        tokens_per_unit=size.tokens_per_unit,
        units_per_step=run.batch.rows,
        micro_tokens=round(micro_size * size.tokens_per_unit / (1 - size.padding_fraction)),
        steps=parts.num_steps,
        pace=pace,
        validations=_times(run.validate.every, parts.num_steps),
        checkpoints=_times(run.save.every, parts.num_steps),
        samples=_times(run.sample.every, parts.num_steps),
        optimizer_bytes_per_parameter=run.optimizer.state_bytes,
        machine=machine,
        usual_error=ledger.usual_error(ledger.read_ledger(), machine),
        versions={"penjing": __version__, "torch": torch.__version__},
    )
    bill = replace(
        bill,
        warnings=[
            *doubts(bill.steps, bill.rows_per_step, size.units_per_epoch, size.unit),
            *(start_doubts(pace.start_loss, run.model.vocabulary_size) if run.start and not begun else []),
        ],
    )
    if strategy.rank == 0:
        write_json(folder.plan, {**bill.to_dict(), **foreseen_loss(folder.path / FORECAST, bill)})
    return bill


def foreseen_loss(file: Path, bill: Bill) -> dict[str, float]:
    """The loss that `penjing plan forecast` foresaw, if for so many parameters and about so many tokens."""
    found = read_json(file) if file.is_file() else {}
    tokens, planned = found.get("tokens", 0), bill.tokens
    if found.get("parameters") != bill.parameters or abs(tokens - planned) > FORECAST_TOLERANCE * planned:
        return {}
    return {name: value for name, value in found.items() if name.startswith("predicted_loss")}


def expected(bill: Bill) -> Expected:
    """What the meter holds the run against while it runs."""
    wait = sum(seconds for name, seconds in bill.step_parts_seconds.items() if name != "compute")
    return Expected(
        steps=bill.steps,
        step_seconds=bill.step_seconds,
        wait_seconds=wait,
        other_seconds=bill.predicted_seconds - bill.parts_seconds.get("training", bill.predicted_seconds),
    )


def _full_square(run: Run, size: Size, model: nn.Module) -> float:
    return training_flops_per_token(
        run.model,
        size.row_tokens,
        window_keys=size.row_tokens,
        trainable=trainable_of(model, run.model),
        extra_forwards=size.extra_forwards,
    )


def _machine(strategy: Strategy) -> str:
    name = torch.cuda.get_device_name(strategy.device) if strategy.device.type == "cuda" else hardware.cpu_name()
    threads = f", {torch.get_num_threads()} threads" if strategy.device.type == "cpu" else ""
    return f"{strategy.world} x {name}{threads}"


def _times(every: int, steps: int) -> int:
    return math.ceil(steps / every) if every else 0


def probe(
    run: Run,
    stage: Stage[Any],
    size: Size,
    strategy: Strategy,
    model: nn.Module,
    parts: TrainingContext,
    trials: Trials | None = None,
) -> Pace:
    """Time the real step on this machine, leaving model, optimizer and data exactly as they were.

    The steps run at rate 0, so no copy of the weights is needed and the peak of memory is the run's own. A round of
    sampling serves `size.round_steps` steps: whole rounds are timed. With several passes in a step a second point with
    half of them tells what each pass costs and what is fixed.
    """
    began = time.time()
    held: list[int] = []
    with _at_rest(model, parts):
        seconds, wait = _timed(run, stage, size, strategy, parts, parts.accumulate, share=1.0, held=held)
        mean = _mean(seconds)
        points = [(float(parts.accumulate), mean)]
        line: Line | None = None
        if parts.accumulate > 1 and size.round_steps == 1:
            fewer = max(1, parts.accumulate // 2)
            quicker, _ = _timed(run, stage, size, strategy, parts, fewer, share=0.5, warm=mean >= SLOW_SECONDS)
            points.insert(0, (float(fewer), _mean(quicker)))
            line = two_points(points[0], points[-1])
        start = time.perf_counter()
        figures = parts.validate()
        validation = time.perf_counter() - start
        saving, last_saving, sampling = _try(model, strategy, Path(run.out), trials)
    late_sizes = run.model.is_mixture or (not stage.runs_ahead and len(seconds) * size.round_steps <= size.probe_steps)
    start_up = began - trials.began if trials and trials.began else 0.0
    return Pace(
        step_seconds=mean,
        wait_seconds=wait,
        waits_for="data_wait" if stage.runs_ahead else "generation",
        validation_seconds=validation,
        checkpoint_seconds=saving,
        last_checkpoint_seconds=last_saving,
        sample_seconds=sampling,
        startup_seconds=start_up + time.time() - began,
        spread=(quantile(seconds, 0.9) - quantile(seconds, 0.1)) / 2 / mean,
        num_steps=len(seconds),
        line=line,
        points=tuple(points),
        start_loss=figures.get("validation_loss_nats_per_token"),
        peak_memory_bytes=_peak(run, size, strategy, parts, held, late_sizes=late_sizes),
    )


def _timed(
    run: Run,
    stage: Stage[Any],
    size: Size,
    strategy: Strategy,
    parts: TrainingContext,
    passes: int,
    share: float,
    held: list[int] | None = None,
    *,
    warm: bool = False,
) -> tuple[list[float], float]:
    """Seconds of each step (of a round: of its steps on average) with so many passes, and of them the mean wait.

    The same batches come twice where steps are quick: the first time each new size of product is compiled, which is
    soon over in a run; the second time is timed. held: is filled with the peak of memory after each round of the first.
    warm: steps of these sizes were taken, and are slow: one more, waiting for data aside, tells all.
    """
    feed: Source = parts.source.fresh()
    meter = Meter(0.0, None)
    trial = replace(parts, source=feed, meter=meter, schedule=AtRest(), accumulate=passes)
    each, begin = size.round_steps, feed.place()
    ahead = stage.runs_ahead and size.probe_steps >= LEAST_STEPS
    first = _round(trial, each)
    waited_first, meter.data_wait_seconds = meter.data_wait_seconds, 0.0
    seconds: list[float] = []
    if ahead and warm:
        seconds = [first - waited_first]
    elif ahead:
        while not seconds or not strategy.any(_enough(seconds, each, parts.num_steps, share)):
            seconds.append(_round(trial, each))
            if held is not None:
                held.append(hardware.peak_memory_bytes(strategy.device))
        if strategy.any(_mean(seconds) < SLOW_SECONDS):
            feed.restore(begin)
            _round(trial, each)  # waits for the first batch, which later ones do not
            meter.data_wait_seconds = 0.0
            seconds = [_round(trial, each) for _ in range(len(seconds))]
    else:  # no two rounds of sampling are the same; the first ones compile
        least, waited = max(1, size.probe_steps // each), [0.0]
        while len(seconds) < least or not strategy.any(_sampled_enough(seconds, each, parts.num_steps)):
            seconds.append(_round(trial, each))
            waited.append(meter.data_wait_seconds)
        skipped = max(0, min(len(seconds) // 2, len(seconds) - least))
        seconds, meter.data_wait_seconds = seconds[skipped:], waited[-1] - waited[skipped]
    count = len(seconds)
    seconds = [one / each for one in seconds]
    feed.close()
    if strategy.world > 1:  # all ranks plan with the same figures
        seconds = [one / strategy.world for one in strategy.add(torch.tensor(seconds)).tolist()]
    return seconds, meter.data_wait_seconds / (count * each)


def _round(trial: TrainingContext, steps: int) -> float:
    """Take so many steps and wait for the device; returns the seconds."""
    start = time.perf_counter()
    for _ in range(steps):
        float(step(trial, 0).loss)
    return time.perf_counter() - start


def _enough(seconds: list[float], each: int, num_steps: int, share: float) -> bool:
    """Whether so many rounds will do: a few at least, then for some time, for no more than a small share of the run."""
    spent, taken = sum(seconds), len(seconds)
    allowed = max(_always_allowed(num_steps), round(RUN_SHARE * num_steps))
    if taken >= max(2, round(allowed * share) // each) or (taken >= 2 and spent > MOST_SECONDS * share):
        return True
    wanted = max(PROBE_SECONDS, TIME_SHARE * num_steps * spent / (taken * each))
    least = 2 if spent / taken >= SLOW_SECONDS else max(2, round(LEAST_STEPS * share))
    return taken >= least and spent > wanted * share


def _sampled_enough(seconds: list[float], each: int, num_steps: int) -> bool:
    """Whether so many rounds of sampling will do: twice PROBE_SECONDS, as the first half is not counted."""
    return sum(seconds) > 2 * PROBE_SECONDS or len(seconds) * each >= _always_allowed(num_steps)


def _always_allowed(num_steps: int) -> int:
    """Steps that may be timed however short the run is; of a run of few steps half as many."""
    return max(min(LEAST_STEPS, ALWAYS_ALLOWED), min(ALWAYS_ALLOWED, num_steps // 2))


def still_to_grow(held: list[int]) -> int:
    """Bytes that memory will grow by after the probe, from how its growth slowed down within.

    On a CPU each new size of product is compiled and kept, so memory grows with every length of document first seen,
    ever more slowly. Growth of the second half over the first is taken for the ratio of a geometric series.
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
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


@contextmanager
def _at_rest(model: nn.Module, parts: TrainingContext) -> Iterator[None]:
    """Whatever a step at rate 0 changes is put back: buffers, the optimizers' state, the random numbers.

    So is what modules count for themselves, such as how many masks an adapter has drawn: how many steps are timed
    depends on the clock, and what a run learns must not.
    """
    kept = model.state_dict().keys()
    buffers: dict[str, Tensor] = {name: value.clone() for name, value in model.named_buffers() if name in kept}
    counting = [module for module in model.modules() if type(module).get_extra_state is not nn.Module.get_extra_state]
    counts = [copy.deepcopy(module.get_extra_state()) for module in counting]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in parts.optimizers]  # empty before step 1
    random_state = torch.get_rng_state()
    scaler = parts.strategy.scaler
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
        for optimizer, state in zip(parts.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        if scaler is not None:
            scaler.restore(scale)
        torch.set_rng_state(random_state)


def _try(model: nn.Module, strategy: Strategy, out: Path, trials: Trials | None) -> tuple[float, float, float]:
    """Seconds that a checkpoint holds up training, on the way and at the end; seconds of one sample."""
    saved_bytes = 12 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    whole = 0.02 + saved_bytes / WRITE_RATE
    if trials is None:
        return whole, whole, 0.0
    start = time.perf_counter()
    trials.sample()
    sampling = time.perf_counter() - start
    if saved_bytes > SAVED_AT_MOST:
        return whole, whole, sampling
    place = out / ".probe"
    start = time.perf_counter()
    try:
        held = trials.save(place)
        return held, time.perf_counter() - start, sampling
    finally:
        if strategy.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def _peak(
    run: Run, size: Size, strategy: Strategy, parts: TrainingContext, early: list[int], *, late_sizes: bool
) -> int:
    """The most memory so far, which holds all a run does; on a CPU, and the pages of token files still to be read.

    late_sizes: whether products of many more sizes are to come.
    """
    held = hardware.peak_memory_bytes(strategy.device)
    if strategy.device.type != "cpu":
        return held
    held += round(held * RISE) + min(still_to_grow(early), round(held * MOST_GROWTH))
    if late_sizes:
        held += MORE_SIZES
    if size.unit != "rows":
        return held
    tokens = min(run.batch.rows * parts.num_steps, size.units_per_epoch) * size.row_tokens
    return held + tokens * token_bytes(run.model.vocabulary_size)

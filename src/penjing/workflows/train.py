"""Execute a run: strategy, preparation, summary, training loop, and outcome."""

import importlib.util
import math
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

import penjing
from penjing import devices
from penjing.base import config
from penjing.base.config import Layer
from penjing.base.errors import UserError, is_out_of_memory, missing_extra
from penjing.base.files import sha256_file, write_json
from penjing.base.lock import locked
from penjing.base.markup import escape_markup, printable, silent_console
from penjing.base.registry import look_up
from penjing.base.untrusted import Fields
from penjing.checkpoint.delivered import choose
from penjing.checkpoint.load import Checkpoint, weights_sha256
from penjing.checkpoint.manifest import damage, folder_name
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.devices import host
from penjing.devices.choose import local_device
from penjing.eval.regression_questions import RegressionQuestions
from penjing.eval.training_tasks import TrainingTasks
from penjing.export.adapter import save_run_adapter
from penjing.infer.generate import generate
from penjing.infer.requests import NotFiniteError
from penjing.infer.sample import Sampling
from penjing.kernels.cpu import spinning
from penjing.model import presets
from penjing.model.transformer import Transformer
from penjing.optim.ema import swap
from penjing.parallel.base import launched_world, make_strategy
from penjing.plan import prediction_history as history
from penjing.plan.run_estimate import RunEstimate
from penjing.planner.page import print_plan
from penjing.recipes import RECIPES
from penjing.report.html import FILE_NAME, write_report
from penjing.report.load_runs import read_record
from penjing.track import TRACKERS
from penjing.track.base import Tracker
from penjing.track.console import ConsoleTracker
from penjing.track.process import TrackerProcess
from penjing.track.run_dir import RunDir
from penjing.track.run_record import RunRecord
from penjing.track.system_metrics import SystemSampler
from penjing.train.build import PreparedRun, prepare_run
from penjing.train.build_context import RunHooks
from penjing.train.config import Run
from penjing.train.load_model import load_weights, set_threads
from penjing.train.loop import train
from penjing.train.oom_recovery import empty_cache, smaller_passes_kept
from penjing.train.resolve import start_run, with_settings
from penjing.train.resume import flat_settings
from penjing.train.signals import Stopped
from penjing.train.watchdog import watched

SPENT = ("training_seconds", "validation_seconds", "checkpoint_seconds", "sample_seconds")
SAMPLE_STYLE = Sampling(temperature=0.7, top_p=0.9)


def resolve_run(recipe: str, *layers: Layer) -> Run:
    """The settings of a recipe, overridden by `layers`; with `init_from`, the shape is that of the initial model."""
    if recipe not in RECIPES and presets.named(name := recipe.replace(":", "-")):
        raise UserError("a model, not a recipe", where=recipe, next_step=f"It is a setting: pretrain model={name}")
    base = look_up(RECIPES, recipe, what="recipe")()
    requested = [*layers[:-1], *map(_last_length_wins, layers[-1:])]
    return start_run(base, requested)


def named_run(recipe: str, overrides: Layer) -> Run:
    """The run of a recipe or a TOML file, overridden by `overrides`."""
    if recipe.endswith(".toml") or Path(recipe).is_file():
        layer = config.read_toml(Path(recipe))
        stage = str(layer.get("stage", "pretrain"))  # may be a name that the user chose
        return resolve_run(stage if stage in RECIPES else "pretrain", layer, overrides)
    return resolve_run(recipe, overrides)


def _free_earlier_memory(device: torch.device) -> None:
    """What earlier trainings of this process, such as stages of a quickstart, cached on a device is not this run's.
    Nobody has run this on a card yet."""
    kind = devices.of(device)
    if not kind.is_host:
        empty_cache()
        kind.reset_peak_memory(device)


def _last_length_wins(layer: Layer) -> Layer:
    """Of `epochs` and `max_steps` the later layer wins. Raises UserError for both in one layer."""
    if "epochs" in layer and "max_steps" in layer:
        raise UserError("both set the length of training", where="epochs, max_steps", wanted="one of them")
    return {**layer, "max_steps": 0} if "epochs" in layer else layer


def execute(run: Run, console: Console, allow_change: Sequence[str] = ()) -> dict[str, Any]:
    """Train; returns the outcome, which is also written to outcome.json. On ranks other than 0 the console is silent.
    allow_change: fields in which a resumed run may differ from the original one."""
    began = time.perf_counter()
    places = _tracker_places(run)
    _share_cores(run)
    strategy = make_strategy(run.compute.device, run.parallel.strategy, offload=run.parallel.offload)
    _free_earlier_memory(strategy.device)
    quiet = console if strategy.rank == 0 else Console(quiet=True)
    _name_idle(strategy.device, run.compute.device)
    spinning.report_busy_cores(lambda text: quiet.print(Text(f"  {text}", style="yellow")))
    spinning.use_every_cpu()  # so that the process of the trackers is not bound to one
    try:
        questions, tasks = RegressionQuestions(run, quiet), TrainingTasks(run)
        about = _identity(run, allow_change) if strategy.world > 1 else {}
        with (
            TrackerProcess(places, Path(run.out))
            if strategy.rank == 0 and places
            else nullcontext() as tracker_process,
            watched(strategy, about) as report_progress,
            locked(Path(run.out)) if strategy.rank == 0 else nullcontext(),
            smaller_passes_kept(RunDir(Path(run.out))),
        ):
            prepared = prepare_run(
                run,
                strategy,
                RunHooks(
                    report=lambda text: quiet.print(Text(f"  {text} ...")),
                    trackers=lambda fitted, steps, start: [
                        ConsoleTracker(quiet, name=fitted.stage, num_steps=steps, start_step=start)
                    ],
                    sample=lambda model, tokenizer, step: write_samples(
                        run, model, tokenizer, quiet if step >= 0 else silent_console(quiet)
                    ),
                    ask_tasks=tasks,
                    start_time=began,
                ),
                allow_change,
            )
            print_plan(prepared, quiet, [*questions.describe(), *tasks.describe()])
            context = replace(prepared.context, report_progress=report_progress)
            with SystemSampler(strategy.device) if strategy.rank == 0 else nullcontext() as sampler:
                if sampler is not None:
                    context = replace(context, extra_metrics=[*context.extra_metrics, sampler.metrics])
                prepared = replace(prepared, context=context)
                return _train_prepared(run, prepared, tracker_process, questions, quiet, began)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what = f"out of memory: {' '.join(str(error).split())[:200]}"
        hint = "`penjing plan memory` shows what uses the memory; `penjing plan search` finds what fits."
        raise UserError(what, where=run.compute.device, next_step=hint) from error
    finally:
        strategy.close()


def _share_cores(run: Run) -> None:
    """Give this rank its part of the machine's cores: on the CPU its own ones."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", launched_world()))
    on_host = devices.of(local_device(run.compute.device)).is_host
    pinned = on_host and host.pin_to_share(int(os.environ.get("LOCAL_RANK", "0")), ranks)
    set_threads(run.compute.threads, 1 if pinned else ranks)


def _name_idle(device: torch.device, requested: str) -> None:
    """Warn about cards of this machine that nothing was requested for."""
    kind, used = devices.of(device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = 0 if kind.is_host or ":" in requested else kind.count()
    if used < count:
        warnings.warn(f"{used} of {count} GPUs used: --gpus {count}", stacklevel=2)


def _identity(run: Run, allow_change: Sequence[str]) -> dict[str, Any]:
    """What must be the same on all ranks: the settings, and the code, file by file."""
    folder = Path(penjing.__file__).parent
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".c", ".h", ".jinja"))
    code = {f"penjing/{path.relative_to(folder)}": sha256_file(path)[:12] for path in files}
    versions = {"torch": torch.__version__, "penjing": penjing.__version__, "--allow-change": ",".join(allow_change)}
    return {**versions, **code, **flat_settings(run)}


def _train_prepared(
    run: Run,
    prepared: PreparedRun,
    tracker_process: TrackerProcess | None,
    questions: RegressionQuestions,
    console: Console,
    began: float,
) -> dict[str, Any]:
    strategy, trackers = prepared.context.strategy, prepared.context.trackers
    try:
        if tracker_process is not None:
            trackers.add([_begin(tracker_process, prepared)])
        if run.eval.at_start and prepared.state.step == 0:
            with prepared.context.meter.share("validation"):
                trackers.log(0, {"tokens": 0, **prepared.context.validate()})
            with strategy.gathered(prepared.model):
                questions.ask(prepared, "before")
        figures = train(prepared.context, prepared.state)
        outcome = _outcome(prepared, _deliver(prepared, figures), began)
        for line in (outcome.get("stopped_early"), Fields(outcome).fields("delivered").text("why")):
            if line:
                console.print(Text(f"  {line}"))
        if strategy.rank == 0 and run.log.trackers:
            trackers.summary("outcome", outcome)
            _send_report(prepared)
    except BaseException as error:
        _append_history(prepared, time.perf_counter() - began, error)
        raise
    finally:
        trackers.end()
        prepared.context.source.close()
    if run.lora.rank:
        with strategy.gathered(prepared.model):
            if strategy.rank == 0:
                _save_adapter(run, prepared, console)
    _append_history(prepared, time.perf_counter() - began)
    with strategy.gathered(prepared.model):
        return questions.compare(prepared, outcome)


def _deliver(prepared: PreparedRun, figures: dict[str, float]) -> dict[str, float]:
    """Give the model the weights that are delivered; return their figures. figures: of the last step."""
    strategy, best, step = prepared.strategy, prepared.context.best, prepared.state.step
    swap(prepared.optimizers, strategy.loading, to_average=True)
    chosen = choose(best.state(), step).step
    folder = prepared.folder.checkpoints / folder_name(chosen)
    if chosen == step or strategy.any(bool(damage(folder))):
        return figures
    with strategy.loading():
        load_weights(prepared.trainable, Checkpoint(folder, chosen, ()), strategy.place)
    return dict(best.kept["figures"])


def _save_adapter(run: Run, prepared: PreparedRun, console: Console) -> None:
    try:
        step = choose(prepared.context.best.state(), prepared.state.step).step
        adapter = save_run_adapter(run, prepared.model, prepared.stage.tokenizer, prepared.base, step)
        console.print(Text(f"  adapter in the format of peft: {adapter}"))
    except UserError as error:  # the checkpoint still has the full adapter
        console.print(escape_markup("no adapter in the format of peft", str(error)))


def plan_only(run: Run, console: Console) -> RunEstimate:
    """Prepare the data, time a few steps and print the plan; does not train, and leaves no files."""
    set_threads(run.compute.threads, 1)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_run(
            with_settings(run, {"out": folder}),
            make_strategy(run.compute.device, run.parallel.strategy),
            RunHooks(
                sample=lambda model, tokenizer, step: write_samples(run, model, tokenizer, silent_console(console)),
                ask_tasks=TrainingTasks(run),
            ),
        )
        print_plan(replace(prepared, run=with_settings(prepared.run, {"out": run.out})), console)
        prepared.context.trackers.end()
        return prepared.estimate


def _tracker_places(run: Run) -> dict[str, str]:
    """Of the run's trackers. Raises UserError for one that is unknown or not installed."""
    for name in run.log.trackers:
        package = look_up(TRACKERS, name, what="tracker").package
        if package and importlib.util.find_spec(package) is None:
            raise missing_extra(package, name, f"log.trackers={name}")
    return {name: TRACKERS[name] for name in run.log.trackers}


def _begin(process: TrackerProcess, prepared: PreparedRun) -> Tracker:
    run, folder = prepared.run, prepared.folder.path
    names = {"project": run.log.project, "name": run.log.run_name}
    trackers = process.begin(prepared.resumed_from or 0, config=config.to_dict(run), **names)
    trackers.summary("plan", RunRecord(folder).plan.raw)
    return trackers


def _send_report(prepared: PreparedRun) -> None:
    """The report, and for which run the prediction was how good, to the trackers. Never raises."""
    try:
        page = write_report(read_record([prepared.folder.path]), prepared.folder.path / FILE_NAME)
        prepared.context.trackers.attach(page)
    except (OSError, UserError) as error:
        warnings.warn(f"no report for the trackers: {error}", stacklevel=2)


def write_samples(run: Run, model: Transformer, tokenizer: Tokenizer, console: Console) -> list[dict[str, Any]]:
    """Generate samples, each time for the same prompts with the same seed."""
    prompts = list(run.sample.prompts)
    if not prompts or console.quiet:
        return []
    if run.data.format != "documents":
        prompt_ids = [render(tokenizer, [Message(role="user", content=prompt)], ask=True).ids for prompt in prompts]
    else:
        prompt_ids = [[tokenizer.begin, *tokenizer.encode(prompt)] for prompt in prompts]
    stop = tokenizer.stop
    try:
        texts = generate(
            model, prompt_ids, max_new_tokens=run.sample.max_new_tokens, stop=stop, sampling=SAMPLE_STYLE, seed=run.seed
        )
    except NotFiniteError as error:  # training decides what becomes of it
        console.print(Text(f"    no samples: {error.line()}", style="yellow"))
        return []
    samples = []
    for prompt, ids in zip(prompts, texts, strict=True):
        text = tokenizer.decode(ids)
        language = "zh" if any("\u4e00" <= character <= "\u9fff" for character in prompt) else "en"
        samples.append({"prompt": prompt, "text": text, "language": language})
        shown = " ".join((prompt + (" -> " if run.data.format != "documents" else "") + text).split())
        console.print(Text(f"    {printable(shown)[:160]}", style="dim"))  # no markup
    return samples


def _outcome(prepared: PreparedRun, figures: dict[str, float], began: float) -> dict[str, Any]:
    """The outcome of the run that `began`; for a run that was already finished, the saved one."""
    folder, strategy = prepared.folder, prepared.context.strategy
    record = RunRecord(folder.path)
    if prepared.resumed_from == prepared.state.step and record.outcome:
        return dict(record.outcome.raw)
    if not figures:  # never validated during training, or resumed at the last checkpoint
        with prepared.context.meter.share("validation"):
            figures = prepared.context.validate()
    if bad := prepared.context.guard.num_bad:
        warnings.warn(f"NaN or Inf in {bad} steps, which changed nothing; samples: {folder.incidents}", stacklevel=2)
    for name in [name for name, value in figures.items() if not math.isfinite(value)]:
        if strategy.rank == 0:
            warnings.warn(f"{name} is NaN or Inf after the last step: left out of {folder.outcome}", stacklevel=2)
        figures = {other: value for other, value in figures.items() if other != name}
    totals = _spent(prepared, time.perf_counter() - began)
    best, used = prepared.context.best, record.delivered if strategy.rank == 0 else None
    outcome = {
        "penjing": penjing.__version__,
        **({"stopped_early": best.stopped, "steps_done": prepared.state.step} if best.stopped else {}),
        **({"delivered": {**used._asdict(), "why": used.why}} if used else {}),
        **totals,
        "other_seconds": totals["sample_seconds"],
        **figures,
        "before": _before(record, figures) if strategy.rank == 0 else {},
        "weights_sha256": weights_sha256(folder.checkpoints / folder_name(used.step)) if used else "",
        "data_sha256": prepared.stage.fingerprint,
    }
    if strategy.rank == 0:
        write_json(folder.outcome, outcome)
    return outcome


def _before(record: RunRecord, figures: dict[str, float]) -> dict[str, float]:
    """Validation figures before the first step, for figures that are known now too."""
    first = next((line for line in record.metrics if line.raw["step"] == 0), Fields())
    return {name: value for name, value in first.raw.items() if name in figures and name.startswith("val_")}


def _append_history(prepared: PreparedRun, seconds: float, error: BaseException | None = None) -> None:
    """Add the run's prediction and outcome to the history; for a run that stopped, write ended.json. Never raises."""
    strategy = prepared.context.strategy
    if strategy.rank != 0 or prepared.state.step == prepared.resumed_from:
        return
    record = RunRecord(prepared.folder.path)
    folder = record.folder
    try:
        if error is None:
            folder.ended.unlink(missing_ok=True)
            outcome = record.outcome.raw
        else:
            outcome = _ended(prepared, seconds, error)
            write_json(folder.ended, outcome)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        history.append(history.entry(str(folder.path.resolve()), now, record.plan.raw, outcome))
    except (OSError, UserError) as failure:  # a full disk or a read-only home must not fail the run
        warnings.warn(f"not in the prediction history: {failure}", stacklevel=2)


def _ended(prepared: PreparedRun, seconds: float, error: BaseException) -> dict[str, Any]:
    kind = "out of memory" if is_out_of_memory(error) else "stopped" if isinstance(error, Stopped) else "failed"
    told = isinstance(error, UserError | Stopped)  # in a sentence for people
    return {
        "ended": "interrupted" if isinstance(error, KeyboardInterrupt) else kind,
        "why": (str(error) if told else f"{type(error).__name__}: {error}")[:500],
        "steps_done": prepared.state.step,
        **_spent(prepared, seconds),
    }


def _spent(prepared: PreparedRun, seconds: float) -> dict[str, Any]:
    """What the run took so far. seconds: of this process."""
    totals, device = prepared.context.meter.totals(), prepared.context.strategy.device
    return {
        "seconds": sum(value or 0.0 for name, value in totals.items() if name in SPENT),
        "this_process_seconds": seconds,
        **totals,
        "peak_memory_bytes": devices.of(device).peak_memory_bytes(device),
        "resumed": prepared.resumed,
    }

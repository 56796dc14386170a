"""penjing plan forecast: predict the loss of a run from a few tiny runs on the same data."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from penjing.base import config
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import read_json, write_json
from penjing.base.markup import escape_markup, print_table, silent_console
from penjing.data.corpus import Corpus
from penjing.model.config import ModelConfig
from penjing.plan import cost
from penjing.plan.device_model import Machine
from penjing.plan.flops import parameters
from penjing.plan.scaling_law_fit import Forecast, LossPoint, forecast
from penjing.plan.shape import shape_of
from penjing.plan.step_time import step_time
from penjing.plan.step_workload import Workload
from penjing.planner.inputs import PlanOptions, find_machine
from penjing.track.run_dir import RunDir
from penjing.track.run_record import RunRecord
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.step_probe import FORECAST
from penjing.workflows.train import execute

LOSS = "val_loss"
LADDER = "ladder.json"  # in the folder of the proxy runs: the options, and the runs chosen for them
SHARES = (1 / 32, 1 / 16, 1 / 8)  # of the planned model's parameters without embedding
LENGTHS = (1.0, 2.0, 4.0)  # tokens of the runs of one size, relative to the shortest
MIN_SIZE = 20_000  # minimum parameters without embedding: smaller models say little about larger ones
POOR_FIT_NATS = 0.1  # of the residual: where it was 0.22, the forecast was 45 % off; where 0.05, 2 %
OVERHEAD = 2.0  # time of a run relative to its computed step time: probe, validation, checkpoints


@dataclass(frozen=True, kw_only=True)
class ProxyRun:
    """A small run: a scaled-down shape of the planned model, and its number of steps."""

    name: str
    model: dict[str, Any]
    parameters: int
    steps: int
    tokens: int
    seconds: float  # computed


def family(run: Run) -> list[dict[str, Any]]:
    """Scaled-down shapes of the planned model, with the same vocabulary and head size. Raises UserError."""
    base_model = config.to_dict(run.model)
    if run.model.is_mixture:
        raise UserError("a forecast is for dense models only", where="model", got=run.model.architecture)
    shapes: list[dict[str, Any]] = []
    for share in SHARES:
        # Parameters scale with width^2 x depth: both shrink, the width by more.
        width_share, depth_share = share ** (2 / 5), share ** (1 / 5)
        head = run.model.head_dim
        heads = max(1, round(run.model.num_attention_heads * width_share))
        keys = max(1, round(heads * run.model.num_key_value_heads / run.model.num_attention_heads))
        heads = keys * max(1, round(heads / keys))
        width = max(16, 16 * round(run.model.hidden_size * width_share / 16))
        layers = max(1, round(run.model.num_hidden_layers * depth_share))
        shape = {
            **base_model,
            "preset": "",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "head_dim": head if head <= 2 * width else max(2, 2 * (width // 2)),
            "intermediate_size": max(16, 16 * round(run.model.intermediate_size * width_share / 16)),
            **_windows(run.model, layers),
        }
        if shape not in shapes:
            shapes.append(shape)
    large = [shape for shape in shapes if parameters(config.resolve(ModelConfig, shape)).without_embedding >= MIN_SIZE]
    if len(large) < 2:
        got = f"{parameters(run.model).without_embedding:,} parameters without embedding"
        wanted = f"at least {round(MIN_SIZE / SHARES[1]):,}"
        raise UserError("the model is too small for a forecast", where="model", got=got, wanted=wanted)
    return large


def _windows(model: ModelConfig, layers: int) -> dict[str, Any]:
    """Which layers have the planned model's window: the same fraction at every size."""
    if not model.sliding_window_layers:  # every layer, or none
        return {}
    total = model.num_hidden_layers
    before = np.cumsum([0, *(layer in model.sliding_window_layers for layer in range(total))])
    share_L = np.interp(np.arange(layers + 1) * total / layers, np.arange(total + 1), before) * layers / total
    counts_L = np.floor(share_L + 0.5 + 1e-9)  # windowed layers among the first n, rounded
    windowed = tuple(np.flatnonzero(np.diff(counts_L)).tolist())
    return {"sliding_window": model.sliding_window if windowed else 0, "sliding_window_layers": windowed}


def proxy_runs(run: Run, budget_seconds: float, machine: Machine) -> list[ProxyRun]:
    """Sizes x lengths that together take about the budget. All lengths are multiples of the shortest."""
    per_step, geometry = run.batch.size * run.data.seq_len, batch_geometry(run, 1, torch.device(machine.kind))
    sizes = []
    for shape in family(run):
        model = config.resolve(ModelConfig, shape)
        work = Workload(
            shape=shape_of(model),
            tokens=geometry.micro_size * run.data.seq_len,
            seq_len=run.data.seq_len,
            keys=(run.data.seq_len + 1) / 2,
            passes=geometry.accumulation,
            dtype=machine.fastest_dtype,
            optimizer=run.optimizer.name,
        )
        sizes.append((shape, parameters(model).total, OVERHEAD * step_time(work, machine).seconds))
    total_seconds = sum(seconds for _, _, seconds in sizes) * sum(LENGTHS)
    shortest = max(20, math.floor(budget_seconds / total_seconds))
    runs = []
    for shape, count, seconds in sizes:
        for steps in (round(shortest * length) for length in LENGTHS):
            what: dict[str, Any] = {"name": f"{units.count(count)}-{steps}", "model": shape, "parameters": count}
            runs.append(ProxyRun(**what, steps=steps, tokens=steps * per_step, seconds=steps * seconds))
    return runs


def forecast_loss(run: Run, budget: str, console: Console) -> Forecast:
    """Train the proxy runs, fit a scaling law, and save the predicted held-out loss of the run, for `plan verify`.

    Raises UserError for missing data, a bad budget, a stage whose validation figure is not that loss, a run that
    continues another model, or a model too small to scale down.
    """
    if not run.objective.is_language_modelling or run.data.format == "prompts":
        stage = f"{run.objective.name} on {run.data.format}"
        raise UserError("a forecast is for next-token losses only", where=run.stage, got=stage)
    if run.init_from:
        what = "a forecast is for a run that trains from scratch"
        raise run.error("init_from", what, next_step="Leave init_from= out.")
    if not run.data.holds_out:
        raise run.data.error("validation", "a forecast needs held-out texts", wanted="files, or it left out")
    Corpus(run.data).files  # noqa: B018 (an error comes before a proxy run)
    seconds = cost.read_seconds(budget, "--budget")
    folder = Path(run.out) / "scale"
    runs = _ladder(run, seconds, folder / LADDER)
    console.print(f"  {len(runs)} proxy runs, about {units.duration(sum(proxy.seconds for proxy in runs))}")
    points, first = [], ""
    for proxy in runs:
        outcome = _train(run, proxy, folder, first, console)
        first = first or str(folder / proxy.name)
        if LOSS not in outcome:
            what = "the loss of a proxy run is NaN or Inf"
            raise UserError(what, where=folder / proxy.name, next_step="Lower the learning rate.")
        points.append(LossPoint(proxy.parameters, int(outcome["tokens"]), float(outcome[LOSS])))
        console.print(f"  {proxy.name}: {points[-1].loss:.4f} nats per token")
    return _predict(run, points, first, console)


def _ladder(run: Run, budget_seconds: float, file: Path) -> list[ProxyRun]:
    """The proxy runs. They are chosen once and saved: measured speed varies, and a stopped forecast must continue with
    the same runs. Other options or settings choose new ones."""
    settings = {
        name: value for name, value in config.to_dict(run).items() if name not in ("out", "max_steps", "epochs")
    }
    settings["batch"].pop("min_steps")  # proxy runs have a number of steps
    settings["data"].pop("min_seq_len")
    request = json.loads(json.dumps({"budget_seconds": budget_seconds, "settings": settings}))
    if not file.is_file() or read_json(file).get("asked") != request:
        machine, _, _ = find_machine(PlanOptions(), run)
        runs = [asdict(proxy) for proxy in proxy_runs(run, budget_seconds, machine)]
        write_json(file, {"asked": request, "runs": runs})
    return [ProxyRun(**proxy) for proxy in read_json(file)["runs"]]


def _train(run: Run, proxy: ProxyRun, folder: Path, first: str, console: Console) -> dict[str, Any]:
    """Train one proxy run with the tokenizer and shards of the first one; if finished already, return its outcome.
    Raises UserError if it was started with other settings or data."""
    shared: dict[str, Any] = {}
    if first:
        first_run = RunDir(Path(first))
        shared = {"tokenizer": {"path": str(first_run.tokenizer)}}
        if first_run.shards.is_dir():  # else the data were already shards
            shared["data"] = {"train": [str(first_run.shards)]}
    settings = {
        "out": str(folder / proxy.name),
        "max_steps": proxy.steps,
        "epochs": 1,  # ignored: max_steps is set
        "model": proxy.model,
        "batch": {"min_steps": 0},
        "eval": {"every": 0},
        "sample": {"every": 0},
        "checkpoint": {"every": max(1, proxy.steps)},
        **shared,
    }
    return execute(config.resolve(Run, config.to_dict(run), settings), silent_console(console))


def _predict(run: Run, points: list[LossPoint], first: str, console: Console) -> Forecast:
    size, first_run = parameters(run.model).total, RunRecord(Path(first))
    per_epoch = first_run.plan.raw["tokens_per_epoch"]
    per_step = run.batch.size * run.data.seq_len
    tokens = run.max_steps * per_step if run.max_steps else round(run.epochs * per_epoch)
    predicted = forecast(points, size, tokens)
    law = predicted.law
    sized = [(point.parameters, point.tokens, point.loss) for point in points]
    rows = [(*map(units.count, size), f"{loss:.4f}", f"{law.loss(*size):.4f}") for *size, loss in sized]
    print_table(console, ("parameters>", "tokens>", "loss>", "law>"), rows)
    console.print(
        f"L = {law.limit:.3f} + {law.a:.4g} / N^{law.alpha:.2f} + {law.b:.4g} / D^{law.beta:.2f}, off by "
        f"{predicted.residual_nats:.3f} nats"
    )
    console.print(
        f"{units.count(size)} parameters on {units.count(tokens)} tokens: {predicted.loss:.3f} nats per token "
        f"({predicted.low:.3f} to {predicted.high:.3f}, 80 % interval)"
    )
    if predicted.residual_nats > POOR_FIT_NATS:
        console.print(escape_markup("note", "the law misses even its own runs: give a larger --budget", indent=""))
    reach = size * tokens / max(point.parameters * point.tokens for point in points)
    if reach > 100:
        note = f"extrapolates to {reach:.0f} x the compute of the longest proxy run"
        console.print(escape_markup("note", note, indent=""))
    write_json(
        Path(run.out) / FORECAST,
        {
            "points": [asdict(point) for point in points],
            "law": asdict(law),
            "parameters": size,
            "tokens": tokens,
            "predicted_loss": predicted.loss,
            "predicted_loss_low": predicted.low,
            "predicted_loss_high": predicted.high,
            "tokenizer": str(first_run.folder.tokenizer),
        },
    )
    console.print(
        f"`penjing train` with out={run.out} and tokenizer.path={first_run.folder.tokenizer} is compared "
        "with it by `penjing plan verify`",
        soft_wrap=True,
    )
    return predicted

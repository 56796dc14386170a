"""penjing data ablate: what each source and each cleaning rule is worth, from tiny runs of equal compute."""

from __future__ import annotations

import json
import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from penjing.base import config
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.base.markup import print_table, silent_console
from penjing.data.corpus import Corpus
from penjing.plan import cost
from penjing.plan.flops import parameters
from penjing.track.run_dir import RunDir
from penjing.track.run_record import RunRecord
from penjing.train.config import Run
from penjing.workflows.train import execute, resolve_run

FIGURE = "val_bits_per_byte"
PILOT_STEPS, FEWEST_STEPS = 30, 50
START_SECONDS = 4.0  # of a run before step 1 and after the last: an estimate
# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A training: the share of each source, and the cleaning rules."""

    name: str
    shares: tuple[float, ...]
    clean: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Effect:
    """By how many bits per byte something lowers the held-out loss, with a 95 % interval over the seeds."""

    name: str
    helps: float
    low: float
    high: float

    @classmethod
    def of(cls, name: str, without: Sequence[float], with_it: Sequence[float]) -> Effect:
        """From the figures of the same seeds."""
        differences = [before - after for before, after in zip(without, with_it, strict=True)]
        mean = statistics.mean(differences)
        reach = STUDENT_95[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
        return cls(name=name, helps=mean, low=mean - reach, high=mean + reach)

    @property
    def verdict(self) -> str:
        return "helps" if self.low > 0 else "hurts" if self.high < 0 else "no difference seen"


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Bits per byte of each arm by seed, what follows from them, and the size of the runs."""

    figures: dict[str, list[float]]
    effects: list[Effect]
    weights: dict[str, float] = field(default_factory=dict)  # recommended; empty: one source
    parameters: int
    steps: int
    tokens: int


def arms_of(sources: Sequence[str], rules: Sequence[str]) -> list[Arm]:
    """All sources in equal shares; without each; each alone; and all with each rule."""
    number = len(sources)
    arms = [Arm(name="all", shares=(1.0,) * number)]
    for index, name in enumerate(sources if number > 1 else ()):
        alone = tuple(float(other == index) for other in range(number))
        arms.append(Arm(name=f"only {name}", shares=alone))
        if number > 2:
            arms.append(Arm(name=f"without {name}", shares=tuple(1 - share for share in alone)))
    return arms + [Arm(name=f"all, cleaned by {rule}", shares=(1.0,) * number, clean=(rule,)) for rule in rules]


def effects_of(sources: Sequence[str], rules: Sequence[str], figures: dict[str, list[float]]) -> list[Effect]:
    mixed, every = sources if len(sources) > 1 else (), figures["all"]
    found = [Effect.of(f"{name} in the mix", _without(name, sources, figures), every) for name in mixed]
    if len(sources) == 2:
        first, second = (figures[f"only {name}"] for name in sources)
        found.append(Effect.of(f"{sources[1]} instead of {sources[0]}", first, second))
    return found + [Effect.of(f"rule {rule}", every, figures[f"all, cleaned by {rule}"]) for rule in rules]


def _without(name: str, sources: Sequence[str], figures: dict[str, list[float]]) -> list[float]:
    others = [other for other in sources if other != name]
    return figures[f"only {others[0]}" if len(others) == 1 else f"without {name}"]


def recommended(sources: Sequence[str], figures: dict[str, list[float]]) -> dict[str, float]:
    """Of each source the share with the lowest loss on a parabola through three shares: 0, equal and 1; scaled to 1."""
    best = {}
    for name in sources:
        none, equal, alone = (
            statistics.mean(runs)
            for runs in (_without(name, sources, figures), figures["all"], figures[f"only {name}"])
        )
        slope = (equal - none) * len(sources)
        bend = (alone - none - slope) / (1 - 1 / len(sources))
        lowest = (bend / len(sources) - slope) / (2 * bend) if bend > 0 else float(alone < none)
        best[name] = min(1.0, max(0.0, lowest))
    total = sum(best.values())
    return {name: round(share / total if total else 1 / len(sources), 2) for name, share in best.items()}


def ablate(
    sources: Sequence[str],
    held_out: Sequence[str],
    *,
    rules: Sequence[str],
    seeds: int,
    budget: str,
    out: Path,
    settings: Sequence[str],
    console: Console,
) -> Ablation:
    """Train all arms for each seed within about the budget. What was trained before for the same request is read.

    Raises UserError for missing data, too short a budget, and if there is nothing to compare.
    """
    seconds = cost.read_seconds(budget, "--budget")
    sources, rules = list(dict.fromkeys(sources)), list(dict.fromkeys(rules))  # one named twice is one
    if len(sources) < 2 and not rules:
        raise UserError("nothing to compare", wanted="two sources or more, or --rules")
    data: dict[str, Any] = {"train": list(sources), "validation": list(held_out), "format": "documents"}
    data["weights"] = [1.0] * len(sources)
    fixed = {"epochs": 1, "batch": {"min_steps": 0}, "eval": {"every": 0, "sequences": 512}, "sample": {"every": 0}}
    run = resolve_run("tiny", {"data": data, **fixed}, config.parse_overrides(settings))
    corpus, arms = Corpus(run.data), arms_of(sources, rules)
    request = json.dumps([corpus.fingerprint, seconds, seeds, config.to_dict(run)], sort_keys=True)
    folder = out / sha256_text(request)[:12]  # the runs of another request lie beside these
    trainer = _Trainer(run, folder, silent_console(console))
    console.print(f"  a run of {PILOT_STEPS} steps, for the time of a step")
    pilot = trainer.train(arms[0], "pilot", PILOT_STEPS, 0)
    step = pilot["training_seconds"] / PILOT_STEPS
    start = START_SECONDS + pilot["validation_seconds"] + pilot["checkpoint_seconds"]
    count = len(arms) * seeds
    steps = int((seconds / count - start) / step)
    if steps < FEWEST_STEPS:
        least = units.duration(count * (start + FEWEST_STEPS * step))
        raise UserError(f"too short for {count} runs", where="--budget", got=budget, wanted=f"at least {least}")
    tokens, began = steps * run.batch.size * run.data.seq_len, time.monotonic()
    console.print(f"  {count} runs of {steps:,} steps ({units.count(tokens)} tokens), about {units.duration(seconds)}")
    figures: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number, (seed, arm) in enumerate(((seed, arm) for seed in range(1, seeds + 1) for arm in arms), start=1):
        outcome = trainer.train(arm, f"{arms.index(arm)}-seed-{seed}", steps, seed)
        if FIGURE not in outcome:
            hint = "Lower the learning rate."
            raise UserError("the held-out loss of a run is NaN or Inf", where=arm.name, next_step=hint)
        figures[arm.name].append(outcome[FIGURE])
        left = units.duration((time.monotonic() - began) / number * (count - number))
        what = f"{number} of {count}: {arm.name}, seed {seed}"
        console.print(f"  {what}: {outcome[FIGURE]:.4f} bits per byte; {left} left")
    return Ablation(
        figures=figures,
        effects=effects_of(sources, rules, figures),
        weights=recommended(sources, figures) if len(sources) > 1 else {},
        parameters=parameters(run.model).total,
        steps=steps,
        tokens=tokens,
    )


class _Trainer:
    """Trains arms with one tokenizer; arms with the same rules share their tokens."""

    def __init__(self, run: Run, folder: Path, console: Console) -> None:
        self.run, self.folder, self.console = run, folder, console
        self.shards: dict[tuple[str, ...], str] = {}  # by rules

    def train(self, arm: Arm, name: str, steps: int, seed: int) -> Mapping[str, Any]:
        """The outcome of the run; that of a finished one is read."""
        out = RunDir(self.folder / name)
        data: dict[str, Any] = {"clean": list(arm.clean), "weights": list(arm.shares)}
        if arm.clean in self.shards:
            data |= {"train": [self.shards[arm.clean]], "validation": []}
        layer = {"out": str(out.path), "seed": seed, "max_steps": steps, "data": data, "checkpoint": {"every": steps}}
        if self.shards:
            layer["tokenizer"] = {"path": str(RunDir(self.folder / "pilot").tokenizer)}
        self.shards.setdefault(arm.clean, str(out.shards))
        finished = RunRecord(out.path).outcome
        return finished.raw if finished else execute(config.resolve(Run, config.to_dict(self.run), layer), self.console)


def print_ablation(made: Ablation, console: Console) -> None:
    """Two tables and the recommended weights."""
    figures = made.figures.items()
    rows = [(name, f"{statistics.mean(runs):.4f}", f"{min(runs):.4f} to {max(runs):.4f}") for name, runs in figures]
    print_table(console, ("trained on", "bits per byte>", "over the seeds>"), rows)
    effects = [
        (one.name, f"{one.helps:+.4f}", f"{one.low:+.4f} to {one.high:+.4f}", one.verdict) for one in made.effects
    ]
    print_table(console, ("what", "bits per byte saved>", "95 % interval>", "verdict"), effects)
    if made.weights:
        weights = ",".join(f"{weight:g}" for weight in made.weights.values())
        sources = shlex.quote(",".join(made.weights))
        console.print(f"  recommended (an estimate): data.weights={weights} for data.train={sources}")
    size = f"{units.count(made.parameters)} parameters and {units.count(made.tokens)} tokens a run"
    console.print(f"  {size}: for a larger model or more tokens than a source has, the order may differ")

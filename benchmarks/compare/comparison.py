"""The framework of all comparisons: contestants x settings x trials, interleaved, each trial in its own process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from compare.figures import Trial, figures
from compare.resume import merge_trials, with_medians
from compare.table import MEBIBYTE, ResultTable, Show, with_range
from compare.trial_process import alternate, run_trial
from compare.trial_spec import PER_TRIAL, TrialSpec
from compare.tuning import tune, tuned_spec
from compare.verdict import ratios, verdict
from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.devices import host
from penjing.optim.adamw import AdamW
from penjing.train.config import Run

OURS = "penjing"
TRL = {"trl": ("trl_trainers", "trl")}
# By method and name: module in baselines/ with its arguments, and required packages.
BASELINES: dict[str, dict[str, tuple[str, str]]] = {
    "pretrain": {
        "trainer": ("hf_trainer", "accelerate"),
        "trainer-packed": ("hf_trainer packed", "accelerate"),
        "litgpt": ("litgpt", "litgpt litdata"),
        "minimind-style": ("minimind_style", "transformers"),
    },
    "dpo": TRL,
    "grpo": TRL,
    "decode": {
        "transformers-bf16": ("hf_generate bfloat16", "transformers"),
        "transformers-compiled": ("hf_generate bfloat16 compiled", "transformers"),
        "llama.cpp-f16": ("llama_cpp f16", "llama_cpp gguf"),
        "llama.cpp-q8_0": ("llama_cpp q8_0", "llama_cpp gguf"),
    },
}
FOLDER = "compare.baselines"
RunTrial = Callable[[str, Any, Path], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a comparison."""

    baselines: tuple[str, ...] = ()  # missing packages: skipped, with a message
    trials: int = 3  # processes per contestant and setting
    seconds: float = 600.0  # path: training after the first step
    evaluations: int = 10  # path: on held-out text
    steps: int = 12  # other settings: per trial, including warm-up
    warmup: int = 2  # steps excluded from rates
    threads: int = 0  # CPU threads; 0 = physical cores
    dtypes: tuple[str, ...] = ("float32",)  # that a baseline's pilots try
    may_compile: bool = True  # whether they try torch.compile
    search: bool = False  # whether to search every contestant's learning rate, by one method
    # TRL: gradient checkpointing, its default. With 1M parameters on one CPU core TRL's DPO reached 15.3 pairs/s and
    # 1015 MiB with it, 16.9 pairs/s and 1262 MiB without.
    checkpointing: bool = True

    def __post_init__(self) -> None:
        if self.trials < 1 or self.threads < 0 or self.seconds <= 0 or self.evaluations < 1:
            raise UserError("too small", where="--trials, --threads, --seconds", got=self.trials)
        if not 0 <= self.warmup < self.steps:
            raise UserError("no step is left to count", where="--steps", got=self.steps, wanted=f"over {self.warmup}")
        object.__setattr__(self, "threads", self.threads or host.physical_cores())


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    """The user's request."""

    options: Options
    resolve: Callable[[Layer], Run]  # the method's recipe, then the layer, then the user's settings
    overrides: Layer  # the user's settings
    start: Path | None = None  # initial model
    data: Path | None = None
    quick: bool = False


def training_fields(run: Run, options: Options, adamw: AdamW) -> dict[str, Any]:
    """Fields of a TrainingSpec, from penjing's run, the options, and the baselines' optimizer."""
    return {
        "out": "",
        "threads": options.threads,
        "steps": options.steps,
        "warmup": options.warmup,
        "seed": run.seed,
        "dtype": run.compute.dtype,
        "batch": run.batch.size,
        "max_grad_norm": run.max_grad_norm,
        "learning_rate": adamw.learning_rate,
        "betas": (adamw.beta1, adamw.beta2),
        "weight_decay": adamw.weight_decay,
    }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Result of `Benchmark.prepare`: the spec of the trials, metadata for the record, and lines to print."""

    spec: TrialSpec
    options: Options
    about: dict[str, Any]
    lines: Sequence[str]


class Benchmark:
    """The parts that differ between comparisons; `BENCHMARKS` lists the subclasses."""

    method: ClassVar[str]
    unit: ClassVar[str]  # of a rate
    settings: ClassVar[dict[str, str]] = {"step": "one step"}  # with the titles of their tables
    ours: ClassVar[dict[str, str]] = {}  # penjing's contestants: module of the trial with its arguments
    needs: ClassVar[dict[str, str]] = {}  # required packages of these
    same_optimizer: ClassVar[str] = OURS  # the one of these with the baselines' optimizer
    tuned: ClassVar[bool] = False  # whether pilots find each baseline's fastest configuration
    goals: ClassVar[dict[str, dict[str, float]]] = {}  # by baseline and figure: minimum speed, maximum of the others
    labels: ClassVar[dict[str, tuple[str, Show]]] = {}  # rows of the table: figure, heading, formatter

    def prepare(self, work: Path, request: BenchmarkRequest) -> Prepared:
        raise NotImplementedError

    def is_included(self, setting: str, name: str) -> bool:
        return True

    def heading(self, record: Mapping[str, Any], setting: str, name: str) -> str:
        return name

    def extra_rows(self, record: Mapping[str, Any], setting: str) -> list[list[str]]:
        return []

    def goal_ratios(self, record: Mapping[str, Any], baseline: str, figure: str) -> tuple[str, list[float | None]]:
        """Our contestant, and the ratio of its figure to the baseline's in each round."""
        first = next(iter(self.settings))
        return self.same_optimizer, ratios(record, first, self.same_optimizer, baseline, figure)

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        """Notes printed before the goals."""
        return []

    def table(self, record: Mapping[str, Any], setting: str) -> ResultTable:
        """A row per figure, a column per contestant: medians with ranges."""
        medians = record[setting]["medians"]
        rows = []
        for figure, (label, show) in self.labels.items():
            values = [stats.get(figure) for stats in medians.values()]
            if None not in values:
                rows.append([label.format(unit=self.unit), *[with_range(stats, show) for stats in values]])
        speed = {name: stats["units_per_second"]["median"] for name, stats in medians.items()}
        if len(medians) > len(self.ours):
            our_speed = speed[self.same_optimizer]
            speed_ups = ["" if name in self.ours else f"{our_speed / stats:.2f} x" for name, stats in speed.items()]
            rows.insert(1, [f"{self.same_optimizer} is faster by", *speed_ups])
        headings = ["", *[self.heading(record, setting, name) for name in medians]]
        title = f"{self.settings[setting]}, median (range over trials)"
        return ResultTable(headings, [*rows, *self.extra_rows(record, setting)], title)


@dataclass(frozen=True, kw_only=True)
class TrialComparison:
    """All trials of one benchmark."""

    benchmark: Benchmark
    prepared: Prepared
    folder: Path
    console: Console
    run_trial: RunTrial = run_trial
    # Called before the first trial and after each, so that a crash loses one trial only.
    save: Callable[[dict[str, Any]], None] = lambda record: None
    earlier: Mapping[str, Any] | None = None  # a record to continue

    def run(self) -> dict[str, Any]:
        """Returns the record; prints tables and verdict. Raises UserError if `earlier` is of another comparison."""
        benchmark, options = self.benchmark, self.prepared.options
        contestants, left_out = self.contestants()
        record: dict[str, Any] = {
            **self.prepared.about,
            "method": benchmark.method,
            "options": asdict(options),
            "spec": {key: value for key, value in asdict(self.prepared.spec).items() if key not in PER_TRIAL},
            "left_out": left_out,
            "goals": benchmark.goals,
        }
        done: dict[str, dict[str, list[Trial]]] = {
            setting: {name: [] for name in contestants if benchmark.is_included(setting, name)}
            for setting in benchmark.settings
        }
        if self.earlier is not None:
            merge_trials(done, record, self.earlier, tuple(benchmark.ours))
        pending = [
            (number, setting, name)
            for number in range(options.trials)
            for setting in benchmark.settings
            for name in alternate(list(done[setting]), number)
            if number >= len(done[setting][name])
        ]
        if self.earlier is not None:
            num_done = sum(len(trials) for by_name in done.values() for trials in by_name.values())
            self.say(f"{num_done} trials done, {len(pending)} remaining")
        self.save({**with_medians(record, done), "finished": False})  # fail now if the path is not writable
        tuned = (self.earlier or {}).get("tuned", {})
        record["tuned"] = {
            name: tuned[name] for name in contestants if name in tuned and any(t.get(name) for t in done.values())
        }
        for name in contestants:
            if name not in record["tuned"] and any(name == other for _, _, other in pending):
                record["tuned"][name] = self.tune(name, contestants[name])
        for number, setting, name in pending:
            done[setting][name].append(self.trial(number, setting, name, contestants[name], record["tuned"][name]))
            self.save({**with_medians(record, done), "finished": False})
        record = with_medians(record, done)
        for setting in benchmark.settings:
            benchmark.table(record, setting).print(self.console)
        for line in verdict(benchmark, record):
            self.say(line)
        return {**record, "finished": True}

    def say(self, line: str) -> None:
        self.console.print(f"  {line}", highlight=False, markup=False)

    def contestants(self) -> tuple[dict[str, str], dict[str, str]]:
        """Module with arguments by name, and why others are skipped, which is printed."""
        baselines, included, left_out = BASELINES.get(self.benchmark.method, {}), {}, {}
        found = [(name, module, self.benchmark.needs.get(name, "")) for name, module in self.benchmark.ours.items()]
        for name in self.prepared.options.baselines:
            module, needs = baselines[name]
            found.append((name, f"{FOLDER}.{module}", needs))
        for name, module, needs in found:
            missing = [package for package in needs.split() if importlib.util.find_spec(package) is None]
            if missing:
                left_out[name] = f"needs {' and '.join(missing)}, which is not installed"
            else:
                included[name] = module
                continue
            self.say(f"{name} {left_out[name]}: skipped")
        return included, left_out

    def tune(self, name: str, module: str) -> dict[str, Any]:
        """The tuned configuration of a contestant's trials: see tuning.py."""
        if not self.benchmark.tuned:
            return {}

        def run(spec: TrialSpec, folder: str) -> dict[str, Any]:
            return self.run_trial(module, spec, self.folder / folder)

        may_pilot = name not in self.benchmark.ours
        return tune(name, self.prepared.spec, self.prepared.options, run, self.say, may_pilot=may_pilot)

    def trial(self, number: int, setting: str, name: str, module: str, tuned: Mapping[str, Any]) -> dict[str, Any]:
        spec = tuned_spec(replace(self.prepared.spec, setting=setting), tuned)
        result = self.run_trial(module, spec, self.folder / f"{setting}-{name}-{number}")
        row = figures(result, spec.warmup)
        self.say(
            f"{setting} {number + 1} {name}: {row['units_per_second']:,.1f} {self.benchmark.unit}/s, "
            f"{row['peak_bytes'] / MEBIBYTE:,.0f} MiB, {result['process_seconds']:.0f} s in total"
        )
        return result

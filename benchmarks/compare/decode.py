"""Decoding compared with other engines: time to first token, tokens per second by batch size, memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from compare.comparison import Benchmark, BenchmarkRequest, Prepared
from compare.figures import complete_rounds
from compare.table import MEBIBYTE, ResultTable, with_range
from compare.trial_spec import DecodeSpec
from compare.verdict import median_or_none, ratios
from penjing import __version__
from penjing.base import config
from penjing.data.tokenizer.train import train_tokenizer
from penjing.devices import host
from penjing.export import gguf, hf
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer
from penjing.plan.flops import parameters
from penjing.plan.hardware import environment

PREFILL_BATCH = 16  # prompts
PRESETS = {"26m": "26m", "1m": "tiny"}  # by setting
FROM_IDS = (400, 2000)  # range of prompt ids: plain tokens in both vocabularies
TRIAL = "compare.penjing_decode"
BF16, INT8, FLOAT32, SERVER = "penjing-bf16", "penjing-int8", "penjing-float32", "penjing-serve"
COMPILED = "transformers-compiled"
# Pairs that the verdict compares: the same precision.
PAIRS = (
    (BF16, "llama.cpp-f16"),
    (INT8, "llama.cpp-q8_0"),
    (BF16, "transformers-bf16"),
    (BF16, COMPILED),
    (SERVER, BF16),
)


@dataclass(frozen=True, kw_only=True)
class DecodeSizes:
    """Sizes to measure; see DecodeSpec."""

    first_token: tuple[int, ...] = (16, 512, 2048)
    prompt_tokens: int = 128
    new_tokens: int = 256
    batches: tuple[int, ...] = (1, 4, 16, 64)
    seconds: float = 1.5


FULL = DecodeSizes()
QUICK = DecodeSizes(first_token=(16, 512), new_tokens=64, batches=(1, 16), seconds=1.0)


@dataclass(frozen=True)
class TableRow:
    """A row of the table."""

    label: str
    unit: str
    show: Callable[[float], str]
    less_is_better: bool = False


class Decode(Benchmark):
    """Two settings: models of 26M parameters, and of 1M as in the quickstart. The weights are random, which does not
    affect speed."""

    method = "decode"
    unit = "tokens"
    settings: ClassVar = {"26m": "26M parameters", "1m": "1M parameters"}
    ours: ClassVar = {
        BF16: f"{TRIAL} bfloat16",
        INT8: f"{TRIAL} int8",
        FLOAT32: f"{TRIAL} float32",
        SERVER: f"{TRIAL}_server bfloat16",
    }
    needs: ClassVar = {SERVER: "fastapi uvicorn"}
    same_optimizer = BF16
    goals: ClassVar = {"llama.cpp-f16": {"units_per_second": 1.0}, "llama.cpp-q8_0": {"units_per_second": 1.0}}

    def is_included(self, setting: str, name: str) -> bool:
        """Not the compiled small model: compiling would take longer than everything else with it."""
        return setting == "26m" or name != COMPILED

    def prepare(self, work: Path, request: BenchmarkRequest) -> Prepared:
        sizes = QUICK if request.quick else FULL
        options = replace(
            request.options,
            threads=request.options.threads or host.physical_cores(),
            steps=2,
            warmup=1,
            seconds=sizes.seconds,
        )
        torch.set_num_threads(options.threads)
        shapes = {setting: model_shape(preset, sizes) for setting, preset in PRESETS.items()}
        for setting, shape in shapes.items():
            write_model(work / "models" / setting, shape, with_gguf=any("llama" in name for name in options.baselines))
        spec = DecodeSpec(
            setting="",
            out="",
            threads=options.threads,
            steps=options.steps,
            warmup=options.warmup,
            seconds=sizes.seconds,
            models=str(work / "models"),
            ids=FROM_IDS,
            first_token=sizes.first_token,
            prompt_tokens=sizes.prompt_tokens,
            new_tokens=sizes.new_tokens,
            batches=sizes.batches,
        )
        about = {
            **environment(torch.device("cpu"), torch.float32, threads=options.threads),
            "parameters": {setting: parameters(shape).total for setting, shape in shapes.items()},
            "weights": "random",
        }
        threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
        batches = ", ".join(map(str, sizes.batches))
        return Prepared(
            spec=spec,
            options=options,
            about=about,
            lines=[
                f"decode: models of {' and '.join(self.settings.values())} with random weights, {threads}; prompts of "
                f"{sizes.prompt_tokens} tokens, {sizes.new_tokens} new ones or {sizes.seconds:g} s of them, greedy, "
                f"batches of {batches}"
            ],
        )

    def table(self, record: Mapping[str, Any], setting: str) -> ResultTable:
        """A row per figure, a column per contestant; a dash for figures that a contestant does not have."""
        medians = record[setting]["medians"]
        rows = [
            [row.label + row.unit, *[with_range(m[name], row.show) if name in m else "-" for m in medians.values()]]
            for name, row in rows_of(record).items()
        ]
        rows.append(["of it beyond the imported libraries, MiB", *map(_beyond_imports, medians.values())])
        title = f"{self.settings[setting]}, median (range over trials)"
        return ResultTable(["", *medians], rows, title)

    def goal_ratios(self, record: Mapping[str, Any], baseline: str, figure: str) -> tuple[str, list[float | None]]:
        ours = next(ours for ours, other in PAIRS if other == baseline)
        return ours, ratios(record, next(iter(self.settings)), ours, baseline, figure)

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        """Comparisons at the same precision."""
        lines = ["the weights are random; goals without a size are for 26M, batch 1", *_absolute_goals(record)]
        for setting in self.settings:
            trials = complete_rounds(record, setting)
            lines += [
                f"{self.settings[setting]}, {ours} beside {other}: {_compare(record, setting, ours, other)}"
                for ours, other in PAIRS
                if ours in trials and other in trials
            ]
        return lines


def rows_of(record: Mapping[str, Any]) -> dict[str, TableRow]:
    """Rows of the table, by figure names of `record.figures`."""
    spec, prefill = record["spec"], f"{PREFILL_BATCH} prompts of {record['spec']['prompt_tokens']}"
    rows = {
        f"last_first_token_{length}": TableRow(
            f"first token after {length:,}", ", ms", _milliseconds, less_is_better=True
        )
        for length in spec["first_token"]
    }
    if PREFILL_BATCH in spec["batches"]:
        rows[f"last_read_{PREFILL_BATCH}"] = TableRow(f"{prefill} read", ", ms", _milliseconds, less_is_better=True)
    for batch in spec["batches"]:
        rows[f"last_rate_{batch}"] = TableRow(f"batch {batch}", ", tokens/s", lambda value: f"{value:,.0f}")
    rows["peak_bytes"] = TableRow("peak memory", ", MiB", _mebibytes, less_is_better=True)
    return rows


def _absolute_goals(record: Mapping[str, Any]) -> Iterator[str]:
    """Goals without a baseline, if all their figures were measured."""

    def rate(setting: str, name: str, batch: int) -> float:
        medians = record[setting]["medians"].get(name, {})
        return float(medians.get(f"last_rate_{batch}", {}).get("median", math.nan))

    batch_1 = rate("26m", BF16, 1)
    for what, got, goal in (
        (f"26M, {BF16}, batch 16, tokens/s", rate("26m", BF16, 16), max(3000.0, 8 * batch_1)),
        (f"1M, {BF16}, batch 1, tokens/s", rate("1m", BF16, 1), 2000.0),
        (f"26M, {SERVER} / {BF16}, batch 16", rate("26m", SERVER, 16) / rate("26m", BF16, 16), 0.9),
    ):
        if math.isfinite(got) and math.isfinite(goal):
            verdict = "reached" if got >= goal else "missed"
            yield f"{what}: {_short(got)}; goal at least {_short(goal)}: {verdict}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def _mebibytes(value: float) -> str:
    return f"{value / MEBIBYTE:,.0f}"


def _beyond_imports(medians: Mapping[str, Any]) -> str:
    """A dash if the libraries' memory is unknown, as in another process."""
    beyond = medians["peak_bytes_beyond_imports"]
    return "-" if beyond == medians["peak_bytes"] else with_range(beyond, _mebibytes)


def _compare(record: Mapping[str, Any], setting: str, ours: str, other: str) -> str:
    """Figures in which `ours` is ahead and behind, with ratios."""
    medians = record[setting]["medians"]
    leads: dict[str, list[str]] = {"ahead": [], "behind": []}
    for name, figure in rows_of(record).items():
        if name in medians[ours] and name in medians[other]:
            ratio = median_or_none(ratios(record, setting, ours, other, name)) or 0.0
            ratio = 1 / ratio if figure.less_is_better else ratio
            leads["ahead" if ratio >= 1 else "behind"].append(f"{figure.label} {ratio:.2f} x")
    return "; ".join(f"{word}: {', '.join(each)}" for word, each in leads.items() if each)


def model_shape(preset: str, sizes: DecodeSizes) -> ModelConfig:
    """The preset, with a context that fits the longest prompt."""
    shape: ModelConfig = config.resolve(ModelConfig, {"preset": preset})
    longest = max(*sizes.first_token, sizes.prompt_tokens) + sizes.new_tokens
    return replace(shape, max_position_embeddings=max(shape.max_position_embeddings, longest))


def _texts() -> list[str]:
    """Text to train a tokenizer: the longest files of Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda file: -file.stat().st_size)
    return [file.read_text(encoding="utf-8") for file in files[:12]]


def write_model(path: Path, shape: ModelConfig, *, with_gguf: bool) -> None:
    """Write a Hugging Face directory `path`, and GGUF files of the same weights next to it."""
    model = Transformer(shape)
    initialise(model, seed=1)
    tokenizer = train_tokenizer(_texts(), shape.vocab_size)
    with torch.no_grad():  # stop tokens are never the most likely: generation does not end early
        model.embed.weight[sorted(tokenizer.stop)] = 0.0
    hf.export(model, tokenizer, path, card=f"Random weights, penjing {__version__}.\n")
    for kind in ("f16", "q8_0") if with_gguf else ():
        gguf.export(model, tokenizer, path.with_name(f"{path.name}-{kind}.gguf"), kind=kind)

"""DPO and GRPO compared with TRL: one model, the same data in the same order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from compare.comparison import OURS, Benchmark, BenchmarkRequest, Prepared, training_fields
from compare.figures import complete_rounds
from compare.table import MEBIBYTE
from compare.trial_spec import AlignmentSpec
from penjing.base import config
from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.base.seeds import derive
from penjing.data.corpus import Corpus
from penjing.data.preference_shards import PreferenceShards, prepare_groups
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.hf import export
from penjing.export.model_card import model_card
from penjing.loader.group_sampler import EpochOrder
from penjing.objective.policy import Policy
from penjing.objective.preference import Preference
from penjing.optim.adamw import AdamW
from penjing.plan.hardware import environment
from penjing.rl.prompts import read
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.load_model import load_trained

FixedSettings = list[tuple[str, object, object]]
"""Settings that the baseline lacks: name, value, and the only value that both support."""


class _Alignment(Benchmark):
    settings: ClassVar = {"step": "steps on identical data"}
    ours: ClassVar = {OURS: "compare.penjing_trial alignment"}
    labels: ClassVar = {
        "units_per_second": ("{unit}/s", lambda value: f"{value:.1f}"),
        "seconds_per_step": ("step, s", lambda value: f"{value:.3f}"),
        "cpu_seconds_per_step": ("step, CPU s", lambda value: f"{value:.3f}"),
        "mean_sampling_seconds": ("of it sampling, s", lambda value: f"{value:.3f}"),
        "training_seconds": ("all steps, s", lambda value: f"{value:.1f}"),
        "process_seconds": ("whole process, s", lambda value: f"{value:.1f}"),
        "peak_bytes": ("peak memory, MiB", lambda value: f"{value / MEBIBYTE:.0f}"),
        "peak_bytes_beyond_imports": ("of it beyond imports, MiB", lambda value: f"{value / MEBIBYTE:.0f}"),
        "last_loss": ("loss, last step", lambda value: f"{value:.4f}"),
        "last_accuracy": ("pairs right, last step", lambda value: f"{value:.3f}"),
        "mean_reward": ("reward, mean", lambda value: f"{value:.3f}"),
        "mean_answer_tokens": ("answer tokens, mean", lambda value: f"{value:.1f}"),
    }
    layer: ClassVar[Layer] = {}  # settings of penjing's run

    def fields(self, settings: Any) -> dict[str, Any]:
        """Fields of the spec, from the objective's settings."""
        raise NotImplementedError

    def fixed(self, settings: Any) -> FixedSettings:
        """Settings of the objective that must have a given value."""
        raise NotImplementedError

    def write(self, run: Run, settings: Any, work: Path) -> Run:
        """Write the data for both sides; returns the run that reads them."""
        raise NotImplementedError

    def prepare(self, work: Path, request: BenchmarkRequest) -> Prepared:
        """An exported model, a resolved recipe, and the same data for the baseline. The recipe's settings, but with a
        constant learning rate without warm-up, float32 by default, and for DPO a reference forward pass in every step
        (objective.reference=precomputed: none).

        Raises UserError for settings that the baseline lacks.
        """
        if request.start is None or request.data is None:
            raise UserError(
                "a model and its data are needed", where=f"--method {self.method}", wanted="RUN and --data FILE"
            )
        options = request.options
        trained = load_trained(request.start, adapters="merged")
        export(trained.model, trained.tokenizer, work / "model", card=model_card(trained, request.start))
        layer: dict[str, Any] = {
            "init_from": str(work / "model"),
            "out": str(work / "ours"),
            "max_steps": options.steps,
            "data": {"train": [str(request.data)]},
            "schedule": {"name": "constant"},
            "eval": {"sequences": 1, "every": 0, "at_start": False},
            "compute": {"device": "cpu", "dtype": "float32", "threads": options.threads},
            "log": {"every": 1},
        }
        run = request.resolve({**layer, **self.layer})
        _check(run, self.fixed(run.objective))
        micro = batch_geometry(run, 1, torch.device("cpu")).micro_size
        run = self.write(replace(run, batch=replace(run.batch, micro_size=micro)), run.objective, work)
        write_text(work / "run.toml", config.to_toml(run))
        optimizer = run.optimizer
        assert isinstance(optimizer, AdamW), "checked"
        spec = AlignmentSpec(
            setting="step",
            method=self.method,
            model=str(work / "model"),
            data=str(work / "data.jsonl"),
            run=str(work / "run.toml"),
            micro=micro,
            checkpointing=options.checkpointing,
            **training_fields(run, options, optimizer),
            **self.fields(run.objective),
        )
        parameters = sum(parameter.numel() for parameter in trained.model.parameters())
        dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
        threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
        return Prepared(
            spec=spec,
            options=options,
            about={
                **environment(torch.device("cpu"), dtype, threads=options.threads),
                "parameters": parameters,
                "init_from": str(request.start),
                "data": request.data.name,
            },
            lines=[
                f"{self.method}: {parameters:,} parameters, {spec.steps} steps of {spec.batch} in passes of {micro}, "
                f"{spec.dtype}, {threads}"
            ],
        )


class Dpo(_Alignment):
    method = "dpo"
    unit = "pairs"
    goals: ClassVar = {"trl": {"units_per_second": 2.0, "peak_bytes": 0.6}}
    layer: ClassVar = {"objective": {"reference": "copy"}}

    def fields(self, settings: Preference) -> dict[str, Any]:
        return {"beta": settings.resolved_beta, "reference": settings.reference}

    def fixed(self, settings: Preference) -> FixedSettings:
        fixed = {"loss": "dpo", "per_token": False, "nll_weight": 0.0}
        found: FixedSettings = [(f"objective.{name}", getattr(settings, name), value) for name, value in fixed.items()]
        if settings.reference not in ("copy", "precomputed"):
            found.append(("objective.reference", settings.reference, "copy"))
        return found

    def write(self, run: Run, settings: Preference, work: Path) -> Run:
        """Token ids of all pairs, made once: a folder for penjing, and for the baseline a file in step order."""
        corpus = Corpus(run.data)
        prepare_groups(
            corpus.placed(),
            Tokenizer.load(work / "model"),
            work / "groups",
            seq_len=run.data.seq_len,
            split=corpus.split,
            about={},
        )
        groups = PreferenceShards(work / "groups" / "train")
        rows = []
        for index in sample_order(run, len(groups)):
            group = groups[index]
            chosen, rejected = group.answers
            if not all([*chosen.weights, *rejected.weights]):
                raise UserError("answers with tool results cannot be compared", where=run.data.train[0])
            rows.append({"prompt_ids": group.prompt, "chosen_ids": chosen.ids, "rejected_ids": rejected.ids})
        _write_rows(work, rows)
        return replace(run, data=replace(run.data, train=(str(work / "groups"),)))

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        firsts = [trials[0]["figures"] for trials in complete_rounds(record, "step").values()]
        if len(firsts) < 2:
            return []
        return [f"losses of the same step differ by {largest_loss_difference(firsts[0], firsts[1]):.1e} at most"]


class Grpo(_Alignment):
    method = "grpo"
    unit = "prompts"
    goals: ClassVar = {"trl": {"units_per_second": 5.0}}

    def fields(self, settings: Policy) -> dict[str, Any]:
        rollout = settings.rollout
        return {
            "beta": settings.kl_coef,
            "num_generations": rollout.num_generations,
            "max_tokens": rollout.max_new_tokens,
            "temperature": rollout.temperature,
            "match": "penjing.rl.rewards.reference_answer:is_match",
        }

    def fixed(self, settings: Policy) -> FixedSettings:
        default, rollout, defaults = Policy(), settings.rollout, Policy().rollout
        names = ("loss", "clip", "advantage_kind", "degenerate_kind", "kl_estimator", "rewards", "reward")
        rollout_names = ("top_p", "top_k", "steps_per_rollout", "num_epochs", "thinking", "max_turns", "tools")
        return [(f"objective.{name}", getattr(settings, name), getattr(default, name)) for name in names] + [
            (f"objective.rollout.{name}", getattr(rollout, name), getattr(defaults, name)) for name in rollout_names
        ]

    def write(self, run: Run, settings: Policy, work: Path) -> Run:
        """The prompts of the run's steps, in order, for the baseline."""
        prompts = read(
            Corpus(run.data),
            Tokenizer.load(work / "model"),
            max_prompt_tokens=run.data.seq_len - settings.rollout.max_new_tokens,
        )
        rows = []
        for index in sample_order(run, len(prompts.train), "prompts"):
            prompt = prompts.train[index]
            turns = [{"role": message.role, "content": message.content} for message in prompt.messages]
            rows.append({"prompt": turns, "gt": list(prompt.truths)})
        _write_rows(work, rows)
        return run


def _write_rows(work: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(work / "data.jsonl", "\n".join(lines) + "\n")


def _check(run: Run, fixed: FixedSettings) -> None:
    """Raise UserError for settings that the baseline does not get."""
    common: FixedSettings = [
        ("optimizer.name", run.optimizer.name, "adamw"),
        ("optimizer.weight_decay", run.optimizer.weight_decay, 0.0),
        ("schedule.name", run.schedule.name, "constant"),
        ("lora.rank", run.lora.rank, 0),
        ("freeze", run.freeze, ()),
        ("compute.device", run.compute.device, "cpu"),
    ]
    for where, got, expected in common + fixed:
        if got != expected:
            raise UserError("the baseline does not get this setting", where=where, got=got, wanted=expected)


def sample_order(run: Run, count: int, *parts: str) -> list[int]:
    """Indices of the groups or prompts, of `count`, that the run's steps use, in order."""
    order = EpochOrder(count, derive(run.seed, "order"), *parts)
    return [order[index] for index in range(run.max_steps * run.batch.size)]


def largest_loss_difference(ours: list[dict[str, float]], baseline: list[dict[str, float]]) -> float:
    """The largest difference between losses of the same step."""
    return max(abs(our["loss"] - their["loss"]) for our, their in zip(ours, baseline, strict=True))

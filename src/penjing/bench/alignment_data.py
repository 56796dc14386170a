"""Files of a comparison of DPO or GRPO: an exported model, a resolved recipe, and the same data for the baseline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penjing.base import config
from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.base.seeds import derive
from penjing.bench.comparison import BenchmarkRequest, Prepared
from penjing.bench.record import facts
from penjing.bench.trial_spec import AlignmentSpec
from penjing.data import formats
from penjing.data.preference_shards import PreferenceShards, prepare_groups
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.hf import export
from penjing.export.model_card import model_card
from penjing.objective.policy import Policy
from penjing.objective.preference import Preference
from penjing.optim.adamw import AdamW
from penjing.plan import hardware
from penjing.rl.prompts import EpochPermutation, read
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.load_model import load_trained

MATCH = "penjing.rl.rewards.exact:is_match"
Fixed = list[tuple[str, object, object]]
"""Settings that only one side knows: name, value, and the value that both have."""


@dataclass(frozen=True)
class Method:
    """What differs between the methods; each function takes the objective's settings.

    layer: settings of penjing's run. fields: of the trial's spec. fixed: what only one side knows. write: writes the
    data for both sides; gives the run that reads them.
    """

    layer: Layer
    fields: Callable[[Any], dict[str, Any]]
    fixed: Callable[[Any], Fixed]
    write: Callable[[Run, Any, Path], Run]


def prepare(work: Path, request: BenchmarkRequest, method: str) -> Prepared:
    """At the recipe's own settings: a constant rate without warm-up, float32 unless asked otherwise, and for DPO a
    reference in every step (objective.reference=precomputed: none).

    Raises UserError for settings that only one side knows.
    """
    if request.start is None or request.data is None:
        raise UserError("a model and its data are needed", where=f"--method {method}", wanted="RUN and --data FILE")
    options = replace(request.options, threads=request.options.threads or hardware.physical_cores())
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
    how = METHODS[method]
    run = request.resolve({**layer, **how.layer})
    _check(run, how.fixed(run.objective))
    micro = batch_geometry(run, 1, torch.device("cpu")).micro_size
    run = how.write(replace(run, batch=replace(run.batch, micro_size=micro)), run.objective, work)
    write_text(work / "run.toml", config.to_toml(run))
    optimizer = run.optimizer
    assert isinstance(optimizer, AdamW), "checked"
    spec = AlignmentSpec(
        setting="step",
        method=method,
        model=str(work / "model"),
        data=str(work / "data.jsonl"),
        run=str(work / "run.toml"),
        out="",
        threads=options.threads,
        batch=run.batch.size,
        micro=micro,
        steps=options.steps,
        warmup=options.warmup,
        learning_rate=optimizer.learning_rate,
        max_grad_norm=run.max_grad_norm,
        betas=(optimizer.beta1, optimizer.beta2),
        seed=run.seed,
        dtype=run.compute.dtype,
        **how.fields(run.objective),
    )
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    return Prepared(
        spec=spec,
        options=options,
        about={
            **facts(torch.device("cpu"), dtype, threads=options.threads),
            "parameters": parameters,
            "init_from": str(request.start),
            "data": request.data.name,
        },
        lines=[
            f"{method}: {parameters:,} parameters, {spec.steps} steps of {spec.batch} in passes of {micro}, "
            f"{spec.dtype}, {threads}"
        ],
    )


def _check(run: Run, fixed: Fixed) -> None:
    """Raise UserError for what a baseline is not told."""
    plain: Fixed = [
        ("optimizer.name", run.optimizer.name, "adamw"),
        ("optimizer.weight_decay", run.optimizer.weight_decay, 0.0),
        ("schedule.name", run.schedule.name, "constant"),
        ("lora.rank", run.lora.rank, 0),
        ("freeze", run.freeze, ()),
        ("compute.device", run.compute.device, "cpu"),
    ]
    for where, got, wanted in plain + fixed:
        if got != wanted:
            raise UserError("the baseline does not get this setting", where=where, got=got, wanted=wanted)


def _dpo_fields(settings: Preference) -> dict[str, Any]:
    return {"beta": settings.strength, "reference": settings.reference}


def _dpo_fixed(settings: Preference) -> Fixed:
    fixed = {"loss": "dpo", "per_token": False, "nll_weight": 0.0}
    found: Fixed = [(f"objective.{name}", getattr(settings, name), value) for name, value in fixed.items()]
    if settings.reference not in ("copy", "precomputed"):
        found.append(("objective.reference", settings.reference, "copy"))
    return found


def _write_pairs(run: Run, settings: Preference, work: Path) -> Run:
    """Token ids of all pairs, made once: a folder for penjing; for the baseline a file in the order of the steps."""
    tokenizer = Tokenizer.load(work / "model")
    prepare_groups(
        formats.read_preferences([Path(name) for name in run.data.train], on_skip=lambda *_: None),
        tokenizer,
        work / "groups",
        seq_len=run.data.seq_len,
        val_fraction=run.data.val_fraction,
        about={},
    )
    groups = PreferenceShards(work / "groups" / "train")
    lines = []
    for index in pair_order(run, len(groups)):
        group = groups[index]
        chosen, rejected = group.answers
        if not all([*chosen.weights, *rejected.weights]):
            raise UserError("answers with results of tools are not compared", where=run.data.train[0])
        ids = {"prompt_ids": group.prompt, "chosen_ids": chosen.ids, "rejected_ids": rejected.ids}
        lines.append(json.dumps(ids))
    write_text(work / "data.jsonl", "\n".join(lines) + "\n")
    return replace(run, data=replace(run.data, train=(str(work / "groups"),)))


def pair_order(run: Run, num_groups: int) -> list[int]:
    """Indices of the groups that the run's steps take, one after the other (loader/group_sampler.py)."""
    seed, wanted = derive(run.seed, run.stage, "order"), run.max_steps * run.batch.size
    order: list[int] = []
    epoch = 0
    while len(order) < wanted:
        order += np.random.Generator(np.random.PCG64(derive(seed, epoch))).permutation(num_groups).tolist()
        epoch += 1
    return order[:wanted]


def _grpo_fields(settings: Policy) -> dict[str, Any]:
    rollout = settings.rollout
    return {
        "beta": settings.kl_coef,
        "num_generations": rollout.num_generations,
        "max_tokens": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "match": MATCH,
    }


def _grpo_fixed(settings: Policy) -> Fixed:
    default, rollout, usual = Policy(), settings.rollout, Policy().rollout
    names = ("loss", "clip", "advantage_kind", "degenerate_kind", "kl_estimator", "rewards", "reward")
    of_rollout = ("top_p", "top_k", "steps_per_rollout", "num_epochs", "thinking", "max_turns", "tools")
    return [(f"objective.{name}", getattr(settings, name), getattr(default, name)) for name in names] + [
        (f"objective.rollout.{name}", getattr(rollout, name), getattr(usual, name)) for name in of_rollout
    ]


def _write_prompts(run: Run, settings: Policy, work: Path) -> Run:
    """The prompts of the run's steps in their order, for the baseline."""
    given = read(
        [Path(name) for name in run.data.train],
        Tokenizer.load(work / "model"),
        longest=run.data.seq_len - settings.rollout.max_new_tokens,
        held_out_fraction=run.data.val_fraction,
    )
    order = EpochPermutation(len(given.train), derive(run.seed, run.stage, "order"))
    lines = []
    for place in range(run.max_steps * run.batch.size):
        prompt = given.train[order[place]]
        turns = [{"role": message.role, "content": message.content} for message in prompt.messages]
        lines.append(json.dumps({"prompt": turns, "gt": list(prompt.truths)}, ensure_ascii=False))
    write_text(work / "data.jsonl", "\n".join(lines) + "\n")
    return run


METHODS = {
    "dpo": Method({"objective": {"reference": "copy"}}, _dpo_fields, _dpo_fixed, _write_pairs),
    "grpo": Method({}, _grpo_fields, _grpo_fixed, _write_prompts),
}

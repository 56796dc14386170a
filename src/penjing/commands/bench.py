"""What `penjing bench train` hands to bench/: an exported model, a resolved recipe, and the same data for the peer."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import atomic_write, write_json, write_text
from penjing.base.seeds import derive
from penjing.bench.meter import Spec
from penjing.bench.train import Asked, compare
from penjing.commands.train import resolve_run
from penjing.data import formats as records
from penjing.data.preference_shards import TokenGroups, prepare_groups
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.hf import export
from penjing.export.model_card import model_card
from penjing.objective.policy import Policy
from penjing.objective.preference import Preference
from penjing.optim.adamw import AdamW
from penjing.plan import hardware
from penjing.rl.prompts import Order, read
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.run_dir import load_trained
from penjing.train.stages import STAGES

MATCH = "penjing.rl.rewards.exact:is_match"


def bench_train(model: Path, data: Path, asked: Asked, console: Console, *settings: str) -> dict[str, Any]:
    """Compare at the recipe's own settings, `settings` over them; returns what was found.

    A constant rate without warm-up, float32 unless asked otherwise, and of dpo a reference in every step
    (objective.reference=precomputed: none). Raises UserError for settings that only one of the two knows.
    """
    asked = replace(asked, threads=asked.threads or hardware.physical_cores())
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        trained = load_trained(model, adapters="merged")
        export(trained.model, trained.tokenizer, work / "model", card=model_card(trained, model))
        layer = {
            "start": str(work / "model"),
            "out": str(work / "ours"),
            "steps": asked.steps,
            "data": {"train": [str(data)]},
            "schedule": {"kind": "constant"},
            "validate": {"rows": 1, "every": 0, "before": "no"},
            "compute": {"device": "cpu", "dtype": "float32", "threads": asked.threads},
            "track": {"every": 1},
        }
        if asked.method == "dpo":
            layer["objective"] = {"reference": "copy"}
        run = resolve_run(asked.method, layer, config.parse_overrides(list(settings)))
        _check(run)
        micro = batch_geometry(run, 1, torch.device("cpu")).micro_size
        run = replace(run, batch=replace(run.batch, micro_rows=micro))
        objective, optimizer = run.objective, run.optimizer
        assert isinstance(optimizer, AdamW), "checked"
        more: dict[str, Any]
        if isinstance(objective, Preference):
            run = _pairs(run, work)
            more = {"beta": objective.strength, "reference": objective.reference}
        else:
            assert isinstance(objective, Policy)
            how = objective.rollout
            _prompts(run, work)
            more = {
                "beta": objective.kl_weight,
                "answers": how.answers,
                "max_tokens": how.max_tokens,
                "temperature": how.temperature,
                "match": MATCH,
            }
        write_text(work / "run.toml", config.to_toml(run))
        spec = Spec(
            method=asked.method,
            model=str(work / "model"),
            data=str(work / "data.jsonl"),
            run=str(work / "run.toml"),
            stage=STAGES[objective.stage][1],
            out="",
            threads=asked.threads,
            batch=run.batch.rows,
            micro=micro,
            steps=asked.steps,
            learning_rate=optimizer.learning_rate,
            clip_norm=run.clip_norm,
            betas=(optimizer.beta1, optimizer.beta2),
            seed=run.seed,
            dtype=run.compute.dtype,
            **more,
        )
        parameters = sum(parameter.numel() for parameter in trained.model.parameters())
        console.print(
            f"{asked.method}: {parameters:,} parameters, {spec.steps} steps of {spec.batch} in passes of {spec.micro}, "
            f"{spec.dtype}, {asked.threads} thread{'s' if asked.threads > 1 else ''}",
            highlight=False,
        )
        dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
        machine = {**hardware.describe(torch.device("cpu"), dtype), "threads": asked.threads}
        return {"parameters": parameters, "machine": machine, **compare(asked, spec, work / "trials", console)}


def bench(
    console: Console,
    *,
    method: str,
    run: Path | None,
    data: Path | None,
    peer: str,
    quick: bool,
    trials: int,
    seconds: float,
    steps: int,
    threads: int,
    checkpointing: bool,
    settings: tuple[str, ...],
    search: bool = False,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
    earlier: Path | None = None,
) -> dict[str, Any]:
    """What `penjing bench train` was asked for. method: empty for pretrain, with a run dpo. search: learning rates, of
    pretraining. save: is handed what there is after every trial of pretraining. earlier: a file of it to go on with, if
    it is there. Raises UserError for words that say nothing to the method."""
    if run is not None and "=" in str(run) and not run.exists():  # with no RUN the first setting stands in its place
        run, settings = None, (str(run), *settings)
    method = method or ("pretrain" if run is None else "dpo")
    if method == "pretrain":
        from penjing.bench import peers, pretrain
        from penjing.commands.bench_pretrain import FULL, QUICK, bench_pretrain

        if run is not None:
            raise UserError("pretraining begins with nothing", where="RUN", got=run, next_step="Leave it out.")
        named = {"all": tuple(peers.PRETRAIN), "none": ()}.get(peer, tuple(peer.split(",")))
        how = pretrain.Asked(peers=named, trials=trials, seconds=seconds, steps=steps, threads=threads, search=search)
        how = replace(how, looks=5) if quick else how
        return bench_pretrain(
            data, how, QUICK if quick else FULL, console, *settings, save=save, earlier=_earlier(earlier)
        )
    if earlier is not None:
        raise UserError("only pretraining's trials can be gone on with", where="--resume", got=method)
    if run is None or data is None:
        raise UserError("a model and its data are needed", where=f"--method {method}", wanted="RUN and --data FILE")
    asked = Asked(
        method=method,  # type: ignore[arg-type]  # checked there
        peer="trl" if peer == "all" else peer,
        trials=trials,
        steps=steps,
        threads=threads,
        checkpointing=checkpointing,
    )
    return bench_train(run, data, asked, console, *settings)


def _earlier(file: Path | None) -> dict[str, Any] | None:
    """What was written there, and None while there is nothing. Raises UserError if it is something else."""
    if file is None or not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("cannot be read", where=file, got=str(error), wanted="what `bench train --out` wrote") from None
    if not isinstance(found, dict) or found.get("method") != "pretrain":
        raise UserError("holds no trials of pretraining", where=file, wanted="what `bench train --out` wrote")
    return found


def write(result: dict[str, Any], out: Path, command: Sequence[str]) -> None:
    """The figures as data, with the arguments of `penjing` that made them."""
    write_json(out, {"command": shlex.join(["penjing", *command]), **result})


def keep(part: dict[str, Any], out: Path, command: Sequence[str]) -> bool:
    """Write what there is so far, and say whether there is a trial in it. Until then what stands at `out` stays: it is
    only shown that the place can be written to. Raises DiskError."""
    from penjing.bench.pretrain_table import KINDS

    has_trials = any(kind in part for kind in KINDS)
    if has_trials or not out.exists():
        write(part, out, command)
    else:
        before = out.read_bytes()
        with atomic_write(out) as file:
            file.write(before)
    return has_trials


def _check(run: Run) -> None:
    """Raise UserError for what a peer is not told."""
    plain: list[tuple[str, object, object]] = [
        ("optimizer.kind", run.optimizer.kind, "adamw"),
        ("optimizer.weight_decay", run.optimizer.weight_decay, 0.0),
        ("schedule.kind", run.schedule.kind, "constant"),
        ("lora.rank", run.lora.rank, 0),
        ("freeze", run.freeze, ()),
        ("compute.device", run.compute.device, "cpu"),
    ]
    if isinstance(run.objective, Preference):
        plain += [(f"objective.{name}", getattr(run.objective, name), value) for name, value in _PLAIN_DPO.items()]
        if run.objective.reference not in ("copy", "precomputed"):
            plain.append(("objective.reference", run.objective.reference, "copy"))
    elif isinstance(run.objective, Policy):
        default = Policy()
        names = ("loss", "clip", "advantage_kind", "degenerate_kind", "kl_estimator", "rewards", "reward")
        plain += [(f"objective.{name}", getattr(run.objective, name), getattr(default, name)) for name in names]
        how = run.objective.rollout
        fixed = ("top_p", "top_k", "updates", "repeats", "thinking", "max_turns", "tools")
        plain += [(f"objective.rollout.{name}", getattr(how, name), getattr(default.rollout, name)) for name in fixed]
    for where, got, wanted in plain:
        if got != wanted:
            raise UserError("the peer is not told of it", where=where, got=got, wanted=wanted)


_PLAIN_DPO = {"loss": "dpo", "per_token": False, "nll_weight": 0.0}


def _pairs(run: Run, work: Path) -> Run:
    """Token ids of all pairs, made once: a folder for ours, and for the peer a file in the order of our steps."""
    tokenizer = Tokenizer.load(work / "model")
    prepare_groups(
        records.read_preferences([Path(name) for name in run.data.train], on_skip=lambda *_: None),
        tokenizer,
        work / "groups",
        row_tokens=run.data.row_tokens,
        validation_fraction=run.data.validation_fraction,
        about={},
    )
    groups = TokenGroups(work / "groups" / "train")
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
    seed, wanted = derive(run.seed, run.stage, "order"), run.steps * run.batch.rows
    order: list[int] = []
    epoch = 0
    while len(order) < wanted:
        order += np.random.Generator(np.random.PCG64(derive(seed, epoch))).permutation(num_groups).tolist()
        epoch += 1
    return order[:wanted]


def _prompts(run: Run, work: Path) -> None:
    """The prompts of the run's steps in their order, for the peer."""
    assert isinstance(run.objective, Policy)
    given = read(
        [Path(name) for name in run.data.train],
        Tokenizer.load(work / "model"),
        longest=run.data.row_tokens - run.objective.rollout.max_tokens,
        held_out_fraction=run.data.validation_fraction,
    )
    order = Order(len(given.train), derive(run.seed, run.stage, "order"))
    lines = []
    for place in range(run.steps * run.batch.rows):
        prompt = given.train[order[place]]
        turns = [{"role": message.role, "content": message.content} for message in prompt.messages]
        lines.append(json.dumps({"prompt": turns, "gt": list(prompt.truths)}, ensure_ascii=False))
    write_text(work / "data.jsonl", "\n".join(lines) + "\n")

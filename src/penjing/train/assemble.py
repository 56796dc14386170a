"""From settings to parts: each part builds itself from its own settings, this file orders the calls."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import read_json, sha256_file, sha256_text, write_json, write_text
from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint, newest
from penjing.checkpoint.save import save
from penjing.feed.batch import Batch, collate
from penjing.feed.prefetch import Prefetch
from penjing.feed.source import PackedSource, Source
from penjing.model.freeze import freeze
from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import keep_base_in, own_state
from penjing.model.transformer import Transformer
from penjing.objective.next_token import NextToken
from penjing.optim.balance import RouterBalance
from penjing.parallel.base import Engine
from penjing.plan import hardware
from penjing.plan.bill import Bill, Pace, make_bill
from penjing.plan.flops import mean_keys, training_flops_per_token
from penjing.text import prepare, records
from penjing.text.pack import BestFitRows, Rows, StreamRows
from penjing.text.shards import META, Shards
from penjing.text.tokenizer import Tokenizer, train_tokenizer
from penjing.text.whole import WholeRows
from penjing.track.base import Tracker, Trackers
from penjing.track.jsonl import JsonLines
from penjing.train.adapters import build_adapted
from penjing.train.folder import RunFolder, load_start, load_weights, start_tokenizer
from penjing.train.loop import Parts, Progress, step
from penjing.train.meter import Meter
from penjing.train.run import Run

Report = Callable[[str], None]
TOKENIZER_TRAINING_BYTES = 64 << 20  # of text a tokenizer is trained on; more changes few merges


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run learns from and is judged by."""

    tokenizer: Tokenizer
    train: Rows
    validation: Rows
    validation_rows: int
    targets_per_byte: float  # of the held-out text, to turn nats per token into bits per byte
    num_keys: float
    fingerprint: str
    skipped: int = 0
    shortened: int = 0


# --- data ------------------------------------------------------------------------------------------------------------


def prepare_data(run: Run, engine: Engine, report: Report) -> Prepared:
    """Tokenizer and packed rows of a run; rank 0 makes the files, the others wait and read them."""
    folder = RunFolder(Path(run.out))
    if engine.rank == 0:
        tokenizer = _tokenizer(run, folder, report)
        shards, counts = _shards(run, folder, tokenizer, report)
    else:
        shards, counts = Path(), {}
    shards, counts = engine.broadcast((shards, counts))
    tokenizer = Tokenizer.load(folder.tokenizer)
    train, validation = Shards(shards / "train"), Shards(shards / "validation")
    for half in (train, validation):
        if half.meta["tokenizer"] != tokenizer.fingerprint:
            raise UserError(
                "these token shards were made with another tokenizer",
                where=half.folder,
                next_step="Give the text itself as data.train, or tokenizer.folder=the one they were made with.",
            )
    train_rows = make_rows(run, train, tokenizer)
    held_out = make_rows(run, validation, tokenizer, validation=True)
    targets = validation.num_tokens + validation.num_documents
    return Prepared(
        tokenizer=tokenizer,
        train=train_rows,
        validation=held_out,
        validation_rows=min(run.validate.rows, held_out.rows_per_epoch),
        targets_per_byte=targets / max(1, validation.num_bytes),
        num_keys=mean_keys(train.end_D - train.start_D, run.data.row_tokens),
        fingerprint=train.fingerprint,
        **counts,
    )


def make_rows(run: Run, shards: Shards, tokenizer: Tokenizer, *, validation: bool = False) -> Rows:
    """Pack shards as the run says; held-out rows come in a fixed order, and may be shorter if there is little text."""
    row_tokens = run.data.row_tokens
    if shards.kind != run.data.kind:
        raise UserError("token shards of another kind", where="data.train", got=shards.kind, wanted=run.data.kind)
    seed, end_of_text = derive(run.seed, run.stage, "order"), tokenizer.end_of_text
    if shards.kind == "chats":
        return BestFitRows(shards, row_tokens, end_of_text=end_of_text, seed=seed, shuffle=not validation)
    if validation:
        row_tokens = max(1, min(row_tokens, shards.num_tokens + shards.num_documents - 1))
    if run.data.packing == "stream":
        return StreamRows(shards, row_tokens, end_of_text=end_of_text, seed=seed, shuffle=not validation)
    order: Literal["shuffled", "as_given", "fixed"] = "fixed" if validation else run.data.order
    return WholeRows(shards, row_tokens, end_of_text=end_of_text, seed=seed, order=order)


def _tokenizer(run: Run, folder: RunFolder, report: Report) -> Tokenizer:
    """The run's tokenizer: its own from before, the named one, that of `start`, or a new one trained on the text."""
    if (folder.tokenizer / "tokenizer.json").is_file():
        return Tokenizer.load(folder.tokenizer)
    given = start_tokenizer(run)
    if given is None:
        size = run.tokenizer.vocabulary or run.model.vocabulary_size
        report(f"training a tokenizer of {size:,} ids")
        given = train_tokenizer(_training_texts(run), size, han_run=run.tokenizer.han_run)
    tokenizer = given
    if tokenizer.size > run.model.vocabulary_size:
        raise UserError(
            "the tokenizer has more ids than the model",
            where="model.vocabulary_size",
            got=run.model.vocabulary_size,
            wanted=f"at least {tokenizer.size}",
            next_step=f"Set model.vocabulary_size={tokenizer.size}, or use the model's own tokenizer.",
        )
    tokenizer.save(folder.tokenizer)
    return tokenizer


def _training_texts(run: Run) -> Iterator[str]:
    """The training half's texts, up to the share a tokenizer needs."""
    paths, share = _data_paths(run), run.data.validation_fraction
    read = records.read_chats if run.data.kind == "chats" else records.read_documents
    below = prepare.held_out_below((prepare.split_key(record) for record in read(paths)), share)
    left = TOKENIZER_TRAINING_BYTES
    for record in read(paths):
        if left <= 0:
            return
        if prepare.is_held_out(prepare.split_key(record), below):
            continue
        text = record.text if isinstance(record, records.Document) else "\n".join(m.content for m in record.messages)
        left -= len(text.encode())
        yield text


def _data_paths(run: Run) -> list[Path]:
    if not run.data.train:
        raise UserError("no data", where="data.train", next_step="Give data.train=FILE, or see `penjing data list`.")
    return records.list_files([Path(name) for name in run.data.train])


def _shards(run: Run, folder: RunFolder, tokenizer: Tokenizer, report: Report) -> tuple[Path, dict[str, int]]:
    """The folder with `train` and `validation` shards: the given one, this run's from before, or newly made."""
    if len(run.data.train) == 1 and (Path(run.data.train[0]) / "train" / META).is_file():
        return Path(run.data.train[0]), {}
    paths = _data_paths(run)
    files = {str(path): [path.stat().st_size, sha256_file(path)] for path in paths}
    wanted = {
        "source": sha256_text(json.dumps(list(files.values()))),
        "tokenizer": tokenizer.fingerprint,
        "kind": run.data.kind,
        "validation_fraction": run.data.validation_fraction,
        "row_tokens": run.data.row_tokens if run.data.kind == "chats" else 0,
    }
    done = folder.shards / "done.json"
    if done.is_file() and read_json(done)["made_from"] == wanted:
        return folder.shards, read_json(done)["counts"]
    report(f"tokenizing {len(paths)} file{'s' if len(paths) > 1 else ''}")
    about = {"source_files": files, "source": wanted["source"]}
    share = run.data.validation_fraction
    if run.data.kind == "chats":
        made = prepare.prepare_chats(
            records.read_chats(paths),
            tokenizer,
            folder.shards,
            row_tokens=run.data.row_tokens,
            validation_fraction=share,
            about=about,
        )
    else:
        made = prepare.prepare_documents(
            records.read_documents(paths), tokenizer, folder.shards, validation_fraction=share, about=about
        )
    counts = {"skipped": made.skipped, "shortened": made.shortened}
    write_json(done, {"made_from": wanted, "counts": counts})
    return folder.shards, counts


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A run put together: `parts` and `progress` for the loop, and what to tell the user."""

    run: Run
    parts: Parts
    progress: Progress
    prepared: Prepared
    model: Transformer
    folder: RunFolder
    base: dict[str, str]  # what a run's adapter sits on, `start` and `sha256`; empty without one
    bill: Bill
    resumed_from: int | None  # step of the checkpoint it goes on from
    resumed: int  # how often it was taken up again
    notes: list[str]


def num_steps(run: Run, rows: Rows) -> int:
    """Optimizer steps of a run."""
    return run.steps or max(1, math.ceil(run.epochs * rows.rows_per_epoch / run.batch.rows))


def micro_rows(run: Run, engine: Engine) -> int:
    """Rows of one forward pass on one device. Raises UserError if the step does not divide evenly.

    Unless set, a device's whole share; but on one CPU half of it, where that is even. In bfloat16 every pass rounds its
    gradients, so only the same passes give the same bits: this way two processes learn exactly what one does.
    """
    world, cut = engine.world, run.batch.rows % 2 == 0 and engine.device.type == "cpu"
    rows = run.batch.micro_rows or max(1, run.batch.rows // max(world, 2 if cut else 1))
    if run.batch.rows % (rows * world):
        share = f"{world} devices" + (f" x {rows} batch.micro_rows" if run.batch.micro_rows else "")
        raise UserError(
            "the rows of a step do not divide evenly",
            where="batch.rows",
            got=run.batch.rows,
            wanted=f"a multiple of {share}",
        )
    return rows


def accumulation(run: Run, engine: Engine) -> int:
    """Forward passes of one step on each device."""
    return run.batch.rows // (micro_rows(run, engine) * engine.world)


def assemble(
    run: Run,
    engine: Engine,
    trackers: Callable[[int, int], Sequence[Tracker]],
    sample: Callable[[Transformer, Tokenizer, int], list[dict[str, Any]]],
    report: Report,
) -> Assembled:
    """Build every part of a run, or restore it from its newest checkpoint; write run.toml and plan.json before step 1.

    trackers: makes the further trackers, given (number of steps, first step). sample: what the model writes now.
    """
    folder = RunFolder(Path(run.out))
    checkpoint = newest(folder.checkpoints)
    _check_same_run(run, folder, checkpoint)
    prepared = prepare_data(run, engine, report)
    dtype = hardware.compute_dtype(run.compute.dtype, engine.device)
    model, base = _build_model(run, checkpoint)
    freeze(model, run.freeze)
    if run.lora.rank:
        keep_base_in(model, dtype)
    model.to(engine.device)
    set_compute_dtype(model, None if dtype == torch.float32 else dtype)
    callable_model = engine.wrap(model)
    optimizers: list[Any] = run.optimizer.build(model)
    if run.model.is_mixture:
        rate = 0.0 if run.lora.rank else run.router.bias_rate  # a frozen base's routers stay as they are
        optimizers.append(RouterBalance(model, rate, engine.add))
    steps = num_steps(run, prepared.train)
    source: Source = PackedSource(
        prepared.train, micro_rows=micro_rows(run, engine), rank=engine.rank, world=engine.world
    )
    progress = Progress()
    about: dict[str, Any] = {"data": prepared.fingerprint, "resumed": 0, "base": base}
    meter = Meter(
        training_flops_per_token(run.model, prepared.num_keys),
        hardware.peak(engine.device, dtype).flops_per_second,
        peak_memory_bytes=lambda: hardware.peak_memory_bytes(engine.device),
    )
    if checkpoint is not None:
        saved = checkpoint.state()
        if saved["data"] != prepared.fingerprint:
            raise UserError(
                "this run was begun on other data",
                where=folder.path,
                got=prepared.fingerprint[:12],
                wanted=saved["data"][:12],
                next_step="Give the same files to continue, or choose another out= to start anew.",
            )
        about["resumed"] = saved["resumed"] + 1
        _restore(optimizers, checkpoint)
        source.restore(saved["source"])
        meter.restore(saved["meter"])
        progress = Progress.restore(saved["progress"], engine)
    source = (
        Prefetch(source, engine.device, run.data.prefetch) if run.data.prefetch else OnDevice(source, engine.device)
    )
    all_trackers = _trackers(engine, folder, trackers(steps, progress.step), progress.step)
    parts = Parts(
        engine=engine,
        model=callable_model,
        objective=NextToken(run.router, biased=run.model.architecture == "glm4_moe"),
        source=source,
        optimizers=optimizers,
        schedule=run.schedule,
        trackers=Trackers(all_trackers),
        meter=meter,
        num_steps=steps,
        accumulate=accumulation(run, engine),
        clip_norm=run.clip_norm,
        log_every=run.track.every,
        validate_every=run.validate.every,
        sample_every=run.sample.every,
        save_every=run.save.every,
        validate=lambda: validate(run, prepared, engine, model),
        sample=lambda index: _sample(folder, engine, sample(model, prepared.tokenizer, index), index),
        save=lambda state: _save(run, folder, engine, parts, {"progress": state, **about}),
    )
    bill = _bill(run, prepared, engine, model, parts, checkpoint, folder)
    if engine.rank == 0:
        write_text(folder.settings, config.to_toml(run))
    return Assembled(
        run=run,
        parts=parts,
        progress=progress,
        prepared=prepared,
        model=model,
        folder=folder,
        base=base,
        bill=bill,
        resumed_from=None if checkpoint is None else checkpoint.step,
        resumed=about["resumed"],
        notes=list(checkpoint.skipped) if checkpoint else [],
    )


def _build_model(run: Run, checkpoint: Checkpoint | None) -> tuple[Transformer, dict[str, str]]:
    """The run's own weights, those of `start`, or fresh ones; and of a run with adapters, what they sit on."""
    if run.lora.rank:
        return build_adapted(run, checkpoint, load_start)
    if checkpoint is None and run.start:
        return load_start(run), {}
    model = Transformer(run.model)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    else:
        initialise(model, derive(run.seed, "weights"))
    return model, {}


# Settings that may differ when a run is continued: they do not change what is computed.
FREE_TO_CHANGE = (
    "compute",
    "track",
    "save",
    "sample",
    "validate",
    "out",
    "batch.micro_rows",
    "data.prefetch",
    "data.train",
)


def _check_same_run(run: Run, folder: RunFolder, checkpoint: Checkpoint | None) -> None:
    """A continued run must be the run that was begun; a changed setting is refused with its name."""
    if checkpoint is None or not folder.settings.is_file():
        return
    before = dict(_flat(config.read_toml(folder.settings)))
    now = dict(_flat(json.loads(json.dumps(config.to_dict(run)))))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) == now.get(key) or any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE):
            continue
        raise UserError(
            "this run was begun with another setting",
            where=f"{folder.path}: {key}",
            got=now.get(key),
            wanted=before.get(key),
            next_step="Put it back to continue, or choose another out= to start anew.",
        )


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _restore(optimizers: list[torch.optim.Optimizer], checkpoint: Checkpoint) -> None:
    states, random_state = checkpoint.optimizers()
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    torch.set_rng_state(random_state)


def _trackers(engine: Engine, folder: RunFolder, further: Sequence[Tracker], start: int) -> list[Tracker]:
    if engine.rank != 0:
        return []
    return [JsonLines(folder.metrics, resume_step=start), *further]


def _save(run: Run, folder: RunFolder, engine: Engine, parts: Parts, state: dict[str, Any]) -> None:
    if engine.rank == 0:
        model = _plain(parts.model)
        kept = own_state(model) if run.lora.rank else model.state_dict()  # of adapters, not the base they sit on
        weights = {name: value.detach().cpu() for name, value in kept.items()}
        save(
            folder.checkpoints,
            state["progress"]["step"],
            weights=weights,
            optimizers=[optimizer.state_dict() for optimizer in parts.optimizers],
            state={**state, "source": parts.source.state(), "meter": parts.meter.state()},
            texts={"run.toml": config.to_toml(run)},
            keep=run.save.keep,
        )
    engine.any(False)  # the others wait until the checkpoint is whole


def _plain(model: Any) -> torch.nn.Module:
    inner = getattr(model, "module", model)
    assert isinstance(inner, torch.nn.Module)
    return inner


def _sample(folder: RunFolder, engine: Engine, written: list[dict[str, Any]], index: int) -> None:
    if engine.rank != 0 or not written:
        return
    tracker = JsonLines(folder.samples, resume_step=index - 1)
    for sample in written:
        tracker.log(index, sample)
    tracker.close()


# --- validation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def validate(run: Run, prepared: Prepared, engine: Engine, model: Transformer) -> dict[str, float]:
    """Mean loss over the held-out rows, every row on one rank only; the same figures for any number of ranks."""
    objective = NextToken()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in _validation_batches(run, prepared, engine):
        sums[0] += objective(model, batch).total.double().cpu()
        sums[1] += objective.weight(batch).double().cpu()
    total, units = engine.add(sums.to(engine.device) if engine.device.type == "cuda" else sums).tolist()
    loss = total / max(1.0, units)
    figures = {"validation_loss_nats_per_token": loss}
    if run.data.kind == "documents":
        figures["validation_bits_per_byte"] = loss / math.log(2) * prepared.targets_per_byte
    return figures


def _validation_batches(run: Run, prepared: Prepared, engine: Engine) -> Iterator[Batch]:
    mine = range(engine.rank, prepared.validation_rows, engine.world)
    size = micro_rows(run, engine)
    for first in range(0, len(mine), size):
        rows = [prepared.validation.row(index) for index in mine[first : first + size]]
        yield collate(rows).to(engine.device)


# --- the bill --------------------------------------------------------------------------------------------------------


def _bill(
    run: Run,
    prepared: Prepared,
    engine: Engine,
    model: Transformer,
    parts: Parts,
    checkpoint: Checkpoint | None,
    folder: RunFolder,
) -> Bill:
    """The plan: read back if the run was begun before, else made from a probe and written."""
    if checkpoint is not None and folder.plan.is_file():
        known = read_json(folder.plan)
        return Bill(**{name: known[name] for name in Bill.__dataclass_fields__})
    rows = prepared.train
    steps = parts.num_steps
    pace = probe(run, prepared, engine, model, parts)
    bill = make_bill(
        run.model,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        num_keys=prepared.num_keys,
        rows_per_epoch=rows.rows_per_epoch,
        row_tokens=rows.row_tokens,
        filled=1 - rows.padding_per_epoch / (rows.rows_per_epoch * rows.row_tokens),
        rows_per_step=run.batch.rows,
        micro_rows=micro_rows(run, engine),
        steps=steps,
        pace=pace,
        validations=_times(run.validate.every, steps),
        checkpoints=_times(run.save.every, steps),
        optimizer_bytes_per_parameter=8 if run.optimizer.kind == "adamw" else 4,
    )
    if engine.rank == 0:
        write_json(folder.plan, bill.to_dict())
    return bill


def _times(every: int, steps: int) -> int:
    return math.ceil(steps / every) if every else 0


PROBE_STEPS = 5


def probe(run: Run, prepared: Prepared, engine: Engine, model: Transformer, parts: Parts) -> Pace:
    """Time the real step on this machine, leaving model, optimizer and data exactly as they were."""
    weights = copy.deepcopy(own_state(model))
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in parts.optimizers]
    source = PackedSource(prepared.train, micro_rows=micro_rows(run, engine), rank=engine.rank, world=engine.world)
    trial = replace(parts, source=OnDevice(source, engine.device))
    seconds = []
    for index in range(PROBE_STEPS + 2):
        start = time.perf_counter()
        float(step(trial, 0).sums["loss"])  # waits for the device
        if index >= 2:
            seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    validated = next(_validation_batches(run, prepared, engine), None)
    if validated is not None:
        with torch.no_grad():
            float(NextToken()(model, validated).total)
    one_batch = time.perf_counter() - start
    batches = math.ceil(math.ceil(prepared.validation_rows / engine.world) / micro_rows(run, engine))
    model.load_state_dict(weights, strict=False)
    for optimizer, state in zip(parts.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    seconds.sort()
    median = seconds[len(seconds) // 2]
    saved_bytes = 12 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Pace(median, one_batch * batches, 0.02 + saved_bytes / 300e6, (seconds[-1] - seconds[0]) / median)


class OnDevice:
    """A source whose batches are moved in line."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device

    def __next__(self) -> Batch:
        return next(self.source).to(self.device)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state)

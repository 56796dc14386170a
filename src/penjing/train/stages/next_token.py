"""Next-token training, of texts (pretraining) and of conversations (SFT): tokenizer, shards, rows, held-out loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.base.files import printable, read_json, sha256_file, sha256_text, write_json
from penjing.base.seeds import derive
from penjing.checkpoint.manifest import steps
from penjing.data import formats as records
from penjing.data import tokenize_dataset as prepare
from penjing.data.packing.best_fit import WholeRows
from penjing.data.packing.concat import BestFitRows, Rows, StreamRows
from penjing.data.token_shards import META, Shards
from penjing.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from penjing.loader.batch import Batch, collate
from penjing.loader.batch_source import PackedSource, Source
from penjing.model.transformer import Transformer
from penjing.objective.next_token import NextToken
from penjing.parallel.base import Engine
from penjing.plan.flops import mean_keys
from penjing.train.config import Run
from penjing.train.run_dir import RunFolder, start_tokenizer
from penjing.train.small_data import fit_rows
from penjing.train.stages.base import Report, Size, micro_units

TOKENIZER_TRAINING_BYTES = 64 << 20  # of text a tokenizer is trained on; more changes few merges


class NextTokenStage:
    """Rows of packed text or conversations, and the loss on those that were held out by hash."""

    runs_ahead = True

    def __init__(self, run: Run, engine: Engine, report: Report) -> None:
        """Makes tokenizer and shards where they are not there yet: rank 0 does, the others wait and read them."""
        self.run, self.engine = run, engine
        folder = RunFolder(Path(run.out))
        if engine.rank == 0:
            tokenizer = run_tokenizer(run, folder, report)
            shards, counts = _shards(run, folder, tokenizer, report)
        else:
            shards, counts = Path(), {}
        shards, counts = engine.broadcast((shards, counts))
        self.tokenizer = Tokenizer.load(folder.tokenizer)
        train, validation = Shards(shards / "train"), Shards(shards / "validation")
        for half in (train, validation):
            if half.meta["tokenizer"] != self.tokenizer.fingerprint:
                raise UserError(
                    "these token shards were made with another tokenizer",
                    where=half.folder,
                    next_step="Give the text itself as data.train, or tokenizer.folder=the one they were made with.",
                )
        self.fingerprint = train.fingerprint
        longest = max(int((half.end_D - half.start_D).max(initial=0)) for half in (train, validation))
        self.run = run = fit_rows(run, train.num_tokens, longest)
        self.rows = make_rows(run, train, self.tokenizer)
        self.held_out = make_rows(run, validation, self.tokenizer, validation=True)
        self._num_held_out = min(run.validate.rows, self.held_out.rows_per_epoch)
        targets = validation.num_tokens + validation.num_documents
        self.targets_per_byte = targets / max(1, validation.num_bytes)
        self._num_keys = mean_keys(train.end_D - train.start_D, run.data.row_tokens)
        skipped, shortened = counts.get("skipped", 0), counts.get("shortened", 0)
        self.notes = []
        if counts.get("bad"):
            self.notes.append(f"{counts['bad']} broken records were left out: {folder.quarantine}")
        if skipped or shortened:
            self.notes.append(
                f"{skipped} conversations were left out, too long for a row or with nothing to learn from; "
                f"{shortened} lost their last turns"
            )

    def size(self) -> Size:
        positions = self.rows.rows_per_epoch * self.rows.row_tokens
        padding = self.rows.padding_per_epoch / positions
        return Size(
            unit="rows",
            units_per_epoch=self.rows.rows_per_epoch,
            tokens_per_unit=self.rows.row_tokens * (1 - padding),
            row_tokens=self.rows.row_tokens,
            num_keys=self._num_keys,
            padding_fraction=padding,
            held_out_units=self._num_held_out,
        )

    def trained(self, model: Transformer) -> nn.Module:
        return model

    def begin(self, model: nn.Module, engine: Engine) -> None:
        self._model = model

    def source(self, micro_units: int, rank: int, world: int) -> Source:
        return PackedSource(self.rows, micro_rows=micro_units, rank=rank, world=world)

    def objective(self) -> NextToken:
        return NextToken(self.run.router, biased=self.run.model.architecture == "glm4_moe")

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean loss over the held-out rows, every row on one rank only."""
        objective = NextToken()
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in self._validation_batches():
            sums[0] += objective(self._model, batch).total.cpu().double()  # in this order: Apple's GPUs know no float64
            sums[1] += objective.weight(batch).cpu().double()
        on_device = sums.to(self.engine.device) if self.engine.device.type == "cuda" else sums
        total, units = self.engine.add(on_device).tolist()
        loss = total / max(1.0, units)
        figures = {"validation_loss_nats_per_token": loss}
        if self.run.data.kind == "documents":
            figures["validation_bits_per_byte"] = loss / math.log(2) * self.targets_per_byte
        return figures

    def _validation_batches(self) -> Iterator[Batch]:
        mine = range(self.engine.rank, self._num_held_out, self.engine.world)
        size = micro_units(self.run, self.engine)
        for first in range(0, len(mine), size):
            rows = [self.held_out.row(index) for index in mine[first : first + size]]
            yield collate(rows).to(self.engine.device)

    def describe(self) -> list[tuple[str, str]]:
        return []


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


def run_tokenizer(run: Run, folder: RunFolder, report: Report) -> Tokenizer:
    """The run's tokenizer: its own from before, the named one, that of `start`, or a new one trained on the text.

    One that an attempt without a checkpoint left behind gives way to a named one, or that of `start`: it may have been
    another's.
    """
    kept = Tokenizer.load(folder.tokenizer) if (folder.tokenizer / "tokenizer.json").is_file() else None
    if kept is not None and steps(folder.checkpoints):
        return kept
    given = start_tokenizer(run)
    if given is None and kept is not None and kept.size <= run.model.vocabulary_size:
        given = kept
    if given is None and run.data.kind not in ("documents", "chats"):
        raise UserError(
            "no tokenizer: one is trained on texts and conversations only",
            where="start",
            got=f"data.kind={run.data.kind}",
            wanted="a model that is there, or tokenizer.folder",
        )
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
    paths, share = data_paths(run), run.data.validation_fraction
    read = records.read_chats if run.data.kind == "chats" else records.read_documents
    # What is broken is listed and counted when the shards are made.
    below = prepare.held_out_below((prepare.split_key(each) for each in read(paths, quarantine=_uncounted())), share)
    left = TOKENIZER_TRAINING_BYTES
    for record in read(paths, quarantine=_uncounted()):
        if left <= 0:
            return
        if prepare.is_held_out(prepare.split_key(record), below):
            continue
        text = record.text if isinstance(record, records.Document) else "\n".join(m.content for m in record.messages)
        left -= len(text.encode())
        yield text


def _uncounted() -> records.Quarantine:
    return records.Quarantine(max_bad=1.0)


def data_paths(run: Run) -> list[Path]:
    """The files that data.train names. Raises UserError if it names none."""
    if not run.data.train:
        raise UserError("no data", where="data.train", next_step="Give data.train=FILE, or see `penjing data list`.")
    return records.list_files([Path(name) for name in run.data.train])


def _shards(run: Run, folder: RunFolder, tokenizer: Tokenizer, report: Report) -> tuple[Path, dict[str, int]]:
    """The folder with `train` and `validation` shards: the given one, this run's from before, or newly made."""
    if len(run.data.train) == 1 and (Path(run.data.train[0]) / "train" / META).is_file():
        return _ready(run, Path(run.data.train[0])), {}

    def make(paths: list[Path], about: dict[str, Any]) -> dict[str, int]:
        share = run.data.validation_fraction
        quarantine = records.Quarantine(run.data.max_bad, folder.quarantine)
        if run.data.kind == "chats":
            made = prepare.prepare_chats(
                records.read_chats(paths, quarantine=quarantine),
                tokenizer,
                folder.shards,
                row_tokens=run.data.row_tokens,
                validation_fraction=share,
                about=about,
                thinking=False if run.data.thinking == "switch" else None,
                quarantine=quarantine,
            )
        else:
            made = prepare.prepare_documents(
                records.read_documents(paths, quarantine=quarantine),
                tokenizer,
                folder.shards,
                validation_fraction=share,
                about=about,
            )
        if note := quarantine.note():
            report(note)
        return {"skipped": made.skipped, "shortened": made.shortened, "bad": quarantine.bad}

    row_tokens = run.data.row_tokens if run.data.kind == "chats" else 0
    return folder.shards, made_once(run, folder.shards, tokenizer, row_tokens, make, report)


def _ready(run: Run, shards: Path) -> Path:
    """Shards that are there. Raises UserError if their answers were written otherwise than the run says."""
    done = shards / "done.json"
    thinking = read_json(done)["made_from"].get("thinking", "as_given") if done.is_file() else run.data.thinking
    if thinking != run.data.thinking:
        raise UserError(
            "these token shards were made otherwise",
            where="data.thinking",
            got=run.data.thinking,
            wanted=f"{thinking}, as in {done}, or the text itself as data.train",
        )
    return shards


def made_once(
    run: Run,
    place: Path,
    tokenizer: Tokenizer,
    row_tokens: int,
    make: Callable[[list[Path], dict[str, Any]], dict[str, int]],
    report: Report,
) -> dict[str, int]:
    """The counts of what `make(files, about)` wrote into `place`, or wrote there before from the same files.

    row_tokens: what the result depends on of `data.row_tokens`; 0 if it does not. `place/done.json` is written last.
    """
    paths = data_paths(run)
    files = {printable(path): [path.stat().st_size, sha256_file(path)] for path in paths}
    wanted = {
        "source": sha256_text(json.dumps(list(files.values()))),
        "tokenizer": tokenizer.fingerprint,
        "kind": run.data.kind,
        "validation_fraction": run.data.validation_fraction,
        "row_tokens": row_tokens,
        **({"thinking": run.data.thinking} if run.data.thinking != "as_given" else {}),
    }
    done = place / "done.json"
    if done.is_file() and read_json(done)["made_from"] == wanted:
        return dict(read_json(done)["counts"])
    report(f"tokenizing {len(paths)} file{'s' if len(paths) > 1 else ''}")
    done.unlink(missing_ok=True)  # it does not vouch for halves of which one is new and the other old
    counts = make(paths, {"source_files": files, "source": wanted["source"]})
    write_json(done, {"made_from": wanted, "counts": counts})
    return counts

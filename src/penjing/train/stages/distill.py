"""Distillation on data: the rows of pretraining or SFT beside a frozen teacher, or its predictions on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.data.packing.best_fit import WholeRows
from penjing.data.packing.concat import BestFitRows, Rows
from penjing.data.teacher_logits_cache import FixedRows, Key, Slots, Store, Writer, find, in_order, numbered
from penjing.data.token_shards import Shards
from penjing.kernels.fused_distillation_loss import likeliest
from penjing.loader.batch import Batch, collate
from penjing.loader.batch_source import PackedSource, Source
from penjing.model.transformer import Transformer
from penjing.objective.distill import Distill, Distillation, TaughtBatch
from penjing.objective.next_token import FIGURE
from penjing.parallel.base import Strategy
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.stages.base import Report, Size
from penjing.train.stages.next_token import NextTokenStage
from penjing.train.stages.teacher_model import (
    TeacherModel,
    about_teacher,
    check_vocabulary,
    judge,
    load_teacher,
    note_teacher,
    place,
    relative_cost,
    take_tokenizer,
)

SYNC_BATCHES = 64  # of a teacher's reading, after which ranks wait for each other and note how far they are


class DistillStage:
    """Rows of packed text or conversations, each with what the teacher makes of it: asked anew, or read from disk."""

    runs_ahead = True

    def __init__(self, run: Run, strategy: Strategy, report: Report) -> None:
        """Makes tokenizer and shards where they are not there yet, and with mode=top_k the store."""
        assert isinstance(run.objective, Distill)
        self.run, self.strategy, self.settings = run, strategy, run.objective
        if run.data.kind not in ("documents", "chats"):
            raise UserError(
                "nothing to read for the teacher",
                where="data.kind",
                got=run.data.kind,
                wanted="documents or chats, or objective.mode=on_policy",
            )
        teacher = load_teacher(run, self.settings)
        if strategy.rank == 0:
            take_tokenizer(run, teacher)
        self._data = NextTokenStage(run, strategy, report)
        self.run = run = self._data.run  # whose rows may be shorter
        self.tokenizer, self.fingerprint, self.notes = self._data.tokenizer, self._data.fingerprint, self._data.notes
        check_vocabulary(self.tokenizer, teacher, self.settings)
        if strategy.rank == 0:
            note_teacher(run, teacher, self.settings)
        self.num_ids = min(teacher.model.config.vocabulary_size, run.model.vocabulary_size)
        self._cost = relative_cost(run, teacher.model, self._data.size().num_keys)
        self._describe = about_teacher(run, self.settings, teacher.model)
        self._teacher: Transformer | None = place(teacher, run, strategy)
        self._stores: list[Store] = []
        if self.settings.mode == "top_k":
            self._stores = [self._store(half, teacher, report) for half in (self._data.rows, self._data.held_out)]
            self._teacher = None

    def _store(self, rows: Rows, teacher: TeacherModel, report: Report) -> Store:
        fixed = _fixed(rows)
        count = min(self.settings.top_k, self.num_ids - 1)
        layout = f"{fixed.shards.kind} in rows of {fixed.row_tokens}"
        key = Key(
            teacher=teacher.sha256,
            data=_all_files(fixed.shards),
            layout=layout,
            count=count,
            num_ids=self.num_ids,
            temperature=self.settings.temperature,
        )
        folder = Path(self.settings.store) if self.settings.store else Path(self.run.out) / "teacher"
        known = self.strategy.broadcast(find(folder, key) is not None if self.strategy.rank == 0 else None)
        if known:
            return Store(folder / key.name, key)
        assert self._teacher is not None
        return make_store(
            self._teacher,
            in_order(fixed),
            folder,
            key,
            self.strategy,
            report,
            batch_geometry(self.run, self.strategy.world, self.strategy.device).micro_size,
        )

    def size(self) -> Size:
        return replace(self._data.size(), extra_forwards=0.0 if self._stores else self._cost)

    def trained(self, model: Transformer) -> nn.Module:
        return model

    def begin(self, model: nn.Module, strategy: Strategy) -> None:
        self._model = model

    def source(self, micro_units: int, rank: int, world: int) -> Source:
        if not self._stores:
            return self._data.source(micro_units, rank, world)
        return StoredSource(_fixed(self._data.rows), self._stores[0], micro_rows=micro_units, rank=rank, world=world)

    def objective(self) -> Distillation:
        return Distillation(
            self.settings,
            self._teacher,
            self.run.router,
            num_ids=self.num_ids,
            biased=self.run.model.architecture == "glm4_moe",
        )

    def validate(self) -> dict[str, float]:
        """Cross-entropy, KL and agreement on the held-out rows, every row on one rank only."""
        names = (FIGURE, "kl_nats_per_token", "agreement")
        figures = judge(self.objective(), self._model, self._held_out(), self.strategy, names)
        if self.run.data.kind == "documents":
            nats = figures[f"validation_{FIGURE}"]
            figures["validation_bits_per_byte"] = nats / math.log(2) * self._data.targets_per_byte
        return figures

    def _held_out(self) -> Iterator[Batch]:
        rows = self._data.held_out
        mine = range(self.strategy.rank, min(self.run.validate.rows, rows.rows_per_epoch), self.strategy.world)
        size = batch_geometry(self.run, self.strategy.world, self.strategy.device).micro_size
        taught = Taught(_fixed(rows), self._stores[1]) if self._stores else None
        for first in range(0, len(mine), size):
            chosen = mine[first : first + size]
            batch = taught.batch(chosen) if taught else collate([rows.row(index) for index in chosen])
            yield batch.to(self.strategy.device)

    def describe(self) -> list[tuple[str, str]]:
        lines = [self._describe]
        if self._stores:
            size = sum(path.stat().st_size for store in self._stores for path in store.folder.glob("*.bin"))
            lines.append(("teacher on disk", f"{units.megabytes(size)}, {self._stores[0].key.count} ids a position"))
        return lines


def _fixed(rows: Rows) -> FixedRows:
    """The rows, if they are the same ones in every epoch. Raises UserError if not."""
    if isinstance(rows, BestFitRows | WholeRows):
        return rows
    raise UserError(
        "a stream cuts the text anew in each epoch, so the teacher's predictions cannot be kept",
        where="data.packing",
        got="stream",
        wanted="whole, or objective.mode=logits",
    )


def _all_files(shards: Shards) -> str:
    return sha256_text(" ".join(f"{name} {facts['sha256']}" for name, facts in sorted(shards.meta["files"].items())))


def make_store(
    teacher: Transformer, rows: FixedRows, folder: Path, key: Key, strategy: Strategy, report: Report, micro_rows: int
) -> Store:
    """Have the teacher read every row once and keep its predictions; each rank reads its share. A stop loses little.

    rows: in an order that is always the same one.
    """
    slots = Slots(rows.shards)
    writer = Writer(folder, key, slots.count)
    done = strategy.broadcast(writer.begin() if strategy.rank == 0 else None)
    writer.open()
    report(f"the teacher reads {max(0, rows.rows_per_epoch - done):,} rows, once")
    places = numbered(rows)
    stride = strategy.world * micro_rows
    for number, first in enumerate(range(done, rows.rows_per_epoch, stride), start=1):
        mine = range(
            first + strategy.rank * micro_rows, min(first + (strategy.rank + 1) * micro_rows, rows.rows_per_epoch)
        )
        if mine:
            batch = collate([rows.row(index) for index in mine]).to(strategy.device)
            id_NK, logp_NJ = read_teacher(teacher, batch, key)
            slot_N = np.concatenate([slots.of(places.row(index)) for index in mine])
            writer.write(slot_N, id_NK.cpu().numpy(), logp_NJ.cpu().numpy())
        if number % SYNC_BATCHES == 0:
            writer.flush()
            strategy.any(False)
            if strategy.rank == 0:
                writer.note(first + stride)
    writer.flush()
    strategy.any(False)
    if strategy.rank == 0:
        writer.finish({"rows": rows.rows_per_epoch})
    strategy.any(False)
    return Store(folder / key.name, key)


@torch.no_grad()
def read_teacher(teacher: Transformer, batch: Batch, key: Key) -> tuple[Tensor, Tensor]:
    """What a store holds of a batch's positions of weight above 0."""
    hidden_ND = teacher.hidden(batch.ids_BT, batch.document_BT).flatten(0, 1)
    if batch.scored_N is not None:
        hidden_ND = hidden_ND[batch.scored_N]
    weight_VD = teacher.head_weight_VD
    return likeliest(
        hidden_ND,
        weight_VD,
        teacher.compute_dtype or weight_VD.dtype,
        count=key.count,
        num_ids=key.num_ids,
        temperature=key.temperature,
    )


class Taught:
    """Rows joined with what a store holds of them."""

    def __init__(self, rows: FixedRows, store: Store) -> None:
        self.rows, self.store, self.places, self.slots = rows, store, numbered(rows), Slots(rows.shards)

    def batch(self, indices: Sequence[int]) -> TaughtBatch:
        batch = collate([self.rows.row(index) for index in indices])
        slot_N = np.concatenate([self.slots.of(self.places.row(index)) for index in indices])
        id_NK, logp_NJ = self.store.read(slot_N)
        return TaughtBatch(**vars(batch), top_id_NK=torch.from_numpy(id_NK), top_logp_NJ=torch.from_numpy(logp_NJ))


class StoredSource(PackedSource):
    """`PackedSource` with the teacher's predictions."""

    def __init__(self, rows: FixedRows, store: Store, *, micro_rows: int, rank: int = 0, world: int = 1) -> None:
        super().__init__(rows, micro_rows=micro_rows, rank=rank, world=world)
        self._taught = Taught(rows, store)

    def __next__(self) -> Batch:
        first = self._next_row + self.rank * self.micro_rows
        self._next_row += self.world * self.micro_rows
        return self._taught.batch(range(first, first + self.micro_rows))

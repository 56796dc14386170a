"""Distillation on data: rows of pretraining or SFT, with a frozen teacher or its predictions on disk."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.data.packing.concat import FixedRows, Rows
from penjing.data.packing.mix import MixedRows
from penjing.data.teacher_logits_cache import (
    CacheKey,
    PositionSlots,
    TeacherLogitsCache,
    TeacherLogitsWriter,
    find,
    fixed_order,
    with_positions,
)
from penjing.kernels.fused_distillation_loss import top_k_log_probs
from penjing.loader.batch import Batch, collate
from penjing.loader.batch_source import PackedSource, Source
from penjing.objective.distill import DistillBatch, run_teacher
from penjing.objective.next_token import LOSS_METRIC
from penjing.train.stages.base import DatasetSize
from penjing.train.stages.held_out import held_out_means
from penjing.train.stages.next_token import NextTokenStage
from penjing.train.stages.run_data import on_rank_0
from penjing.train.stages.teacher_model import TeacherStage, relative_cost

SYNC_BATCHES = 64  # batches of the teacher after which ranks synchronise and store their progress


class DistillStage(TeacherStage):
    """Rows of packed text or conversations with the teacher's predictions, computed in each step or read from disk."""

    def prepare_data(self) -> None:
        """Makes the tokenizer and shards if missing."""
        what = "the teacher needs texts or conversations; prompts are for objective.mode=on_policy"
        self.need_format(what, "documents", "chats")
        teacher = self.read_teacher()
        self._data = NextTokenStage(self.run, self.strategy, self.report)
        self._data.prepare_data()
        self.tokenizer, self.fingerprint, self.notes = self._data.tokenizer, self._data.fingerprint, self._data.notes
        self.set_teacher(teacher)

    def conversations(self) -> tuple[int, int]:
        return self._data.conversations()

    def prepare_rows(self) -> None:
        assert self.teacher is not None
        self._data.run = self.run
        self._data.prepare_rows()
        self._cost = relative_cost(self.run, self.teacher, self._data.size().num_keys)
        self._stores: list[TeacherLogitsCache] = []
        if self.settings.mode == "top_k":
            self._stores = [self._store(rows) for rows in (self._data.rows, self._data.held_out) if rows is not None]
            self.teacher = None

    def _store(self, rows: Rows) -> TeacherLogitsCache:
        fixed = _fixed(rows)
        hashes = [f"{name} {facts['sha256']}" for name, facts in sorted(fixed.shards.meta["files"].items())]
        key = CacheKey(
            teacher=self.teacher_sha256,
            data=sha256_text(" ".join(hashes)),
            layout=f"{fixed.shards.kind} in rows of {fixed.seq_len}",
            count=min(self.settings.top_k, self.num_ids - 1),
            num_ids=self.num_ids,
            temperature=self.settings.temperature,
        )
        folder = Path(self.settings.store) if self.settings.store else Path(self.run.out) / "teacher"
        if not on_rank_0(self.strategy, lambda: find(folder, key) is not None):
            self._make_store(fixed_order(fixed), folder, key)
        return TeacherLogitsCache(folder / key.name, key)

    def _make_store(self, rows: FixedRows, folder: Path, key: CacheKey) -> None:
        """Run the teacher on every row once and store its predictions; each rank takes its share. Progress is stored,
        so that an interruption loses little.

        rows: in a fixed order.
        """
        strategy, micro_size, teacher, slots = self.strategy, self.micro_size, self.teacher, PositionSlots(rows.shards)
        assert teacher is not None
        writer = TeacherLogitsWriter(folder, key, slots.count)
        done = on_rank_0(strategy, writer.begin)
        writer.open()
        self.report(f"the teacher reads {max(0, rows.rows_per_epoch - done):,} rows, once")
        positions = with_positions(rows)
        stride = strategy.world * micro_size
        for number, first in enumerate(range(done, rows.rows_per_epoch, stride), start=1):
            local = range(first, min(first + stride, rows.rows_per_epoch))[strategy.rank * micro_size :][:micro_size]
            if local:
                batch = collate([rows.row(index) for index in local]).to(strategy.device)
                id_NK, logp_NJ = top_k_log_probs(
                    *run_teacher(teacher, batch), count=key.count, num_ids=key.num_ids, temperature=key.temperature
                )
                slot_N = np.concatenate([slots.of(positions.row(index)) for index in local])
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

    def size(self) -> DatasetSize:
        return replace(self._data.size(), extra_forwards=0.0 if self._stores else self._cost)

    def sources(self, num_units: int) -> list[dict[str, Any]]:
        return self._data.sources(num_units)

    def source(self, micro_size: int, rank: int, world: int) -> Source:
        if not self._stores:
            return self._data.source(micro_size, rank, world)
        rows = _fixed(self._data.rows)
        make = DistillRows(rows, self._stores[0]).batch
        seed = self.noise_seed
        return PackedSource(rows, micro_size=micro_size, rank=rank, world=world, make=make, noise_seed=seed)

    def example_batch(self, micro_size: int, device: torch.device) -> Batch:
        batch = NextTokenStage(self.run, self.strategy).example_batch(micro_size, device)
        if self.settings.mode != "top_k":
            return batch
        num_scored, count = len(batch.target_N), self.settings.top_k
        return DistillBatch(
            **vars(batch),
            top_id_NK=torch.empty(num_scored, count, dtype=torch.int32, device=device),
            top_logp_NJ=torch.empty(num_scored, count + 1, dtype=torch.float16, device=device),
        )

    def validate(self) -> dict[str, float]:
        """Cross-entropy, KL and agreement on the held-out rows, each row on one rank."""
        names = (LOSS_METRIC, "kl", "agreement")
        metrics = held_out_means(self.objective(), self.model, self._held_out(), self.strategy, names)
        return self._data.with_bits_per_byte(metrics)

    def _held_out(self) -> Iterator[Batch]:
        rows = self._data.held_out
        assert rows is not None
        with_teacher = DistillRows(_fixed(rows), self._stores[1]) if self._stores else None
        for indices in self._data.held_out_indices(self.micro_size):
            yield with_teacher.batch(indices) if with_teacher else collate([rows.row(index) for index in indices])

    def describe(self) -> list[tuple[str, str]]:
        lines = super().describe()
        if self._stores:
            size = sum(path.stat().st_size for store in self._stores for path in store.folder.glob("*.bin"))
            lines.append(("teacher on disk", f"{units.megabytes(size)}, {self._stores[0].key.count} ids a position"))
        return lines


def _fixed(rows: Rows) -> FixedRows:
    """The rows with the layout of the first epoch in every epoch. Raises UserError if they have none."""
    if isinstance(rows, FixedRows):
        fixed = copy.copy(rows)
        fixed.repacks, fixed._epoch = False, -1
        return fixed
    if isinstance(rows, MixedRows):
        what = "the teacher's predictions cannot be stored for mixed sources"
        raise UserError(what, where="data.weights", wanted="it left out, or objective.mode=logits")
    what = "packing=concat cuts the text differently in each epoch, so the teacher's predictions cannot be stored"
    raise UserError(what, where="data.packing", got="concat", wanted="best_fit, or objective.mode=logits")


class DistillRows:
    """Rows joined with what a store holds of them."""

    def __init__(self, rows: FixedRows, store: TeacherLogitsCache) -> None:
        self.rows, self.store, self.places, self.slots = rows, store, with_positions(rows), PositionSlots(rows.shards)

    def batch(self, indices: Sequence[int]) -> DistillBatch:
        batch = collate([self.rows.row(index) for index in indices])
        slot_N = np.concatenate([self.slots.of(self.places.row(index)) for index in indices])
        id_NK, logp_NJ = self.store.read(slot_N)
        return DistillBatch(**vars(batch), top_id_NK=torch.from_numpy(id_NK), top_logp_NJ=torch.from_numpy(logp_NJ))

"""Next-token training on texts (pretraining) or conversations (SFT): tokenizer, shards, rows, held-out loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.packing.best_fit import BestFitRows
from penjing.data.packing.concat import ConcatRows, Order, PackedRows, Rows
from penjing.data.token_shards import META, TokenShards
from penjing.data.tokenize_dataset import prepare_chats, prepare_documents
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch import Batch, collate
from penjing.loader.batch_source import PackedSource, Source
from penjing.objective.next_token import LOSS_METRIC, NextToken, NextTokenSettings
from penjing.plan.flops import mean_keys
from penjing.track.run_dir import RunDir
from penjing.train.config import Run
from penjing.train.stages.base import DatasetSize, Report, Stage
from penjing.train.stages.example_batches import example_rows
from penjing.train.stages.held_out import held_out_means
from penjing.train.stages.run_data import on_rank_0, run_tokenizer, tokenized


class NextTokenStage(Stage[NextTokenSettings]):
    """Rows of packed text or conversations, and the loss on those held out by hash."""

    def prepare_data(self) -> None:
        run, folder = self.run, self.folder
        shards, notes = on_rank_0(self.strategy, lambda: make_shards(run, run_tokenizer(run, self.report), self.report))
        self.tokenizer = Tokenizer.load(folder.tokenizer)
        train, validation = TokenShards(shards / "train"), TokenShards(shards / "validation")
        for half in (train, validation):
            if half.meta["tokenizer"] != self.tokenizer.fingerprint:
                raise UserError(
                    "these token shards were made with another tokenizer",
                    where=half.folder,
                    next_step="Give the text itself as data.train, or tokenizer.path=the one they were made with.",
                )
        self.fingerprint, self._shards = train.fingerprint, (train, validation)
        self.notes += notes

    def conversations(self) -> tuple[int, int]:
        longest = max(int((half.end_D - half.start_D).max(initial=0)) for half in self._shards)
        return self._shards[0].num_tokens, longest

    def prepare_rows(self) -> None:
        train, validation = self._shards
        self.rows = make_rows(self.run, train, self.tokenizer)
        self.held_out = make_rows(self.run, validation, self.tokenizer, validation=True)
        targets = validation.num_tokens + validation.num_documents
        self.targets_per_byte = targets / max(1, validation.num_bytes)
        self._num_keys = mean_keys(train.end_D - train.start_D, self.run.data.seq_len)

    def size(self) -> DatasetSize:
        positions = self.rows.rows_per_epoch * self.rows.seq_len
        padding = self.rows.padding_per_epoch / positions
        return DatasetSize(
            unit="rows",
            units_per_epoch=self.rows.rows_per_epoch,
            tokens_per_unit=self.rows.seq_len * (1 - padding),
            seq_len=self.rows.seq_len,
            num_keys=self._num_keys,
            padding_fraction=padding,
            held_out_units=min(self.run.eval.sequences, self.held_out.rows_per_epoch),
        )

    def source(self, micro_size: int, rank: int, world: int) -> Source:
        return PackedSource(self.rows, micro_size=micro_size, rank=rank, world=world)

    def objective(self) -> NextToken:
        return NextToken(self.router)

    def example_batch(self, micro_size: int, device: torch.device) -> Batch:
        with_edges = devices.of(self.strategy.device).uses_cu_seqlens
        return example_rows(micro_size, self.run.data.seq_len, device, with_edges=with_edges)

    def validate(self) -> dict[str, float]:
        batches = (
            collate([self.held_out.row(index) for index in indices])
            for indices in self.held_out_indices(self.micro_size)
        )
        return self.with_bits_per_byte(held_out_means(NextToken(), self.model, batches, self.strategy, [LOSS_METRIC]))

    def held_out_indices(self, size: int) -> Iterator[range]:
        """The held-out rows of each of this rank's batches."""
        count, strategy = min(self.run.eval.sequences, self.held_out.rows_per_epoch), self.strategy
        local = range(strategy.rank, count, strategy.world)
        return (local[first : first + size] for first in range(0, len(local), size))

    def with_bits_per_byte(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics, for texts with bits per byte, which do not depend on the tokenizer."""
        if self.run.data.format != "documents":
            return metrics
        nats = metrics[f"val_{LOSS_METRIC}"]
        return {**metrics, "val_bits_per_byte": nats / math.log(2) * self.targets_per_byte}


def make_rows(run: Run, shards: TokenShards, tokenizer: Tokenizer, *, validation: bool = False) -> Rows:
    """Pack shards by the run's settings; held-out rows have a fixed order, and are shorter if there is little text."""
    seq_len = run.data.seq_len
    if shards.kind != run.data.format:
        raise UserError("token shards of another kind", where="data.train", got=shards.kind, wanted=run.data.format)
    if validation and shards.kind == "documents":
        seq_len = max(1, min(seq_len, shards.num_tokens + shards.num_documents - 1))
    packers: dict[str, type[Rows]] = {"best_fit": BestFitRows, "concat": ConcatRows}
    packer = PackedRows if shards.kind == "chats" else packers[run.data.packing]
    order: Order = "fixed" if validation else run.data.order
    seed = derive(run.seed, "order")
    return packer(shards, seq_len, end_of_text=tokenizer.end_of_text, seed=seed, order=order)


def make_shards(run: Run, tokenizer: Tokenizer, report: Report) -> tuple[Path, list[str]]:
    """The folder with `train` and `validation` shards, and notes."""
    shards = RunDir(Path(run.out)).shards
    if run.data.format != "chats":
        return tokenized(run, shards, META, tokenizer, prepare_documents, report)
    thinking = False if run.data.thinking == "switch" else None
    return tokenized(run, shards, META, tokenizer, prepare_chats, report, seq_len=run.data.seq_len, thinking=thinking)

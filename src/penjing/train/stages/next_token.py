"""Next-token training on texts (pretraining) or conversations (SFT): tokenizer, shards, rows, held-out loss."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.packing.best_fit import BestFitRows
from penjing.data.packing.concat import ConcatRows, Order, PackedRows, Rows
from penjing.data.packing.mix import MixedRows, MixedSource
from penjing.data.token_shards import META, TokenShards
from penjing.data.tokenize_dataset import prepare_chats, prepare_documents
from penjing.data.tokenizer.bpe_dropout import BpeDropout
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch import Batch, collate
from penjing.loader.batch_source import PackedSource, Source
from penjing.model.cooccurrence import cooccurrence_embedding
from penjing.objective.next_token import LOSS_METRIC, MTP_SHARE, NextToken, NextTokenSettings
from penjing.plan.flops import mean_keys
from penjing.track.run_dir import RunDir
from penjing.train.config import Run
from penjing.train.stages.base import DatasetSize, Report, Stage
from penjing.train.stages.example_batches import example_rows
from penjing.train.stages.held_out import held_out_means
from penjing.train.stages.run_data import on_rank_0, run_tokenizer, tokenized

VAL_LOSS = f"val_{LOSS_METRIC}"
COUNTED_TOKENS = 1 << 22  # of the training text, for `embedding_init`
BPE_DROPOUT_SHARE = 0.7  # of the epochs; the others read the tokens that the model is used with


class NextTokenStage(Stage[NextTokenSettings]):
    """Rows of packed text or conversations, and the loss on those held out by hash."""

    def prepare_data(self) -> None:
        run, folder = self.run, self.folder
        shards, notes = on_rank_0(self.strategy, lambda: make_shards(run, run_tokenizer(run, self.report), self.report))
        self.tokenizer = Tokenizer.load(folder.tokenizer)
        train, validation = TokenShards(shards / "train"), TokenShards(shards / "validation")
        for half in (train, validation):
            if half.meta["tokenizer"] != self.tokenizer.fingerprint:
                what = "these token shards were made with another tokenizer"
                hint = "Give the text itself as data.train, or tokenizer.path=the one they were made with."
                raise UserError(what, where=half.folder, next_step=hint)
        self.fingerprint, self._shards = train.fingerprint, (train, validation)
        self.notes += notes

    def conversations(self) -> tuple[int, int]:
        longest = max(int((half.end_D - half.start_D).max(initial=0)) for half in self._shards)
        return self._shards[0].num_tokens, longest

    def prepare_rows(self) -> None:
        run, (train, validation) = self.run, self._shards
        self.rows = make_rows(run, train, self.tokenizer)
        self.held_out = make_rows(run, validation, self.tokenizer, validation=True) if run.data.holds_out else None
        self.targets_per_byte = _targets_per_byte(validation)
        self._num_keys = mean_keys(train.end_D - train.start_D, run.data.seq_len)
        if isinstance(self.rows, MixedRows):
            parts = [one.rows.shards for one in self.rows.sources]
            keys = [mean_keys(part.end_D - part.start_D, run.data.seq_len) for part in parts]
            self._num_keys = float(np.dot(self.rows.phases[0], keys))
        if isinstance(self.held_out, MixedRows):
            rates = [_targets_per_byte(one.rows.shards) for one in self.held_out.sources]
            scored = {number: scored for number, (_, scored) in self._held_out_parts.items()}
            self.targets_per_byte = sum(scored.values()) / sum(scored[number] / rates[number] for number in scored)

    def initial_embedding(self) -> Tensor | None:
        if self.run.embedding_init == "normal":
            return None

        def make() -> Tensor:
            self.report("embedding: which tokens stand beside each other")
            model, ids_N = self.run.model, _counted_ids(self._shards[0], self.tokenizer.end_of_text)
            seed = derive(self.run.seed, "embedding")
            return cooccurrence_embedding(ids_N, model.vocab_size, model.hidden_size, seed)

        return on_rank_0(self.strategy, make)

    def size(self) -> DatasetSize:
        return DatasetSize(
            unit="rows",
            units_per_epoch=self.rows.rows_per_epoch,
            tokens_per_unit=self.rows.seq_len * self.rows.filled,
            seq_len=self.rows.seq_len,
            num_keys=self._num_keys,
            padding_fraction=1 - self.rows.filled,
            held_out_units=self._num_held_out,
        )

    def sources(self, num_units: int) -> list[dict[str, Any]]:
        found = []
        if isinstance(self.rows, MixedRows):
            counts = self.rows.counts(num_units)
            filled = [count * one.rows.filled for one, count in zip(self.rows.sources, counts, strict=True)]
            for one, count, rows in zip(self.rows.sources, counts, filled, strict=True):
                share, epochs = rows / sum(filled), count / one.rows.rows_per_epoch
                found.append((one.name, one.rows.shards.num_tokens, share, epochs))
        else:
            train, epochs = self._shards[0], num_units / self.rows.rows_per_epoch
            parts = train.sources()
            for name, _, part in parts if len(parts) > 1 else []:
                found.append((name, part.num_tokens, part.num_tokens / train.num_tokens, epochs))
        return [dict(zip(("name", "tokens", "share", "epochs"), values, strict=True)) for values in found]

    def source(self, micro_size: int, rank: int, world: int) -> Source:
        make, seed = self._batch if self._mtp_weight else None, self.noise_seed
        return PackedSource(self.rows, micro_size=micro_size, rank=rank, world=world, make=make, noise_seed=seed)

    @property
    def _mtp_weight(self) -> float:
        """At the start; 0 also where distillation reads its rows here."""
        return self.settings.mtp_weight if isinstance(self.settings, NextTokenSettings) else 0.0

    def _batch(self, indices: range) -> Batch:
        """Rows with the weight of multi-token prediction at their step."""
        run, per_epoch = self.run, self.rows.rows_per_epoch
        num_steps = run.max_steps or math.ceil(run.epochs * per_epoch / run.batch.size)
        left = max(0.0, 1 - indices.start // run.batch.size / (MTP_SHARE * num_steps))
        batch = collate([self.rows.row(index) for index in indices])
        return replace(batch, mtp_weight=torch.tensor(self._mtp_weight * left))

    def objective(self) -> NextToken:
        return NextToken(self.router)

    def example_batch(self, micro_size: int, device: torch.device) -> Batch:
        with_edges = devices.of(self.strategy.device).uses_cu_seqlens
        batch = example_rows(micro_size, self.run.data.seq_len, device, with_edges=with_edges)
        if self.noise_seed is not None:
            batch = replace(batch, noise_B=batch.ids_BT.new_empty(micro_size))
        return replace(batch, mtp_weight=batch.weight_N.new_ones(())) if self._mtp_weight else batch

    def validate(self) -> dict[str, float]:
        if isinstance(self.held_out, MixedRows):
            return self._validate_sources(self.held_out)
        batches = map(self._held_out_batch, self.held_out_indices(self.micro_size))
        return self.with_bits_per_byte(held_out_means(NextToken(), self.model, batches, self.strategy, [LOSS_METRIC]))

    def _validate_sources(self, rows: MixedRows) -> dict[str, float]:
        """The loss over all sources in their shares, and of each source."""
        metrics, nats, targets = dict[str, float](), 0.0, 0.0
        labels = source_labels([one.name for one in rows.sources])
        for number, (indices, scored) in self._held_out_parts.items():
            batches = map(self._held_out_batch, self._local_batches(indices, self.micro_size))
            loss = held_out_means(NextToken(), self.model, batches, self.strategy, [LOSS_METRIC])[VAL_LOSS]
            nats, targets = nats + loss * scored, targets + scored
            one, metric = rows.sources[number], VAL_LOSS
            if self.run.data.format == "documents":
                loss, metric = loss / math.log(2) * _targets_per_byte(one.rows.shards), "val_bits_per_byte"
            metrics[f"{metric}_{labels[number]}"] = loss
        return {**self.with_bits_per_byte({VAL_LOSS: nats / targets}), **metrics}

    @cached_property
    def _held_out_parts(self) -> dict[int, tuple[list[int], float]]:
        """By source: its held-out rows, and the weight of their targets. Not of sources without any."""
        rows, parts = self.held_out, dict[int, tuple[list[int], float]]()
        assert isinstance(rows, MixedRows)
        for index in range(self._num_held_out):
            indices, scored = parts.get(rows.place(index)[0], ([], 0.0))
            parts[rows.place(index)[0]] = [*indices, index], scored + float(rows.row(index).weight_T.sum())
        return dict(sorted(parts.items()))

    @property
    def _num_held_out(self) -> int:
        return min(self.run.eval.sequences, self.held_out.rows_per_epoch) if self.held_out is not None else 0

    def _held_out_batch(self, indices: Sequence[int]) -> Batch:
        assert self.held_out is not None
        return collate([self.held_out.row(index) for index in indices])

    def held_out_indices(self, size: int) -> Iterator[Sequence[int]]:
        """The held-out rows of each of this rank's batches."""
        return self._local_batches(range(self._num_held_out), size)

    def _local_batches(self, indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
        local = indices[self.strategy.rank :: self.strategy.world]
        return (local[first : first + size] for first in range(0, len(local), size))

    def with_bits_per_byte(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics, for texts with bits per byte, which do not depend on the tokenizer."""
        if self.run.data.format != "documents":
            return metrics
        nats = metrics[VAL_LOSS]
        return {**metrics, "val_bits_per_byte": nats / math.log(2) * self.targets_per_byte}


def _counted_ids(shards: TokenShards, end_of_text: int) -> npt.NDArray[np.int64]:
    """About COUNTED_TOKENS tokens, of documents from all over the text, each after an end-of-text token."""
    stride, left = max(1, shards.num_tokens // COUNTED_TOKENS), COUNTED_TOKENS
    parts: list[npt.ArrayLike] = []
    for first, end in zip(shards.start_D[::stride], shards.end_D[::stride], strict=True):
        parts += [[end_of_text], shards.token_N[first : min(end, first + left)]]
        left -= end - first
        if left <= 0:
            break
    return np.concatenate(parts).astype(np.int64)


def _targets_per_byte(shards: TokenShards) -> float:
    return (shards.num_tokens + shards.num_documents) / max(1, shards.num_bytes)


def source_labels(names: Sequence[str]) -> list[str]:
    """Short and different names of sources, for metrics."""
    paths = [Path(name) if Path(name).name.strip("*?").partition(".")[0] else Path(name).parent for name in names]
    short = [path.name.partition(".")[0] or "text" for path in paths]
    return [one if short.count(one) == 1 else f"{one}_{number}" for number, one in enumerate(short, start=1)]


def make_rows(run: Run, shards: TokenShards, tokenizer: Tokenizer, *, validation: bool = False) -> Rows:
    """Pack shards by the run's settings, with `data.weights` each source by itself.

    Held-out rows have a fixed order. They are mixed alike, or evenly if data.validation names several sources.
    """
    data = run.data
    if shards.kind != data.format:
        raise UserError("token shards of another kind", where="data.train", got=shards.kind, wanted=data.format)
    named, shares = shards.sources(), data.weights
    if validation and shards.meta.get("sources", {}).get("train") != shards.meta.get("sources", {}).get("validation"):
        shares = (1.0,) * len(named) if len(named) > 1 else ()  # files of their own
    if not shares:
        return _packed(run, shards, tokenizer, validation)
    if len(named) != len(shares):
        found = ", ".join(name for name, _, _ in named) or "no sources by name (they are of an older version)"
        raise data.error("weights", "not one for each source", wanted=f"{len(named)}: the tokens have {found}")
    finals = data.final_weights if data.final_weights and not validation else shares
    sources, used = [], []
    for number, (name, first, part) in enumerate(named):
        has_row = part.num_documents and (data.format == "chats" or part.num_tokens + part.num_documents > data.seq_len)
        if (shares[number] or finals[number]) and (has_row or not validation):
            sources.append(MixedSource(name, _packed(run, part, tokenizer, validation), first))
            used.append(number)
    if not any(shares[number] for number in used):
        return _packed(run, shards, tokenizer, validation)
    per_epoch = sum(one.rows.rows_per_epoch for one in sources)
    num_rows = run.max_steps * run.batch.size or math.ceil(run.epochs * per_epoch)
    limits = data.max_epochs * (len(named) // len(data.max_epochs)) if data.max_epochs and not validation else ()
    rows = MixedRows(
        sources,
        [shares[number] for number in used],
        seed=run.seed,
        final_shares=[finals[number] for number in used],
        final_row=round(num_rows * (1 - data.final_fraction)),
        max_epochs=[limits[number] for number in used] if limits else (),
    )
    if limits:
        _check_epochs(run, rows, num_rows)
    if validation:  # no row twice
        counted = [one.rows.rows_per_epoch / share for one, share in zip(sources, rows.phases[0], strict=True) if share]
        rows.rows_per_epoch = max(1, int(min(counted)))
    return rows


def _check_epochs(run: Run, rows: MixedRows, num_rows: int) -> None:
    """Raises UserError if all sources with a share have given what they may before the run ends."""
    counts = rows.counts(num_rows)
    if missing := sum(max(0, count - most) for count, most in zip(counts, rows.limit_S.tolist(), strict=True)):
        found = ", ".join(f"{one.name}: {one.rows.rows_per_epoch:,} rows" for one in rows.sources)
        wanted = f"{num_rows:,} rows for the run, of which {missing:,} are missing"
        raise run.data.error("max_epochs", "too few for so long a run", got=found, wanted=wanted)


def _packed(run: Run, shards: TokenShards, tokenizer: Tokenizer, validation: bool) -> Rows:
    """The rows of shards or of a source; held-out rows are shorter if there is little text."""
    seq_len = run.data.seq_len
    if validation and shards.kind == "documents":
        seq_len = max(1, min(seq_len, shards.num_tokens + shards.num_documents - 1))
    packers: dict[str, type[Rows]] = {"best_fit": BestFitRows, "concat": ConcatRows}
    packer = PackedRows if shards.kind == "chats" else packers[run.data.packing]
    order: Order = "fixed" if validation else run.data.order
    seed = derive(run.seed, "order")
    rows = packer(shards, seq_len, end_of_text=tokenizer.end_of_text, seed=seed, order=order)
    if isinstance(rows, BestFitRows) and run.regularization.bpe_dropout and not validation:
        num_epochs = run.max_steps * run.batch.size / rows.rows_per_epoch or run.epochs
        rows.bpe_dropout = BpeDropout(
            shards, tokenizer, run.regularization.bpe_dropout, BPE_DROPOUT_SHARE * num_epochs, run.seed
        )
    return rows


def make_shards(run: Run, tokenizer: Tokenizer, report: Report) -> tuple[Path, list[str]]:
    """The folder with `train` and `validation` shards, and notes."""
    shards = RunDir(Path(run.out)).shards
    if run.data.format != "chats":
        return tokenized(run, shards, META, tokenizer, prepare_documents, report)
    thinking = False if run.data.thinking == "switch" else None
    return tokenized(run, shards, META, tokenizer, prepare_chats, report, seq_len=run.data.seq_len, thinking=thinking)

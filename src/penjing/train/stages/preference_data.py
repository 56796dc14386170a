"""Base of the stages that learn from preferences: files, groups of tokens, and held-out questions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.preference_shards import META, PreferenceShards, prepare_groups
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch_source import Source
from penjing.loader.group_sampler import EpochOrder, group_source, pack_tight
from penjing.loader.shared_prompt_batch import AnswerBatch, Group
from penjing.train.stages.base import DatasetSize, S, Stage
from penjing.train.stages.run_data import on_rank_0, run_tokenizer, tokenized

CHUNK = 32  # most groups of a forward pass without gradients; the same for any number of ranks


class PreferenceGroups(ABC):
    """Training or held-out data: prompts with their answers, by index."""

    def __init__(self, tokens: PreferenceShards) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @abstractmethod
    def group(self, index: int) -> Group: ...


class PreferenceDataStage(Stage[S]):
    """Prompts with labelled answers, for training and held out."""

    train: PreferenceGroups
    held_out: PreferenceGroups
    thoughts: ClassVar = True  # whether the model reads them

    @abstractmethod
    def groups(self, tokens: PreferenceShards) -> PreferenceGroups:
        """Training or held-out data as groups for batches. Raises UserError for groups that the objective rejects."""

    def prepare_data(self) -> None:
        run, folder = self.run, self.folder.path / "groups"
        self.need_format(f"objective.name={run.objective.name} learns from preferences", "preferences")

        def make() -> tuple[Path, list[str]]:
            tokenizer = run_tokenizer(run, self.report)
            options = {"seq_len": run.data.seq_len, "thoughts": self.thoughts}
            return tokenized(run, folder, META, tokenizer, prepare_groups, self.report, **options)

        path, notes = on_rank_0(self.strategy, make)
        self.tokenizer = Tokenizer.load(self.folder.tokenizer)
        self.tokens = {half: self._checked(PreferenceShards(path / half)) for half in ("train", "validation")}
        self.fingerprint = self.tokens["train"].fingerprint
        self.notes += notes
        self.train, self.held_out = (self.groups(half) for half in self.tokens.values())

    def _checked(self, tokens: PreferenceShards) -> PreferenceShards:
        if tokens.meta["tokenizer"] != self.tokenizer.fingerprint:
            hint = "Give the preferences themselves as data.train, or tokenizer.path=the one of the groups."
            raise UserError("these token groups were made with another tokenizer", where=tokens.folder, next_step=hint)
        if tokens.meta["seq_len"] > self.run.data.seq_len:
            wanted = f"at least {tokens.meta['seq_len']}"
            raise self.run.error("data.seq_len", "these token groups were made for longer rows", wanted=wanted)
        if tokens.meta.get("thoughts", self.thoughts) != self.thoughts:  # missing in groups of older versions
            got = f"groups {'without' if self.thoughts else 'with'} them"
            hint = "Give the preferences themselves as data.train."
            raise UserError("thoughts are for DPO and no reward model", where=tokens.folder, got=got, next_step=hint)
        return tokens

    def size(self) -> DatasetSize:
        tokens, num_keys, padding = measure(self.train.group, len(self.train), self.micro_size)
        return DatasetSize(
            unit="pairs" if self.tokens["train"].has_pairs else "judged answers",
            units_per_epoch=len(self.train),
            tokens_per_unit=tokens,
            seq_len=self.run.data.seq_len,
            num_keys=num_keys,
            padding_fraction=padding,
        )

    def source(self, micro_size: int, rank: int, world: int) -> Source:
        order = EpochOrder(len(self.train), derive(self.run.seed, "order"))
        return group_source(self.train.group, order, micro_size, rank, world)

    def validation_size(self, micro_size: int) -> int:
        return self.no_grad_size

    @property
    def no_grad_size(self) -> int:
        """Groups of a forward pass without gradients: CHUNK, or batch.micro_size if that is smaller."""
        return min(CHUNK, self.run.batch.micro_size or CHUNK)

    def chunks(self, half: PreferenceGroups, number: int, size: int) -> Iterator[tuple[range, AnswerBatch]]:
        """This rank's share of the first `number` groups, `size` at a time for any number of ranks."""
        for first in range(self.strategy.rank * size, number, self.strategy.world * size):
            indices = range(first, min(first + size, number))
            yield indices, pack_tight([half.group(index) for index in indices])

    def held_out_batches(self, size: int) -> Iterator[AnswerBatch]:
        number = min(self.run.eval.sequences, len(self.held_out))
        return (batch for _, batch in self.chunks(self.held_out, number, size))


def need_pairs(groups: PreferenceShards, what: str) -> None:
    """Raise UserError unless every group is a pair."""
    if not groups.has_pairs:
        wanted = f"chosen and rejected in every record, for {what}"
        hint = "objective.loss=kto learns from single answers."
        raise UserError("labelled single answers are not pairs", where=groups.folder, wanted=wanted, next_step=hint)


def measure(make: Callable[[int], Group], num_groups: int, batch_groups: int) -> tuple[float, float, float]:
    """Means over evenly spaced groups: tokens of a group, keys that a query attends to, padding fraction of batches."""
    sample = [make(index) for index in range(0, num_groups, max(1, num_groups // 512))]
    tokens = sum(group.num_tokens for group in sample)
    keys = 0.0
    for group in sample:
        prompt = len(group.prompt)
        keys += prompt * (prompt + 1) / 2
        for answer in group.answers:
            read = len(answer.ids) - 1
            keys += read * prompt + read * (read + 1) / 2
    positions = 0
    for first in range(0, len(sample), batch_groups):
        positions += pack_tight(sample[first : first + batch_groups]).ids_BT.numel()
    return tokens / len(sample), keys / tokens, 1 - tokens / positions

"""Training of a reward model as a stage, and reading a trained one.

The number is read where the answer is all said and the end of its turn comes next. SFT has taught that position to
look at the whole answer, as it must say that it is over; at the end of the turn itself nothing was ever taught, and
reading there orders fewer held-out pairs (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.data.preference_shards import TokenGroups
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch_source import Source
from penjing.loader.group_sampler import GroupSource, pack_tight
from penjing.loader.shared_prompt_batch import Answer, AnswerBatch, Group
from penjing.model.transformer import Transformer
from penjing.model.value_head import ScalarHead
from penjing.objective.base import Objective
from penjing.objective.reward_model import MARGIN, RewardModel, RewardObjective, score_answers
from penjing.parallel.base import Strategy
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.run_dir import load_trained
from penjing.train.stages.base import Report, Size
from penjing.train.stages.preference import CHUNK, groups_of_pass, held_out_figures
from penjing.train.stages.preference_data import measure, need_pairs, prepare_judgements


class RewardStage:
    """Pairs, a decoder with a head of one number, and how often it puts held-out pairs in order."""

    runs_ahead = True

    def __init__(self, run: Run, strategy: Strategy, report: Report) -> None:
        settings = run.objective
        assert isinstance(settings, RewardModel)
        self.run, self.strategy, self.settings = run, strategy, settings
        data = prepare_judgements(run, strategy, report)
        for half in (data.train, data.validation):
            need_pairs(half, "a reward model")
        self.tokenizer, self.notes, self.fingerprint = data.tokenizer, data.notes, data.train.fingerprint
        self._train, self._validation = data.train, data.validation

    def _group(self, groups: TokenGroups, index: int) -> Group:
        known = groups[index]
        answers = [Answer(ids=answer.ids) for answer in known.answers]
        return Group(prompt=known.prompt, answers=answers, figures={MARGIN: [known.margin] * len(answers)})

    def _train_group(self, index: int) -> Group:
        return self._group(self._train, index)

    def size(self) -> Size:
        tokens, num_keys, padding = measure(
            self._train_group,
            len(self._train),
            batch_geometry(self.run, self.strategy.world, self.strategy.device).micro_size,
        )
        return Size(
            unit="pairs",
            units_per_epoch=len(self._train),
            tokens_per_unit=tokens,
            row_tokens=self.run.data.row_tokens,
            num_keys=num_keys,
            padding_fraction=padding,
        )

    def trained(self, model: Transformer) -> nn.Module:
        if model.head is not None:
            model.head.requires_grad_(False)  # no word is predicted here
        return ScalarHead(model)

    def begin(self, model: nn.Module, strategy: Strategy) -> None:
        assert isinstance(model, ScalarHead)
        self._model = model

    def source(self, micro_units: int, rank: int, world: int) -> Source:
        return GroupSource(
            self._train_group,
            len(self._train),
            micro_units=micro_units,
            seed=derive(self.run.seed, self.run.stage, "order"),
            rank=rank,
            world=world,
        )

    def objective(self) -> Objective:
        return RewardObjective(self.settings, self.run.router, biased=self.run.model.architecture == "glm4_moe")

    def validate(self) -> dict[str, float]:
        return held_out_figures(RewardObjective(self.settings), self._model, self._chunks(), self.strategy)

    def _chunks(self) -> Iterator[tuple[range, AnswerBatch]]:
        number = min(self.run.validate.rows, len(self._validation))
        size = groups_of_pass(self.run)
        for first in range(self.strategy.rank * size, number, self.strategy.world * size):
            indices = range(first, min(first + size, number))
            yield indices, pack_tight([self._group(self._validation, index) for index in indices])

    def describe(self) -> list[tuple[str, str]]:
        return [("preferences", f"{len(self._validation):,} pairs held out by question")]


class Judge:
    """A trained reward model: `rewards` of whole conversations, each ending with an answer."""

    def __init__(self, model: ScalarHead, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def rewards(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """One number each, higher for better answers; only differences mean something."""
        groups = []
        for messages in conversations:
            rendered = render(self.tokenizer, messages)
            end = max((index for index, weight in enumerate(rendered.weights) if weight), default=0)
            if not end:
                raise UserError("nothing to judge", where="messages", wanted="a conversation that ends with an answer")
            longest = self.model.model.config.max_tokens
            if end > longest:
                raise UserError("too long", where="messages", got=f"{end} tokens", wanted=f"at most {longest}")
            groups.append(Group(prompt=rendered.ids[:end], answers=[Answer(ids=[rendered.ids[end]])]))
        found: list[float] = []
        for first in range(0, len(groups), CHUNK):
            batch = pack_tight(groups[first : first + CHUNK]).to(self.model.scalar.device)
            scored = score_answers(self.model, batch)
            found += (scored[0] if isinstance(scored, tuple) else scored).tolist()
        return found


def load_judge(path: Path) -> Judge:
    """The reward model of a run made by `penjing train reward`. Raises UserError if the run is of another kind."""
    known = load_trained(path, adapters="merged")
    if known.run.objective.kind != "reward":
        raise UserError("no reward model", where=path, got=f"a run of {known.run.stage}", wanted="penjing train reward")
    model = ScalarHead(known.model)
    model.scalar.data.copy_(known.checkpoint.weights()["scalar"])
    return Judge(model.eval(), known.tokenizer)

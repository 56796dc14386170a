"""Training of a reward model as a stage, and reading a trained one.

The number is read where the answer is all said and the end of its turn comes next. SFT has taught that position to
look at the whole answer, as it must say that it is over; at the end of the turn itself nothing was ever taught, and
reading there orders fewer held-out pairs (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.data.preference_shards import PreferenceShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.group_sampler import pack_tight
from penjing.loader.shared_prompt_batch import Answer, AnswerBatch, Group
from penjing.model.transformer import Transformer
from penjing.model.value_head import ScalarHead
from penjing.objective.base import Objective
from penjing.objective.reward_model import MARGIN, RewardModel, RewardObjective, score_answers
from penjing.train.load_model import load_trained
from penjing.train.stages.example_batches import example_answers
from penjing.train.stages.held_out import held_out_means
from penjing.train.stages.preference_data import CHUNK, PreferenceDataStage, PreferenceGroups, need_pairs


class PairsWithMargin(PreferenceGroups):
    """By how much the chosen answer is better goes with each pair."""

    def group(self, index: int) -> Group:
        known = self.tokens[index]
        answers = [Answer(ids=answer.ids) for answer in known.answers]
        return Group(prompt=known.prompt, answers=answers, figures={MARGIN: [known.margin] * len(answers)})


class RewardStage(PreferenceDataStage[RewardModel]):
    """Pairs, a decoder with a head of one number, and how often it puts held-out pairs in order."""

    def groups(self, tokens: PreferenceShards) -> PairsWithMargin:
        need_pairs(tokens, "a reward model")
        return PairsWithMargin(tokens)

    def trainable(self, model: Transformer) -> nn.Module:
        if model.head is not None:
            model.head.requires_grad_(False)  # no word is predicted here
        return ScalarHead(model)

    def objective(self) -> Objective:
        return RewardObjective(self.settings, self.router)

    def example_batch(self, micro_size: int, device: torch.device) -> AnswerBatch:
        return example_answers((micro_size, 2, self.run.data.seq_len), device, figures=(MARGIN,))

    def validate(self) -> dict[str, float]:
        batches = self.held_out_batches(self.no_grad_size)
        return held_out_means(RewardObjective(self.settings), self.model, batches, self.strategy)

    def describe(self) -> list[tuple[str, str]]:
        return [("preferences", f"{len(self.held_out):,} pairs held out by question")]


class RewardScorer:
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
            longest = self.model.model.config.max_position_embeddings
            if end > longest:
                raise UserError("too long", where="messages", got=f"{end} tokens", wanted=f"at most {longest}")
            groups.append(Group(prompt=rendered.ids[:end], answers=[Answer(ids=[rendered.ids[end]])]))
        found: list[float] = []
        for first in range(0, len(groups), CHUNK):
            batch = pack_tight(groups[first : first + CHUNK]).to(self.model.scalar.device)
            found += score_answers(self.model, batch).tolist()
        return found


def load_reward_model(path: Path) -> RewardScorer:
    """The reward model of a run made by `penjing train reward`. Raises UserError if the run is of another kind."""
    known = load_trained(path, adapters="merged")
    if known.run.objective.name != "reward":
        raise UserError("no reward model", where=path, got=f"a run of {known.run.stage}", wanted="penjing train reward")
    model = ScalarHead(known.model)
    model.scalar.data.copy_(known.checkpoint.weights()["scalar"])
    return RewardScorer(model.eval(), known.tokenizer)

"""The stage that trains a reward model, and the scorer that uses a trained one.

The reward is read at the answer's last token before the end of turn. SFT has trained that position to attend to the
full answer, because it must predict the end. The end-of-turn token itself was never trained to predict anything, and
reading there orders fewer held-out pairs correctly (docs/log.md).

Conversations are read without thoughts, in training and scoring: people compare answers, and a policy could not raise
its reward by what it thinks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

Conversation = tuple[Sequence[Message], Sequence[dict[str, Any]]]  # messages, and the tools on offer


class PairsWithMargin(PreferenceGroups):
    """Pairs with the margin by which the chosen answer is better."""

    def group(self, index: int) -> Group:
        pair = self.tokens[index]
        answers = [Answer(ids=answer.ids) for answer in pair.answers]
        return Group(prompt=pair.prompt, answers=answers, figures={MARGIN: [pair.margin] * len(answers)})


class RewardStage(PreferenceDataStage[RewardModel]):
    """Pairs, a decoder with a scalar head, and its accuracy on held-out pairs."""

    thoughts = False

    def groups(self, tokens: PreferenceShards) -> PairsWithMargin:
        need_pairs(tokens, "a reward model")
        return PairsWithMargin(tokens)

    def trainable(self, model: Transformer) -> nn.Module:
        if model.head is not None:
            model.head.requires_grad_(False)  # no token is predicted
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
    """A trained reward model: `rewards` of conversations that end with an answer."""

    def __init__(self, model: ScalarHead, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def rewards(self, conversations: Sequence[Conversation]) -> list[float]:
        """One reward per conversation, higher for better answers; only differences are meaningful."""
        groups = []
        for messages, tools in conversations:
            rendered = render(self.tokenizer, messages, tools, thoughts=False)
            end = max((index for index, weight in enumerate(rendered.weights) if weight), default=0)
            if not end:
                raise UserError("nothing to score", where="messages", wanted="a conversation that ends with an answer")
            longest = self.model.model.config.max_position_embeddings
            if end > longest:
                raise UserError("too long", where="messages", got=f"{end} tokens", wanted=f"at most {longest}")
            groups.append(Group(prompt=rendered.ids[:end], answers=[Answer(ids=[rendered.ids[end]])]))
        chunks = [groups[first : first + CHUNK] for first in range(0, len(groups), CHUNK)]
        device, model = self.model.scalar.device, self.model
        return [reward for one in chunks for reward in score_answers(model, pack_tight(one).to(device)).tolist()]


def load_reward_model(path: Path) -> RewardScorer:
    """The reward model of a run made by `penjing train reward`. Raises UserError if the run is of another kind."""
    saved = load_trained(path, adapters="merged", to_score=True)
    if saved.run.objective.name != "reward":
        raise UserError("no reward model", where=path, got=f"a run of {saved.run.stage}", wanted="penjing train reward")
    model = ScalarHead(saved.model)
    model.scalar.data.copy_(saved.checkpoint.weights()["scalar"])
    return RewardScorer(model.eval(), saved.tokenizer)

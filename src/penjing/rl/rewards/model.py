"""The score that a reward model gives the conversation with its answer, without thoughts.

Either a run of `penjing train reward`, or a Hugging Face directory or hub name of a sequence classifier with one
output, whose own tokenizer and chat template are used.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penjing.base.errors import UserError, import_extra
from penjing.data.formats import Message
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Reward, RewardInput, RewardRuntime
from penjing.track.run_dir import is_run_or_checkpoint
from penjing.train.stages.reward import Conversation, load_reward_model

MODEL = "objective.reward.model"


class ModelReward(Reward):
    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        if not settings.model:
            raise UserError("no reward model is set", where=MODEL, wanted="a run or a directory")
        if is_run_or_checkpoint(Path(settings.model)):
            judge = load_reward_model(Path(settings.model))
            judge.model.to(runtime.device)
            self.score_conversations = judge.rewards
        else:
            self.score_conversations = Classifier(settings.model, runtime.device).rewards

    def __call__(self, answers: Sequence[RewardInput]) -> list[float]:
        return self.score_conversations(
            [([*one.messages, Message(role="assistant", content=one.answer_text)], one.tools) for one in answers]
        )


class Classifier:
    """A sequence classifier of `transformers` with one output."""

    def __init__(self, name: str, device: torch.device) -> None:
        transformers = import_extra("transformers", "hf", where=MODEL)
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
            self.model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(name).to(device).eval()
        except (OSError, ValueError) as error:
            raise UserError(f"not a reward model: {str(error).splitlines()[0]}", where=MODEL, got=name) from None
        if self.model.config.num_labels != 1:
            got, what = f"{self.model.config.num_labels} outputs", "not a reward model: its head is a classifier"
            raise UserError(what, where=MODEL, got=got, wanted="one")
        if not self.tokenizer.chat_template:
            raise UserError("its tokenizer has no chat template", where=MODEL, got=name)
        self.device = device

    @torch.no_grad()
    def rewards(self, conversations: Sequence[Conversation]) -> list[float]:
        """One conversation at a time: padding would need a pad token."""
        scores: list[float] = []
        for messages, _ in conversations:
            turns = [{"role": message.role, "content": message.content} for message in messages]
            ids = self.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
            scores.append(float(self.model(torch.tensor([ids], device=self.device)).logits[0, 0]))
        return scores

"""One round of sampling: prompts, the answers to each, what they were worth; as arrays, so that ranks can exchange it
and a checkpoint can hold it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from penjing.loader.shared_prompt_batch import Answer, AnswerBatch, Group, pack
from penjing.objective.policy import ADVANTAGE, COUNTS
from penjing.rl.prompts import Prompt

FloatArray = npt.NDArray[np.float64]


@dataclass(kw_only=True)
class RolloutBuffer:
    """P prompts with A answers of up to M tokens each.

    prompt_P: index of each prompt among those that are learned from. id_PAM, length_PA: the answers, stop ids included.
    behaviour_PAM, reference_PAM: log-probabilities. value_PAM, gain_PAM, return_PAM: what ppo's value foresaw before
    each token, the token's advantage, and what should have been foreseen; empty for the others. sampled_PAM: 1 for
    tokens that the model said, 0 for those that it was given between two turns. turns_PA, calls_PA, failed_PA: of the
    model, of tools, and of these those that did not work. cut_off_PA: not ended
    by the model. score_RPA: each reward; reward_PA: their weighted sum; advantage_PA; counts_P: 0 for prompts that are
    not learned from.
    sampled, degenerate: prompts that were answered for this round, and those whose answers were all worth the same.
    seconds: of sampling; scoring_seconds: of rewards and references; tokens: that were sampled, on all ranks.
    """

    prompt_P: npt.NDArray[np.int64]
    id_PAM: npt.NDArray[np.int64]
    length_PA: npt.NDArray[np.int64]
    behaviour_PAM: npt.NDArray[np.float32]
    reference_PAM: npt.NDArray[np.float32]
    value_PAM: npt.NDArray[np.float32]
    gain_PAM: npt.NDArray[np.float32]
    return_PAM: npt.NDArray[np.float32]
    sampled_PAM: npt.NDArray[np.int64]
    turns_PA: npt.NDArray[np.int64]
    calls_PA: npt.NDArray[np.int64]
    failed_PA: npt.NDArray[np.int64]
    cut_off_PA: npt.NDArray[np.int64]
    score_RPA: FloatArray
    reward_PA: FloatArray
    advantage_PA: FloatArray
    counts_P: FloatArray
    sampled: int = 0
    degenerate: int = 0
    tokens: int = 0
    seconds: float = 0.0
    scoring_seconds: float = 0.0

    def to_text(self) -> str:
        """For a checkpoint's JSON."""
        stream = io.BytesIO()
        arrays: dict[str, Any] = {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}
        np.savez_compressed(stream, **arrays)
        return base64.b64encode(stream.getvalue()).decode()

    @classmethod
    def from_text(cls, text: str) -> RolloutBuffer:
        with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays.files}
        return cls(**{name: value if value.ndim else value.item() for name, value in values.items()})

    def group(self, place: int, prompts: Sequence[Prompt], values: Sequence[str]) -> Group:
        """One prompt and its answers. values: which log-probabilities its tokens carry."""
        arrays = {
            "behaviour": self.behaviour_PAM,
            "reference": self.reference_PAM,
            "value": self.value_PAM,
            ADVANTAGE: self.gain_PAM,
            "return": self.return_PAM,
        }
        num_answers = self.length_PA.shape[1]
        answers = []
        for answer in range(num_answers):
            length = int(self.length_PA[place, answer])
            sampled = self.sampled_PAM[place, answer, :length]
            answers.append(
                Answer(
                    ids=self.id_PAM[place, answer, :length].tolist(),
                    weights=None if sampled.all() else sampled.astype(float).tolist(),
                    values={name: arrays[name][place, answer, :length].tolist() for name in values},
                )
            )
        figures = {
            ADVANTAGE: self.advantage_PA[place].tolist(),
            COUNTS: [float(self.counts_P[place])] * num_answers,
        }
        return Group(prompt=prompts[int(self.prompt_P[place])].ids, answers=answers, figures=figures)

    def figures(self, places: range, names: Sequence[str], steps: int, *, turns: bool = False) -> dict[str, float]:
        """What the curves show of these prompts; the round's seconds are shared evenly by its optimizer steps.

        turns: answers may have several, so that turns and calls are shown, also of a round that called nothing.
        """
        part = slice(places.start, places.stop)
        reward = self.reward_PA[part]
        shown = {
            "reward": float(reward.mean()),
            "reward_std": float(reward.std()),
            "frac_zero_reward_std": self.degenerate / max(1, self.sampled),
            "answer_tokens": float(self.sampled_PAM[part].sum(axis=-1).mean()),
            "truncated_fraction": float(self.cut_off_PA[part].mean()),
            "rollout_seconds": self.seconds / steps,
            "scoring_seconds": self.scoring_seconds / steps,
            "rollout_tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }
        if turns:
            shown |= {
                "answer_turns": float(self.turns_PA[part].mean()),
                "tool_calls": float(self.calls_PA[part].mean()),
                "tool_failed_fraction": float(self.failed_PA[part].sum() / max(1, self.calls_PA[part].sum())),
            }
        if len(names) > 1:
            shown |= {f"reward_{name}": float(self.score_RPA[row, part].mean()) for row, name in enumerate(names)}
        return shown


def split(group: Group, seq_len: int) -> list[Group]:
    """The same answers in as many groups as it takes for each to fit a row; the prompt is read in each of them."""
    parts: list[list[int]] = [[]]
    left = seq_len - len(group.prompt)
    for index, answer in enumerate(group.answers):
        if parts[-1] and len(answer.ids) - 1 > left:
            parts.append([])
            left = seq_len - len(group.prompt)
        parts[-1].append(index)
        left -= len(answer.ids) - 1
    return [
        Group(
            prompt=group.prompt,
            answers=[group.answers[index] for index in part],
            figures={name: [values[index] for index in part] for name, values in group.figures.items()},
        )
        for part in parts
    ]


def collate(groups: Sequence[Group], seq_len: int, figures: dict[str, float]) -> AnswerBatch:
    """Groups in rows, without those that do not count (one is kept if none does); `figures` stand at every answer."""
    counting = [group for group in groups if group.figures[COUNTS][0]]
    kept = counting or [min(groups, key=lambda group: group.num_tokens)]
    shown = [
        Group(
            prompt=part.prompt,
            answers=part.answers,
            figures={**part.figures, **{name: [value] * len(part.answers) for name, value in figures.items()}},
        )
        for group in kept
        for part in split(group, seq_len)
    ]
    return pack(shown, seq_len)


def concat(first: RolloutBuffer, second: RolloutBuffer) -> RolloutBuffer:
    """The prompts of both, one after the other, and their counters added."""
    values: dict[str, Any] = {}
    for field in fields(RolloutBuffer):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, np.ndarray):
            values[field.name] = np.concatenate([one, other], axis=1 if field.name == "score_RPA" else 0)
        else:
            values[field.name] = one + other
    return RolloutBuffer(**values)


def select(one: RolloutBuffer, places: Sequence[int]) -> RolloutBuffer:
    """Only these prompts, in this order."""
    values: dict[str, Any] = {}
    for field in fields(RolloutBuffer):
        value = getattr(one, field.name)
        if isinstance(value, np.ndarray):
            value = value[:, list(places)] if field.name == "score_RPA" else value[list(places)]
        values[field.name] = value
    return RolloutBuffer(**values)

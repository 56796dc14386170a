"""The prompts, answers and rewards of one rollout, as arrays: ranks can exchange them, and a checkpoint can store
them."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from penjing.loader.shared_prompt_batch import Answer, AnswerBatch, Group, pack
from penjing.objective.policy import ADVANTAGE, COUNTS, KEPT
from penjing.rl.prompts import Prompt

FloatArray = npt.NDArray[np.float64]
AdvantageKind = Literal["normalised", "centred", "leave_one_out"]
PROMPT_AXIS = {"score_RPA": 1}  # of all other arrays it is the first
STD_EPSILON = 1e-4  # added to a group's standard deviation, so that near-equal rewards do not give large advantages


@dataclass(kw_only=True)
class RolloutBuffer:
    """P prompts with A answers of up to M tokens each.

    prompt_P: index of each prompt among the training prompts. id_PAM, length_PA: the answers, stop ids included.
    behaviour_PAM, reference_PAM: log-probabilities under the sampled distribution and the reference policy. kept_PAM:
    log of the probability that top_p and top_k kept; empty without them. value_PAM, gain_PAM,
    return_PAM: ppo's value before each token, its advantage and its return; empty for other losses. sampled_PAM: 1 for
    tokens that the model generated, 0 for tool results and other tokens between its turns. turns_PA, calls_PA,
    failed_PA: number of model turns, of tool calls, and of calls that failed. cut_off_PA: 1 for truncated answers.
    score_RPA: each reward; reward_PA: their weighted sum. counts_P: 0 for prompts that are not trained on.
    sampled, degenerate: prompts answered in this rollout, and those of them whose answers all got the same reward.
    seconds: of sampling; scoring_seconds: of rewards and references; tokens: sampled on all ranks.
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
    kept_PAM: npt.NDArray[np.float32] = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    sampled: int = 0
    degenerate: int = 0
    tokens: int = 0
    seconds: float = 0.0
    scoring_seconds: float = 0.0

    @classmethod
    def empty(cls, indices: Sequence[int], sizes: Mapping[str, int], without: Collection[str]) -> RolloutBuffer:
        """Zeros for the prompts at these indices, which all count. sizes: of the dimensions that a name ends with.
        without: arrays that have no tokens."""
        arrays: dict[str, Any] = {}
        for name, kind in get_type_hints(cls).items():
            if get_origin(kind) is np.ndarray:
                letters = name.rpartition("_")[2]
                shape = [0 if letter == "M" and name in without else sizes[letter] for letter in letters]
                arrays[name] = np.zeros(shape, get_args(get_args(kind)[1])[0])
        arrays["prompt_P"][:], arrays["counts_P"][:] = indices, 1
        return cls(**arrays)

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

    def group(self, index: int, prompts: Sequence[Prompt], values: Sequence[str]) -> Group:
        """Prompt number `index` with its answers. values: which arrays its tokens carry."""
        arrays = {
            "behaviour": self.behaviour_PAM,
            "reference": self.reference_PAM,
            KEPT: self.kept_PAM,
            "value": self.value_PAM,
            ADVANTAGE: self.gain_PAM,
            "return": self.return_PAM,
        }
        num_answers = self.length_PA.shape[1]
        answers = []
        for answer in range(num_answers):
            length = int(self.length_PA[index, answer])
            sampled = self.sampled_PAM[index, answer, :length]
            answers.append(
                Answer(
                    ids=self.id_PAM[index, answer, :length].tolist(),
                    weights=None if sampled.all() else sampled.astype(float).tolist(),
                    values={name: arrays[name][index, answer, :length].tolist() for name in values},
                )
            )
        figures = {ADVANTAGE: self.advantage_PA[index].tolist(), COUNTS: [float(self.counts_P[index])] * num_answers}
        return Group(prompt=prompts[int(self.prompt_P[index])].ids, answers=answers, figures=figures)

    def metrics(self, indices: range, names: Sequence[str], steps: int, *, turns: bool = False) -> dict[str, float]:
        """The logged metrics of these prompts; the rollout's seconds are divided evenly among its optimizer steps.
        turns: answers may have several turns, so turns and calls are included even if nothing was called."""
        part = slice(indices.start, indices.stop)
        reward = self.reward_PA[part]
        metrics = {
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
            metrics |= {
                "answer_turns": float(self.turns_PA[part].mean()),
                "tool_calls": float(self.calls_PA[part].mean()),
                "tool_failed_fraction": float(self.failed_PA[part].sum() / max(1, self.calls_PA[part].sum())),
            }
        if len(names) > 1:
            metrics |= {f"reward_{name}": float(self.score_RPA[row, part].mean()) for row, name in enumerate(names)}
        return metrics


def split(group: Group, seq_len: int) -> list[Group]:
    """Split a group so that each part fits a row; the prompt is repeated in each part."""
    parts: list[list[int]] = [[]]
    free_tokens = seq_len - len(group.prompt)
    for index, answer in enumerate(group.answers):
        if parts[-1] and len(answer.ids) - 1 > free_tokens:
            parts.append([])
            free_tokens = seq_len - len(group.prompt)
        parts[-1].append(index)
        free_tokens -= len(answer.ids) - 1
    return [
        dataclasses.replace(
            group,
            answers=[group.answers[index] for index in part],
            figures={name: [values[index] for index in part] for name, values in group.figures.items()},
        )
        for part in parts
    ]


def collate(groups: Sequence[Group], seq_len: int, figures: dict[str, float]) -> AnswerBatch:
    """Pack the groups that count into rows (the shortest if none counts); every answer carries `figures`."""
    counting = [group for group in groups if group.figures[COUNTS][0]]
    selected = counting or [min(groups, key=lambda group: group.num_tokens)]
    parts = [part for group in selected for part in split(group, seq_len)]
    for part in parts:
        part.figures.update({name: [value] * len(part.answers) for name, value in figures.items()})
    return pack(parts, seq_len)


def concat(first: RolloutBuffer, second: RolloutBuffer) -> RolloutBuffer:
    """The prompts of both, one after the other, and their counters added."""
    values: dict[str, Any] = {}
    for name, a in vars(first).items():
        b = getattr(second, name)
        values[name] = np.concatenate([a, b], PROMPT_AXIS.get(name, 0)) if isinstance(a, np.ndarray) else a + b
    return RolloutBuffer(**values)


def select(buffer: RolloutBuffer, indices: Sequence[int]) -> RolloutBuffer:
    """Only these prompts, in this order."""
    arrays = {name: value for name, value in vars(buffer).items() if isinstance(value, np.ndarray)}
    chosen: dict[str, Any] = {
        name: value.take(list(indices), PROMPT_AXIS.get(name, 0)) for name, value in arrays.items()
    }
    return dataclasses.replace(buffer, **chosen)


def advantages(reward_PA: FloatArray, kind: AdvantageKind) -> FloatArray:
    """advantage_PA of P prompts with A answers each.

    normalised: (r - mean) / (std + 1e-4), with the group's sample standard deviation (arXiv:2402.03300, sec. 4.1.2).
    centred: r - mean (arXiv:2503.20783). leave_one_out: r minus the mean of the other answers
    (arXiv:2402.14740), which is A / (A - 1) times the centred advantage.
    """
    centred_PA: FloatArray = reward_PA - reward_PA.mean(axis=1, keepdims=True)
    answers = reward_PA.shape[1]
    if kind == "centred" or answers < 2:
        return centred_PA
    if kind == "leave_one_out":
        scale_P1: FloatArray = np.asarray(answers / (answers - 1))
    else:
        scale_P1 = 1 / (reward_PA.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON)
    scaled_PA: FloatArray = centred_PA * scale_P1
    return scaled_PA


def degenerate(reward_PA: FloatArray) -> npt.NDArray[np.bool_]:
    """True for prompts whose answers all got the same reward: their advantages are 0."""
    same_P: npt.NDArray[np.bool_] = np.isclose(reward_PA.max(axis=1), reward_PA.min(axis=1), rtol=0, atol=1e-8)
    return same_P

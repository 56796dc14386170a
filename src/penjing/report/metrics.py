"""Charts of a run's metrics: the table of names in metrics.jsonl, and which points are drawn."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penjing.track.console import BY_TASK

HELD_OUT = "val_"  # prefix of the same metric on held-out data
TOKENS = "tokens"  # trained on so far
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Chart:
    """One chart: a metric and the same metric on held-out data; for a single run also further metrics."""

    metric: str
    title: str
    chinese: str
    unit: str
    extras: tuple[tuple[str, str], ...] = ()  # metric, its name in the legend
    label: str = "training"
    best: Literal["low", "high", ""] = ""  # which end of a comparison is marked
    percent: bool = False
    log: bool = False
    from_zero: bool = False


CHARTS = (
    Chart("loss", "Loss", "损失", "nats per token", best="low"),
    Chart("bits_per_byte", "Unseen text", "验证集", "bits per byte (held out)", best="low"),
    Chart("preference_loss", "Preference loss", "偏好损失", "loss per pair or answer"),
    Chart("ranking_loss", "Ranking loss", "排序损失", "nats per pair", best="low"),
    Chart("reward", "Reward", "奖励", "mean reward of an answer", best="high"),
    Chart("exact_match", "Exact match", "完全匹配", "fraction of prompts", best="high", percent=True),
    Chart("reward_accuracy", "Reward accuracy", "奖励准确率", "fraction of pairs", best="high", percent=True),
    Chart("reward_margin", "Reward margin", "奖励间隔", "chosen − rejected"),
    Chart("chosen_reward", "Rewards", "奖励", "reward", (("rejected_reward", "rejected"),), "chosen"),
    Chart("logp_accuracy", "Log-prob accuracy", "对数概率准确率", "fraction of pairs", best="high", percent=True),
    Chart("kl_per_answer", "KL to the reference", "与参考模型的 KL", "nats per answer", from_zero=True),
    Chart("kl", "KL per token", "逐词元 KL", "nats per token", from_zero=True),
    Chart("agreement", "Agreement with the teacher", "与教师一致", "fraction of tokens", best="high", percent=True),
    Chart("policy_loss", "Policy loss", "策略损失", "loss"),
    Chart("value_loss", "Value loss", "价值损失", "loss", best="low"),
)
SMALL_CHARTS = (
    Chart("reward_std", "Reward std", "奖励标准差", "standard deviation", from_zero=True),
    Chart("frac_zero_reward_std", "Zero-std groups", "零方差组", "fraction of groups", percent=True, from_zero=True),
    Chart("truncated_fraction", "Truncated answers", "截断比例", "fraction of answers", percent=True, from_zero=True),
    Chart("answer_tokens", "Answer length", "回答长度", "tokens", from_zero=True),
    Chart("chosen_tokens", "Answer length", "回答长度", "tokens", (("rejected_tokens", "rejected"),), "chosen"),
    Chart("own_answer_tokens", "Length of own answers", "自身回答长度", "tokens", from_zero=True),
    Chart("entropy", "Entropy", "熵", "nats per token", from_zero=True),
    Chart("kl_old_new", "KL old to new policy", "新旧策略 KL", "nats per token", from_zero=True),
    Chart(
        "max_expert_load_ratio",
        "Expert load",
        "专家负载",
        "times the mean",
        (("mean_expert_load_ratio", "mean"),),
        "worst",
    ),
    Chart("learning_rate", "Learning rate", "学习率", "learning rate", from_zero=True),
    Chart("grad_norm", "Gradient norm", "梯度范数", "gradient norm (log)", log=True),
    Chart("tokens_per_second", "Speed", "速度", "tokens/s", best="high", from_zero=True),
)
# Not drawn: the x axis, and metrics that other parts of the page show better.
NOT_DRAWN = {TOKENS, "seconds", "seconds_left", "memory_bytes", "mfu", "mfu_full_square", "skipped_steps"}
NOT_DRAWN |= {"seconds_over_plan", "wait_over_plan", "rollout_seconds", "scoring_seconds"}
NOT_FINAL = {"learning_rate", "grad_norm"}  # their last value says nothing about a run
# By task: English and Chinese name, and whether the x axis is tokens (else steps).
TASKS = {
    "documents": ("Pretraining", "预训练", True),
    "chats": ("Fine-tuning", "指令微调", True),
    "distill": ("Distillation", "知识蒸馏", True),
    "preference": ("Preference optimisation", "偏好优化", False),
    "reward": ("Reward model", "奖励模型", False),
    "policy": ("Reinforcement learning", "强化学习", False),
}


def task_names(task: str) -> tuple[str, str, bool]:
    return TASKS.get(task, ("Training", "训练", False))


def main_charts(names: Iterable[str]) -> list[Chart]:
    """What a run is judged by: the table, and the score of each of `eval.tasks`."""
    scores = sorted(name.removeprefix(BY_TASK) for name in names if name.startswith(BY_TASK))
    unit = "fraction of questions"
    return [
        *CHARTS,
        *(Chart(f"acc_{task}", f"Score: {task}", f"得分：{task}", unit, best="high", percent=True) for task in scores),
    ]


def first_chart(names: Container[str]) -> Chart | None:
    """That of the figure which says most about a run with these metrics."""
    return next((chart for chart in CHARTS if chart.metric in names or HELD_OUT + chart.metric in names), None)


def default_charts(names: set[str]) -> list[Chart]:
    """A small chart for each metric without an entry in the tables: reward components, metrics of a new objective."""
    tables = (*main_charts(names), *SMALL_CHARTS)
    known = NOT_DRAWN | {name for chart in tables for name in (chart.metric, *(extra for extra, _ in chart.extras))}
    unknown = {name.removeprefix(HELD_OUT) for name in names} - known
    return [Chart(name, name.replace("_", " ").capitalize(), "", name) for name in sorted(unknown)]


def thinned(y: Floats, most: int) -> NDArray[np.intp]:
    """At most about `most` indices: first, last, and the minimum and maximum of each bucket, which keeps spikes."""
    if len(y) <= most:
        return np.arange(len(y))
    size = -(-2 * len(y) // most)
    whole = len(y) // size * size
    grid, start = y[:whole].reshape(-1, size), np.arange(0, whole, size)
    kept = [start + grid.argmin(axis=1), start + grid.argmax(axis=1), np.array([0, len(y) - 1])]
    if whole < len(y):
        kept.append(whole + np.array([y[whole:].argmin(), y[whole:].argmax()]))
    return np.unique(np.concatenate(kept))

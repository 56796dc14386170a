"""The scores of a task, over all requests and over kinds of them, as plain values."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

from penjing.base.accuracy import wilson
from penjing.eval.scorer import Graded, groups, standard_error
from penjing.eval.task import METRICS, LogLikelihood, Metric, Task, best, normalised, share_of_best


def summary(name: str, task: Task, graded: Sequence[Graded]) -> dict[str, Any]:
    """The task's row, with `kinds` and `groups`. `uniform` is the score of a model to which all tokens are equally
    likely: by sums, it prefers few tokens."""
    counted = [one for one in graded if one.request.is_counted]
    return {
        "task": name,
        "metric": task.metric,
        "shots": task.shots,
        **_scores(task, counted),
        "truncated": sum(one.result.is_truncated for one in graded),
        **({"figures": figures} if (figures := task.figures(counted) if counted else {}) else {}),
        "notes": [*task.notes()],
        "groups": _parts(task, graded, "group"),
        "kinds": _parts(task, graded, "kind"),
    }


def _scores(task: Task, graded: Sequence[Graded]) -> dict[str, Any]:
    right, asked = sum(one.score for one in graded), len(graded)
    scores: dict[str, Any] = {
        "asked": asked,
        "score": right / asked if asked else 0.0,
        "standard_error": standard_error(graded),
        "interval": wilson(right, asked),
        "chance": fmean(one.request.chance for one in graded) if asked else 0.0,
    }
    choices = [one for one in graded if isinstance(one.request, LogLikelihood) and len(one.request.choices) > 1]
    if choices and len(choices) == asked:
        by_metric = {metric: [normalised(one.request, one.result, metric) for one in graded] for metric in METRICS}
        answers = [one.request.answer for one in graded]
        scores |= {metric: _mean_share(values, answers) for metric, values in by_metric.items()}
        scores["ties"] = fmean(sum(best(values)) > 1 for values in by_metric[task.metric])
        scores["uniform"] = _mean_share([_uniform(one, task.metric) for one in graded], answers)
    return scores


def _mean_share(values: Iterable[Sequence[float]], answers: Iterable[int]) -> float:
    return fmean(map(share_of_best, values, answers))


def _uniform(one: Graded, metric: Metric) -> list[float]:
    logps = [-float(count) for count in one.result.num_tokens]
    return normalised(one.request, replace(one.result, logps=logps), metric)


def _parts(task: Task, graded: Sequence[Graded], by: Literal["kind", "group"]) -> list[dict[str, Any]]:
    """The scores of each part that has a name."""
    return [
        {"name": name, "language": language, **_scores(task, part)}
        for (name, language), part in groups(graded, by).items()
        if name
    ]


def paired_change(before: Sequence[Graded], after: Sequence[Graded]) -> tuple[float, float | None]:
    """(change of the mean score, its standard error) on the same requests."""
    changes = [
        Graded(new.request, new.result, new.score - old.score)
        for old, new in zip(before, after, strict=True)
        if new.request.is_counted
    ]
    return fmean(one.score for one in changes) if changes else 0.0, standard_error(changes)

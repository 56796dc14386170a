"""Ask a model what a task asks, and add up the scores."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.chat.turn_parser import without_reasoning
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.eval.log_likelihood import Ending, log_likelihoods, num_common
from penjing.eval.task import Continuation, Generate, LogLikelihood, Result, Task
from penjing.infer import requests as engine_requests
from penjing.infer.generate import generate, sample_batch
from penjing.infer.sample import Sampling
from penjing.infer.text_stream import TextStream
from penjing.model.transformer import Transformer
from penjing.train.oom_recovery import retry_on_oom

MAX_THINKING_TOKENS = 192  # added to an answer's limit when thinking is on


@dataclass(frozen=True, slots=True)
class Graded:
    """A request, the model's answer, and its score from 0 to 1."""

    request: Any
    result: Result
    score: float

    @property
    def is_correct(self) -> bool:
        return self.score == 1

    @property
    def text(self) -> str:
        return self.result.text


def grade(
    task: Task,
    asked: Iterable[LogLikelihood | Continuation | Generate],
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    thinking: bool | None = None,
    max_tokens: int = 0,
    batch_size: int = 64,
) -> list[Graded]:
    """The answers to these requests of `task`, each asked for itself.

    thinking: as in `render`; thoughts are not graded. max_tokens: limit of an answer with its thought; 0: that of the
    request, with thinking 192 more. batch_size: requests that are answered together. Raises UserError for a request
    that fills the context.
    """
    requests, results = list(asked), dict[int, Result]()
    alike: dict[tuple[type, int], list[int]] = defaultdict(list)  # indices of requests by type and limit
    for index, request in enumerate(requests):
        limit = 0 if isinstance(request, LogLikelihood) else max_tokens or request.max_new_tokens
        if isinstance(request, Generate) and thinking and not max_tokens:
            limit += MAX_THINKING_TOKENS
        alike[type(request), limit].append(index)
    for (kind, limit), indices in alike.items():
        batch: Any = [requests[index] for index in indices]
        if issubclass(kind, LogLikelihood):
            found = _compared(batch, model, tokenizer, batch_size)
        elif issubclass(kind, Continuation):
            found = _continued(batch, model, tokenizer, limit, batch_size)
        else:
            found = _answers(batch, model, tokenizer, thinking, limit, batch_size)
        results |= dict(zip(indices, found, strict=True))
    return [
        Graded(request, results[index], task.score(request, results[index])) for index, request in enumerate(requests)
    ]


class ShrinkingGrader:
    """`grade` beside training: after an out-of-memory error fewer requests are answered together, from then on."""

    def __init__(self, setting: str, hint: str) -> None:
        """setting, hint: of the UserError if memory does not suffice for one."""
        self._setting, self._hint, self._batch_size = setting, hint, 64

    def __call__(self, task: Task, asked: Sequence[Any], *model: Any, **how: Any) -> list[Graded]:
        return retry_on_oom(lambda: grade(task, asked, *model, **how, batch_size=self._batch_size), self._halve)

    def _halve(self, message: str) -> None:
        if self._batch_size == 1:
            raise UserError(f"out of memory: {message}", where=self._setting, next_step=self._hint)
        self._batch_size //= 2


def _too_long(request: Any, num_tokens: int, limit: int) -> UserError:
    where = request.where or request.text[:60]
    return UserError("too long", where=where, got=f"{num_tokens} tokens", wanted=f"under {limit}")


def _answers(
    requests: Sequence[Generate],
    model: Transformer,
    tokenizer: Tokenizer,
    thinking: bool | None,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[Result]:
    context = model.config.max_position_embeddings
    prompts = [render(tokenizer, item.messages, item.tools, ask=True, thinking=thinking).ids for item in requests]
    for request, prompt in zip(requests, prompts, strict=True):
        if len(prompt) >= context:
            raise _too_long(request, len(prompt), context)
    generated = generate(model, prompts, max_new_tokens=max_new_tokens, stop=tokenizer.stop, rows=batch_size)
    for prompt, ids in zip(prompts, generated, strict=True):
        is_truncated = len(ids) == min(max_new_tokens, context - len(prompt))
        yield Result(text=without_reasoning(tokenizer, ids, thinking).strip(), is_truncated=is_truncated)


def _continued(
    requests: Sequence[Continuation], model: Transformer, tokenizer: Tokenizer, max_new_tokens: int, batch_size: int
) -> Iterator[Result]:
    """Each text's continuation. A text that leaves too little of the context loses its beginning."""
    limit = max(1, model.config.max_position_embeddings - max_new_tokens)
    encoded = tokenizer.encode_many([request.text for request in requests])
    prompts = [[*_begin(request, tokenizer), *ids] for request, ids in zip(requests, encoded, strict=True)]

    def stopper(until: Sequence[str]) -> Callable[[int, int], bool]:
        stream = TextStream(tokenizer, until)
        return lambda _, new_id: stream.extend([new_id])

    asked = [
        engine_requests.Request(prompt=prompt[-limit:], should_stop=stopper(request.until) if request.until else None)
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    completions = sample_batch(
        model, asked, max_new_tokens=max_new_tokens, stop=tokenizer.stop, sampling=Sampling(), slots=batch_size
    )
    for request, prompt, (completion,) in zip(requests, prompts, completions, strict=True):
        ids = completion.ids[:-1] if completion.ids and completion.ids[-1] in tokenizer.stop else completion.ids
        text = tokenizer.decode(ids)
        ends = [text.index(end) for end in request.until if end in text]
        is_truncated = completion.finish_reason == "length" or len(prompt) > limit
        yield Result(text=text[: min(ends, default=len(text))], is_truncated=is_truncated)


def _compared(
    requests: Sequence[LogLikelihood], model: Transformer, tokenizer: Tokenizer, batch_size: int
) -> Iterator[Result]:
    """The probability of each request's choices, and the most probable one. A text that is longer than the context
    loses its beginning."""
    endings, truncated = list[Ending](), list[bool]()
    limit = model.config.max_position_embeddings + 1  # the last token is not read
    for request, found in zip(requests, _endings(requests, tokenizer), strict=True):
        longest = max(len(ending.ids) - ending.first for ending in found)
        if longest >= limit:
            raise _too_long(request, longest, limit)
        cuts = [max(0, len(ending.ids) - limit) for ending in found]
        endings += [Ending(one.ids[cut:], one.first - cut) for one, cut in zip(found, cuts, strict=True)]
        truncated.append(any(cuts))
    scores = iter(log_likelihoods(model, endings, batch_size))
    for request, is_truncated in zip(requests, truncated, strict=True):
        logps, num_tokens, greedy = zip(*(next(scores) for _ in request.choices), strict=True)
        text = request.choices[logps.index(max(logps))]
        yield Result(text=text, is_truncated=is_truncated, logps=logps, num_tokens=num_tokens, greedy=greedy)


def _begin(request: LogLikelihood | Continuation, tokenizer: Tokenizer) -> list[int]:
    is_always_added = tokenizer.begin != tokenizer.end_of_text
    has_text = bool(request.text or (isinstance(request, LogLikelihood) and request.texts))
    return [tokenizer.begin] if request.begins or is_always_added or not has_text else []


def _endings(requests: Sequence[LogLikelihood], tokenizer: Tokenizer) -> Iterator[list[Ending]]:
    """The ids of each request's texts with their choices, and where what is scored begins."""
    texts = [request.texts or [request.text] * len(request.choices) for request in requests]
    pairs = [list(zip(before, one.choices, strict=True)) for before, one in zip(texts, requests, strict=True)]
    wanted = dict.fromkeys(text for ends in pairs for before, choice in ends for text in (before, before + choice))
    ids_of = dict(zip(wanted, tokenizer.encode_many(list(wanted)), strict=True))
    for request, ends in zip(requests, pairs, strict=True):
        begin = _begin(request, tokenizer)
        all_ids = [[*begin, *ids_of[before + choice]] for before, choice in ends]
        if request.scored == "choice":
            # A token may contain characters of both text and choice: it counts to the choice.
            firsts = [
                num_common([*begin, *ids_of[before]], ids) for (before, _), ids in zip(ends, all_ids, strict=True)
            ]
        elif request.texts:
            common = num_common(*(ids[::-1] for ids in all_ids))
            firsts = [len(ids) - common for ids in all_ids]
        else:
            # A choice with which all others begin keeps its last token: the mean over none would be the best one.
            firsts = [min(num_common(*all_ids), min(map(len, all_ids)) - 1)] * len(all_ids)
        yield [Ending(ids, max(1, first)) for ids, first in zip(all_ids, firsts, strict=True)]


def groups(graded: Sequence[Graded], by: Literal["kind", "group"] = "kind") -> dict[tuple[str, str], list[Graded]]:
    """What counts, by kind (or group) and language."""
    found: dict[tuple[str, str], list[Graded]] = defaultdict(list)
    for one in graded:
        if one.request.is_counted:
            found[getattr(one.request, by), one.request.language].append(one)
    return found


def score_rows(stage: str, graded: Sequence[Graded]) -> list[dict[str, Any]]:
    """Right and asked per kind and language; chance is the mean over what was asked."""
    return [
        {
            "stage": stage,
            "kind": kind,
            "language": language,
            "asked": len(group),
            "right": sum(one.score for one in group),
            "chance": fmean(one.request.chance for one in group),
        }
        for (kind, language), group in groups(graded).items()
    ]


def standard_error(graded: Sequence[Graded]) -> float | None:
    """Of the mean score; a single one has none."""
    scores = [one.score for one in graded]
    return stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None


def accuracy(graded: Sequence[Graded], language: str | None = None) -> float:
    """The mean score of what counts."""
    scores = [one.score for one in graded if one.request.is_counted and language in (None, one.request.language)]
    return fmean(scores) if scores else 0.0

"""Rewards by the form of an answer: a pattern, the form of a thought, length, repetition, and tool calls."""

import re

from penjing.base.errors import UserError
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import THINK_END, THINK_START, Reward, RewardInput, RewardRuntime

_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")  # a Chinese character counts as a word


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """Raises UserError for an invalid pattern."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"not a regular expression: {error}", where=where, got=repr(pattern)) from None


class Regex(Reward):
    """1 if the whole answer, without thoughts, matches a pattern; else 0, and 0 if truncated. Model output is matched,
    so a user's pattern with exponential backtracking can hang the run."""

    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        if not settings.pattern:
            raise UserError("the reward regex needs a pattern", where="objective.reward.pattern")
        self.pattern = compile_pattern(settings.pattern, "objective.reward.pattern")

    def score(self, answer: RewardInput) -> float:
        return float(not answer.truncated and self.pattern.fullmatch(answer.answer_text) is not None)


def has_think_format(text: str) -> bool:
    """One thought that is not empty, then an answer. The opening tag may be in the prompt."""
    thought, closed, answer = text.strip().removeprefix(THINK_START).partition(THINK_END)
    tags = thought.count(THINK_START) + answer.count(THINK_START) + answer.count(THINK_END)
    return bool(closed and thought.strip() and answer.strip()) and tags == 0


class Format(Reward):
    """1 if the answer is complete and has the required format, else 0; by default thoughts in tags, then an answer."""

    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        pattern = settings.format_pattern
        self.pattern = compile_pattern(pattern, "objective.reward.format_pattern") if pattern else None

    def score(self, answer: RewardInput) -> float:
        text = answer.text
        matches = has_think_format(text) if self.pattern is None else self.pattern.fullmatch(text.strip()) is not None
        return float(not answer.truncated and matches)


class Length(Reward):
    """0 up to a soft length, then linearly down to -1 at the longest answer; -1 if truncated: the soft overlong
    punishment of arXiv:2503.14476, eq. 13."""

    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        self.max_tokens = runtime.max_tokens
        self.soft_length = settings.soft_length or self.max_tokens * 3 // 4
        if self.soft_length >= self.max_tokens:
            wanted = f"under objective.rollout.max_new_tokens = {self.max_tokens}"
            raise settings.error("soft_length", "no answer can be that long", wanted=wanted)

    def score(self, answer: RewardInput) -> float:
        excess = (answer.num_tokens - self.soft_length) / (self.max_tokens - self.soft_length)
        return -1.0 if answer.truncated else -min(1.0, max(0.0, excess))


def repeated_fraction(text: str, n: int) -> float:
    """1 - (distinct n-grams) / (n-grams)."""
    words = _WORD.findall(text.casefold())
    ngrams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


class Repetition(Reward):
    """Minus the fraction of n-grams that repeat an earlier one of the answer: 0 without repetition, near -1 for a loop.
    With several turns the last one counts, thoughts included, because models loop there."""

    def score(self, answer: RewardInput) -> float:
        return -repeated_fraction(answer.text, self.settings.repeated_words)


class Tools(Reward):
    """The fraction of tool calls that worked: well-formed, of a known tool, with valid arguments. 0 without a call.
    Each call beyond `most_calls` in one answer subtracts a fixed amount, down to -1; otherwise the model would learn to
    call without end. Calls of a last turn count as failed, since nothing runs them."""

    def score(self, answer: RewardInput) -> float:
        max_calls = self.settings.most_calls
        calls = sum(len(turn.turn.calls) for turn in answer.turns)
        if not calls:
            return 0.0
        worked = sum(result.worked for turn in answer.turns for result in turn.results)
        return max(-1.0, worked / calls - max(0, calls - max_calls) / max_calls)

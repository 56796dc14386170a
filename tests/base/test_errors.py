"""One line that says what, where, got, wanted and what to do."""

from __future__ import annotations

from penjing.base.errors import UserError, nearest, suggest


def test_the_line_holds_everything_it_was_given() -> None:
    error = UserError("too small", where="batch.size", got=0, wanted="at least 1", next_step="Try batch.size=8.")
    assert str(error) == "batch.size: too small; got 0; wanted at least 1. Try batch.size=8."
    assert str(UserError("no data")) == "no data"


def test_the_line_is_one_line() -> None:
    assert str(UserError("a\nb", where="c\r\nd", got="e\u2028f", wanted="g\x85h")) == "c d: a b; got e f; wanted g h"


def test_nearest() -> None:
    choices = ["learning_rate", "weight_decay", "tiny"]
    assert nearest("learningrate", choices) == "learning_rate"
    assert nearest("decay", choices) == "weight_decay"
    assert nearest("xyz", choices) is None
    assert nearest("a", []) is None


def test_suggest_names_one_or_all() -> None:
    assert suggest("tiyn", ["tiny", "pretrain"]) == "Did you mean tiny?"
    assert suggest("xyz", ["tiny", "pretrain"]) == "Choices: pretrain, tiny"

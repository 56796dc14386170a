"""The average of models, by hand."""

from __future__ import annotations

import pytest
import torch
from user_errors import raises_user_error

from penjing.train.average import mean


def member(name, **values):
    return name, lambda: {key: torch.tensor(value) for key, value in values.items()}


def test_the_mean_and_the_weighted_mean():
    models = [member("a", x=[1.0, 5.0]), member("b", x=[3.0, 1.0])]
    assert mean(models)["x"].tolist() == [2.0, 3.0]
    assert mean(models, [3, 1])["x"].tolist() == [1.5, 4.0]
    assert mean(models, [0, 2])["x"].tolist() == [3.0, 1.0]
    assert mean(models)["x"].dtype == torch.float32


def test_many_small_parts_are_not_lost():
    models = [member(str(index), x=[1.0 + index * 2**-23]) for index in range(2)] * 500
    assert mean(models)["x"].item() in (1.0, 1.0 + 2**-23)
    assert mean([member("a", x=[0.1])] * 1000)["x"].item() == torch.tensor(0.1).item()


@pytest.mark.parametrize(
    ("models", "weights", "facts"),
    [
        ([member("a", x=[1.0])], [1, 2], {"where": "--weights", "got": 2, "wanted": 1}),
        ([member("a", x=[1.0])] * 2, [1, -1], {"where": "--weights", "got": "[1, -1]"}),
        ([member("a", x=[1.0])] * 2, [0, 0], {"where": "--weights", "got": "[0, 0]"}),
    ],
)
def test_what_cannot_be_averaged(models, weights, facts):
    with raises_user_error(**facts):
        mean(models, weights)

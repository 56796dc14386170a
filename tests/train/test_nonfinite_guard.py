"""Bad steps and spikes by hand: how many, how far off, and what is excused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from penjing.base.errors import UserError
from penjing.parallel.base import guarded_step
from penjing.train.nonfinite_guard import NonFiniteGuard, is_spike

FINE, NONE = torch.tensor(1.0), torch.tensor(math.nan)


def observe(guard, step, loss=5.0, norm=1.0):
    loss, norm = torch.tensor(loss), torch.tensor(norm)
    bad = torch.tensor(float(not (math.isfinite(loss) and math.isfinite(norm))))
    return guard.observe(step, bad, loss, norm, lambda: {"rows": [step]})


@pytest.mark.parametrize(
    ("norm", "loss", "learns"), [(FINE, FINE, True), (NONE, FINE, False), (FINE, NONE, False), (FINE / 0, FINE, False)]
)
def test_nothing_is_learned_unless_norm_and_loss_are_numbers(norm, loss, learns):
    taken = []
    optimizer = SimpleNamespace(step=lambda: taken.append("step"), zero_grad=lambda set_to_none: taken.append("zero"))
    assert bool(guarded_step([optimizer], norm, loss)) is not learns
    assert taken == (["step", "zero"] if learns else ["zero"])


def test_a_spike_is_ten_deviations_and_half_of_the_usual_loss_above_it():
    """Median 5, its median distance 4: a deviation of 1.4826 x 4 as of normal values, ten of which are 59.3."""
    wide = [1.0, 9.0] * 16
    assert not is_spike(5 + 59.0, wide)
    assert is_spike(5 + 59.6, wide)
    even = [5.0] * 16  # no spread at all: half of the median is left
    assert not is_spike(7.4, even)
    assert is_spike(7.6, even)
    assert not is_spike(7.6, even[:15])


def test_three_bad_steps_in_a_row_send_the_run_back_and_a_good_one_begins_anew():
    incidents = []
    guard = NonFiniteGuard(incidents.append)
    losses = [math.nan, math.nan, 5.0, math.nan, math.nan, math.nan]
    assert [observe(guard, step, loss) for step, loss in enumerate(losses)] == ["go on"] * 5 + ["roll back"]
    assert [each["in_a_row"] for each in incidents] == [1, 2, 1, 2, 3]
    assert not guard.last_step_finite
    assert guard.num_bad == 5


def test_a_run_goes_back_three_times_and_not_a_fourth():
    guard = NonFiniteGuard()
    for time in range(3):
        observe(guard, time)
        guard.rolled_back(10, 4)
        assert guard.last_step_finite
        assert guard.state()["recent"] == []  # of weights that are no more
    with pytest.raises(UserError, match="after 3 rollbacks"):
        guard.rolled_back(10, 4)
    with pytest.raises(UserError):
        NonFiniteGuard().rolled_back(10, None)  # there is nothing to go back to


@pytest.mark.parametrize(
    ("falls", "loss", "excused"), [(True, 5.0, True), (False, 5.0, False), (True, math.inf, False)]
)
def test_an_overflow_is_excused_while_the_scale_can_halve(falls, loss, excused):
    """But not a loss that is no number: no scale explains that."""
    incidents = []
    guard = NonFiniteGuard(incidents.append, SimpleNamespace(can_halve=lambda: torch.tensor(falls)))
    observe(guard, 1, loss, norm=math.inf)
    assert (guard.num_bad, len(incidents)) == ((0, 0) if excused else (1, 1))

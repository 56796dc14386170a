"""From the rewards of a group to advantages."""

from __future__ import annotations

import numpy as np
import pytest

from penjing.rl.rollout_buffer import advantages, degenerate

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [3.0, -1.0, 0.0, 0.0]])


def test_centred_and_leave_one_out():
    centred = advantages(REWARDS, "centred")
    np.testing.assert_allclose(centred.sum(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(centred[0], [0.5, -0.5, -0.5, 0.5])
    left = advantages(REWARDS, "leave_one_out")
    others = [[np.delete(row, index).mean() for index in range(4)] for row in REWARDS]
    np.testing.assert_allclose(left, REWARDS - np.array(others))


def test_normalised_have_a_spread_of_one():
    found = advantages(REWARDS, "normalised")
    assert found[0].std(ddof=1) == pytest.approx(1, rel=1e-3)
    assert found[2].std(ddof=1) == pytest.approx(1, rel=1e-3)
    assert (found[1] == 0).all()


def test_equal_rewards_teach_nothing():
    assert degenerate(REWARDS).tolist() == [False, True, False]
    assert degenerate(np.array([[0.1 + 0.2, 0.3]])).tolist() == [True]
    assert degenerate(np.array([[0.5, 0.501]])).tolist() == [False]


def test_the_floor_of_the_spread_is_published():
    """Added to the standard deviation, as TRL has it: rewards a thousandth apart still count."""
    found = advantages(np.array([[0.5, 0.501]]), "normalised")
    spread = 0.001 / np.sqrt(2)  # of a sample of two
    np.testing.assert_allclose(found, [[-0.0005 / (spread + 1e-4), 0.0005 / (spread + 1e-4)]], rtol=1e-6)

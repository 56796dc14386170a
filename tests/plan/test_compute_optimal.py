"""Tokens, repeats, batches, prices and budgets, against published figures and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from user_errors import raises_user_error

from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan import scaling_law_fit as losslaw
from penjing.plan.compute_optimal import LAWS, LossLaw
from penjing.plan.scaling_law_fit import LossPoint


@pytest.mark.parametrize(
    ("law", "ratios"),
    [
        ("corrected", [27.1, 25.6, 24.1, 22.7]),
        ("as printed", [20.5, 25.7, 32.1, 40.1]),
    ],
)
def test_optimal_tokens_for_each_parameter(law, ratios):
    """At 1e17 to 1e20 FLOPs: the corrected fit falls gently, the printed one climbs and contradicts its own paper."""
    for flops, ratio in zip((1e17, 1e18, 1e19, 1e20), ratios, strict=True):
        size = math.sqrt(flops / (6 * ratio))
        assert LAWS[law].optimal_tokens(size) / size == pytest.approx(ratio, rel=0.006)


@given(some.floats(1e6, 1e12))
def test_the_optimum_is_one(size):
    law = LAWS["corrected"]
    amount = law.optimal_tokens(size)
    best = law.loss(size, amount)
    for factor in (0.8, 1.25):
        assert law.loss(size * factor, amount / factor) > best


def test_advice_names_both_counts_and_its_range():
    found = tokens.advise(64_000_000, 60_000_000)
    assert found.low < found.tokens < found.high
    assert found.tokens / 64e6 == pytest.approx(25.9, abs=0.1)
    assert found.by_matrices == 10.5 * 60_000_000
    assert tokens.LAWS["corrected"].optimal_parameters(found.tokens) == pytest.approx(64e6, rel=1e-3)


@pytest.mark.parametrize(("epochs", "worth"), [(1, 1.0), (2, 0.98), (4, 0.93), (8, 0.83), (16, 0.66), (40, 0.38)])
def test_repeats_are_worth_what_was_published(epochs, worth):
    assert tokens.repeat_worth(epochs) == pytest.approx(worth, abs=0.006)


def test_warnings_of_repeats_and_small_data():
    assert tokens.repeat_warning(4) == ""
    assert "more text" not in tokens.repeat_warning(8) and tokens.repeat_warning(8)
    assert "more text" in tokens.repeat_warning(40)
    assert tokens.small_data_advice(64_000_000, 2e9) == []
    assert "2.5M" in tokens.small_data_advice(64_000_000, 20e6)[0]


@pytest.mark.parametrize(
    ("text", "amount", "currency"),
    [("2.5USD", 2.5, "USD"), ("$5", 5, "USD"), ("20CNY", 20, "CNY"), ("¥3", 3, "CNY"), ("1.3 RMB", 1.3, "CNY")],
)
def test_prices_are_read(text, amount, currency):
    assert cost.read_money(text, "--price") == cost.Money(amount, currency)


@pytest.mark.parametrize("text", ["free", "-3USD", "3 bananas", "$3USD", ""])
def test_bad_prices_are_one_line(text):
    with raises_user_error(where="--price"):
        cost.read_money(text, "--price")


def test_budgets_are_read():
    found = cost.read_budget("3h,24GB,20CNY")
    assert (found.seconds, found.memory_bytes, found.money) == (10800, 24 * 10**9, cost.Money(20, "CNY"))
    assert cost.read_budget("24GiB").memory_bytes == 24 * 2**30
    assert cost.read_budget("90min").seconds == 5400


@pytest.mark.parametrize("text", ["3parsecs", "24", "-3h", "GB", "3h,,", "0h", "$0", "5XQZ", f"1{'0' * 400}h"])
def test_bad_budgets_are_one_line(text):
    with raises_user_error(where="--budget", wanted="such as 3h, 90min, 24GB, 20CNY or $5"):
        cost.read_budget(text)


@pytest.mark.parametrize(
    ("text", "meant"), [("8GBB", "8GB"), ("3houres", "3hours"), ("5USDD", "5USD"), ("2GiBs", "2GiB")]
)
def test_an_unknown_unit_names_the_nearest(text, meant):
    with raises_user_error(where="--budget", next_step=f"Did you mean {meant}?"):
        cost.read_budget(text)


def test_counts_are_read():
    assert [cost.read_count(text, "x") for text in ("64M", "1.2B", "10000", "10_000", "1e9")] == [
        64_000_000,
        1_200_000_000,
        10_000,
        10_000,
        10**9,
    ]
    for text in ("-64M", "0", "0.4", "1e400", "many", "5X"):
        with raises_user_error(where="--params", wanted="such as 64M, 1.2B or 10000"):
            cost.read_count(text, "--params")


def test_cost_and_energy(tmp_path, monkeypatch):
    monkeypatch.setenv("PENJING_HOME", str(tmp_path))
    price = cost.price_of("RTX 3090")
    assert str(cost.cost(price, 7200, 2)) == "5.20 CNY"
    assert price.source.endswith(f" edit {tmp_path}/prices.toml")
    assert cost.price_of("RTX 3090", "2USD").hour == cost.Money(2, "USD")
    assert cost.price_of("TITAN X") is None
    (tmp_path / "prices.toml").write_text('"TITAN X" = "0.4 EUR"\n"RTX 3090" = "9 CNY"\n')
    assert cost.price_of("TITAN X").hour == cost.Money(0.4, "EUR")
    assert cost.price_of("RTX 3090").hour.amount == 9
    assert cost.kilowatt_hours(3600, 1, 350) == pytest.approx(0.35 * 0.9 + 0.1)
    assert cost.kilowatt_hours(3600, 1, 0, cores=4) == pytest.approx(0.032)


def runs_of(law: LossLaw, noise: float) -> list[LossPoint]:
    random = np.random.default_rng(3)
    return [
        LossPoint(int(size), int(amount), law.loss(size, amount) + float(random.normal(0, noise)))
        for size in (3e5, 1e6, 3e6)
        for amount in (2e6, 5e6, 12e6)
    ]


def test_a_law_is_found_again_and_foresees_a_larger_run():
    law = LossLaw(120.0, 900.0, 1.2, 0.34, 0.40)
    found = losslaw.forecast(runs_of(law, 0.005), 3e7, 1e8)
    assert found.residual_nats < 0.01
    assert abs(found.loss - law.loss(3e7, 1e8)) < 0.06
    assert found.low <= law.loss(3e7, 1e8) <= found.high
    assert found.high - found.low < 0.3


@pytest.mark.parametrize(
    "law",
    [
        LossLaw(900.0, 200.0, 0.6, 0.43, 0.27),  # exponents far from the published ones
        pytest.param(LossLaw(120.0, 900.0, 1.2, 0.34, 0.40), marks=pytest.mark.nightly),
        pytest.param(LossLaw(40.0, 3000.0, 2.0, 0.26, 0.45), marks=pytest.mark.nightly),
    ],
)
def test_a_forecast_lies_within_its_interval_and_the_interval_is_as_wide_as_the_noise(law):
    for noise in (0.003, 0.02):
        found = losslaw.forecast(runs_of(law, noise), 1e8, 1e9)
        assert found.low < found.loss < found.high
        near = losslaw.forecast(runs_of(law, noise), 1e6, 5e6)  # amid the runs, where the prior matters little
        assert 2.2 * near.residual_nats < near.high - near.low < 6 * near.residual_nats + 0.01


def test_coefficients_are_the_non_negative_least_squares():
    """No small step that keeps the signs lowers the error: the problem is convex."""
    random = np.random.default_rng(1)
    for _ in range(20):
        first_P, second_P = random.uniform(0.1, 1, 6), random.uniform(0.1, 1, 6)
        loss_PR = random.uniform(0.1, 3, (6, 3))
        solved_3R, error_R = losslaw._solve_linear(first_P, second_P, loss_PR)
        matrix_P3 = np.stack([np.ones(6), first_P, second_P], axis=1)
        assert (solved_3R >= 0).all()
        assert ((matrix_P3 @ solved_3R - loss_PR) ** 2).sum(axis=0) == pytest.approx(error_R)
        for change_3 in random.normal(0, 0.01, (50, 3)):
            nearby_3R = np.maximum(0, solved_3R + change_3[:, None])
            assert (((matrix_P3 @ nearby_3R - loss_PR) ** 2).sum(axis=0) >= error_R - 1e-12).all()


def test_a_law_wants_several_sizes_and_lengths():
    points = runs_of(LAWS["corrected"], 0.0)
    with raises_user_error(got=3, wanted="at least 4"):
        losslaw.fit(points[:3])
    with raises_user_error(wanted="at least two sizes and two lengths"):
        losslaw.fit([point for point in points if point.parameters == 300_000] * 2)

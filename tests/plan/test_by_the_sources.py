"""Figures of data sheets, papers and docs/cost.md, written down once more: a slip of the pen in the code shows here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from published_rows import MaterialisedWork

from penjing.model.config import ModelConfig
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan import prediction_history as ledger
from penjing.plan.device_model import MARGINS, Machine, machine_from_spec
from penjing.plan.gpu_specs import GPU_SPECS
from penjing.plan.layout import STATE_BYTES, Layout
from penjing.plan.shape import shape_of
from penjing.plan.step_time import DecodeWorkload, decode_time, step_time
from penjing.plan.step_workload import Workload

SHAPE = shape_of(
    ModelConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
    )
)
WORK = Workload(shape=SHAPE, tokens=100, seq_len=100, keys=50.5, passes=3, dtype="float32")
# Whatever is asked of it takes a second for each FLOP or byte.
UNIT = Machine(
    name="unit",
    kind="cuda",
    level="L1",
    source="",
    matmul_flops={"float32": 1.0, "bfloat16": 1.0},
    attention_share=1.0,
    bytes_per_second=1.0,
    launch_seconds=0.0,
    bus_bytes_per_second=1.0,
)


@pytest.mark.parametrize(
    ("name", "half", "memory_gib", "gigabytes", "watts"),
    [
        ("H100", 989, (79, 80), 3350, 700),
        ("H200", 989, (139, 141), 4800, 700),
        ("A100", 312, (79, 80), 2039, 400),
        ("A100 40GB", 312, (39, 40), 1555, 400),
        ("V100", 125, (31, 32), 900, 300),
        ("T4", 65, (14, 16), 320, 70),
        ("L4", 121, (21, 24), 300, 72),
        ("RTX 3090", 71, (23, 24), 936, 350),
        ("RTX 4090", 165.2, (23, 24), 1008, 450),
        ("RTX 5090", 209.5, (31, 32), 1792, 575),
    ],
)
def test_cards_are_those_of_their_sheets(name, half, memory_gib, gigabytes, watts):
    """Dense rates with float32 accumulation: half of what is printed for sparse matrices, and for GeForce cards half
    again; memory is what is left of the printed size."""
    card = GPU_SPECS[name]
    assert (card.half, card.gigabytes_per_second, card.watts) == (half, gigabytes, watts)
    assert memory_gib[0] <= card.memory_gib <= memory_gib[1]


def test_what_a_card_sustains():
    h100, home = machine_from_spec(GPU_SPECS["H100"]), machine_from_spec(GPU_SPECS["RTX 4090"])
    assert h100.rate("bfloat16") == pytest.approx(0.60 * 989e12)
    assert home.rate("bfloat16") == pytest.approx(0.95 * 165.2e12)
    assert h100.rate("float32") == pytest.approx(0.9 * 67e12)
    assert h100.attention_rate("bfloat16", 1024) == pytest.approx(0.25 * 989e12)
    assert h100.bytes_per_second == pytest.approx(0.8 * 3350e9)
    assert (h100.bus_bytes_per_second, home.bus_bytes_per_second) == (230e9, 12e9)
    assert h100.launch_seconds == home.launch_seconds == 25e-6


def test_intervals_of_the_levels():
    assert MARGINS == {"L0": 0.30, "L1": 0.15, "L2": 0.03, "L3": 0.02}


def test_a_step_of_sharded_weights():
    """FSDP2 gathers float32 weights twice a pass, embeddings once, and scatters gradients; 15 % of it is not hidden.
    Between nodes it takes two and a half times as long."""
    layout = Layout(ranks=2, shards=frozenset(STATE_BYTES))
    one_pass = 4 * (3 * SHAPE.parameters - SHAPE.vocabulary * SHAPE.width)
    two = step_time(replace(WORK, layout=layout), UNIT)
    assert two.communication == pytest.approx(0.15 * 3 * one_pass / 2)
    many = step_time(replace(WORK, layout=replace(layout, ranks=16, nodes=2)), UNIT)
    assert many.communication == pytest.approx(0.15 * 2.5 * 3 * one_pass * 15 / 16)


def test_launches_and_what_kernels_of_our_own_move():
    assert WORK.kernels() == 2 * 100 + 60
    half = replace(WORK, dtype="bfloat16")
    assert half.kernels() == 2 * 100 * 1.5 + 60
    assert replace(WORK, compiled=True).kernels() == (2 * 100 + 60) / 4
    assert replace(WORK, recompute="block").kernels() == pytest.approx(2 * 100 * 1.3 + 60)
    assert replace(WORK, triton_kernels=True).head_bytes() == 100 * 1000 * 10
    values = 45 * 64 * 2 + 14 * 128 * 2
    assert replace(WORK, triton_kernels=True).elementwise_bytes() == pytest.approx(100 * values * 4 * 0.85)
    assert replace(WORK, compiled=True).elementwise_bytes() == pytest.approx(100 * values * 4 * 0.5)
    assert half.elementwise_bytes() == pytest.approx(100 * values * 2 * 1.5)
    assert half.optimizer_bytes() == SHAPE.parameters * (28 * 2 + 20)
    assert replace(half, fused_optimizer=True).optimizer_bytes() == SHAPE.parameters * (28 + 20)
    maps = MaterialisedWork(**vars(WORK))
    assert maps.map_bytes() == 100 * 100 * 2 * 2 * 18 * 4
    assert maps.attention_flops() == (2 + 4) * 2 * 100 * 64 * 100 * 2


def test_published_rules_for_batches_and_rates():
    """1e9 parameters on 1e11 tokens, 6e20 FLOPs; the papers' own constants."""
    step, deep, power = tokens.cross_checks(10**9, 1e11, 6e20)
    assert step[1:] == pytest.approx((0.58 * 1e11**0.571, 1.79 * 1e9**-0.713 * 1e11**0.307)), "arXiv:2503.04715"
    assert deep[1:] == pytest.approx((0.2920 * 6e20**0.3271, 0.3118 * 6e20**-0.1250)), "arXiv:2401.02954"
    assert power[1] == pytest.approx(524_288 * (1e11 / 1.2e9) ** 0.383), "arXiv:2505.13738"


def test_the_range_of_the_advice_turns_around_1e20_flops():
    """The exponent of the corrected fit is 0.513 +- 0.020 (arXiv:2404.10102); four of five lie within 1.28 of that."""
    found = tokens.advise(64_000_000, 60_000_000)
    away = abs(math.log(6 * 64e6 * found.tokens / 1e20))
    assert found.high / found.tokens == pytest.approx(math.exp(2 * 1.28 * 0.020 * away))
    assert found.low / found.tokens == pytest.approx(math.exp(-2 * 1.28 * 0.020 * away))


def test_a_bill_of_money_and_electricity():
    price = cost.Price(hour=cost.Money(2.5, "USD"), source="")
    assert cost.cost(price, 2 * 3600, 8) == cost.Money(40.0, "USD")
    assert cost.kilowatt_hours(3600, 8, 700) == pytest.approx((8 * 700 * 0.9 + 100) / 1000)
    assert cost.read_budget("1GB").memory_bytes == 10**9
    assert cost.read_count("1.5B", "x") == 1_500_000_000
    assert cost.read_count("2T", "x") == 2 * 10**12


def test_answers_that_wait_for_a_slot_take_their_time():
    """64 answers of 50 tokens in 16 slots are 200 steps, though the longest has 100; in 64 slots they are 100."""

    def steps(slots):
        decode = DecodeWorkload(answers=64, prompts=64, prompt_tokens=0.0, answer_tokens=50.0, longest=100, slots=slots)
        slow_host = replace(UNIT, matmul_flops={"float32": 1e30}, bytes_per_second=1e30, launch_seconds=3.0)
        return decode_time(decode, WORK, slow_host) / WORK.kernels()

    assert steps(16) == pytest.approx(200)
    assert steps(64) == pytest.approx(100)


def test_keys_and_values_of_answers_are_read_at_every_token():
    """Two of each, for each layer and slot, of the prompt and on average half of the answer; beside all matrices."""
    machine = replace(UNIT, matmul_flops={"float32": 1e30})
    one = (SHAPE.matrices_read(4) + 2 * 4 * 2 * 32 * 125) * 4
    decode = DecodeWorkload(answers=4, prompts=4, prompt_tokens=100.0, answer_tokens=50.0, longest=1, slots=4)
    assert decode_time(decode, WORK, machine) == pytest.approx(50 * one)


def test_prices_that_are_not_given_are_round_figures_of_rented_cards():
    prices = {"RTX 3090": (1.3, "CNY"), "RTX 4090": (2, "CNY"), "A100": (1.5, "USD"), "H100": (2.5, "USD")}
    for card, price in prices.items():
        assert cost.read_money(cost.PRICES[card], card) == cost.Money(*price)


@pytest.mark.parametrize(("seconds", "inside"), [(80, False), (95, True), (105, True), (120, False)])
def test_a_plan_was_right_where_the_time_lies_in_its_range(seconds, inside):
    plan = {"predicted_seconds": 100, "predicted_seconds_low": 90, "predicted_seconds_high": 110, "steps": 10}
    one = ledger.entry("run", "now", plan, {"seconds": seconds, "steps_done": 10})
    assert one.in_interval is inside

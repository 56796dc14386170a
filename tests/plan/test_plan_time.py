"""Cards, terms of a step, probes and intervals, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.flop_counter import FlopCounterMode
from user_errors import raises_user_error

from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer
from penjing.optim.muon import Muon
from penjing.plan.device_model import (
    NVLINK_BYTES_PER_SECOND,
    PCIE_BYTES_PER_SECOND,
    AttentionRate,
    Gemm,
    Machine,
    machine_from_spec,
    nearest_matmul,
)
from penjing.plan.gpu_specs import GPU_SPECS, find_gpu_spec, match_gpu_spec
from penjing.plan.layout import Layout
from penjing.plan.shape import Shape, shape_of
from penjing.plan.step_time import DecodeWorkload, decode_time, fit_two_points, interval, step_time
from penjing.plan.step_workload import Workload
from penjing.plan.trainable import Trainable

SHAPE = Shape(
    layers=2,
    width=64,
    heads=4,
    query_size=64,
    key_size=32,
    intermediate_size=128,
    mlp_matrices=3,
    vocabulary=1000,
    parameters=130_000,
)
PLAIN = Machine(
    name="plain",
    kind="cpu",
    level="L1",
    source="made up",
    matmul_flops={"float32": 1e9},
    attention_share=0.5,
    bytes_per_second=1e9,
    launch_seconds=0.0,
)
DENSE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DENSE |= {"intermediate_size": 48, "vocab_size": 100}
MIXTURE = {
    **DENSE,
    "architecture": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
SHARED = {**MIXTURE, "architecture": "glm4_moe", "shared_expert_intermediate_size": 24, "mlp_only_layers": (0,)}
WORK = Workload(shape=SHAPE, tokens=100, seq_len=50, keys=25.5, passes=3, dtype="float32")


@pytest.mark.parametrize("name", ["RTX 3090", "rtx3090", "3090", "NVIDIA GeForce RTX 3090", "RTX-3090"])
def test_a_card_is_found_however_it_is_written(name):
    assert find_gpu_spec(name).name == "RTX 3090"


def test_cards_of_two_sizes_are_told_apart():
    assert find_gpu_spec("A100-40GB").name == "A100 40GB"
    assert match_gpu_spec("NVIDIA A100-SXM4-40GB").name == "A100 40GB"
    assert match_gpu_spec("Tesla V100-SXM2-16GB", 16 * 10**9).name == "V100 16GB"
    assert match_gpu_spec("Tesla V100-SXM2-32GB", 32 * 10**9).name == "V100"


@pytest.mark.parametrize(("name", "nearest"), [("RTX 9090", "RTX"), ("H1000", "H100"), ("nonsense-card", "Known:")])
def test_an_unknown_card_is_one_line_that_helps(name, nearest):
    with raises_user_error(where="--gpu", next_step=nearest):
        find_gpu_spec(name)


def test_the_table_of_cards_is_consistent():
    for name, card in GPU_SPECS.items():
        assert card.name == name
        assert find_gpu_spec(name) is card
        assert card.half >= card.single * 0.6
        assert 5 < card.memory_gib < 200
        assert 200 <= card.gigabytes_per_second <= 8000
    # fp32-accumulating tensor rate of GeForce cards: SMs x boost x 256 FMA x 2
    assert GPU_SPECS["RTX 3090"].half == pytest.approx(82 * 1.695 * 512 / 1e3, rel=0.01)
    assert GPU_SPECS["RTX 4090"].half == pytest.approx(128 * 2.52 * 512 / 1e3, rel=0.01)
    assert GPU_SPECS["RTX 5090"].half == pytest.approx(170 * 2.407 * 512 / 1e3, rel=0.01)


@pytest.mark.parametrize("name", GPU_SPECS)
def test_only_cards_with_a_link_of_their_own_have_its_rate(name):
    linked = name in ("A100", "A100 40GB", "V100", "V100 16GB", "H100", "H100 NVL", "H200", "GH200", "B200", "GB200")
    rate = NVLINK_BYTES_PER_SECOND if linked else PCIE_BYTES_PER_SECOND
    assert machine_from_spec(GPU_SPECS[name]).bus_bytes_per_second == rate


def test_a_step_by_hand():
    matrices = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128) + 64 * 1000
    assert SHAPE.matrices == matrices
    found = step_time(WORK, PLAIN)
    assert found.matmuls == pytest.approx(3 * 6 * matrices * 100 / 1e9)
    assert found.attention == pytest.approx(3 * 7 * 2 * 100 * 64 * 25.5 * 2 / 0.5e9)
    values = 45 * 64 * 2 + 14 * 128 * 2
    assert found.elementwise == pytest.approx(3 * 100 * values * 4 / 1e9)
    assert found.head == pytest.approx(3 * 100 * 1000 * 40 * 2 / 1e9)
    assert found.optimizer == pytest.approx(130_000 * 28 * 2 / 1e9)
    assert found.launch == found.communication == 0
    assert found.seconds == pytest.approx(sum(asdict(found).values()))
    assert found.bottleneck == max(asdict(found), key=asdict(found).get)


def test_a_step_is_never_quicker_than_its_launches():
    slow_host = replace(PLAIN, kind="cuda", launch_seconds=1.0)
    found = step_time(WORK, slow_host)
    assert found.seconds - found.optimizer == pytest.approx(3 * WORK.kernels())


def test_a_cpu_calls_its_operations_while_it_does_nothing_else():
    calling = step_time(WORK, replace(PLAIN, launch_seconds=1e-6))
    assert calling.launch == pytest.approx(3e-6 * WORK.kernels())
    assert calling.seconds == pytest.approx(step_time(WORK, PLAIN).seconds + calling.launch)


def test_attention_is_as_fast_as_measured_at_its_dtype_and_length():
    def seconds(keys):  # a query's own cost, and each key's
        return 4e-9 * keys + 400e-9

    measured = [
        AttentionRate(dtype="float32", keys=keys, flops_per_second=keys / seconds(keys)) for keys in (128.5, 512.5)
    ]
    machine = replace(PLAIN, attentions=tuple(measured))
    for keys in (20.0, 128.5, 300.0, 512.5, 2000.0):
        assert machine.attention_rate("float32", keys) == pytest.approx(keys / seconds(keys))
    assert machine.attention_rate("bfloat16", 300.0) == 0.5e9  # not measured: by its share of matmuls
    flat = replace(PLAIN, attentions=(measured[0],))
    assert flat.attention_rate("float32", 300.0) == pytest.approx(128.5 / seconds(128.5))
    assert step_time(WORK, machine).attention == pytest.approx(3 * WORK.attention_flops() * seconds(25.5) / 25.5)


@pytest.mark.parametrize("quicker", [1.0, 1.1, 100.0])
def test_attention_has_a_rate_at_any_length_whatever_was_measured(quicker):
    measured = (
        AttentionRate(dtype="float32", keys=100.0, flops_per_second=1e9),
        AttentionRate(dtype="float32", keys=110.0, flops_per_second=1e9 * quicker),
    )
    machine = replace(PLAIN, attentions=measured)
    rates = [machine.attention_rate("float32", keys) for keys in (1.0, 105.0, 1e3, 1e6)]
    assert all(0 < rate <= 2e9 * quicker for rate in rates) and rates == sorted(rates)


def test_several_devices_exchange_what_computation_does_not_hide():
    alone = step_time(WORK, PLAIN)
    slow = replace(PLAIN, bus_bytes_per_second=1e5)
    two = step_time(replace(WORK, layout=Layout(ranks=2)), slow)
    sent = 2 * 4 * 130_000 / 2 / 1e5
    busy = (alone.matmuls + alone.attention + alone.elementwise + alone.head) / 3
    assert two.communication == pytest.approx(sent - busy / 2)
    quick = replace(PLAIN, bus_bytes_per_second=1e12)
    assert step_time(replace(WORK, layout=Layout(ranks=2)), quick).communication == pytest.approx(
        0.1 * sent * 1e5 / 1e12
    )


def test_measured_products_go_before_the_general_rate():
    measured = Gemm(rows=100, inner=64, outputs=1000, dtype="float32", flops_per_second=4e9)
    machine = replace(PLAIN, matmuls=(measured,))
    assert machine.matmul_seconds(100, 64, 1000, "float32") == pytest.approx(2 * 100 * 64 * 1000 / 4e9)
    assert machine.matmul_seconds(1000, 100, 64, "float32") == pytest.approx(2 * 100 * 64 * 1000 / 4e9)
    assert machine.matmul_seconds(100, 64, 100, "float32") == pytest.approx(2 * 100 * 64 * 100 / 1e9)
    assert nearest_matmul((measured,), 100, 64, 1000, "bfloat16") is None


def test_odd_sides_are_slow_on_a_gpu_only():
    card = machine_from_spec(GPU_SPECS["A100"])
    even, odd = (card.matmul_seconds(8192, 768, size, "bfloat16") for size in (50304, 50257))
    assert odd / even == pytest.approx(2 * 50257 / 50304)
    assert PLAIN.matmul_seconds(7, 7, 7, "float32") == 2 * 343 / 1e9


ADAPTERS = Trainable(num_trainable=100_000, weights=0, inputs=25_000_000)


def test_more_of_anything_takes_longer():
    machine = machine_from_spec(GPU_SPECS["RTX 3090"])
    base = Workload(shape=shape_of(ModelConfig(**ModelConfig.named("26m"))), tokens=8192, seq_len=512, keys=256.5)
    seconds = step_time(base, machine).seconds
    for more in (
        {"tokens": 16384},
        {"passes": 2},
        {"keys": 512.0},
        {"recompute": "mlp"},
        {"recompute": "block"},
        {"extra_forwards": 1.0},
    ):
        assert step_time(replace(base, **more), machine).seconds > seconds
    for less in ({"compiled": True}, {"trainable": ADAPTERS}):
        assert step_time(replace(base, **less), machine).seconds < seconds
    muon = replace(base, optimizer="muon")
    assert step_time(muon, machine).optimizer > step_time(base, machine).optimizer


@pytest.mark.parametrize("shape", [DENSE, MIXTURE, SHARED])
def test_the_flops_of_muon_are_those_that_its_step_takes(shape):
    config = ModelConfig(**shape)
    model = Transformer(config)
    initialise(model, 1)
    optimizers = Muon().build(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        for optimizer in optimizers:
            optimizer.step()
    work = replace(WORK, shape=shape_of(config), optimizer="muon")
    assert work.optimizer_flops() == counter.get_total_flops() > 0


def test_cpus_share_muons_work_and_then_the_weights():
    alone, shared = replace(WORK, optimizer="muon"), replace(WORK, optimizer="muon", layout=Layout(ranks=4))
    # Two blocks; m and n of the matrices: query and output, key and value, the MLP's three.
    sides = [(64, 64), (64, 64), (32, 64), (32, 64), (64, 128), (64, 128), (64, 128)]
    seconds = 2 * sum(3 * (4 * m * m * n + 2 * m**3) for m, n in sides) / 1e9
    one, four = step_time(alone, PLAIN), step_time(shared, PLAIN)
    assert one.optimizer - four.optimizer == pytest.approx(3 / 4 * seconds)
    adamw = step_time(replace(shared, optimizer="adamw"), PLAIN)
    weights = 2 * sum(m * n for m, n in sides)
    received = 4 * weights * 3 / 4 / PLAIN.bus_bytes_per_second
    assert four.communication - adamw.communication == pytest.approx(received)
    # Between GPUs nothing is shared.
    gpu = replace(PLAIN, kind="cuda")
    assert step_time(shared, gpu).optimizer == step_time(alone, gpu).optimizer
    assert step_time(shared, gpu).communication == step_time(replace(shared, optimizer="adamw"), gpu).communication


def test_a_line_through_two_probes():
    line = fit_two_points((4, 1.3), (8, 2.3))
    assert (line.fixed, line.slope) == pytest.approx((0.3, 0.25))
    assert line.at(32) == pytest.approx(8.3)
    assert fit_two_points((8, 2.3), (4, 1.3)) == line
    # More work that took less time, and a line that would begin below zero, cannot be.
    assert fit_two_points((4, 2.0), (8, 1.0)).at(16) == 1.0
    assert fit_two_points((4, 1.0), (8, 4.0)).at(16) == 8.0
    assert fit_two_points((4, 1.0), (4, 2.0)).at(8) == 4.0


@given(
    some.floats(0, 10), some.floats(1e-3, 10), some.integers(1, 50), some.integers(51, 200), some.integers(201, 10_000)
)
def test_two_probes_of_a_line_give_the_line_back(fixed, each, small, large, size):
    line = fit_two_points((small, fixed + each * small), (large, fixed + each * large))
    assert line.at(size) == pytest.approx(fixed + each * size, rel=1e-3)


def test_writing_answers_is_bound_by_weights_or_launches():
    decode = DecodeWorkload(answers=64, prompts=64, prompt_tokens=100, answer_tokens=50, longest=100, slots=32)
    work = replace(WORK, dtype="float32")
    prefill = 2 * SHAPE.matrices * 64 * 100 / 1e9
    moved = SHAPE.matrices * 4 + 2 * 32 * 2 * 32 * 125 * 4
    matmuls = 32 * (2 * SHAPE.matrices + 4 * 2 * 64 * 125) / 1e9
    busy = prefill + 100 * max(moved / 1e9, matmuls)
    assert decode_time(decode, work, PLAIN) == pytest.approx(busy)
    host = replace(PLAIN, kind="cuda", launch_seconds=1.0)
    assert decode_time(decode, work, host) == pytest.approx(prefill + 100 * work.kernels() / 3)
    cpu = replace(PLAIN, launch_seconds=1e-3)
    assert decode_time(decode, work, cpu) == pytest.approx(busy + 0.1 * work.kernels() / 3)


def test_writing_answers_reads_every_expert_that_one_of_them_goes_through():
    shape = shape_of(ModelConfig(**MIXTURE))  # two of four experts in each of two layers
    slow = replace(PLAIN, bytes_per_second=1.0)

    def values_read(answers: int) -> float:
        decode = DecodeWorkload(
            answers=answers, prompts=answers, prompt_tokens=0.0, answer_tokens=0.0, longest=1, slots=1000
        )
        return decode_time(decode, replace(WORK, shape=shape), slow) / 4

    expert = 3 * 32 * 24
    assert values_read(1) == pytest.approx(shape.matrices)
    assert values_read(2) == pytest.approx(shape.matrices + 2 * expert)  # three of four on average
    assert values_read(1000) == pytest.approx(shape.matrices + 2 * 2 * expert)


def test_an_interval_is_as_wide_below_as_above():
    assert interval(100, 0.3) == (70, 130)

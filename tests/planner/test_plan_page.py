"""The page, its smaller sisters and the probe, as a user meets them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from user_errors import raises_user_error

from penjing.base import config
from penjing.base.errors import UserError
from penjing.data import progress
from penjing.devices.choose import local_device
from penjing.devices.cpu import Cpu
from penjing.kernels.triton import ops as gpu
from penjing.model.config import ModelConfig
from penjing.parallel.ddp import DataParallel
from penjing.plan import profile
from penjing.plan.cost import read_count
from penjing.plan.device_model import machine_from_spec
from penjing.plan.flops import parameters
from penjing.plan.gpu_specs import find_gpu_spec
from penjing.plan.layout import STATE_BYTES
from penjing.plan.memory import Target, is_tight, safe_bytes
from penjing.plan.memory.fake_device_mode import FakeDeviceMode
from penjing.plan.step_time import step_time
from penjing.planner import counts as plan_counts
from penjing.planner import history as verify
from penjing.planner import inputs as plan_run
from penjing.planner import report as planning
from penjing.planner import search as plan_tools
from penjing.planner.inputs import PlanOptions
from penjing.planner.page import SHOWN_SOURCES, print_page, source_rows, verdict_of
from penjing.planner.report import make_report, read_external
from penjing.train import step_timing
from penjing.train.build import prepare_run
from penjing.train.build_context import RunHooks
from penjing.train.memory_trace import trace
from penjing.train.signals import Stopped
from penjing.workflows.forecast import family
from penjing.workflows.train import execute, resolve_run

TINY = ["model=tiny", "model.num_hidden_layers=2", "data.seq_len=64", "batch.size=8", "compute.compile=off"]


def settings(*words: str):
    return config.parse_overrides([*TINY, *words])


def text_of(show) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    show(console)
    return console.export_text()


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENJING_HOME", str(tmp_path / "home"))


def test_the_whole_page_without_gpu_and_without_data():
    run = resolve_run("pretrain", config.parse_overrides([]))
    page = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", unique="1.2B"))
    text = text_of(lambda console: print_page(page, console, explain=True))
    for word in ("parameters", "causal", "full square", "L0, spec sheet", "traced", "fits", "CNY", "kWh", "bottleneck"):
        assert word in text, word
    assert page.parameters == parameters(run.model).total
    assert page.epochs == 1.0 and page.tokens == 1_200_000_000
    assert page.predicted_seconds_low < page.predicted_seconds < page.predicted_seconds_high
    assert page.predicted_seconds == pytest.approx(sum(page.parts_seconds.values()))
    assert page.mfu_causal < page.mfu_full_square < 1
    assert sum(page.waterfall.values()) == page.peak_memory_bytes
    assert page.fits and len(page.alternatives) == 2  # less memory is no advice where it fits
    json.dumps(asdict(page), allow_nan=False)


def test_a_card_that_is_too_small_is_named_and_rows_are_found_that_fit(monkeypatch):
    small = replace(find_gpu_spec("RTX 3060"), memory_gib=0.9)
    for module in (plan_run, profile):
        monkeypatch.setattr(module, "find_gpu_spec", lambda name: small)
    run = resolve_run("pretrain", settings("batch.size=256", "data.seq_len=256"))
    page = make_report("pretrain", run, PlanOptions(gpu="small", tokens="1M"))
    assert page.fits and 0 < page.micro_size < 256 and 256 % page.micro_size == 0
    assert any("batch.micro_size=" in line for line in page.warnings)
    fixed = replace(run, batch=replace(run.batch, micro_size=256))
    assert make_report("pretrain", fixed, PlanOptions(gpu="small", tokens="1M")).fits is False


def test_rows_are_found_that_fit_a_budget_of_memory():
    run = resolve_run("pretrain")
    whole = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M"))
    less = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M", budget="4GiB"))
    assert (whole.micro_size, whole.memory_bytes > less.memory_bytes, less.memory_bytes) == (64, True, 4 << 30)
    assert less.fits and not less.tight and not less.over_budget and 64 % less.micro_size == 0


GIB = 1 << 30


def let_memory_be(monkeypatch, total_bytes) -> list[int]:
    """Pages are made with a total of memory by rows; returns the numbers of rows that are asked for."""
    run, asked = resolve_run("pretrain", settings()), []
    plan = trace.predict_memory(run, Target(name="RTX 3090", capability=(8, 6), memory_bytes=24 * GIB))

    def predict(run, target, *, micro_size, **how):
        asked.append(micro_size)
        return replace(plan, total_bytes=total_bytes(micro_size))

    monkeypatch.setattr(trace, "predict_memory", predict)
    return asked


def test_the_largest_pass_is_one_that_fits_though_the_optimizer_needs_the_most_of_smaller_ones(monkeypatch):
    """Up to 100 rows the peak stays, beyond them it grows: two traces of fewer rows do not show where memory ends."""

    def total(rows: int) -> int:
        return max(4 * GIB, GIB + rows * GIB * 3 // 100)

    traced = let_memory_be(monkeypatch, total)
    page = make_report(
        "pretrain", resolve_run("pretrain", settings("batch.size=64")), PlanOptions(gpu="RTX 3090", tokens="1M")
    )
    assert 0.9 * page.memory_bytes < total(page.largest_micro_size) <= safe_bytes(page.memory_bytes)
    assert len(traced) == 3


def test_more_rows_are_only_promised_where_they_do(monkeypatch):
    let_memory_be(monkeypatch, lambda rows: max(4 * GIB, rows * GIB // 2))
    run = resolve_run("pretrain", settings("batch.size=64", "batch.micro_size=8"))
    page = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M"))
    lines = [line for line in page.alternatives if "and fits" in line]
    assert len(lines) == 1 and lines[0].startswith("batch.micro_size=32:")


@pytest.mark.parametrize(("words", "advised"), [(("batch.micro_size=64",), "batch.micro_size=16: fits"), ((), None)])
def test_fewer_rows_are_proposed_where_the_chosen_ones_do_not_fit(monkeypatch, words, advised):
    let_memory_be(monkeypatch, lambda rows: rows * GIB)
    run = resolve_run("pretrain", settings("batch.size=64", *words))
    page = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M"))
    assert page.fits is not bool(advised)
    assert not advised or page.alternatives[0] == advised
    assert not any("less memory" in line for line in page.alternatives)


def test_what_fits_of_a_prime_is_said_with_a_batch_that_is_faster(monkeypatch):
    let_memory_be(monkeypatch, lambda rows: GIB + rows * GIB // 4)
    run = resolve_run("pretrain", settings("batch.size=109", "batch.micro_size=109"))
    asked = PlanOptions(gpu="RTX 3090", tokens="100M")
    fits, nearby = make_report("pretrain", run, asked).alternatives
    assert fits == "batch.micro_size=1: fits"
    size, percent = (int(re.search(words, nearby)[1]) for words in (r"batch.size=(\d+)", r"(\d+)% less time"))
    slow, fast = (
        make_report("pretrain", resolve_run("pretrain", settings(*words)), asked).predicted_seconds
        for words in (("batch.size=109", "batch.micro_size=1"), (f"batch.size={size}",))
    )
    assert percent / 100 == pytest.approx(1 - fast / slow, abs=0.1)


@pytest.mark.parametrize(("size", "gib_per_row"), [(1, 1), (2, 1), (16, 1), (8, 8)])
def test_twice_the_batch_gains_what_its_own_plan_says(monkeypatch, size, gib_per_row):
    let_memory_be(monkeypatch, lambda rows: rows * gib_per_row * GIB // 4)

    def page(rows):
        run = resolve_run("pretrain", settings("model=26m", f"batch.size={rows}"))
        return make_report("pretrain", run, PlanOptions(gpu="H100", tokens="1B"))

    told = next((line for line in page(size).alternatives if line.startswith(f"batch.size={2 * size}:")), "0% less")
    gain = 1 - page(2 * size).predicted_seconds / page(size).predicted_seconds
    assert int(re.search(r"(\d+)% less", told)[1]) / 100 == pytest.approx(gain, abs=0.03) and gain > 0.4


def test_a_batch_nearby_with_larger_passes_is_proposed(monkeypatch):
    """A share of 109 rows, a prime, has passes of one row where 109 do not fit."""
    let_memory_be(monkeypatch, lambda rows: GIB + rows * GIB // 4)
    run = resolve_run("pretrain", settings("batch.size=872"))
    asked = PlanOptions(gpu="RTX 3090", gpus=8, tokens="1B")
    page = make_report("pretrain", run, asked)
    assert (page.micro_size, page.passes) == (1, 109)
    (line,) = (each for each in page.alternatives if "micro-batches of" in each)
    size, rows = (int(re.search(words, line)[1]) for words in (r"batch.size=(\d+)", r"micro-batches of (\d+)"))
    assert 0.875 * 872 <= size <= 1.125 * 872
    run = replace(run, batch=replace(run.batch, size=size))
    better = make_report("pretrain", run, asked)
    assert better.micro_size == rows > 8 and better.predicted_seconds < 0.95 * page.predicted_seconds


@pytest.mark.parametrize(
    ("gib_of_a_row", "length", "advised"),
    [
        (30, 64, ["takes 30.00 GiB", "--gpu 'A100': fits"]),
        (1000, 64, ["takes 1000.00 GiB", "parameters fits"]),
        (70, 1024, ["takes 70.00 GiB", "data.seq_len=256: fits", "--gpu 'A100': fits"]),
    ],
)
def test_a_run_that_never_fits_is_told_what_would(monkeypatch, gib_of_a_row, length, advised):
    """Memory here follows the tokens of a pass alone: neither recomputation nor states in int8 help."""
    let_memory_be(monkeypatch, lambda rows: rows)
    rows_only = trace.predict_memory

    def predict(run, target, **how):
        plan = rows_only(run, target, **how)
        return replace(plan, total_bytes=plan.total_bytes * gib_of_a_row * GIB * run.data.seq_len // length)

    monkeypatch.setattr(trace, "predict_memory", predict)
    run = resolve_run("pretrain", settings("batch.size=64", f"data.seq_len={length}"))
    page = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M"))
    assert page.fits is False and page.micro_size == 1
    assert len(page.alternatives) == len(advised)
    assert all(words in line for words, line in zip(advised, page.alternatives, strict=True))


@pytest.mark.parametrize(("words", "gpus"), [((), 3), (("batch.micro_size=3",), 1), (("batch.micro_size=8",), 2)])
def test_what_training_would_refuse_is_not_planned(words, gpus):
    run, asked = resolve_run("pretrain", settings(*words)), PlanOptions(gpu="RTX 3090", gpus=gpus)
    with raises_user_error(where="batch.size", got=8):
        make_report("pretrain", run, asked)
    if not words:  # a search looks for rows of a pass itself
        with raises_user_error(where="batch.size", got=8, wanted="a multiple of 3 devices"):
            plan_tools.search(run, asked, "", (), Console(quiet=True))


def test_what_fits_by_a_hair_is_called_tight():
    limit = 16 << 30
    safe = safe_bytes(limit)
    assert [is_tight(each, limit) for each in (safe, safe + 1, limit, limit + 1)] == [False, True, True, False]
    assert [str(verdict_of(fits, False)) for fits in (True, False)] == ["fits", "does not fit"]
    run = resolve_run("pretrain", settings("batch.micro_size=4"))
    need = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M")).peak_memory_bytes
    budget = f"{1.01 * need / (1 << 20):.0f}MiB"
    close = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M", budget=budget))
    assert close.fits and close.tight and not close.over_budget
    assert "tight" in text_of(lambda console: print_page(close, console))


def test_a_budget_that_is_too_small_is_reported():
    run = resolve_run("pretrain", settings("max_steps=100000"))
    page = make_report("pretrain", run, PlanOptions(gpu="RTX 3090", budget="1min,100MB,0.01CNY"))
    assert len(page.over_budget) == 3
    assert make_report("pretrain", run, PlanOptions(gpu="RTX 3090", budget="9d,20GB,99CNY")).over_budget == []
    assert "USD" in make_report("pretrain", run, PlanOptions(gpu="A100", budget="9CNY"), trace=False).over_budget[0]


def test_stages_that_sample_pay_for_it():
    run = resolve_run("grpo", settings("max_steps=10", "objective.rollout.max_new_tokens=16"))
    page = make_report("grpo", run, PlanOptions(gpu="RTX 4090"), trace=False)
    assert page.step_parts_seconds["generation"] > 0
    assert page.bottleneck == "generation"
    longer = resolve_run("grpo", settings("max_steps=10", "objective.rollout.max_new_tokens=48"))
    more = make_report("grpo", longer, PlanOptions(gpu="RTX 4090"), trace=False)
    assert more.step_parts_seconds["generation"] > 2 * page.step_parts_seconds["generation"]


@pytest.mark.parametrize("installed", [True, False])
def test_a_card_at_hand_is_planned_with_the_kernels_that_run_there(monkeypatch, installed):
    properties = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(plan_run, "find_profile", lambda key: None)
    monkeypatch.setattr(plan_run, "profile_key", lambda device: "")
    monkeypatch.setattr(gpu, "has_triton", installed)
    run = resolve_run(
        "pretrain", settings("compute.dtype=bfloat16", "compute.device=cuda", "model.num_hidden_layers=1")
    )
    machine, target, notes = plan_run.find_machine(PlanOptions(), run)
    assert any("Triton" in note for note in notes) != installed
    work = plan_run.workload_of(run, machine, PlanOptions(), 4)
    assert work.triton_kernels == installed
    with FakeDeviceMode(target):
        assert (not gpu.reason(torch.device("cuda"), torch.bfloat16)) == installed
    assert gpu.has_triton == installed
    with FakeDeviceMode(Target(capability=(9, 0))):
        assert not gpu.reason(torch.device("cuda"), torch.bfloat16), "another machine's card has what it needs"


@pytest.mark.parametrize(("setting", "planned"), [("auto", "mps"), ("cpu", "cpu"), ("mps", "mps")])
def test_a_plan_is_for_the_device_that_trains(monkeypatch, setting, planned):
    """Here on a Mac. Its measurements run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 << 30)
    for name in ("matmul", "copy_rate", "launch_seconds", "attention_rate"):
        real = getattr(plan_run, name)
        monkeypatch.setattr(plan_run, name, lambda *args, real=real, **more: real(*_on_host(args), **more))
    assert local_device(setting).type == planned
    run = resolve_run("pretrain", settings(f"compute.device={setting}", "model.num_hidden_layers=1"))
    page = make_report("pretrain", run, PlanOptions(tokens="1M"))
    assert page.level == "L0" and page.fits and page.waterfall
    if planned == "mps":
        assert (page.device, page.memory_bytes, page.dtype) == ("mps", 12 << 30, "float32")


def _on_host(args):
    return [torch.device("cpu") if isinstance(one, torch.device) else one for one in args]


@pytest.mark.parametrize(("waited", "said"), [(0.0, False), (0.05, False), (3.0, True)])
def test_a_measurement_beside_other_programs_says_so(monkeypatch, waited, said):
    """A thread that ran for one second and waited for a core for `waited` more."""
    plan_run._measured_once.cache_clear()
    times = lambda since=None: {"1": (1.0, waited)}  # noqa: E731
    monkeypatch.setattr(plan_run, "thread_seconds", times)
    monkeypatch.setattr(plan_run, "find_profile", lambda key: None)
    _, _, notes = plan_run.find_machine(PlanOptions(), resolve_run("pretrain", settings("compute.device=cpu")))
    lines = [note for note in notes if "used the cores" in note]
    assert len(lines) == said and all(f"{1 + waited:.1f} x" in line for line in lines)


def test_longer_runs_and_faster_cards():
    run = resolve_run("pretrain", settings())
    asked = {name: PlanOptions(gpu=name, tokens="10B") for name in ("RTX 3090", "H100")}
    pages = {name: make_report("pretrain", run, options, trace=False) for name, options in asked.items()}
    assert pages["H100"].predicted_seconds < pages["RTX 3090"].predicted_seconds
    both = make_report("pretrain", run, PlanOptions(gpu="H100", gpus=2, tokens="10B"))
    assert both.passes * both.micro_size * 2 == run.batch.size


@pytest.mark.parametrize(
    ("asked", "where"),
    [({"gpu": "RTX 9090"}, "--gpu"), ({"tokens": "-5"}, "--tokens"), ({"budget": "3 moons"}, "--budget")],
)
def test_bad_input_is_one_line(asked, where):
    with raises_user_error(where=where):
        make_report("pretrain", resolve_run("pretrain", settings()), PlanOptions(**{"gpu": "RTX 3090", **asked}))


def test_a_hugging_face_config_is_read(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    with raises_user_error(where="config.json", got="gpt2"):
        read_external(tmp_path, {})
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 300,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(llama))
    run = read_external(tmp_path / "config.json", {})
    assert run.model.hidden_size == 64
    page = make_report("llama", run, PlanOptions(gpu="A100"), trace=False)
    assert not page.traced  # a formula, and the page says so
    assert "formula" in text_of(lambda console: print_page(page, console))
    with raises_user_error(where="data.seq_len", got=99999, wanted="at most model.max_position_embeddings = 1024"):
        read_external(tmp_path, {"data": {"seq_len": 99999}})


def test_a_probed_plan_costs_what_its_one_card_does():
    over = planning.over_budget(PlanOptions(budget="1USD", gpus=2), 3600.0, 0, "1 x NVIDIA H200")
    assert over == ["3.00 USD of at most 1.00 USD"]


def test_sizes_beyond_the_ladder_have_its_largest_shape():
    assert plan_counts.model_of(7_000_000_000) == plan_counts.model_of(3_000_000_000)


@pytest.mark.parametrize(
    "option", ["--tokens=1M", "--unique=1M", "--gpus=2", "--nodes=2", "--network=9", "--strategy=ddp", "--explain"]
)
def test_what_a_probe_does_not_look_at_is_refused(option):
    from typer.testing import CliRunner

    from penjing.cli import app

    done = CliRunner().invoke(app, ["plan", "pretrain", "data.train=x.txt", option])
    assert isinstance(done.exception, UserError)
    assert done.exception.line() == (
        f"{option.partition('=')[0]}: has no effect with data.train. Add --gpu NAME, or max_steps=N."
    )


@pytest.mark.parametrize(
    ("shards", "held"), [((), 16), (("optimizer state",), 10), (("optimizer state", "gradients"), 7), (STATE_BYTES, 4)]
)
def test_devices_that_share_the_states_hold_a_part_by_formula(monkeypatch, shards, held):
    """Bytes of a parameter on each of four devices."""
    run = resolve_run("pretrain", settings("optimizer=adamw", "batch.size=32", "batch.micro_size=4"))
    options = PlanOptions(gpu="A100", gpus=4)
    alone = make_report("pretrain", run, options, trace=False)
    monkeypatch.setattr(DataParallel, "shards", frozenset(shards))
    shared = make_report("pretrain", run, options, trace=False)
    saved = alone.peak_memory_bytes - shared.peak_memory_bytes
    assert saved == pytest.approx((16 - held) * alone.parameters, abs=4)


def test_several_devices_are_searched_as_training_shares_them():
    run, asked = resolve_run("pretrain", settings("batch.size=4")), PlanOptions(gpu="RTX 3060", gpus=2)
    shown = text_of(lambda console: plan_tools.search(run, asked, "", (), console, every=True))
    assert "ddp over 2 devices" in shown


def test_a_search_over_adapters_times_adapters():
    run = resolve_run("lora", settings("lora.rank=4"))
    found = plan_tools._candidate(run, CARD, PlanOptions(), 4, 0)
    work = work_on_card(run)
    assert work.weight_share == 0 and found.seconds == step_time(work, CARD).seconds
    assert found.seconds < step_time(replace(work, trainable=None), CARD).seconds


@pytest.mark.parametrize(
    ("windowed", "where"),
    [((), "everywhere"), ((0, 2, 4, 6), "alternating"), ((4, 5, 6, 7), "above"), ((0, 1, 2), "below")],
)
def test_the_small_runs_of_a_forecast_have_windows_where_the_planned_model_has_them(windowed, where):
    shape = {"preset": "26m", "architecture": "qwen3", "num_hidden_layers": 8, "sliding_window": 128}
    run = resolve_run("pretrain", {"model": {**shape, "sliding_window_layers": windowed}})
    for small in family(run):
        model = config.resolve(ModelConfig, small)
        layers = model.num_hidden_layers
        found = [layer for layer in range(layers) if model.window(layer)]
        assert len(found) == pytest.approx(len(windowed or range(8)) / 8 * layers, abs=0.5)
        if where == "alternating":
            assert not any(layer + 1 in found for layer in found)
        elif where == "above":
            assert found == list(range(layers - len(found), layers))
        else:
            assert found == list(range(len(found)))


def test_memory_search_tokens_and_estimate_say_what_they_should():
    run = resolve_run("pretrain", settings("batch.size=4"))
    asked = PlanOptions(gpu="RTX 3060")
    shown = text_of(lambda console: plan_tools.print_memory(run, asked, console, waterfall=True))
    assert "fits" in shown and "activations" in shown and "#" in shown
    found = []
    shown = text_of(lambda console: found.append(plan_tools.search(run, asked, "8GiB", (), console, every=True)))
    assert found[0] >= 3 and "traced configurations fit 8.00 GiB" in shown
    assert all(how in shown for how in ("none", "mlp", "block"))
    assert plan_tools.search(run, asked, "1MB", (), Console(quiet=True)) == 0
    with raises_user_error(where="--fit", got="'3h'", wanted="such as 24GB or 8GiB"):
        plan_tools.search(run, asked, "3h", (), Console(quiet=True))
    shown = text_of(lambda console: plan_counts.print_tokens("64M", "1.2B", "2", "RTX 3060", 1, console))
    assert "1.66B tokens" in shown and "2 h 00 min on 1 x RTX 3060" in shown
    shown = text_of(lambda console: plan_counts.print_estimate("26M", "10B", 75.0, "", console))
    assert "(347 min)" in shown and "ours:" in shown
    with raises_user_error(where="--tflops", next_step="--tflops"):
        plan_counts.print_estimate("26M", "10B", 0.0, "", Console(quiet=True))


CPU = torch.device("cpu")
CARD = machine_from_spec(find_gpu_spec("RTX 3090"))
LARGE_CPU = Target(kind="cpu", name="cpu", memory_bytes=1 << 40)


def work_on_card(run):
    """What the page times, in passes of four rows."""
    return plan_run.workload_of(run, CARD, PlanOptions(), 4)


@pytest.mark.parametrize("few_rows", [False, True])
def test_the_probe_leaves_everything_as_it_was(small_run, tmp_path, monkeypatch, few_rows):
    """Weights, buffers, optimizers and the place in the data after the plan are those of a run without one."""
    from penjing.parallel.single import Single
    from penjing.train import build as module

    def states(name: str):
        words = [*small_run, f"out={tmp_path / name}", "compute.compile=off"]
        run = resolve_run("pretrain", config.parse_overrides(words))
        torch.manual_seed(5)
        made = prepare_run(run, Single(CPU))
        made.context.trackers.end()
        optimizers = [optimizer.state_dict() for optimizer in made.context.optimizers]
        return made.model.state_dict(), optimizers, made.context.source.state(), torch.get_rng_state(), made.estimate

    sizes = []
    timed = step_timing._time_small_passes
    monkeypatch.setattr(step_timing, "_time_small_passes", lambda *given: sizes.append(1) or timed(*given))
    if few_rows:
        monkeypatch.setattr(Cpu, "eager_share", 1e-9)
        monkeypatch.setattr(step_timing, "MIN_RATIO", 2)
    probed = states("probed")
    assert len(sizes) == few_rows
    monkeypatch.setattr(module, "plan", lambda *given, **named: probed[4])
    bare = states("bare")
    for name, value in bare[0].items():
        assert torch.equal(value, probed[0][name]), name
    assert bare[1] == probed[1]
    assert bare[1][0]["state"] == {}
    assert bare[2] == probed[2]
    assert torch.equal(bare[3], probed[3])
    bill = probed[4]
    assert bill.level == "L2" and bill.probe["num_timed"] >= 2 and 0 < bill.probe["pass_seconds"] < bill.step_seconds
    assert bill.predicted_peak_memory_bytes > 50 << 20


def test_trackers_of_a_run_that_is_never_begun_are_closed(small_run, tmp_path, monkeypatch):
    from penjing.parallel.single import Single
    from penjing.track.base import Tracker
    from penjing.train import build as module

    def refuse(*given, **named):
        raise UserError("no plan")

    monkeypatch.setattr(module, "plan", refuse)
    closed = []
    tracker = Tracker()
    monkeypatch.setattr(tracker, "end", lambda: closed.append(True))
    run = resolve_run("pretrain", config.parse_overrides([*small_run, f"out={tmp_path / 'run'}"]))
    with pytest.raises(UserError, match="no plan"):
        prepare_run(run, Single(CPU), RunHooks(trackers=lambda *given: [tracker]))
    assert closed == [True]


def test_a_run_keeps_its_plan_and_its_score(small_run, tmp_path):
    """plan.json is not written again, and verify's figures follow from the two files by hand."""
    words = [*small_run, f"out={tmp_path / 'run'}", "compute.compile=off", "sample.every=0"]
    run = resolve_run("pretrain", config.parse_overrides(words))
    execute(run, Console(quiet=True))
    written = (tmp_path / "run/plan.json").read_bytes()
    terms = {term.name.strip(): term for term in verify.verify(tmp_path / "run", Console(quiet=True))}
    plan, outcome = json.loads(written), json.loads((tmp_path / "run/outcome.json").read_text())
    assert terms["time"].error == pytest.approx(plan["predicted_seconds"] / outcome["seconds"] - 1)
    assert terms["training"].actual == outcome["training_seconds"]
    assert plan["predicted_seconds"] == pytest.approx(sum(plan["parts_seconds"].values()))
    assert plan["parts_seconds"]["training"] == pytest.approx(plan["steps"] * plan["step_seconds"])
    assert plan["flops_per_token"] < plan["flops_per_token_full_square"]
    assert outcome["refit_seconds"] > 0
    execute(run, Console(quiet=True))
    assert (tmp_path / "run/plan.json").read_bytes() == written
    shown = text_of(verify.print_history)
    assert shown.count("run  ") == 2 or shown.count("L2") >= 2  # a line, and the summary of its level


@pytest.mark.parametrize(
    ("error", "ended", "why"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", "OutOfMemoryError: CUDA out of memory"),
        (UserError("NaN"), "failed", "NaN"),
        (Stopped(15, 3), "stopped", str(Stopped(15, 3))),
    ],
)
def test_a_run_that_breaks_is_scored_too(small_run, tmp_path, monkeypatch, error, ended, why):
    from penjing.workflows import train as module

    def broken(parts, progress):
        progress.step = 3
        raise error

    monkeypatch.setattr(module, "train", broken)
    words = [*small_run, f"out={tmp_path / 'run'}", "compute.compile=off"]
    with pytest.raises((UserError, Stopped)):
        execute(resolve_run("pretrain", config.parse_overrides(words)), Console(quiet=True))
    written = json.loads((tmp_path / "run/ended.json").read_text())
    assert (written["ended"], written["why"], written["steps_done"]) == (ended, why, 3)
    assert f"{ended} after step 3 of 12" in text_of(lambda console: verify.verify(tmp_path / "run", console))
    assert ended in text_of(verify.print_history)


def test_what_was_never_planned_or_never_ended_is_one_line(tmp_path):
    with raises_user_error(where=str(tmp_path), wanted="`penjing train`"):
        verify.verify(tmp_path, Console(quiet=True))
    (tmp_path / "plan.json").write_text("{}")
    with raises_user_error(where=str(tmp_path), wanted="outcome.json or ended.json"):
        verify.verify(tmp_path, Console(quiet=True))
    with raises_user_error(where="ledger.jsonl", next_step="penjing train"):
        verify.print_history(Console(quiet=True))


def test_exit_codes_of_the_command_line(penjing, tmp_path):
    home = {"PENJING_HOME": str(tmp_path)}
    words = ("plan", "pretrain", *TINY, "--gpu", "RTX 3090", "--tokens", "1M")
    fine = penjing(*words, "--json", **home)
    assert json.loads(fine.stdout)["level"] == "L0"
    small = penjing(*words, "--budget", "1MB", check=False, **home)
    assert small.returncode == 3 and "over budget" in small.stdout
    unknown = penjing("plan", "pretrian", "--gpu", "RTX 3090", check=False, **home)
    assert unknown.returncode == 2 and "Did you mean pretrain?" in unknown.stderr


def test_a_plan_for_another_card_counts_the_tokens_of_the_data(tmp_path, monkeypatch):
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps({"text": f"line {n:05d} " * 40}) + "\n" for n in range(2000)))
    run = resolve_run("pretrain", {}, settings(f"data.train={file}", "epochs=3"))
    page = make_report("pretrain", run, PlanOptions(gpu="RTX 3090"), trace=False)
    assert page.unique_tokens == pytest.approx(2000 * 440 / 4, rel=0.01) and page.tokens == 3 * page.unique_tokens
    assert make_report("pretrain", run, PlanOptions(gpu="RTX 3090", tokens="1M"), trace=False).tokens == 1_000_000

    monkeypatch.setattr(progress, "SHOWN_EVERY", 0.0)
    monkeypatch.setattr(plan_run, "READ_BYTES", 2e5)  # a quarter of it
    plan_run._data_size.cache_clear()
    part = make_report("pretrain", run, PlanOptions(gpu="RTX 3090"), trace=False)
    assert part.unique_tokens == pytest.approx(page.unique_tokens, rel=0.1)


def test_a_plan_by_data_has_the_batch_of_one_by_their_tokens(tmp_path):
    turns = [{"role": role, "content": "some words " * 20} for role in ("user", "assistant")]
    lines = {"pretrain": {"text": "some words " * 40}, "sft": {"messages": turns}}
    for recipe, line in lines.items():
        file = tmp_path / f"{recipe}.jsonl"
        file.write_text(f"{json.dumps(line)}\n" * 1000)
        run = resolve_run(recipe, {"model": "tiny", "data": {"train": [str(file)]}})
        page = make_report(recipe, run, PlanOptions(gpu="RTX 3090"), trace=False)
        assert page.unique_tokens == pytest.approx(110_000, rel=0.01) and page.rows_per_step < run.batch.size
        options = PlanOptions(gpu="RTX 3090", unique=str(page.unique_tokens))
        other = make_report(recipe, resolve_run(recipe, {"model": "tiny"}), options, trace=False)
        for figure in ("tokens", "steps", "rows_per_step", "seq_len"):
            assert getattr(page, figure) == getattr(other, figure)


def test_tokens_of_an_hour_are_those_of_the_plan():
    run = resolve_run("pretrain", {"model": "26m"})
    page = make_report("pretrain", run, PlanOptions(gpu="RTX 3090"), trace=False)
    shown = text_of(lambda console: plan_counts.print_tokens("25.83M", "", "1", "RTX 3090", 1, console))
    found = re.search(r"sheet\) is (\d+)M tokens", shown)
    assert 1e6 * float(found[1]) == pytest.approx(3600 * page.tokens_per_second, rel=0.1)


def test_of_many_sources_the_largest_are_shown():
    sources = [{"name": f"{n}.html", "tokens": n, "share": 0.01, "epochs": 2.0} for n in range(100)]
    rows = list(source_rows(sources))
    assert [name for name, _ in rows[:-1]] == [f"source {number}" for number in range(101 - SHOWN_SOURCES, 101)]
    assert rows[-1][1].startswith(f"{100 - SHOWN_SOURCES}, ") and len(list(source_rows(sources[:SHOWN_SOURCES]))) == 8


def pairs_and_prompts(tmp_path):
    question = {"role": "user", "content": "What is a kite? " * 5}
    answers = [[question, {"role": "assistant", "content": text * 8}] for text in ("A toy. ", "A bird. ")]
    for number, name in enumerate(("pairs", "prompts")):
        record = (
            {"conversations": [question], "gt": ["toy"]}
            if number
            else dict(zip(("chosen", "rejected"), answers, strict=True))
        )
        lines = [json.dumps({**record, "id": index}) for index in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path / "pairs.jsonl", tmp_path / "prompts.jsonl"


def test_pairs_and_prompts_of_the_data_are_counted(tmp_path):
    pairs, prompts = pairs_and_prompts(tmp_path)
    asked = {"dpo": (pairs, (80 + 56 + 64) / 4), "grpo": (prompts, 80 / 4 + 8 * 32)}
    for recipe, (file, mean) in asked.items():
        run = resolve_run(recipe, settings(f"data.train={file}", "data.val_fraction=0.1", "batch.size=4", "epochs=2"))
        page = make_report(recipe, run, PlanOptions(gpu="RTX 4090"), trace=False)
        assert page.tokens_per_step / 4 == pytest.approx(mean, rel=0.05)
        assert page.epochs == pytest.approx(2) and "2 epochs of data.train" in page.tokens_reason
        assert 80 <= page.steps <= 100  # of 200 a tenth is held out
        assert not any("compute-optimal" in line for line in page.warnings)


def test_a_reference_that_runs_in_each_step_takes_its_time():
    """With `epochs` it runs once before step 1; with few steps in each, as the trace and training have it."""
    pages = {
        words: make_report("dpo", resolve_run("dpo", settings(*words)), PlanOptions(gpu="H100"), trace=False)
        for words in (("epochs=3",), ("max_steps=1000",), ("max_steps=1000", "objective.reference=precomputed"))
    }
    once, each, precomputed = (page.flops_per_token for page in pages.values())
    assert once == precomputed and each == pytest.approx(once * 4 / 3)


def test_a_reference_or_teacher_that_runs_once_reads_the_data_before_step_1():
    def frozen(recipe, *words, epochs=1):
        """Its seconds as a share of the forward passes of one epoch, which are a third of their passes."""
        run = resolve_run(recipe, settings(*words, f"epochs={epochs}"))
        page = make_report(recipe, run, PlanOptions(gpu="H100", unique="100M"), trace=False)
        passes = sum(page.step_parts_seconds[name] for name in ("matmuls", "attention", "elementwise", "head"))
        return page.parts_seconds["frozen model"] / (page.steps / epochs * passes / 3)

    for loss in ("dpo", "kto"):
        assert frozen("dpo", f"objective.loss={loss}", epochs=3) == pytest.approx(1, rel=0.01)
    assert frozen("dpo", "objective.loss=simpo") == frozen("dpo", "objective.reference=copy") == 0
    assert frozen("distill", "objective.mode=top_k", epochs=2) == pytest.approx(1, rel=0.01)
    assert frozen("distill") == 0


def test_the_student_s_own_answers_take_their_time():
    words = ("data.format=chats", "objective.ce_weight=0", "objective.mode=on_policy")
    own, none = (
        make_report("distill", resolve_run("distill", settings(*words, *more)), PlanOptions(gpu="H100"), trace=False)
        for more in ((), ("objective.on_policy_fraction=0",))
    )
    assert own.bottleneck == "generation" and "generation" not in none.step_parts_seconds
    assert own.predicted_seconds > 2 * none.predicted_seconds


def test_a_prompt_is_read_once_for_its_answers():
    run = resolve_run("grpo", settings("batch.size=4"))
    machine, _, _ = plan_run.find_machine(PlanOptions(gpu="H100"), run)
    slow = replace(machine, matmul_flops=dict.fromkeys(machine.matmul_flops, 1e9), attention_share=1.0)
    work = plan_run.workload_of(run, slow, PlanOptions(gpu="H100"), 4)
    prompt, rollout = (512 - 64) / 2, run.objective.rollout
    least = 2 * work.shape.matrices * 4 * prompt / 1e9
    written = 2 * work.shape.matrices * 4 * rollout.num_generations * rollout.max_new_tokens / 1e9
    assert least < plan_run.generation_seconds(run, work, slow) < least + 1.5 * written < 8 * least


def test_the_tokens_of_several_cards_pay_for_their_communication():
    """At the rate of the steps that `plan` expects of DDP, not at so many times that of one card."""

    def per_card(card, gpus):
        shown = text_of(lambda console: plan_counts.print_tokens("1B", "", "2", card, gpus, console))
        return read_count(re.search(r"sheet\) is (\S+) tokens", shown)[1], "tokens") / gpus

    alone, eight, machines = (per_card("RTX 3090", gpus) for gpus in (1, 8, 64))
    assert machines < 0.75 * alone and 0.9 * alone < eight < 0.98 * alone
    assert 0.98 * per_card("H100", 1) < per_card("H100", 8) < per_card("H100", 1)  # with a link of their own

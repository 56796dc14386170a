"""Memory of whole runs: every stage is traced, the step is the real one, and the parts add up."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from user_errors import raises_user_error

from penjing import devices
from penjing.base.config import Layer, parse_overrides
from penjing.kernels import tiled_attention
from penjing.loader.batch import Batch
from penjing.loader.batch_source import Source
from penjing.model.linear import set_compute_dtype
from penjing.model.transformer import Transformer
from penjing.objective.next_token import NextToken
from penjing.parallel.single import Single
from penjing.plan.layout import STATE_BYTES, Layout
from penjing.plan.memory import FakeDeviceMode, Target, Tracer, plan_from
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, step
from penjing.train.memory_trace.trace import TraceShape, predict_memory, trace_run
from penjing.train.precision import Precision
from penjing.train.throughput import Meter
from penjing.workflows.train import resolve_run

MIB = 1 << 20
TINY: Layer = {"model": {"preset": "tiny"}, "data": {"seq_len": 64}, "batch": {"size": 4}}
CARD = Target(name="RTX 3090", capability=(8, 6), memory_bytes=24 << 30)
CPU = Target(kind="cpu", memory_bytes=8 << 30)


def run_of(recipe: str, **changes: Any) -> Run:
    return resolve_run(recipe, {**TINY, **changes})


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("pretrain", {}),
        ("pretrain", {"optimizer": {"name": "muon"}}),
        ("pretrain", {"batch": {"size": 4, "micro_size": 1}}),
        ("pretrain", {"model": {"preset": "tiny-moe"}}),
        ("sft", {}),
        ("lora", {"lora": {"rank": 4}}),
        ("lora", {"lora": {"rank": 4, "use_dora": True, "dropout": 0.1}}),
        ("dpo", {"objective": {"reference": "copy"}}),
        ("dpo", {"objective": {"reference": "precomputed"}}),
        ("reward", {}),
        ("grpo", {"data": {"seq_len": 512}}),
        ("distill", {}),
        ("distill", {"objective": {"mode": "top_k"}, "regularization": {"dropout": 0.1}}),
    ],
)
def test_every_stage_is_traced_and_adds_up(recipe: str, changes: Layer) -> None:
    run = run_of(recipe, **changes)
    plan = predict_memory(run, CARD)
    assert sum(plan.waterfall.values()) == plan.total_bytes
    assert plan.peak_allocated_bytes <= plan.peak_reserved_bytes < plan.total_bytes
    assert plan.peak_at and ".py:" in plan.peak_line
    held = plan.waterfall.get("weights", 0) + plan.waterfall.get("master weights", 0)
    assert held >= 2 * sum(p.numel() for p in meta_model(run).parameters())


@pytest.mark.parametrize("recipe", ["dpo", "grpo", "ppo", "reward"])
def test_answers_to_one_prompt_are_traced_on_a_cpu(recipe: str) -> None:
    plan = predict_memory(run_of(recipe, data={"seq_len": 256}), CPU, process_bytes=0)
    assert plan.peak_allocated_bytes > 16 * sum(p.numel() for p in meta_model(run_of(recipe)).parameters())


@pytest.mark.parametrize("window", [0, 100])
def test_traced_tiles_are_those_of_rows_that_hold_one_document(window: int) -> None:
    document_BT = torch.zeros(3, 500, dtype=torch.long)
    with FakeDeviceMode(CPU):
        traced = tiled_attention.group_tiles(document_BT, None, window, torch.float32)
    real = tiled_attention.group_tiles(document_BT, None, window, torch.float32)
    for one, other in zip(traced, real, strict=True):
        for name in ("tile_N", "key_tile_NM", "bias_NTS"):
            assert getattr(one, name).shape == getattr(other, name).shape


def meta_model(run: Run) -> Transformer:
    with torch.device("meta"):
        return Transformer(run.model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trace_of_a_cpu_run_is_what_it_really_allocates(dtype: str) -> None:
    """Byte for byte at the peak: the same step, on real memory."""
    noise = {"dropout": 0.1} if dtype == "bfloat16" else {}
    run = run_of("pretrain", compute={"dtype": dtype}, data={"seq_len": 64, "prefetch": 0}, regularization=noise)
    planned, _ = trace_run(run, CPU, TraceShape(micro_size=2, accumulate=2))
    model = Transformer(run.model)
    model.regularization = run.regularization
    matmuls = torch.bfloat16 if dtype == "bfloat16" else None
    set_compute_dtype(model, matmuls)
    strategy = Single(torch.device("cpu"))
    tracer = Tracer("cpu", kernel_temporaries=False)

    class Random(Source):
        def __next__(self) -> Batch:
            tokens = 2 * 64
            ids_BT = torch.randint(0, run.model.vocab_size, (2, 64))
            document_BT, targets_N = torch.zeros(2, 64, dtype=torch.long), ids_BT.flatten().clone()
            return Batch(
                ids_BT=ids_BT,
                document_BT=document_BT,
                scored_N=None,
                target_N=targets_N,
                weight_N=torch.ones(tokens),
                num_tokens=tokens,
                noise_B=torch.arange(2) if noise else None,
            )

        def state(self) -> dict[str, Any]:
            return {}

        def restore(self, state: dict[str, Any]) -> None:
            pass

    optimizers = run.optimizer.build(model)
    context = TrainingContext(
        strategy=strategy,
        model=strategy.wrap(model),
        objective=NextToken(),
        source=Random(),
        optimizers=optimizers,
        schedule=run.schedule,
        meter=Meter(0.0, None),
        num_steps=2,
        accumulate=2,
        max_grad_norm=run.max_grad_norm,
    )
    with tracer:
        tracer.tag_model(model, matmuls)
        for index in range(2):  # the second has the optimizer's state, as the plan does
            step(context, index)
    assert max(planned.live_bytes()) == max(tracer.trace.live_bytes())


def test_what_is_trained_is_what_costs() -> None:
    adamw, muon = (
        predict_memory(run_of("pretrain", optimizer={"name": "adamw"}), CARD),
        predict_memory(run_of("pretrain", optimizer={"name": "muon"}), CARD),
    )
    numel = sum(p.numel() for p in meta_model(run_of("pretrain")).parameters())
    assert adamw.waterfall["optimizer state"] == pytest.approx(8 * numel, rel=0.02)
    assert muon.waterfall["optimizer state"] < 0.9 * adamw.waterfall["optimizer state"]
    assert adamw.waterfall["master weights"] == pytest.approx(4 * numel, rel=0.02)
    lora = predict_memory(run_of("lora", lora={"rank": 4}), CARD)
    assert lora.waterfall["optimizer state"] < 0.2 * adamw.waterfall["optimizer state"]


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_a_card_without_bfloat16_is_traced_in_what_it_computes_in(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card, model = Target(name="T4", capability=(7, 5), memory_bytes=14 << 30), {"preset": preset}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: card.capability)
    auto, half = run_of("pretrain", model=model), run_of("pretrain", model=model, compute={"dtype": "float16"})
    planned = Precision.resolve(auto.compute, torch.device("cuda"), capability=card.capability)
    assert planned.dtype == devices.of("cuda").compute_dtype("auto", torch.device("cuda")) == torch.float16
    plan = predict_memory(auto, card)
    assert plan == predict_memory(half, card)
    assert "master weights" in plan.waterfall


def test_the_products_of_experts_are_traced_in_any_dtype() -> None:
    """torch describes those in bfloat16 alone; in float16, of the same size, the same must come out."""
    half, ours = (
        predict_memory(run_of("pretrain", model={"preset": "tiny-moe"}, compute={"dtype": dtype}), CARD)
        for dtype in ("float16", "bfloat16")
    )
    assert half.waterfall == ours.waterfall
    wide = predict_memory(run_of("pretrain", model={"preset": "tiny-moe"}, compute={"dtype": "float32"}), CARD)
    assert wide.peak_allocated_bytes > half.peak_allocated_bytes


def test_a_reference_costs_weights() -> None:
    without = predict_memory(run_of("dpo", objective={"reference": "precomputed"}), CARD)
    copied = predict_memory(run_of("dpo", objective={"reference": "copy"}), CARD)
    numel = sum(p.numel() for p in meta_model(run_of("dpo")).parameters())
    assert copied.waterfall["weights"] - without.waterfall["weights"] > numel  # in bfloat16, the tables in float32


def test_a_divergence_from_the_start_costs_its_weights_where_no_adapter_can_be_switched_off() -> None:
    def weights(recipe: str, **changes: Any) -> int:
        run = run_of(recipe, data={"seq_len": 512}, **changes)
        return predict_memory(run, CARD).waterfall["weights"]

    lora: Layer = {"lora": {"rank": 4}}
    numel = sum(p.numel() for p in meta_model(run_of("grpo")).parameters())
    assert weights("grpo", objective={"kl_coef": 0.1}) - weights("grpo") > numel
    assert weights("grpo", objective={"kl_coef": 0.1}, **lora) == weights("grpo", **lora)
    assert weights("grpo", objective={"kl_coef": 0.1, "reference": "copy"}, **lora) - weights("grpo", **lora) > numel


def test_ranks() -> None:
    run = run_of("pretrain", model={"preset": "26m"}, batch={"size": 16})
    numel = sum(p.numel() for p in meta_model(run).parameters())
    alone = predict_memory(run, CARD, micro_size=2)
    ddp = predict_memory(run, CARD, micro_size=2, layout=Layout(ranks=8))
    shared = predict_memory(run, CARD, micro_size=2, layout=Layout(ranks=8, shards=frozenset(STATE_BYTES)))
    assert ddp.waterfall["communication"] >= 1.45 * (1 << 30) - 1
    assert ddp.peak_allocated_bytes - alone.peak_allocated_bytes <= 4.1 * numel  # the buckets, at most
    assert shared.waterfall["optimizer state"] == pytest.approx(alone.waterfall["optimizer state"] / 8, rel=0.05)
    assert shared.total_bytes < ddp.total_bytes
    with raises_user_error(where="batch.size", got=16, wanted="a multiple of 3 devices"):
        predict_memory(run, CARD, layout=Layout(ranks=3))


def test_a_cpu_run_is_the_process_with_its_tensors() -> None:
    run = run_of("pretrain", compute={"dtype": "float32"}, optimizer={"name": "adamw"})
    plan = predict_memory(run, CPU, process_bytes=300 * MIB)
    assert plan.waterfall["context"] == 300 * MIB
    assert sum(plan.waterfall.values()) == plan.total_bytes
    numel = sum(p.numel() for p in meta_model(run_of("pretrain")).parameters())
    assert plan.waterfall["checkpoint copy"] == pytest.approx(12 * numel, rel=0.01)
    few, many = (
        predict_memory(run_of("pretrain", batch={"size": rows, "micro_size": rows}), CPU, process_bytes=0)
        for rows in (4, 16)
    )
    assert 1.5 < many.waterfall["activations"] / few.waterfall["activations"] < 4.5


def test_many_rows_on_a_cpu_are_foreseen_from_few_though_the_optimizer_needs_the_most_of_those() -> None:
    """A wide model with Muon: at four rows its optimizer step is the peak, at twelve its activations are."""
    wide: Layer = {"preset": "tiny", "hidden_size": 256, "intermediate_size": 1024}
    run = run_of("pretrain", model=wide, batch={"size": 12, "micro_size": 12})
    few, traced = (trace_run(run, CPU, TraceShape(micro_size=rows))[0] for rows in (4, 12))
    assert plan_from(few, CPU).peak_phase == "optimizer"
    whole = plan_from(traced, CPU)
    assert whole.peak_phase in ("forward", "backward")
    foreseen = predict_memory(run, CPU, process_bytes=0)
    assert foreseen.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=0.03)
    assert foreseen.waterfall["activations"] == pytest.approx(whole.waterfall["activations"], rel=0.03)


def test_a_hundred_million_parameters_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = predict_memory(run_of("pretrain", model={"preset": "104m"}), CARD)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert plan.waterfall["master weights"] > 400e6
    assert (after - before) * 1024 < 200e6


@pytest.mark.parametrize("target", [CARD, CPU])
@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"model": {"preset": "tiny", "num_hidden_layers": 5000}}, "model.num_hidden_layers"),
        ({"model": {"preset": "tiny", "vocab_size": 1 << 32}}, "vocab_size"),
        ({"model": {"preset": "tiny", "hidden_size": 1 << 40}}, "parameters"),
        ({"model": {"preset": "tiny", "max_position_embeddings": 10**9}, "data": {"seq_len": 10**9}}, "vocab_size"),
    ],
)
def test_what_would_take_many_minutes_to_trace_is_refused(target: Target, changes: Layer, where: str) -> None:
    with raises_user_error(where=where, next_step="penjing plan --rough"):
        predict_memory(run_of("pretrain", **changes), target, process_bytes=0)


def test_a_cpu_works_in_chunks_of_wide_layers_which_are_counted() -> None:
    with raises_user_error(where="widths", next_step="penjing plan --rough"):
        model, data = {"preset": "tiny", "hidden_size": 1 << 22}, {"seq_len": 1024}
        wide = run_of("pretrain", model=model, data=data, batch={"size": 64})
        predict_memory(wide, CPU, process_bytes=0)


@pytest.mark.parametrize(("name", "value"), [("model.num_hidden_layers", 10**12), ("batch.size", 10**18)])
def test_what_would_take_for_ever_to_count_is_out_of_range(name: str, value: int) -> None:
    with raises_user_error(where=name, what="out of range"):
        resolve_run("pretrain", {"model": {"preset": "tiny"}}, parse_overrides([f"{name}={value}"]))

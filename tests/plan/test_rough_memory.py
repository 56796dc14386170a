"""The formula of a step's memory against traces of the real step, which it must meet to within its margin."""

import pytest

from penjing.plan.device_model import Machine
from penjing.plan.memory import Target, safe_bytes
from penjing.plan.rough_memory import HOST_CONTEXT_BYTES, ROUGH_MARGIN, rough_memory
from penjing.planner.fit import rough_fit
from penjing.planner.inputs import PlanOptions, find_machine, workload_of
from penjing.train.memory_trace.trace import predict_memory
from penjing.train.resolve import with_settings
from penjing.workflows.train import resolve_run

BLOCK, MLP = ({"compute": {"activation_checkpointing": how}} for how in ("block", "mlp"))
ADAMW = {"optimizer": "adamw"}
CASES = {
    "our kernels": ("26m", "RTX 3090", 1, 64, {}),
    "many passes": ("26m", "RTX 3090", 1, 1, {}),
    "large vocabulary": ("qwen3-0.6b", "H100", 1, 16, {}),
    "no bfloat16": ("26m", "V100", 1, 8, {}),
    "float32": ("tiny", "RTX 4090", 1, 64, {"compute": {"dtype": "float32"}}),
    "mixture": ("198m-moe", "RTX 3090", 1, 8, {}),
    "checkpointing": ("104m", "RTX 3090", 1, 32, BLOCK),
    "checkpointing of MLPs": ("26m", "RTX 3090", 1, 32, MLP),
    "data parallel": ("104m", "RTX 3090", 4, 16, {}),
    "ZeRO-3": ("104m", "RTX 3090", 4, 16, {**ADAMW, "parallel": {"strategy": "zero3"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_formula_meets_the_trace(case):
    model, gpu, gpus, rows, settings = CASES[case]
    run = resolve_run("pretrain", {"model": {"preset": model, "num_hidden_layers": 4}, **settings})
    options = PlanOptions(gpu=gpu, gpus=gpus)
    machine, target, _ = find_machine(options, run)
    work = workload_of(run, machine, options, rows)
    parts = rough_memory(work, state_bytes=run.optimizer.state_bytes, context_bytes=target.context_bytes)
    traced = predict_memory(run, target, micro_size=rows, layout=options.layout(run))
    assert sum(parts.values()) == pytest.approx(traced.total_bytes, rel=ROUGH_MARGIN)
    assert parts.keys() <= {*traced.waterfall, "activations", "logits and loss", "gradients", "temporaries", "weights"}


def test_the_largest_micro_batch_that_fits_is_taken():
    run = resolve_run("pretrain", {"model": "tinyllama-1.1b"})
    options = PlanOptions(gpu="RTX 3090")
    machine, target, _ = find_machine(options, run)
    rows, parts = rough_fit(run, machine, target, options)
    _, larger = rough_fit(with_settings(run, {"batch.micro_size": 2 * rows}), machine, target, options)
    assert 1 < rows < 64
    assert sum(parts.values()) <= safe_bytes(target.memory_bytes) < sum(larger.values())


@pytest.mark.parametrize(("model", "dtype"), [("tiny", "bfloat16"), ("26m", "float32"), ("26m", "bfloat16")])
def test_the_formula_meets_the_trace_on_a_cpu(model, dtype):
    run = resolve_run("pretrain", {"model": model, "compute": {"dtype": dtype}})
    rates = {"matmul_flops": {dtype: 1e11}, "bytes_per_second": 1e10, "launch_seconds": 1e-6, "attention_share": 1.0}
    machine = Machine(name="a CPU", kind="cpu", level="L0", source="a test", **rates)
    work = workload_of(run, machine, PlanOptions(), 32)
    parts = rough_memory(work, state_bytes=run.optimizer.state_bytes, context_bytes=0, on_host=True)
    traced = predict_memory(run, Target(kind="cpu"), micro_size=32, process_bytes=HOST_CONTEXT_BYTES)
    assert sum(parts.values()) == pytest.approx(traced.total_bytes, rel=ROUGH_MARGIN)


@pytest.mark.parametrize("gpu", ["RTX 4090", "H100"])
@pytest.mark.parametrize("recipe", ["dpo", "reward", "grpo", "ppo"])
def test_the_formula_meets_the_trace_where_answers_share_a_prompt(recipe, gpu):
    """Before Hopper, attention with a mask holds the scores: three times the memory of rows without one."""
    run = resolve_run(
        recipe, {"model": {"preset": "26m", "num_hidden_layers": 4}, "batch": {"size": 16, "micro_size": 16}}
    )
    options = PlanOptions(gpu=gpu)
    machine, target, _ = find_machine(options, run)
    micro, parts = rough_fit(run, machine, target, options)
    traced = predict_memory(run, target, micro_size=micro, layout=options.layout(run))
    assert sum(parts.values()) == pytest.approx(traced.total_bytes, rel=ROUGH_MARGIN)

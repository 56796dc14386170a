"""A plan's advice is what training accepts, and its seconds are those that training stands still or writes answers."""

from dataclasses import replace

import pytest
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.plan.device_model import machine_from_spec
from penjing.plan.gpu_specs import find_gpu_spec
from penjing.plan.step_time import step_time
from penjing.planner import advice as plan_advice
from penjing.planner.inputs import (
    PlanOptions,
    accepted,
    checkpoint_bytes,
    checkpoint_seconds,
    generation_seconds,
    parts_of,
    workload_of,
)
from penjing.workflows.train import resolve_run

H100 = machine_from_spec(find_gpu_spec("H100"))


def planned(recipe, *words):
    run = resolve_run(recipe, parse_overrides(list(words)))
    work = workload_of(run, H100, PlanOptions(), run.batch.micro_size or run.batch.size, steps=1000)
    return run, work.shape, work


def test_a_checkpoint_in_the_background_costs_its_copy_and_the_last_one_its_write():
    run, shape, _ = planned("pretrain", "model=198m-moe", "checkpoint.every=500")
    saved = checkpoint_bytes(run, shape)
    table = shape.vocabulary * shape.width  # of which AdamW keeps a second moment
    assert saved == pytest.approx(8 * shape.parameters + 4 * table, rel=1e-3)  # float32 weights and Muon's one state
    waiting = replace(run, checkpoint=replace(run.checkpoint, async_=False))
    seconds = {each.checkpoint.async_: checkpoint_seconds(each, saved, H100, 0.05, 10_000) for each in (run, waiting)}
    assert seconds[False] == pytest.approx(20 * (0.02 + saved / 4e9 + saved / 300e6))
    assert seconds[True] == pytest.approx(20 * (0.02 + saved / 4e9) + saved / 300e6)
    # Where the next one is due before the disk has finished, training waits for the rest.
    assert checkpoint_seconds(run, saved, H100, 0.001, 10_000) == pytest.approx(
        seconds[True] + 19 * (saved / 300e6 - 0.5)
    )


def test_adapters_save_themselves_and_their_state():
    run, shape, work = planned("lora", "lora.rank=4")
    assert checkpoint_bytes(run, shape) == 12 * work.trained < shape.parameters
    dora, _, more = planned("lora", "lora.rank=4", "lora.use_dora=true")
    assert more.trained > work.trained and dora.lora.use_dora


def test_training_and_plan_refuse_the_same():
    with raises_user_error(where="compute.compile", got="the batches of answers have another shape in every step"):
        planned("grpo", "compute.compile=blocks")
    run, _, _ = planned("grpo")
    assert accepted(run, H100, 1)
    assert not accepted(replace(run, compute=replace(run.compute, compile="blocks")), H100, 1)
    assert not accepted(replace(run, batch=replace(run.batch, micro_size=3)), H100, 1)
    float8, _, _ = planned("pretrain", "compute.fp8=tensorwise")
    assert accepted(float8, H100, 1) and not accepted(float8, machine_from_spec(find_gpu_spec("A100")), 1)


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_cpu_is_planned_to_compile_only_if_it_can_and_is_told_to(monkeypatch, has_compiler):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if has_compiler else None)
    monkeypatch.setattr("torch.__file__", "/home/trees/torch/__init__.py")  # no space, wherever these tests run
    cpu = replace(H100, name="a processor", kind="cpu")
    run, _, _ = planned("pretrain", "compute.compile=off")

    def with_compile(setting):
        return replace(run, compute=replace(run.compute, compile=setting))

    def compiled(setting):
        return workload_of(with_compile(setting), cpu, PlanOptions(), 1, steps=10**7).compiled

    assert not compiled("auto")
    assert accepted(with_compile("blocks"), cpu, 1) is has_compiler
    if not has_compiler:
        with raises_user_error(where="compute.compile", got="no C++ compiler (g++)"):
            compiled("blocks")


def test_writing_answers_counts_for_advice_and_validation():
    run, _, work = planned("grpo")
    step = step_time(work, H100)
    parts, generation = parts_of(run, work, H100, run.eval.every, 0)
    assert generation > 5 * step.seconds
    # Twice as many passes take twice the step's own time, and writing takes what it did.
    now = plan_advice._CurrentPlan(run=run, machine=H100, work=work, seconds=1.0)
    halved = replace(work, tokens=work.tokens // 2, passes=2 * work.passes)
    slower = step_time(halved, H100).seconds - step.seconds
    assert -now.gain(run, halved) == pytest.approx(
        (slower + generation_seconds(run, halved, H100) - generation) / (step.seconds + generation)
    )
    assert -now.gain(run, halved) < 0.2
    more = replace(run, eval=replace(run.eval, sequences=4 * run.eval.sequences))
    assert parts["validation"] > 0.1 * generation
    assert parts_of(more, work, H100, run.eval.every, 0)[0]["validation"] > parts["validation"]

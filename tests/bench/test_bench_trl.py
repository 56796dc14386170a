"""What TRL's trainers are told: the step of the spec, in TRL's own words."""

from dataclasses import replace

import pytest

from penjing.bench.meter import units_per_second
from penjing.bench.peers import trl_shared


@pytest.mark.parametrize(("dtype", "half"), [("bfloat16", True), ("float32", False)])
def test_the_peer_s_step_is_the_one_that_was_asked_for(spec, dtype, half):
    asked = replace(spec, learning_rate=3e-4, clip_norm=0.7, beta=0.25, seed=9, batch=24, micro=4, steps=5, dtype=dtype)
    told = trl_shared.settings(replace(asked, checkpointing=True))
    wanted = {
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 0.7,
        "beta": 0.25,
        "gradient_accumulation_steps": 6,
        "max_steps": 5,
        "bf16": half,
        "gradient_checkpointing": True,
        "seed": 9,
        "optim": "adamw_torch_fused",
        "model_init_kwargs": {"dtype": "float32"},
    }
    assert {name: told[name] for name in wanted} == wanted
    assert trl_shared.settings(asked)["gradient_checkpointing"] is False


def test_a_rate_leaves_the_warm_up_out():
    """Four pairs a step: 100 s of compiling, then 2 s and 4 s."""
    assert units_per_second({"step_seconds": [100.0, 2.0, 4.0]}, 4, 1) == pytest.approx(8 / 6)

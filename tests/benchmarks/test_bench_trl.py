"""What TRL's trainers are told: the step of the spec, in TRL's own words."""

from dataclasses import replace

import pytest
from compare.baselines import trl_trainers


@pytest.mark.parametrize(("dtype", "half"), [("bfloat16", True), ("float32", False)])
def test_trl_takes_the_step_of_the_spec(alignment_spec, dtype, half):
    step = {"learning_rate": 3e-4, "max_grad_norm": 0.7, "beta": 0.25, "seed": 9, "batch": 24, "micro": 4, "steps": 5}
    spec = replace(alignment_spec, **step, dtype=dtype)
    told = trl_trainers.settings(replace(spec, checkpointing=True))
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
    assert trl_trainers.settings(spec)["gradient_checkpointing"] is False

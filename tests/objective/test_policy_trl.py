"""The family of GRPO against TRL's own loss on the same log-probabilities: values and gradients."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from policy_batches import make_batch, padded

from penjing.objective.policy import Policy, PolicyObjective, Rollout
from penjing.rl.rollout_buffer import advantages

LONGEST = 11


class FakeAccelerator:
    num_processes = 1

    def gather(self, value):
        return value

    def reduce(self, value, reduction):
        return value


def trl_loss(settings, logp_AT, mask_AT, batch):
    """TRL's `_compute_loss` on a trainer that has what the method reads and nothing else."""
    # Here, not above: it takes seconds, and every process that runs tests reads this file.
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer")
    low, high = settings.clip
    trainer = object.__new__(trainer_module.GRPOTrainer)
    trainer.__dict__.update(
        loss_type={"gspo": "grpo"}.get(settings.loss, settings.loss),
        importance_sampling_level="sequence" if settings.loss == "gspo" else "token",
        epsilon_low=low,
        epsilon_high=1 + high if settings.loss == "cispo" else high,
        beta=settings.kl_coef,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=FakeAccelerator(),
        current_gradient_accumulation_steps=1,
        max_completion_length=settings.rollout.max_new_tokens,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    trainer._get_per_token_logps_and_entropies = lambda *given, **named: (logp_AT, torch.zeros_like(logp_AT), None)
    ids_AT = torch.zeros_like(logp_AT, dtype=torch.long)
    inputs = {
        "prompt_ids": ids_AT[:, :1],
        "prompt_mask": ids_AT[:, :1],
        "completion_ids": ids_AT,
        "completion_mask": mask_AT,
        "advantages": batch.figures["advantage"],
        "old_per_token_logps": padded(batch.values["behaviour"], batch)[0],
        "ref_per_token_logps": padded(batch.values["reference"], batch)[0],
        "num_items_in_batch": mask_AT.sum(),
    }
    return trainer._compute_loss(trainer.model, inputs), trainer._metrics["train"]


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize("clip", [{}, {"clip_high": 0.4}])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_loss_and_gradient_equal_trl(loss, clip, kl_coef):
    settings = Policy(loss=loss, kl_coef=kl_coef, rollout=Rollout(max_new_tokens=LONGEST, num_epochs=2), **clip)
    batch = make_batch(seed=5, prompts=5, answers=4)
    generator = torch.Generator().manual_seed(3)
    logp_N = (batch.values["behaviour"] + 0.5 * torch.randn(len(batch.target_N), generator=generator)).requires_grad_()
    objective = PolicyObjective(settings)
    if not kl_coef:
        values = {name: value for name, value in batch.values.items() if name != "reference"}
        without = type(batch)(**{**vars(batch), "values": values})
        total, parts = objective.loss_from_log_probs(logp_N, torch.zeros_like(logp_N), without)
    else:
        total, parts = objective.loss_from_log_probs(logp_N, torch.zeros_like(logp_N), batch)
    mine = total / objective.weight(batch)
    logp_AT, mask_AT = padded(logp_N, batch)
    theirs, metrics = trl_loss(settings, logp_AT, mask_AT, batch)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    (my_gradient,) = torch.autograd.grad(mine, logp_N)
    (their_gradient,) = torch.autograd.grad(theirs, logp_N)
    torch.testing.assert_close(my_gradient, their_gradient, rtol=0, atol=1e-5)
    assert my_gradient.any()
    units = float(objective.weight(batch))
    if loss in ("dapo", "gspo"):  # of the others TRL shows means over tokens where ours are over answers
        assert float(parts["clipped_low_fraction"]) / units == pytest.approx(metrics["clip_ratio/low_mean"][0])
        assert float(parts["clipped_high_fraction"]) / units == pytest.approx(metrics["clip_ratio/high_mean"][0])
        assert float(parts["clipped_high_fraction"]) > 0 or (loss == "gspo" and clip)


def test_normalised_advantages_equal_trls():
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    reward_PA = torch.rand(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reward_PA[2] = 0.5
    expected = (reward_PA - reward_PA.mean(1, keepdim=True)) / (nanstd(reward_PA, dim=1)[:, None] + 1e-4)
    found = advantages(reward_PA.numpy(), "normalised")
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-6, atol=1e-9)

"""Policy losses: against slow plain twins, in any split of a batch, and what they show."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from policy_batches import make_batch, make_groups, make_model
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.objective.policy import (
    Policy,
    PolicyObjective,
    RewardSettings,
    Rollout,
    divergence,
    token_advantages,
    value_loss,
    whiten,
)
from penjing.objective.router import RouterSettings
from penjing.objective.run_model import run_model

LOSSES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo"]
LONGEST = 11


def settings(loss, **changes):
    return Policy(loss=loss, **{"kl_coef": 0.1, "rollout": Rollout(max_new_tokens=LONGEST, num_epochs=2), **changes})


def plain_loss(how, logp_N, batch):
    """One answer and one token at a time, as the papers write it."""
    low, high = how.clip
    answers, tokens = [], []
    for answer in range(batch.num_answers):
        places = [n for n in range(len(batch.answer_N)) if batch.answer_N[n] == answer and batch.weight_N[n]]
        if not places:
            continue
        from_group = batch.figures["advantage"][answer]
        logs = [logp_N[n] - batch.values["behaviour"][n] for n in places]
        whole = (sum(logs) / len(logs)).exp()
        losses = []
        for n, log in zip(places, logs, strict=True):
            apart = batch.values["reference"][n] - logp_N[n]
            advantage = from_group + how.kl_coef * apart.item() if how.kl_estimator == "k1" else from_group
            ratio = whole if how.loss == "gspo" else log.exp()
            if how.loss == "cispo":
                gain = min(ratio.item(), 1 + high) * advantage * logp_N[n]
            else:
                bounded = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
                gain = min(ratio * advantage, bounded * advantage)
            kl = {"k1": 0, "k2": apart**2 / 2, "k3": apart.exp() - apart - 1}[how.kl_estimator]
            losses.append(-gain + how.kl_coef * kl)
        answers.append(sum(losses) / (LONGEST if how.loss == "dr_grpo" else len(losses)))
        tokens += losses
    chosen = tokens if how.loss in ("dapo", "cispo", "ppo") else answers
    return sum(chosen), len(chosen)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("given", [False, True])
def test_equals_the_plain_twin(loss, estimator, given):
    batch = make_batch(given=given)
    how = settings(loss, kl_estimator=estimator)
    objective = PolicyObjective(how)
    generator = torch.Generator().manual_seed(3)
    logp_N = (-3.7 + 0.6 * torch.randn(len(batch.target_N), generator=generator)).requires_grad_()
    total, _ = objective.loss_from_log_probs(logp_N, torch.zeros_like(logp_N), batch)
    expected, units = plain_loss(how, logp_N, batch)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    assert float(objective.weight(batch)) == units
    (found,) = torch.autograd.grad(total, logp_N)
    (wanted,) = torch.autograd.grad(expected, logp_N)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert wanted.any()


def gradients(model, objective, batches):
    units = sum(objective.weight(batch) for batch in batches)
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    sums = {}
    for batch in batches:
        loss = objective(model, batch)
        (loss.total / units).backward()
        total += loss.total.detach()
        for name, value in loss.parts.items():
            sums[name] = sums.get(name, 0) + value
    means = {name: float(value / units) for name, value in sums.items()}
    return float(total), means, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("loss", "temperature"), [*((loss, 1.0) for loss in LOSSES), *((loss, 0.7) for loss in LOSSES if loss != "ppo")]
)
def test_any_split_gives_the_same_gradients(loss, temperature):
    """Two ranks with two unequal micro-batches each sum the same as one rank with one batch."""
    model = make_model()
    objective = PolicyObjective(
        settings(loss, rollout=Rollout(max_new_tokens=LONGEST, num_epochs=2, temperature=temperature))
    )
    groups = make_groups(prompts=6, given=True)
    whole = gradients(model, objective, [pack(groups, 64)])
    parts = [groups[:1], groups[1:4], groups[4:5], groups[5:]]
    cut = gradients(model, objective, [pack(part, 64) for part in parts])
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)
    assert cut[1] == pytest.approx(whole[1], rel=1e-4, abs=1e-6)
    for one, other in zip(cut[2], whole[2], strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm()


def test_a_mixture_of_experts_adds_its_routers_loss():
    shape = {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make_model(**shape).train()
    groups = make_groups(prompts=6)
    for loss in ("grpo", "dapo"):
        objective = PolicyObjective(settings(loss), RouterSettings(balance="sequence", z_loss_coef=0.01))
        rows = [[group] for group in groups]
        cut = gradients(model, objective, [pack(row, 32) for row in rows])
        assert {"router_balance", "router_z"} <= cut[1].keys()
        again = gradients(model, objective, [pack(row, 32) for row in reversed(rows)])
        for one, other in zip(cut[2], again[2], strict=True):
            assert (one - other).norm() <= 2e-5 * other.norm()


def test_without_old_log_probabilities_every_ratio_is_one():
    batch = make_batch()
    batch.values.pop("behaviour")
    objective = PolicyObjective(Policy())
    logp_N = torch.full((len(batch.target_N),), -2.0, requires_grad=True)
    _, parts = objective.loss_from_log_probs(logp_N, torch.zeros_like(logp_N), batch)
    assert float(parts["ratio"] / objective.weight(batch)) == pytest.approx(1.0)
    assert parts["clipped_low_fraction"] == parts["clipped_high_fraction"] == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_strictly_on_policy_rounding_between_writing_and_scoring_is_no_ratio(loss):
    """Each answer serves one step: the gradient is A times that of log pi, and nothing is cut off."""
    batch = make_batch()
    batch.values.pop("reference")
    generator = torch.Generator().manual_seed(3)
    rounded_N = batch.values["behaviour"] + 0.01 * torch.randn(len(batch.target_N), generator=generator)
    objective = PolicyObjective(Policy(loss=loss, rollout=Rollout(max_new_tokens=LONGEST)))
    logp_N = rounded_N.requires_grad_()
    total, parts = objective.loss_from_log_probs(logp_N, torch.zeros_like(logp_N), batch)
    (found_N,) = torch.autograd.grad(total, logp_N)
    per_token = loss in ("dapo", "cispo", "ppo")
    length_A = batch.length_A()
    share_A = torch.ones_like(length_A) if per_token else 1 / (LONGEST if loss == "dr_grpo" else length_A)
    wanted_N = (-batch.figures["advantage"] * share_A)[batch.answer_N]
    torch.testing.assert_close(found_N, wanted_N, rtol=1e-5, atol=1e-7)
    assert float(parts["ratio"] / objective.weight(batch)) == pytest.approx(1.0)
    assert parts["clipped_low_fraction"] == parts["clipped_high_fraction"] == 0
    assert parts["kl_old_new"] > 0  # it is still shown
    twice = PolicyObjective(Policy(loss=loss, rollout=Rollout(max_new_tokens=LONGEST, num_epochs=2)))
    (other_N,) = torch.autograd.grad(twice.loss_from_log_probs(logp_N, torch.zeros_like(logp_N), batch)[0], logp_N)
    assert (other_N == 0).any() if loss == "gspo" else (other_N != 0).all()


def test_answers_that_do_not_count_have_no_part():
    groups = make_groups(prompts=3)
    counts = [1.0, 0.0, 1.0]
    marked = [
        Group(prompt=g.prompt, answers=g.answers, figures={**g.figures, "counts": [count] * 3})
        for g, count in zip(groups, counts, strict=True)
    ]
    model = make_model()
    for loss in LOSSES:
        objective = PolicyObjective(settings(loss))
        whole = objective(model, pack(marked, 64))
        without = objective(model, pack([groups[0], groups[2]], 64))
        torch.testing.assert_close(whole.total, without.total, rtol=1e-5, atol=1e-5)
        assert objective.weight(pack(marked, 64)) == objective.weight(pack([groups[0], groups[2]], 64))


def test_figures_are_means_over_units():
    batch = make_batch()
    logp_N = batch.values["behaviour"] + 1.0
    objective = PolicyObjective(Policy(loss="dapo", rollout=Rollout(num_epochs=2)))
    _, parts = objective.loss_from_log_probs(logp_N, torch.full_like(logp_N, 0.5), batch)
    means = {name: float(value / objective.weight(batch)) for name, value in parts.items()}
    assert means["ratio"] == pytest.approx(math.e, rel=1e-5)
    assert means["entropy"] == pytest.approx(0.5)
    positive_N = (batch.figures["advantage"] > 0)[batch.answer_N]
    assert means["clipped_high_fraction"] == pytest.approx(float(positive_N.float().mean()))
    assert means["clipped_low_fraction"] == 0
    per_answer = PolicyObjective(Policy(loss="grpo"))
    _, parts = per_answer.loss_from_log_probs(logp_N, logp_N, batch)
    assert float(parts["reward"] / per_answer.weight(batch)) == pytest.approx(float(batch.figures["reward"].mean()))


def test_temperature_divides_the_logits():
    model, batch = make_model(), make_batch()
    logits_BTV = model(
        batch.ids_BT, batch.document_BT, subtree_end_BT=batch.subtree_end_BT, position_BT=batch.position_BT
    )
    expected = (logits_BTV.flatten(0, 1)[batch.scored_N] / 0.7).log_softmax(-1)
    logp_2N = run_model(model, batch, temperature=0.7)
    torch.testing.assert_close(logp_2N[0], expected.gather(1, batch.target_N[:, None])[:, 0], rtol=1e-5, atol=1e-5)


def test_estimators_agree_with_the_divergence_on_average():
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 8, generator=generator).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    drawn = torch.multinomial(policy.exp(), 400_000, replacement=True, generator=generator)
    for estimator in ("k1", "k3"):
        assert float(divergence(policy[drawn], reference[drawn], estimator).mean()) == pytest.approx(exact, rel=0.02)
    assert (divergence(policy[drawn], reference[drawn], "k3") >= 0).all()


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "dr_grpo"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_pulls_towards_the_reference(estimator, loss):
    """Over all tokens that the policy may draw: with k1 and k2 the gradient is that of the divergence itself."""
    generator = torch.Generator().manual_seed(0)
    reference_V = torch.randn(8, generator=generator).log_softmax(-1)
    answers = [Answer(ids=[token], values={"reference": [float(logp)]}) for token, logp in enumerate(reference_V)]
    batch = pack([Group(prompt=[1], answers=answers, figures={"advantage": [0.0] * 8})], 64)
    assert batch.target_N.tolist() == list(range(8))
    logits_V = torch.randn(8, generator=generator, requires_grad=True)
    logp_V = logits_V.log_softmax(-1)
    total, parts = PolicyObjective(settings(loss, kl_estimator=estimator)).loss_from_log_probs(logp_V, logp_V, batch)
    (each_V,) = torch.autograd.grad(total, logp_V, retain_graph=True)
    (found,) = torch.autograd.grad(logp_V, logits_V, logp_V.exp() * each_V, retain_graph=True)
    (exact,) = torch.autograd.grad(0.1 * (logp_V.exp() * (logp_V - reference_V)).sum(), logits_V)
    assert float(torch.cosine_similarity(found, exact, dim=0)) > (0.5 if estimator == "k3" else 0.9999)
    if estimator != "k3":
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts["kl"], divergence(logp_V, reference_V, "k3").sum())


def test_generalised_advantages_equal_the_sum_of_the_paper():
    generator = torch.Generator().manual_seed(1)
    lengths, discount, decay = [4, 1, 6], 0.97, 0.9
    answer_N = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    reward_N, value_N = torch.randn(2, sum(lengths), generator=generator)
    advantage_N, return_N = token_advantages(reward_N, value_N, answer_N, gamma=discount, gae_lambda=decay)
    first = 0
    for length in lengths:
        value = [*value_N[first : first + length].tolist(), 0.0]
        delta = [float(reward_N[first + t]) + discount * value[t + 1] - value[t] for t in range(length)]
        for t in range(length):
            expected = sum((discount * decay) ** (later - t) * delta[later] for later in range(t, length))
            assert float(advantage_N[first + t]) == pytest.approx(expected, abs=1e-5)
        first += length
    torch.testing.assert_close(return_N, advantage_N + value_N)


def test_whitening_and_the_clipped_value_loss():
    white_N = whiten(torch.tensor([1.0, 2.0, 5.0]))
    assert float(white_N.mean()) == pytest.approx(0, abs=1e-6)
    assert float((white_N**2).mean()) == pytest.approx(1, abs=1e-5)
    value_N = torch.tensor([0.0, 1.0, 0.1], requires_grad=True)
    loss_N, clipped_N = value_loss(value_N, torch.zeros(3), torch.tensor([1.0, 0.5, 1.0]), clip=0.2)
    assert loss_N.tolist() == pytest.approx([0.5, max(0.25, 0.09) / 2, 0.405])
    assert not clipped_N.any()
    held_N, was_clipped_N = value_loss(torch.tensor([1.0]), torch.zeros(1), torch.tensor([1.0]), clip=0.2)
    assert held_N.tolist() == pytest.approx([0.32])
    assert was_clipped_N.all()


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"clip_high": -0.1}, "objective.clip_high"),
        ({"rewards": ()}, "objective.rewards"),
        ({"rewards": ("exact", "format"), "reward_weights": (1.0,)}, "objective.reward_weights"),
        ({"loss": "cispo", "clip_low": 0.2}, "objective.clip_low"),
        ({"kl_estimator": "k1"}, "objective.kl_estimator"),
        ({"reference": "copy"}, "objective.reference"),
        ({"resample_rounds": 5}, "objective.resample_rounds"),
        ({"resample_rounds": 5, "degenerate": "drop"}, "objective.resample_rounds"),
        ({"loss": "ppo", "degenerate": "drop"}, "objective.degenerate"),
        ({"loss": "ppo", "degenerate": "resample"}, "objective.degenerate"),
        ({"rollout": Rollout(old_logprobs="recomputed")}, "objective.rollout.old_logprobs"),
        ({"loss": "gspo", "clip_low": 1e-3}, "objective.clip_low"),
        ({"clip_high": 0.3}, "objective.clip_high"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, where):
    with pytest.raises(UserError) as caught:
        Policy(**changes)
    assert caught.value.where == where


def test_settings_that_have_an_effect_are_taken():
    assert Policy(kl_coef=0.1, kl_estimator="k1", reference="copy").kl_estimator == "k1"
    assert Policy(loss="dapo", resample_rounds=5).degenerate_kind == "resample"
    assert not Policy(clip_high=0.3, rollout=Rollout(old_logprobs="recomputed", steps_per_rollout=2)).strictly_on_policy


def test_settings_of_sampling_that_make_no_sense_are_refused():
    for name, value in {"temperature": 0.0, "num_generations": 0, "top_p": 0.0, "max_concurrent": -1}.items():
        with raises_user_error(where=f"objective.rollout.{name}", got=value):
            Rollout(**{name: value})
    with raises_user_error(where="objective.rollout.num_generations", got=1):
        Policy(rollout=Rollout(num_generations=1))


def test_settings_of_rewards_are_read_by_one_that_is_asked_for():
    def unused(rewards, **changes):
        return list(RewardSettings(**changes).unused(rewards))

    assert unused(["exact"], most_calls=2, code_seconds=1.0) == [("most_calls", "tools"), ("code_seconds", "code")]
    assert unused(["exact", "tools", "code"], most_calls=2, code_seconds=1.0) == []
    assert unused(["format"], answer_after="####") == []  # held-out prompts are matched with it
    assert unused(["mine:Reward"], soft_length=7) == []
    for setting in fields(RewardSettings):
        changed = {setting.name: "x" if isinstance(setting.default, str) else setting.default + 1}
        assert bool(unused(["exact"], **changed)) == (setting.name != "answer_after")

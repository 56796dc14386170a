"""Every log-probability of a run is of the temperature at which it samples: sampled, recomputed, the reference's, and
the policy's own. Each is held against a plain softmax of one answer alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import NumberTokenizer, small_model

from penjing.base import config
from penjing.data.formats import Message
from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.model.lora import Lora, adapted, adapter_scope, add_adapter
from penjing.objective.policy import Policy, PolicyObjective, Rollout
from penjing.parallel.single import Single
from penjing.rl.prompts import Prompt
from penjing.rl.rollout_source import RolloutSampler, RolloutSource
from penjing.rl.stage import PolicyStage
from penjing.train.config import Run

TEMPERATURE = 0.6
PROMPTS = [(3, 5, 7), (2, 4, 6, 8, 10), (11, 12), (1, 9, 1, 9)]


class OddTokens:
    names, weights = ("odd",), (1.0,)

    def __call__(self, answers):
        return np.array([[sum(int(token) % 2 for token in answer.text.split()) for answer in answers]], dtype=float)

    def total(self, score_RN):
        return score_RN[0]


@torch.no_grad()
def plain(model, prompt, ids, temperature):
    """log p of an answer's tokens after its prompt, in a row of its own."""
    logits_TV = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1]
    return (logits_TV / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def settings(**rollout):
    shape = {"num_generations": 3, "max_new_tokens": 6, "temperature": TEMPERATURE, "steps_per_rollout": 2, **rollout}
    return Policy(kl_coef=0.1, rollout=Rollout(**shape))


def sampled(model, how):
    """The first batch of a source that samples from `model`, and its answers with their prompts."""
    prompts = [
        Prompt(ids=ids, messages=(Message(role="user", content="?"),), truths=(), kind="", record={}, where="")
        for ids in PROMPTS
    ]
    sampler = RolloutSampler(
        settings=how,
        model=model,
        tokenizer=NumberTokenizer(),
        scorer=OddTokens(),
        strategy=Single(torch.device("cpu")),
        seq_len=64,
    )
    source = RolloutSource(sampler, prompts, seed=1, prompts_per_step=2, micro_units=2)
    batch = next(source)
    one = source._round
    answers = [
        (prompts[int(one.prompt_P[place])].ids, one.id_PAM[place, answer, : one.length_PA[place, answer]].tolist())
        for place in range(2)
        for answer in range(3)
    ]
    return batch, answers


@pytest.mark.parametrize("behaviour", ["sampled", "recomputed"])
def test_old_log_probabilities(behaviour):
    model = small_model()
    batch, answers = sampled(model, settings(old_logprobs=behaviour))
    wanted, cold = (torch.cat([plain(model, *each, heat) for each in answers]) for heat in (TEMPERATURE, 1.0))
    torch.testing.assert_close(batch.values["behaviour"], wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - cold).abs().max() > 0.1


def truncated(logp_TV, top_p=1.0, top_k=0):
    """The distribution that is sampled from, token by token: sorted, cut, normalised."""
    kept_TV = torch.full_like(logp_TV, -torch.inf)
    for logp_V, kept_V in zip(logp_TV, kept_TV, strict=True):
        total = 0.0
        for token in logp_V.argsort(descending=True).tolist()[: top_k or None]:
            kept_V[token] = logp_V[token]
            total += float(logp_V[token].exp())
            if total >= top_p:
                break
    return kept_TV.log_softmax(-1)


@pytest.mark.parametrize("how", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.6, "old_logprobs": "recomputed"}])
@torch.no_grad()
def test_under_top_p_and_top_k_the_behaviour_policy_is_the_sampled_one(how):
    model = small_model()
    batch, answers = sampled(model, settings(**how))
    wanted, whole = [], torch.cat([plain(model, *each, TEMPERATURE) for each in answers])
    cut = {name: value for name, value in how.items() if name != "old_logprobs"}
    for prompt, ids in answers:
        logits_TV = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1]
        logp_TV = truncated((logits_TV / TEMPERATURE).log_softmax(-1), **cut)
        wanted.append(logp_TV.gather(1, torch.tensor(ids)[:, None])[:, 0])
    torch.testing.assert_close(batch.values["behaviour"], torch.cat(wanted), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch.values["kept"], whole - torch.cat(wanted), rtol=1e-4, atol=1e-4)
    assert batch.values["kept"].max() < -0.01


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "dapo", "ppo", "dr_grpo"])
def test_the_gradient_of_truncated_samples_is_the_policy_s_own_on_what_was_kept(loss):
    """One answer of each kept token, its loss times the probability that it is sampled, is the derivative of the sum of
    p(token) A(token) over the kept ones. Ratios stay 1, also for tokens whose advantage is negative."""
    logit_V, advantage_V = torch.tensor([1.0, 0.3, -0.2, 0.9, -1.0]), [1.0, -2.0, 0.5, -1.0, 3.0]
    kept, top = [0, 1, 3], {"top_k": 3, "num_epochs": 2, "max_new_tokens": 1}
    how = Policy(loss=loss, degenerate="keep" if loss == "dapo" else "auto", rollout=Rollout(**top))
    logit_V.requires_grad_()
    logp_V = logit_V.log_softmax(-1)
    kept_mass = float(logp_V.detach()[kept].exp().sum())
    total = torch.zeros(())
    for token in kept:
        logp = float(logp_V.detach()[token])
        values = {"behaviour": [logp - float(np.log(kept_mass))], "kept": [float(np.log(kept_mass))]}
        answer = Answer(ids=[token + 1], values=values)
        batch = pack([Group(prompt=[9], answers=[answer], figures={"advantage": [advantage_V[token]]})], 8)
        loss_N, parts = PolicyObjective(how).loss_from_log_probs(logp_V[token][None], torch.zeros(1), batch)
        assert float(parts["ratio"]) == pytest.approx(1) and float(parts["kl_old_new"]) == pytest.approx(0, abs=1e-6)
        total = total + loss_N * np.exp(logp) / kept_mass
    (found_V,) = torch.autograd.grad(total, logit_V)
    wanted = -sum(logit_V.log_softmax(-1)[token].exp() * advantage_V[token] for token in kept)
    torch.testing.assert_close(found_V, torch.autograd.grad(wanted, logit_V)[0], rtol=1e-5, atol=1e-6)


def answer_batch():
    answers = [[7, 3, 0], [2, 0], [5, 5, 5, 0]]
    return pack([Group(prompt=PROMPTS[0], answers=[Answer(ids=ids) for ids in answers])], 64), answers


def reference_of(model, kind):
    stage = object.__new__(PolicyStage)
    stage.run, stage.strategy = config.resolve(Run, {"compute": {"dtype": "float32"}}), Single(torch.device("cpu"))
    stage.settings = Policy(kl_coef=0.1, reference=kind, rollout=Rollout(temperature=TEMPERATURE))
    return stage._reference(model)


def with_adapters():
    """A model whose adapter has learned something, and the base's own answers."""
    model = small_model()
    base = [plain(model, PROMPTS[0], ids, TEMPERATURE) for ids in answer_batch()[1]]
    add_adapter(model, Lora(rank=2))
    for layer in adapted(model).values():
        layer.adapters["default"].B.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return model, torch.cat(base)


@pytest.mark.parametrize("kind", ["adapter_off", "auto", "copy"])
def test_the_reference_beside_adapters_is_the_base_at_that_temperature(kind):
    model, wanted = with_adapters()
    batch, answers = answer_batch()
    found = reference_of(model, kind)(batch).detach()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with adapter_scope(model, "default"):
        learned = torch.cat([plain(model, PROMPTS[0], ids, TEMPERATURE) for ids in answers])
    assert (learned - wanted).abs().max() > 0.05


def test_the_copied_reference_is_the_start_at_that_temperature():
    model = small_model()
    batch, answers = answer_batch()
    reference = reference_of(model, "auto")
    wanted = torch.cat([plain(model, PROMPTS[0], ids, TEMPERATURE) for ids in answers])
    with torch.no_grad():
        model.embed.weight.mul_(1.5)  # what is learned later does not move it
    torch.testing.assert_close(reference(batch).detach(), wanted, rtol=1e-4, atol=1e-4)


def test_the_policy_is_trained_at_the_temperature_that_it_samples_at():
    """With what it was as behaviour every ratio is 1; and the loss has the slope of the hot softmax."""
    model = small_model()
    batch, answers = answer_batch()
    wanted = torch.cat([plain(model, PROMPTS[0], ids, TEMPERATURE) for ids in answers])
    batch.values["behaviour"] = wanted - 0.1
    batch.figures["advantage"] = torch.ones(3)
    objective = PolicyObjective(Policy(rollout=Rollout(temperature=TEMPERATURE, steps_per_rollout=2)))
    loss = objective(model, batch)
    assert loss.parts["ratio"].item() / 3 == pytest.approx(np.exp(0.1), rel=1e-4)


def test_answers_of_one_prompt_are_drawn_apart():
    _, answers = sampled(small_model(), settings(max_new_tokens=12))
    assert len({tuple(ids) for _, ids in answers[:3]}) == 3


class Flat(OddTokens):
    def __call__(self, answers):
        return np.ones((1, len(answers)))


def test_rewards_that_never_vary_are_told_once():
    prompts = [
        Prompt(ids=ids, messages=(Message(role="user", content="?"),), truths=(), kind="", record={}, where="")
        for ids in PROMPTS
    ]
    sampler = RolloutSampler(
        settings=settings(steps_per_rollout=1),
        model=small_model(),
        tokenizer=NumberTokenizer(),
        scorer=Flat(),
        strategy=Single(torch.device("cpu")),
        seq_len=64,
    )
    source = RolloutSource(sampler, prompts, seed=1, prompts_per_step=2, micro_units=2)
    for _ in range(4):
        next(source)  # a warning is an error here
    with pytest.warns(UserWarning, match="equal reward"):
        next(source)
    for _ in range(5):
        next(source)

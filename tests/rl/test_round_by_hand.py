"""A round of sampling against its own rewards and tokens: which advantages each loss gets, from whom answers come."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import NumberTokenizer, small_model

from penjing.data.formats import Message
from penjing.model.value_head import ScalarHead
from penjing.objective.policy import Policy, RewardSettings, Rollout
from penjing.parallel.single import Single
from penjing.rl.prompts import Prompt
from penjing.rl.rewards.base import RewardInput, RewardMix, RewardRuntime
from penjing.rl.rollout_source import RolloutSampler
from penjing.rl.stage import PolicyStage

PROMPTS = [
    Prompt(ids=ids, messages=(Message(role="user", content="?"),), truths=(), kind="", record={}, where="")
    for ids in [(3, 5, 7), (2, 4, 6, 8, 10), (11, 12), (1, 9, 1, 9)]
]
SEEDS = [[10 * place + answer for answer in range(4)] for place in range(4)]
CPU = torch.device("cpu")


class FirstToken:
    """An answer is worth its first number."""

    names, weights = ("first",), (1.0,)

    def __call__(self, answers):
        return np.array([[float((answer.text.split() or ["0"])[0]) for answer in answers]])

    def total(self, score_RN):
        return score_RN[0]


@pytest.fixture(scope="module")
def model():
    return small_model(num_hidden_layers=1)


def round_of(model, *, values=None, loss="grpo", scorer=None, **rollout):
    settings = Policy(loss=loss, rollout=Rollout(**{"num_generations": 4, "max_new_tokens": 8, **rollout}))
    sampler = RolloutSampler(
        settings=settings,
        model=model,
        tokenizer=NumberTokenizer(),
        scorer=scorer or FirstToken(),
        strategy=Single(CPU),
        seq_len=64,
        values=values,
    )
    return sampler.sample(PROMPTS, [0, 1, 2, 3], SEEDS)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "cispo", "dr_grpo"])
def test_advantages_are_those_of_the_loss_s_paper(model, loss):
    """Divided by the group's spread (arXiv:2402.03300), but not for Dr. GRPO (arXiv:2503.20783)."""
    one = round_of(model, loss=loss)
    reward_PA = one.id_PAM[:, :, 0].astype(float)
    np.testing.assert_array_equal(one.reward_PA, reward_PA)
    for rewards, found in zip(reward_PA, one.advantage_PA, strict=True):
        gap = rewards - rewards.sum() / 4
        spread = np.sqrt((gap**2).sum() / 3)
        np.testing.assert_allclose(found, gap if loss == "dr_grpo" else gap / (spread + 1e-4), rtol=1e-6)


def test_ppo_s_advantages_are_whitened_over_the_tokens_of_the_round(model):
    head = ScalarHead(model)
    torch.nn.init.normal_(head.scalar, generator=torch.Generator().manual_seed(0))
    one = round_of(model, values=head, loss="ppo")
    said = one.sampled_PAM.astype(bool)
    gains = one.gain_PAM[said]
    assert abs(gains.mean()) < 1e-5
    assert gains.var() == pytest.approx(1, rel=1e-3)
    # Without a discount and with lambda 0.95 the last token's return is the answer's reward.
    last = one.length_PA - 1
    found = np.take_along_axis(one.return_PAM, last[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(found, one.reward_PA, rtol=1e-5, atol=1e-5)


def test_of_the_likeliest_token_alone_all_answers_are_one(model):
    for how in ({"top_k": 1}, {"top_p": 1e-6}):
        one = round_of(model, **how)
        assert (one.id_PAM == one.id_PAM[:, :1]).all()
    assert (round_of(model).id_PAM != one.id_PAM).any()


def test_rewards_are_added_up_by_their_weights(model):
    settings = Policy(
        rewards=("length", "repetition"), reward_weights=(2.0, -3.0), reward=RewardSettings(repeated_words=1)
    )
    scorer = RewardMix(settings, RewardRuntime(device=CPU, max_tokens=8))
    one = round_of(model, scorer=scorer)
    np.testing.assert_allclose(one.reward_PA, 2 * one.score_RPA[0] - 3 * one.score_RPA[1])
    assert one.score_RPA[0].any() and one.score_RPA[1].any()


def test_a_length_is_what_was_said_before_the_stop(model):
    """And an answer that reaches the longest without one is cut off."""
    seen = []

    class Sees(FirstToken):
        def __call__(self, answers):
            seen.extend(answers)
            return super().__call__(answers)

    one = round_of(model, scorer=Sees(), max_new_tokens=20)
    assert 0 < one.cut_off_PA.sum() < 16
    for ids, length, cut_off, answer in zip(
        one.id_PAM.reshape(16, -1), one.length_PA.flat, one.cut_off_PA.flat, seen, strict=True
    ):
        stopped = ids[length - 1] == 0
        assert cut_off == answer.truncated == (not stopped)
        assert answer.num_tokens == length - stopped == len(answer.text.split())


def test_groups_are_degenerate_where_all_rewards_are_equal(model):
    class Little(FirstToken):
        """Of two prompts all rewards are equal, of the others one is a thousandth more."""

        def __call__(self, answers):
            return np.array([[0.5] * 8 + [0.501, 0.5, 0.5, 0.5] * 2])

    one = round_of(model, scorer=Little(), loss="dapo")
    assert one.counts_P.tolist() == [0, 0, 1, 1]
    assert (one.sampled, one.degenerate) == (4, 2)
    kept = round_of(model, scorer=Little())
    assert kept.counts_P.tolist() == [1, 1, 1, 1]
    shown = replace(one, seconds=6.0, tokens=30).metrics(range(4), ["first"], 3)
    assert shown["frac_zero_reward_std"] == 0.5
    assert shown["rollout_seconds"] == 2.0
    assert shown["rollout_tokens_per_second"] == 5.0


def test_held_out_prompts_are_answered_greedily_and_counted_where_they_can_be_right():
    """Of four prompts two have a reference answer, and one of these is met; drawn answers meet both."""

    class Says:
        sampling = object()

        def generate(self, prompts, seeds, sampling):
            return [[sampling]] * len(prompts)

        def reward_input(self, prompt, written):
            drawn = written is Says.sampling
            assert drawn or written.temperature == 0
            text = "right" if drawn or prompt.kind == "a" else "wrong"
            more = {"truths": prompt.truths, "where": "", "truncated": False}
            return RewardInput(messages=prompt.messages, text=text, num_tokens=3, **more)

    stage = object.__new__(PolicyStage)
    stage.strategy, stage.settings, stage.run = Single(CPU), Policy(), SimpleNamespace(seed=1)
    stage.sampler = Says()

    class Tenth(FirstToken):
        def __call__(self, answers):
            return np.full((1, len(answers)), 0.1)

    stage.scorer = Tenth()
    kinds = [("a", ("right",)), ("b", ("right",)), ("a", ()), ("b", ())]
    stage.held_out = [replace(PROMPTS[0], kind=kind, truths=truths) for kind, truths in kinds]
    figures = stage.validate()
    assert figures["val_exact_match"] == 0.5
    assert (figures["val_exact_match_a"], figures["val_exact_match_b"]) == (1, 0)
    assert figures["val_exact_match_drawn"] == 1
    assert figures["val_reward"] == pytest.approx(0.1)
    assert figures["val_answer_tokens"] == 3

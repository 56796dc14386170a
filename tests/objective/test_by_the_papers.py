"""Numbers of the papers, and cases worked out by hand: nothing here reads a setting's own field."""

from __future__ import annotations

import math

import pytest
import torch

from penjing.loader.batch import Batch
from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.model.moe import RouterStats
from penjing.objective.next_token import NextToken
from penjing.objective.policy import Policy, PolicyObjective, Rollout, divergence
from penjing.objective.preference import Preference, PreferenceObjective, pair_losses
from penjing.objective.reward_model import RewardModel, RewardObjective
from penjing.objective.router import RouterSettings

TWICE = Rollout(max_new_tokens=10, num_epochs=2)  # so that ratios are not 1 by definition


def one_token(loss, ratio, advantage):
    """(the loss, its gradient along log pi) of an answer of one token, now `ratio` times as likely as it was."""
    answer = Answer(ids=[7], values={"behaviour": [-2.0]})
    batch = pack([Group(prompt=[1], answers=[answer], figures={"advantage": [advantage]})], 32)
    logp_N = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    objective = PolicyObjective(Policy(loss=loss, rollout=TWICE))
    total, parts = objective.loss_from_log_probs(logp_N, torch.zeros(1), batch)
    (gradient,) = torch.autograd.grad(total, logp_N)
    return total.item(), gradient.item(), parts


# arXiv:2402.03300 and arXiv:1707.06347 clip at 0.2; arXiv:2503.14476 section 3.1: 0.2 below, 0.28 above;
# arXiv:2507.18071 section 5.1: 3e-4 below, 4e-4 above.
BORDERS = {
    "grpo": (0.8, 1.2),
    "dr_grpo": (0.8, 1.2),
    "ppo": (0.8, 1.2),
    "dapo": (0.8, 1.28),
    "gspo": (1 - 3e-4, 1 + 4e-4),
}


@pytest.mark.parametrize("loss", BORDERS)
def test_the_ratio_is_clipped_where_the_paper_says(loss):
    low, high = BORDERS[loss]
    little = 0.01 * min(1 - low, high - 1)
    share = 0.1 if loss == "dr_grpo" else 1.0  # over the longest answer, ten tokens
    for advantage, ratio in ((2.0, high - little), (-2.0, low + little)):
        total, gradient, parts = one_token(loss, ratio, advantage)
        assert (total, gradient) == pytest.approx([-ratio * advantage * share] * 2, rel=1e-5)
        assert parts["clipped_low_fraction"] == parts["clipped_high_fraction"] == 0
    for advantage, ratio, border, name in ((2.0, high + little, high, "high"), (-2.0, low - little, low, "low")):
        total, gradient, parts = one_token(loss, ratio, advantage)
        assert total == pytest.approx(-border * advantage * share, rel=1e-5)
        assert gradient == 0
        assert parts[f"clipped_{name}_fraction"] == 1
    for advantage, ratio in ((-2.0, high + little), (2.0, low - little)):  # the other way nothing is cut off
        total, gradient, parts = one_token(loss, ratio, advantage)
        assert total == pytest.approx(-ratio * advantage * share, rel=1e-5)
        assert parts["clipped_low_fraction"] == parts["clipped_high_fraction"] == 0


def test_cispo_weighs_a_token_five_times_at_most():
    """arXiv:2506.13585 clips the weight alone: above 1 + 4 it stays 5, and the token keeps its gradient."""
    for ratio, weight in ((0.01, 0.01), (0.5, 0.5), (4.9, 4.9), (5.1, 5.0), (50.0, 5.0)):
        for advantage in (2.0, -2.0):
            total, gradient, _ = one_token("cispo", ratio, advantage)
            logp = -2.0 + math.log(ratio)
            assert gradient == pytest.approx(-weight * advantage, rel=1e-4)
            assert total == pytest.approx(-weight * advantage * logp, rel=1e-4)


def test_ratios_far_off_are_not_cut_before_the_clip():
    """A token a hundred thousand times likelier counts so where it is a bad one: the minimum has no upper end."""
    total, gradient, _ = one_token("grpo", 1e5, -1.0)
    assert (total, gradient) == pytest.approx([1e5] * 2, rel=1e-3)


def test_dr_grpo_divides_by_the_longest_answer_allowed():
    """arXiv:2503.20783: sums over tokens, over a constant; an answer of two tokens counts twice one of one."""
    answers = [Answer(ids=[7] * length, values={"behaviour": [-2.0] * length}) for length in (1, 2)]
    batch = pack([Group(prompt=[1], answers=answers, figures={"advantage": [1.0, 1.0]})], 32)
    objective = PolicyObjective(Policy(loss="dr_grpo", rollout=Rollout(max_new_tokens=25, num_epochs=2)))
    logp_N = torch.full((3,), -2.0)
    total, _ = objective.loss_from_log_probs(logp_N, torch.zeros(3), batch)
    assert float(total) == pytest.approx(-3 / 25)


def test_estimates_of_the_divergence_of_one_token():
    """J. Schulman, "Approximating KL Divergence": log r is q over p at a token drawn from p."""
    logp, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert divergence(logp, reference, "k1").item() == pytest.approx(0.5)
    assert divergence(logp, reference, "k2").item() == pytest.approx(0.125)
    assert divergence(logp, reference, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_grpo_s_penalty_is_deepseekmath_s():
    """arXiv:2402.03300, equation 4: e^d - d - 1 with d the reference's log-probability less the policy's, here -0.5."""
    answer = Answer(ids=[7], values={"behaviour": [-2.0], "reference": [-2.5]})
    batch = pack([Group(prompt=[1], answers=[answer], figures={"advantage": [0.0]})], 32)
    objective = PolicyObjective(Policy(loss="grpo", kl_coef=0.1, rollout=TWICE))
    loss, _ = objective.loss_from_log_probs(torch.tensor([-2.0]), torch.tensor([0.5]), batch)
    assert float(loss) == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1))


def test_what_is_shown_beside_the_loss():
    answer = Answer(ids=[7, 8], values={"behaviour": [-2.0, -1.0], "reference": [-2.5, -1.0]})
    batch = pack([Group(prompt=[1], answers=[answer], figures={"advantage": [-1.0]})], 32)
    objective = PolicyObjective(Policy(loss="dapo", kl_coef=0.1, rollout=TWICE))
    _, parts = objective.loss_from_log_probs(torch.tensor([-2.0, -2.0]), torch.tensor([0.5, 1.5]), batch)
    assert float(parts["entropy"]) == pytest.approx(2.0)
    # k3 of tokens that the behaviour drew, with respect to the policy: e^(-1) - 1 + 1 of the second.
    assert float(parts["kl_old_new"]) == pytest.approx(math.exp(-1))
    assert float(parts["kl"]) == pytest.approx(math.exp(-0.5) - 1 + 0.5 + math.exp(1) - 1 - 1)
    assert float(parts["ratio"]) == pytest.approx(1 + math.exp(-1))
    assert float(parts["clipped_low_fraction"]) == 1


def test_the_value_s_loss_is_a_tenth_of_the_policy_s():
    """0.1, as TRL has it: half the larger of two squares, for one token V = 1.5 beside the return 1, from 1 before."""
    values = {"behaviour": [-2.0], "advantage": [0.0], "value": [1.0], "return": [1.0]}
    batch = pack([Group(prompt=[1], answers=[Answer(ids=[7], values=values)])], 32)
    value_N = torch.tensor([1.5], requires_grad=True)
    outputs = (torch.tensor([[-2.0], [0.0]]), value_N)
    loss = PolicyObjective(Policy(loss="ppo"))(lambda *given, **named: outputs, batch)
    assert loss.total.item() == pytest.approx(0.1 * 0.5 * 0.25)
    assert loss.parts["value_loss"].item() == pytest.approx(0.5 * 0.25)
    (gradient,) = torch.autograd.grad(loss.total, value_N)
    assert gradient.item() == pytest.approx(0.1 * 0.5)
    held = PolicyObjective(Policy(loss="ppo"))._value_loss(torch.tensor([0.5]), batch)[1]
    assert held["value_loss"].item() == pytest.approx(0.5 * 0.25)  # further off than 0.8, where it is held
    batch.values["return"] = torch.tensor([0.0])
    held = PolicyObjective(Policy(loss="ppo"))._value_loss(torch.tensor([0.5]), batch)[1]
    assert held["value_loss"].item() == pytest.approx(0.5 * 0.64)  # at 0.8, though 0.5 is nearer
    assert held["value_clipped_fraction"].item() == 1


# --- preferences -----------------------------------------------------------------------------------------------------


def test_betas_that_are_not_given_are_the_papers():
    """0.1 (arXiv:2305.18290, section 6) and for SimPO 2.0 with a margin of 0.5 (arXiv:2405.14734)."""
    logp_P2, reference_P2 = torch.tensor([[-2.0, -6.0]]), torch.tensor([[-3.0, -4.0]])
    length_P2 = torch.tensor([[2.0, 4.0]])

    def loss(**settings):
        return pair_losses(Preference(**settings), logp_P2, logp_P2 - reference_P2, length_P2)[0].item()

    # c - c0 = 1, r - r0 = -2; means over tokens: c = -1, r = -1.5
    assert loss() == pytest.approx(math.log1p(math.exp(-0.1 * 3)))
    assert loss(loss="simpo") == pytest.approx(math.log1p(math.exp(-(2.0 * 0.5 - 0.5))))
    assert loss(loss="ipo") == pytest.approx((1 / 2 + 2 / 4 - 1 / (2 * 0.1)) ** 2)
    h = 0.1 * 3
    good, bad = math.log1p(math.exp(-h)), math.log1p(math.exp(h))
    assert loss(loss="cdpo", label_smoothing=0.2) == pytest.approx(0.8 * good + 0.2 * bad)
    assert loss(loss="robust", label_smoothing=0.2) == pytest.approx((0.8 * good - 0.2 * bad) / (1 - 2 * 0.2))


def kto_loss(answers, **settings):
    """The loss and the figures of groups with one answer to their own question and one to another's.

    answers: of each group (wanted, gain of its own answer, gain of the other's) over the reference, in nats.
    """
    groups, logp = [], []
    for wanted, own, other in answers:
        groups.append(
            Group(
                prompt=[1],
                answers=[Answer(ids=[7], values={"reference": [-3.0]}), Answer(ids=[8], values={"reference": [-3.0]})],
                figures={"desirable": [float(wanted), 0.0], "mismatched": [0.0, 1.0]},
            )
        )
        logp += [-3.0 + own, -3.0 + other]
    logp_N = torch.tensor(logp, requires_grad=True)
    objective = PreferenceObjective(Preference(loss="kto", beta=0.5, **settings))
    batch = pack(groups, 64)
    loss = objective(lambda *given, **named: torch.stack([logp_N, torch.zeros_like(logp_N)]), batch)
    (gradient_N,) = torch.autograd.grad(loss.total, logp_N)
    return loss, gradient_N.tolist(), float(objective.weight(batch))


def sigma(x):
    return 1 / (1 + math.exp(-x))


def test_kto_s_divergence_is_never_negative():
    """arXiv:2402.01306, section 4.2: max(0, the mean over answers to other questions)."""
    loss, gradients, units = kto_loss([(True, 1.0, -4.0), (False, 1.0, -2.0)], undesirable_weight=3.0)
    assert units == 2
    assert float(loss.parts["kto_z"]) == 0
    assert loss.total.item() == pytest.approx((1 - sigma(0.5)) + 3 * (1 - sigma(-0.5)))
    assert gradients[1] == gradients[3] == 0  # the estimate has no gradient


def test_kto_s_divergence_is_the_mean_over_a_block_of_other_answers():
    loss, gradients, _ = kto_loss([(True, 1.0, 2.0), (False, 1.0, 0.0)], desirable_weight=2.0)
    assert float(loss.parts["kto_z"]) == pytest.approx(2 * 1.0)  # z = 1 of each of two answers
    assert loss.total.item() == pytest.approx(2 * (1 - sigma(0.0)) + (1 - sigma(0.0)))
    assert gradients[1] == gradients[3] == 0
    assert gradients[0] == pytest.approx(-2 * 0.5 * 0.25)
    assert gradients[2] == pytest.approx(0.5 * 0.25)
    apart, _, _ = kto_loss([(True, 1.0, 2.0), (False, 1.0, 0.0)], desirable_weight=2.0, kl_groups=1)
    assert apart.total.item() == pytest.approx(2 * (1 - sigma(0.5 * (1 - 2))) + (1 - sigma(-0.5 * 1)))


def test_figures_of_pairs_by_hand():
    """A tie is half a pair; rewards are beta times the gain; drift is the half square of each token's."""
    answers = [Answer(ids=[7, 8], values={"reference": [-1.0, -1.0]}), Answer(ids=[9], values={"reference": [-4.0]})]
    tie = [Answer(ids=[7], values={"reference": [-1.0]}), Answer(ids=[9], values={"reference": [-1.0]})]
    batch = pack([Group(prompt=[1], answers=answers), Group(prompt=[1], answers=tie)], 64)
    logp_N = torch.tensor([-0.5, -2.5, -2.0, -1.0, -1.0])
    loss = PreferenceObjective(Preference(beta=0.5))(
        lambda *given, **named: torch.stack([logp_N, torch.zeros_like(logp_N)]), batch
    )
    parts = {name: float(value) for name, value in loss.parts.items()}
    # chosen: -3 against -2, gain -1; rejected: -2 against -4, gain 2
    assert parts["chosen_reward"] == pytest.approx(-0.5)
    assert parts["rejected_reward"] == pytest.approx(1.0)
    assert parts["reward_margin"] == pytest.approx(-1.5)
    assert parts["reward_accuracy"] == pytest.approx(0.5)
    assert parts["logp_accuracy"] == pytest.approx(0.5)  # -3 against -2, and the tie
    assert parts["chosen_nll"] == pytest.approx(3 / 2 + 1)
    assert parts["chosen_kl_to_reference"] == pytest.approx((0.5**2 / 2 + 1.5**2 / 2) / 2)
    likelier = PreferenceObjective(Preference(beta=0.5))(
        lambda *given, **named: torch.stack([logp_N + torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), logp_N]), batch
    )
    # Now the chosen one is likelier (-1 against -2), though it gained less (1 against 2).
    assert float(likelier.parts["logp_accuracy"]) == pytest.approx(1.5)
    assert float(likelier.parts["reward_accuracy"]) == pytest.approx(0.5)


def test_figures_of_a_reward_model_by_hand():
    """Four pairs: two won, one lost, and a tie, which is half a pair."""
    rewards = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0, 0.0, 1.0, -1.0])
    pairs = [
        Group(prompt=[1], answers=[Answer(ids=[7]), Answer(ids=[8])], figures={"margin": [margin] * 2})
        for margin in (0.5, 0.0, 0.0, 0.0)
    ]
    loss = RewardObjective(RewardModel())(lambda *given, **named: rewards, pack(pairs, 64))
    parts = {name: value.item() for name, value in loss.parts.items()}
    assert parts["reward_accuracy"] == 2.5
    assert parts["reward_margin"] == pytest.approx(1.5 - 2.0 + 2.0)
    assert (parts["chosen_reward"], parts["rejected_reward"]) == pytest.approx((2.0, 0.5))
    # -log sigma(gap - margin), and 0.01 of the squared sums, as in arXiv:2312.09244: 2.5 and three times 0.
    wanted = math.log1p(math.exp(-1.0)) + math.log1p(math.exp(2.0)) + math.log(2) + math.log1p(math.exp(-2.0)) + 0.0625
    assert loss.total.item() == pytest.approx(wanted)


def test_what_routers_add_is_learned_and_not_shown_as_the_loss():
    """arXiv:2101.03961: 0.01 of the balance loss of each unit beside the nats."""
    means = RouterStats(torch.tensor(1.5), torch.tensor([1.5]), torch.tensor([4.0]))
    ids_BT = torch.zeros(1, 5, dtype=torch.long)
    more = {"scored_N": None, "target_N": ids_BT[0], "weight_N": torch.ones(5), "num_tokens": 5}
    batch = Batch(ids_BT=ids_BT, document_BT=ids_BT, **more)
    for z_loss_coef, added in ((0.0, 0.075), (0.1, 2.075)):
        router = RouterSettings(z_loss_coef=z_loss_coef)
        loss = NextToken(router)(lambda *given, **named: (torch.tensor(10.0), means), batch)
        assert loss.total.item() == pytest.approx(10.0 + added)
        assert loss.parts["loss"].item() == 10.0

"""Preference losses and reward models: sums over units, at hand-computed points, and what their settings refuse."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import small_model
from user_errors import raises_user_error

from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.model.score import LogProbs
from penjing.model.value_head import ScalarHead, last_token_indices
from penjing.objective.preference import (
    DESIRABLE,
    MISMATCHED,
    REFERENCE,
    Preference,
    PreferenceObjective,
    kto_losses,
    pair_losses,
)
from penjing.objective.reward_model import MARGIN, RewardModel, RewardObjective, ranking_losses, score_answers
from penjing.objective.router import RouterSettings
from penjing.objective.run_model import run_model

SHAPE = {"vocab_size": 40, "max_position_embeddings": 128}
MIXTURE = {
    **SHAPE,
    "architecture": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
NUM_GROUPS = 8
PAIR_SETTINGS = [
    Preference(loss="dpo"),
    Preference(loss="dpo", length="mean", beta=1.0, nll_weight=0.3),
    Preference(loss="cdpo", label_smoothing=0.1),
    Preference(loss="robust", label_smoothing=0.1),
    Preference(loss="ipo"),
    Preference(loss="hinge"),
    Preference(loss="simpo"),
    Preference(loss="orpo"),
]
KTO = Preference(loss="kto", beta=0.5, desirable_weight=1.2, kl_groups=2)


def made(shape):
    return small_model(noise=0.1, **shape)


@pytest.fixture
def model():
    return made(SHAPE)


def groups(kind, seed=0):
    """Groups of unequal lengths: pairs, or of kto one or two single answers with one to another question."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        number = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(1, 40, (number,), generator=generator).tolist()

    def answer():
        answer = ids(1, 9)
        known = (-4 * torch.rand(len(answer), generator=generator)).tolist()
        weights = [1.0] + [float(index % 3 > 0) for index in range(1, len(answer))]
        return Answer(ids=answer, weights=weights, values={REFERENCE: known})

    found = []
    for index in range(NUM_GROUPS):
        number = 2 if kind == "pairs" else 2 + index % 2
        other = [0.0] * number
        if kind == "kto":
            other[-1] = 1.0
        figures = {DESIRABLE: [float((index + place) % 2) for place in range(number)], MISMATCHED: other}
        figures[MARGIN] = [index / 10] * number
        found.append(Group(prompt=ids(3, 12), answers=[answer() for _ in range(number)], figures=figures))
    return found


def gradients(objective, model, all_groups, splits):
    """Gradients of the mean loss, worked on in micro-batches of these numbers of groups."""
    batches, first = [], 0
    for size in splits:
        batches.append(pack(all_groups[first : first + size], 64))
        first += size
    units = sum(objective.weight(batch) for batch in batches)
    model.zero_grad(set_to_none=True)
    parts: dict[str, float] = {}
    for batch in batches:
        loss = objective(model, batch)
        (loss.total / units).backward()
        for name, value in {"loss": loss.total.detach(), **loss.parts}.items():
            parts[name] = parts.get(name, 0.0) + float(value / units)
    return float(units), parts, [value.grad.clone() for value in model.parameters() if value.grad is not None]


def check_splits(objective, model, all_groups, splits):
    units, parts, expected = gradients(objective, model, all_groups, (NUM_GROUPS,))
    split_units, split_parts, found = gradients(objective, model, all_groups, splits)
    assert units == split_units
    assert split_parts == pytest.approx(parts, rel=1e-4, abs=1e-6)
    assert any(value.abs().max() > 1e-4 for value in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm() + 1e-7
    return units


@pytest.mark.parametrize("splits", [(1, 7), (4, 4), (3, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("settings", PAIR_SETTINGS, ids=lambda settings: f"{settings.loss}-{settings.length}")
def test_any_split_of_pairs_gives_the_same_gradients(model, settings, splits):
    assert check_splits(PreferenceObjective(settings), model, groups("pairs"), splits) == NUM_GROUPS


@pytest.mark.parametrize("splits", [(2, 6), (4, 4), (2, 2, 2, 2)], ids=str)
def test_any_split_of_kto_into_whole_blocks_gives_the_same_gradients(model, splits):
    # Single answers and pairs in turn: units are answers, and those to another question are none.
    assert check_splits(PreferenceObjective(KTO), model, groups("kto"), splits) == 12


@pytest.mark.parametrize("splits", [(1, 7), (3, 1, 2, 2)], ids=str)
def test_any_split_of_a_reward_models_pairs_gives_the_same_gradients(model, splits):
    head = ScalarHead(model)
    head.scalar.data += torch.randn(16, generator=torch.Generator().manual_seed(2))
    assert check_splits(RewardObjective(RewardModel()), head, groups("pairs"), splits) == NUM_GROUPS


@pytest.mark.parametrize("objective", [PreferenceObjective, RewardObjective])
def test_a_mixture_adds_its_routers_loss_by_units(objective):
    # Balance over each row alone does not depend on how the rows were put into batches.
    router = RouterSettings(balance="sequence", z_loss_coef=0.01)
    settings = Preference(reference="copy") if objective is PreferenceObjective else RewardModel()
    model = made(MIXTURE)
    trained = model if objective is PreferenceObjective else ScalarHead(model)
    batch = pack(groups("pairs"), 64)
    loss = objective(settings, router=router)(trained, batch)
    plain = objective(settings, router=RouterSettings(balance="none"))(trained, batch)
    added = 0.01 * (loss.parts["router_balance"] + loss.parts["router_z"])
    assert (loss.total - plain.total).item() == pytest.approx(float(added), rel=1e-3)
    assert float(loss.parts["router_balance"]) == pytest.approx(NUM_GROUPS, rel=0.2)  # 1 is even


def test_the_reference_is_asked_where_the_batch_does_not_bring_it(model):
    batch = pack(groups("pairs"), 64)
    known = batch.values.pop(REFERENCE)
    asked = []

    def reference(given):
        assert not torch.is_grad_enabled()
        asked.append(given)
        return known

    given = PreferenceObjective(Preference(), reference)(model, batch)
    batch.values[REFERENCE] = known
    assert PreferenceObjective(Preference())(model, batch).total.item() == given.total.item()
    assert asked == [batch]


def test_at_the_start_nothing_is_preferred():
    logp_P2 = torch.tensor([[-3.0, -5.0], [-2.0, -1.0]])
    length_P2 = torch.tensor([[2.0, 4.0], [1.0, 1.0]])
    for settings in PAIR_SETTINGS[:1] + PAIR_SETTINGS[2:4]:
        loss_P, reward_P2 = pair_losses(settings, logp_P2, torch.zeros(2, 2), length_P2)
        assert loss_P.tolist() == pytest.approx([math.log(2)] * 2)
        assert not reward_P2.any()


@pytest.mark.parametrize("settings", [Preference(), KTO], ids=lambda settings: settings.loss)
def test_what_differs_by_rounding_alone_is_tied(model, settings):
    batch = pack(groups("kto" if settings is KTO else "pairs"), 64)
    with torch.no_grad():
        known_N = run_model(model, batch)[0]
    for change, tied in ((2e-7, True), (1e-3, False)):
        batch.values[REFERENCE] = known_N + change * torch.randn(
            known_N.shape, generator=torch.Generator().manual_seed(3)
        )
        objective = PreferenceObjective(settings)
        share = objective(model, batch).parts["reward_accuracy"] / objective.weight(batch)
        assert (share.item() == 0.5) is tied


def test_losses_at_points_worked_out_by_hand():
    logp_P2, reference_P2 = torch.tensor([[-2.0, -6.0]]), torch.tensor([[-3.0, -4.0]])
    length_P2 = torch.tensor([[2.0, 4.0]])

    def loss(**settings):
        return pair_losses(Preference(**settings), logp_P2, logp_P2 - reference_P2, length_P2)[0].item()

    # c - c0 = 1, r - r0 = -2: h = 3 beta
    assert loss(beta=0.5) == pytest.approx(math.log1p(math.exp(-1.5)))
    assert loss(loss="hinge", beta=0.1) == pytest.approx(0.7)
    assert loss(loss="hinge", beta=0.5) == 0
    assert loss(loss="ipo", beta=0.1) == pytest.approx((1 / 2 + 2 / 4 - 5) ** 2)
    assert loss(loss="simpo") == pytest.approx(math.log1p(math.exp(-(2 * (-1 + 1.5) - 0.5))))
    odds = [p / (1 - p) for p in (math.exp(-1), math.exp(-1.5))]
    assert loss(loss="orpo") == pytest.approx(1 + 0.1 * math.log1p(odds[1] / odds[0]))
    assert loss(beta=0.5, nll_weight=2.0) == pytest.approx(math.log1p(math.exp(-1.5)) + 2.0)


def test_orpo_bears_answers_that_are_certain():
    logp_P2 = torch.tensor([[0.0, -1e-9], [-1e-4, -200.0]], requires_grad=True)
    loss_P, _ = pair_losses(Preference(loss="orpo"), logp_P2, torch.zeros(2, 2), torch.ones(2, 2))
    loss_P.sum().backward()
    assert torch.isfinite(loss_P).all()
    assert torch.isfinite(logp_P2.grad).all()


def test_kto_pushes_good_and_bad_apart():
    settings = Preference(loss="kto", beta=1.0, undesirable_weight=3.0)
    ratio_A = torch.tensor([1.0, 1.0, -2.0], requires_grad=True)
    loss_A = kto_losses(settings, ratio_A, torch.tensor([True, False, False]), torch.full((3,), 0.5))
    half, low = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-2.5))
    assert loss_A.tolist() == pytest.approx([1 - half, 3 * half, 3 * (1 - low)])
    loss_A.sum().backward()
    assert ratio_A.grad.sign().tolist() == [-1, 1, 1]


def test_ranking_loss_at_a_point_worked_out_by_hand():
    reward_P2 = torch.tensor([[2.0, 1.0]])
    loss = ranking_losses(RewardModel(center_rewards_coefficient=0.1), reward_P2, torch.tensor([0.5])).item()
    assert loss == pytest.approx(math.log1p(math.exp(-0.5)) + 0.9)
    loss = ranking_losses(RewardModel(center_rewards_coefficient=0.0), reward_P2, torch.tensor([0.0])).item()
    assert loss == pytest.approx(math.log1p(math.exp(-1.0)))


def test_a_reward_is_read_before_the_end_of_the_turn_and_sees_no_other_answer(model):
    head = ScalarHead(model)
    head.scalar.data.normal_(generator=torch.Generator().manual_seed(2))
    all_groups = groups("pairs")
    batch = pack(all_groups, 64)
    reward_A = score_answers(head, batch)
    alone = []
    for group in all_groups:
        for answer in group.answers:
            hidden_BTD = model.hidden(torch.tensor([[*group.prompt, *answer.ids[:-1]]]))
            alone.append((hidden_BTD[0, -1] @ head.scalar).item())
    assert reward_A.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-5)


def test_a_fresh_head_calls_all_answers_equal(model):
    loss = RewardObjective(RewardModel())(ScalarHead(model), pack(groups("pairs"), 64))
    assert float(loss.parts["reward_accuracy"]) == NUM_GROUPS / 2
    assert not float(loss.parts["chosen_reward"])
    assert RewardModel().best_metric.removeprefix("val_") in loss.parts  # else no checkpoint is the best one


def test_log_probabilities_and_values_come_from_one_pass(model):
    head = ScalarHead(model)
    head.scalar.data.normal_(generator=torch.Generator().manual_seed(2))
    batch = pack(groups("pairs"), 64)
    shown = {"subtree_end_BT": batch.subtree_end_BT, "position_BT": batch.position_BT}
    asked = {"scored_N": batch.scored_N, "score": LogProbs(batch.target_N)}
    places = last_token_indices(batch.scored_N, batch.answer_N, batch.num_answers)
    logp_2N, value_N = head(batch.ids_BT, batch.document_BT, scalar_N=places, **asked, **shown)
    torch.testing.assert_close(logp_2N, model(batch.ids_BT, batch.document_BT, **asked, **shown))
    torch.testing.assert_close(logp_2N, head(batch.ids_BT, batch.document_BT, **asked, **shown))
    torch.testing.assert_close(value_N, score_answers(head, batch))


@pytest.mark.parametrize(
    ("settings", "name", "facts"),
    [
        ({"loss": "robust"}, "label_smoothing", {"got": 0.0, "wanted": "more than 0"}),
        ({"loss": "cdpo", "label_smoothing": 0.5}, "label_smoothing", {"wanted": "0.5"}),
        ({"label_smoothing": 0.1}, "label_smoothing", {"next_step": "cdpo or robust"}),
        ({"beta": -1}, "beta", {}),
        ({"simpo_gamma": 1.0}, "simpo_gamma", {"next_step": "simpo"}),
        ({"kl_groups": 4}, "kl_groups", {"next_step": "kto"}),
        ({"kl_groups": 1}, "kl_groups", {"next_step": "kto"}),
        ({"desirable_weight": 8.0}, "desirable_weight", {"next_step": "kto"}),
        ({"desirable_weight": 2.0}, "desirable_weight", {"next_step": "kto"}),
        ({"loss": "kto", "nll_weight": 1.0}, "nll_weight", {"next_step": "kto"}),
        ({"loss": "orpo", "length": "sum"}, "length", {"wanted": "mean"}),
        ({"loss": "simpo", "reference": "copy"}, "reference", {"next_step": "simpo"}),
        ({"own_answers": -1}, "own_answers", {}),
        ({"own_answer_tokens": 0}, "own_answer_tokens", {}),
    ],
)
def test_settings_without_effect_are_refused(settings, name, facts):
    with raises_user_error(**{"where": f"objective.{name}", "got": settings.get(name), **facts}):
        Preference(**settings)


def test_a_negative_weight_is_refused():
    with raises_user_error(where="objective.center_rewards_coefficient", got=-1, wanted=">= 0"):
        RewardModel(center_rewards_coefficient=-1)

"""Losses and gradients of TRL's trainers on the same log-probabilities, to 1e-5."""

from types import SimpleNamespace

import pytest
import torch

from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.objective.preference import DESIRABLE, MISMATCHED, REFERENCE, Preference, PreferenceObjective
from penjing.objective.reward_model import RewardModel, ranking_losses

pytest.importorskip("trl")

LENGTHS = [(5, 3), (1, 7), (4, 4), (2, 6), (9, 1)]


class Metrics(dict):
    """Lists that are there as soon as they are asked for."""

    def __missing__(self, name):
        return self.setdefault(name, [])


def accelerator():
    def same(value):
        return value

    return SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)


def pairs(seed=0):
    """A batch of pairs, a model that says the leaf tensor of log-probabilities, and that leaf."""
    generator = torch.Generator().manual_seed(seed)
    groups, reference = [], []
    for lengths in LENGTHS:
        answers = []
        for length in lengths:
            known = (-3 * torch.rand(length, generator=generator)).tolist()
            reference += known
            answers.append(Answer(ids=[3] * length, values={REFERENCE: known}))
        groups.append(Group(prompt=[1], answers=answers))
    noise = torch.randn(len(reference), generator=generator)
    logp_N = (torch.tensor(reference) + 0.7 * noise).clamp(max=-0.02).requires_grad_()
    return pack(groups, 64), logp_N


def saying(logp_N):
    return lambda *_, **__: torch.stack((logp_N, torch.zeros_like(logp_N)))


def padded(value_N, batch):
    """[2 P, longest]: all chosen answers, then all rejected ones, each padded with zeros behind."""
    parts = value_N.split(batch.length_A().int().tolist())
    longest = max(map(len, parts))
    return torch.stack(
        [torch.nn.functional.pad(part, (0, longest - len(part))) for part in [*parts[0::2], *parts[1::2]]]
    )


def trl_dpo(loss_type, beta, batch, logp_N, *, label_smoothing=0.0):
    from trl.trainer.dpo_trainer import DPOTrainer

    mask = (padded(torch.ones(len(logp_N)), batch) > 0).long()
    mask = torch.cat((torch.zeros(len(mask), 1, dtype=torch.long), mask), dim=1)  # a prompt of one token
    nothing = torch.zeros(mask[:, 1:].shape)
    outputs = SimpleNamespace(
        log_probs=padded(logp_N, batch), entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), aux_loss=None
    )
    metrics = {"train": Metrics()}
    trainer = SimpleNamespace(
        accelerator=accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    reference_P2 = batch.sum_A(batch.values[REFERENCE]).view(-1, 2)
    inputs = {
        "input_ids": torch.full_like(mask, 3),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference_P2[:, 0],
        "ref_rejected_logps": reference_P2[:, 1],
    }

    class Model:
        training = True

        def __call__(self, **_):
            return outputs

    trainer.model = Model()
    return DPOTrainer._compute_loss(trainer, trainer.model, inputs, False), metrics["train"]


def ours(settings, batch, logp_N):
    objective = PreferenceObjective(settings)
    loss = objective(saying(logp_N), batch)
    return loss.total / objective.weight(batch), {
        name: value / objective.weight(batch) for name, value in loss.parts.items()
    }


def compare(settings, theirs, batch, logp_N):
    mine, parts = ours(settings, batch, logp_N)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(value, logp_N, retain_graph=True)[0] for value in (mine, theirs)]
    assert grads[0].abs().max() > 1e-3
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    return parts


@pytest.mark.parametrize(
    ("settings", "loss_type", "beta", "flipped"),
    [
        (Preference(loss="dpo"), "sigmoid", 0.1, 0.0),
        (Preference(loss="dpo", beta=0.5), "sigmoid", 0.5, 0.0),
        (Preference(loss="robust", beta=0.3, label_smoothing=0.2), "robust", 0.3, 0.2),
        (Preference(loss="hinge", beta=0.2), "hinge", 0.2, 0.0),
        (Preference(loss="ipo", beta=0.4), "ipo", 0.4, 0.0),
        (Preference(loss="dpo", length="mean", beta=1.5), "sigmoid_norm", 1.5, 0.0),
    ],
    ids=lambda value: value.loss if isinstance(value, Preference) else None,
)
def test_pair_losses_are_those_of_the_dpo_trainer(settings, loss_type, beta, flipped):
    batch, logp_N = pairs()
    theirs, _ = trl_dpo(loss_type, beta, batch, logp_N, label_smoothing=flipped)
    compare(settings, theirs, batch, logp_N)


def test_figures_are_those_of_the_dpo_trainer():
    batch, logp_N = pairs(4)
    theirs, metrics = trl_dpo("sigmoid", 0.1, batch, logp_N)
    parts = compare(Preference(), theirs, batch, logp_N)
    names = {
        "rewards/chosen": "chosen_reward",
        "rewards/rejected": "rejected_reward",
        "rewards/accuracies": "reward_accuracy",
        "rewards/margins": "reward_margin",
    }
    for their_name, name in names.items():
        assert float(parts[name]) == pytest.approx(metrics[their_name][0], abs=1e-5)


def cpo(loss_type, beta, gamma, smoothing, chosen_P, rejected_P):
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer = SimpleNamespace(
        alpha=0.0, beta=beta, loss_type=loss_type, simpo_gamma=gamma, label_smoothing=smoothing,
        accelerator=accelerator(),
    )  # fmt: skip
    return CPOTrainer.cpo_loss(trainer, chosen_P, rejected_P)[0].mean()


@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 0.5), (2.5, 1.4)])
def test_simpo_is_that_of_the_cpo_trainer(beta, gamma):
    batch, logp_N = pairs(1)
    mean_P2 = (batch.sum_A(logp_N) / batch.length_A()).view(-1, 2)
    theirs = cpo("simpo", beta, gamma, 0.0, mean_P2[:, 0], mean_P2[:, 1])
    compare(Preference(loss="simpo", beta=beta, simpo_gamma=gamma), theirs, batch, logp_N)


def test_conservative_dpo_is_that_of_the_cpo_trainer_less_the_reference():
    batch, logp_N = pairs(2)
    ratio_P2 = (batch.sum_A(logp_N) - batch.sum_A(batch.values[REFERENCE])).view(-1, 2)
    theirs = cpo("sigmoid", 0.3, 0.0, 0.15, ratio_P2[:, 0], ratio_P2[:, 1])
    compare(Preference(loss="cdpo", beta=0.3, label_smoothing=0.15), theirs, batch, logp_N)


def test_orpo_is_that_of_the_orpo_trainer_with_the_papers_mean_over_each_chosen_answer():
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    batch, logp_N = pairs(3)
    mean_P2 = (batch.sum_A(logp_N) / batch.length_A()).view(-1, 2)
    trainer = SimpleNamespace(beta=0.25, accelerator=accelerator())
    odds_P = ORPOTrainer.odds_ratio_loss(trainer, mean_P2[:, 0], mean_P2[:, 1])[0]
    theirs = -mean_P2[:, 0].mean() - odds_P.mean()  # their own first part also counts the prompt's tokens
    compare(Preference(loss="orpo", beta=0.25), theirs, batch, logp_N)


def test_kto_is_that_of_the_kto_trainer():
    from trl.trainer.kto_trainer import KTOTrainer

    generator = torch.Generator().manual_seed(5)
    labels, lengths = [True, False, False, True, True, False], [3, 5, 2, 4, 1, 6]
    groups, reference = [], []
    for index, length in enumerate(lengths):
        answers = []
        for number in (length, lengths[index - 1]):
            known = (-3 * torch.rand(number, generator=generator)).tolist()
            reference += known
            answers.append(Answer(ids=[3] * number, values={REFERENCE: known}))
        figures = {DESIRABLE: [float(labels[index]), 0.0], MISMATCHED: [0.0, 1.0]}
        groups.append(Group(prompt=[1], answers=answers, figures=figures))
    batch = pack(groups, 64)
    shift = 0.8 * torch.randn(len(reference), generator=generator) + 0.3
    logp_N = (torch.tensor(reference) + shift).requires_grad_()
    logp_A, reference_A = batch.sum_A(logp_N), batch.sum_A(batch.values[REFERENCE])

    class Model:
        """Says the log-probability of a whole answer in one place."""

        training = True

        def __init__(self, logp_A):
            self.logp_A = logp_A

        def __call__(self, **_):
            nothing = torch.zeros(len(self.logp_A), 1)
            return SimpleNamespace(
                log_probs=self.logp_A[:, None], entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
            )

    model = Model(logp_A[0::2])
    trainer = SimpleNamespace(
        model=model,
        accelerator=accelerator(),
        _compute_kl_logps=lambda *_: logp_A[1::2].detach(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.4,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        _metrics={"train": Metrics()},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ones = torch.ones(len(labels), 2, dtype=torch.long)
    inputs = {
        "label": torch.tensor(labels),
        "input_ids": ones,
        "attention_mask": ones,
        "completion_mask": ones,
        "ref_logps": reference_A[0::2],
        "ref_KL_logps": reference_A[1::2],
    }
    theirs = KTOTrainer._compute_loss(trainer, model, inputs, False)
    settings = Preference(loss="kto", beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)
    parts = compare(settings, theirs, batch, logp_N)
    assert float(parts["kto_z"]) > 0.1


@pytest.mark.parametrize("margins", [None, [0.0, 1.0, 0.5]])
def test_ranking_loss_is_that_of_the_reward_trainer(margins):
    from trl.trainer.reward_trainer import RewardTrainer

    reward_P2 = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=0.02),
        accelerator=accelerator(),
        _metrics={"train": Metrics()},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(6, 2)}
    if margins:
        inputs["margin"] = torch.tensor(margins)
    logits = torch.cat((reward_P2[:, 0], reward_P2[:, 1]))[:, None]
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)
    margin_P = torch.tensor(margins or [0.0] * 3)
    mine = ranking_losses(RewardModel(center_rewards_coefficient=0.02), reward_P2, margin_P).mean()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(value, reward_P2, retain_graph=True)[0] for value in (mine, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)

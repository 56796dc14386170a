"""Distillation against slow plain twins: values, gradients, splits, mixtures of experts, the stored teacher."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from small_models import small_model
from user_errors import raises_user_error

from penjing.data.packing.concat import Row
from penjing.kernels import fused_distillation_loss as head_distill
from penjing.kernels.fused_distillation_loss import (
    DistillationSums,
    DivergenceConfig,
    LiveTeacher,
    StoredTeacher,
    compare,
    fused_distillation_loss,
    softmax,
    top_k_log_probs,
)
from penjing.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
from penjing.loader.batch import collate
from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.objective.distill import Distill, Distillation, DistillBatch

N, D, WIDER, V = 37, 12, 20, 23
KINDS = ("forward", "reverse", "mixed", "jsd")


# --- the head --------------------------------------------------------------------------------------------------------


def case(seed=0, more_student=0, more_teacher=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "hidden_ND": draw(N, D).requires_grad_(),
        "weight_VD": draw(V + more_student, D).requires_grad_(),
        "target_N": torch.randint(0, V, (N,), generator=generator),
        "weight_N": torch.rand(N, generator=generator) * (draw(N) > -0.5),
        "ce_weight_N": torch.rand(N, generator=generator) * (draw(N) > 0),
        "teacher": LiveTeacher(draw(N, WIDER), draw(V + more_teacher, WIDER) * 0.7, torch.float32),
    }


def plain_divergence(logp, logq, measure):
    """By the book, on whole distributions."""

    def kl(log_a, log_b):
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    forward, reverse, share = kl(logp, logq), kl(logq, logp), measure.mixture
    mixture = (share * logp.exp() + (1 - share) * logq.exp()).log()
    return {
        "forward": forward,
        "reverse": reverse,
        "mixed": (1 - share) * forward + share * reverse,
        "jsd": share * kl(logp, mixture) + (1 - share) * kl(logq, mixture),
    }[measure.divergence]


def plain(made, measure, logp_logq=None):
    """The slow twin: all logits of both models at once."""
    logits = made["hidden_ND"] @ made["weight_VD"].T
    teacher, heat = made["teacher"], measure.temperature
    teacher_logits = teacher.hidden_ND @ teacher.weight_VD.T
    ids = min(logits.shape[1], teacher_logits.shape[1])
    logp, logq = (teacher_logits[:, :ids] / heat).log_softmax(-1), (logits[:, :ids] / heat).log_softmax(-1)
    if logp_logq is not None:
        logp, logq = logp_logq(logp, logq)
    nats = functional.cross_entropy(logits, made["target_N"], reduction="none")
    divergence = plain_divergence(logp, logq, measure)
    weight, given, share = made["weight_N"], made["ce_weight_N"], measure.ce_weight
    total = ((1 - share) * heat**2 * divergence * weight + share * nats * given).sum()
    agreed = (logits[:, :ids].argmax(-1) == teacher_logits[:, :ids].argmax(-1)).float()
    forward = plain_divergence(logp, logq, replace(measure, divergence="forward"))
    return DistillationSums(
        *(x.sum() for x in (total, nats * given, forward * weight, divergence * weight, agreed * weight))
    )


def check(made, measure, expected, factor=0.37):
    found = DistillationSums(*fused_distillation_loss(**made, dtype=torch.float32, measure=measure).unbind())
    for name, one, other in zip(DistillationSums._fields, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    inputs = (made["hidden_ND"], made["weight_VD"])
    ours = torch.autograd.grad(found.total * factor, inputs)
    theirs = torch.autograd.grad(expected.total * factor, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heat", [1.0, 2.5])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_plain_twin(kind, share, heat):
    measure = DivergenceConfig(divergence=kind, mixture=0.3, temperature=heat, ce_weight=share)
    made = case()
    check(made, measure, plain(made, measure))


@pytest.mark.parametrize("chunk", [1, V, 2 * V + 5, N * V])
def test_any_chunk_gives_the_same(monkeypatch, chunk):
    monkeypatch.setattr(head_distill, "CHUNK_LOGITS", chunk)
    measure = DivergenceConfig(divergence="jsd", temperature=1.5, ce_weight=0.2)
    made = case(seed=1)
    check(made, measure, plain(made, measure))


@pytest.mark.parametrize("more", [{"more_student": 3}, {"more_teacher": 4}])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_ids_that_only_one_model_has_are_left_out(more, share):
    measure = DivergenceConfig(divergence="reverse", ce_weight=share)
    made = case(seed=2, **more)
    check(made, measure, plain(made, measure))


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    made = case(seed=3)
    made["teacher"] = LiveTeacher(made["hidden_ND"].detach(), made["weight_VD"].detach(), torch.float32)
    for kind in KINDS:
        sums = DistillationSums(
            *fused_distillation_loss(**made, dtype=torch.float32, measure=DivergenceConfig(divergence=kind)).unbind()
        )
        assert sums.total.item() == pytest.approx(0, abs=1e-4)
        assert sums.agreement == made["weight_N"].sum()
        assert torch.autograd.grad(sums.total, made["weight_VD"])[0].abs().max() < 1e-5


def test_jsd_becomes_forward_and_reverse_at_its_ends():
    """arXiv:2306.13649, section 3: divided by the mixture (or its rest) it goes to a KL."""
    generator = torch.Generator().manual_seed(0)
    p, q = map(softmax, torch.randn(2, 5, 11, generator=generator, dtype=torch.float64))
    for mixture, kind in ((1e-6, "forward"), (1 - 1e-6, "reverse")):
        found = compare(p, q, DivergenceConfig(divergence="jsd", mixture=mixture))[0] / min(mixture, 1 - mixture)
        torch.testing.assert_close(found, compare(p, q, DivergenceConfig(divergence=kind))[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_huge_logits_stay_finite(kind):
    made = case(seed=4)
    made["hidden_ND"] = (made["hidden_ND"].detach() * 1e3).requires_grad_()
    for teacher in (made["teacher"], stored(made, DivergenceConfig(), 5)):
        sums = fused_distillation_loss(
            **{**made, "teacher": teacher},
            dtype=torch.float32,
            measure=DivergenceConfig(divergence=kind, ce_weight=0.5),
        )
        grads = torch.autograd.grad(sums[0], (made["hidden_ND"], made["weight_VD"]))
        assert all(torch.isfinite(value).all() for value in (sums, *grads))


def test_data_alone_is_the_plain_cross_entropy():
    made = case(seed=5)
    sums = fused_distillation_loss(**made, dtype=torch.float32, measure=DivergenceConfig(ce_weight=1.0))
    nats = fused_linear_cross_entropy(
        made["hidden_ND"], made["weight_VD"], made["target_N"], made["ce_weight_N"], torch.float32
    )
    torch.testing.assert_close(sums[0], nats)


def test_no_gradient_is_made_where_none_is_asked():
    made = case(seed=6)
    with torch.no_grad():
        assert not fused_distillation_loss(**made, dtype=torch.float32, measure=DivergenceConfig()).requires_grad
    made["weight_VD"].requires_grad_(False)
    fused_distillation_loss(**made, dtype=torch.float32, measure=DivergenceConfig())[0].backward()
    assert made["hidden_ND"].grad is not None
    assert made["weight_VD"].grad is None


def test_bfloat16_matmuls_give_float32_sums_and_gradients():
    made, measure = case(seed=7), DivergenceConfig(divergence="jsd", ce_weight=0.3)
    made["teacher"] = made["teacher"]._replace(dtype=torch.bfloat16)
    sums = fused_distillation_loss(**made, dtype=torch.bfloat16, measure=measure)
    expected = plain(made, measure)
    assert sums.dtype == torch.float32
    inputs = (made["hidden_ND"], made["weight_VD"])
    ours, theirs = (torch.autograd.grad(total, inputs) for total in (sums[0], expected.total))
    for one, other in zip(ours, theirs, strict=True):
        assert 0 < (one - other).norm() < 0.03 * other.norm()


# --- the stored teacher ----------------------------------------------------------------------------------------------


def stored(made, measure, count):
    teacher = made["teacher"]
    num_ids = min(V, teacher.num_ids)
    ids, logps = top_k_log_probs(
        teacher.hidden_ND,
        teacher.weight_VD,
        torch.float32,
        count=count,
        num_ids=num_ids,
        temperature=measure.temperature,
    )
    return StoredTeacher(ids, logps, num_ids)


def bucketed(ids):
    """Distributions over the k ids and "another one"."""

    def make(logp, logq):
        out = []
        for log in (logp, logq):
            chance = log.exp()
            top = chance.gather(1, ids)
            out.append(torch.cat((top, (chance.sum(-1, keepdim=True) - top.sum(-1, keepdim=True))), -1).log())
        return out

    return make


@pytest.mark.parametrize("heat", [1.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_stored_predictions_equal_the_twin_over_k_ids_and_the_others(kind, heat):
    measure = DivergenceConfig(divergence=kind, mixture=0.4, temperature=heat, ce_weight=0.25)
    made = case(seed=8)
    teacher = stored(made, measure, 5)
    expected = plain(made, measure, bucketed(teacher.id_NK))
    check({**made, "teacher": teacher}, measure, expected)


def test_all_but_one_id_stored_is_the_whole_distribution():
    measure = DivergenceConfig(divergence="reverse", temperature=1.3)
    made = case(seed=9)
    check({**made, "teacher": stored(made, measure, V - 1)}, measure, plain(made, measure))


def test_the_divergence_of_few_ids_is_a_lower_bound_that_rises():
    made = case(seed=10)
    whole = plain(made, DivergenceConfig()).kl
    few = [
        fused_distillation_loss(
            **{**made, "teacher": stored(made, DivergenceConfig(), k)}, dtype=torch.float32, measure=DivergenceConfig()
        )[2]
        for k in (1, 4, 16)
    ]
    assert 0 < few[0] < few[1] < few[2] < whole


def test_the_students_order_among_the_others_is_left_to_itself():
    """The gradient for the others is the same push for all, in proportion to the student's own chances."""
    made = case(seed=11)
    teacher = stored(made, DivergenceConfig(), 4)
    logits = (made["hidden_ND"] @ made["weight_VD"].T).detach().requires_grad_()
    eye = torch.eye(V)
    ones = torch.ones(N)
    total = fused_distillation_loss(
        logits, eye, torch.float32, made["target_N"], ones, ones, teacher, DivergenceConfig()
    )[0]
    (slope,) = torch.autograd.grad(total, logits)
    ratio = slope / logits.softmax(-1).detach()
    others = torch.ones(N, V, dtype=torch.bool).scatter_(1, teacher.id_NK, False)
    for row in range(N):
        torch.testing.assert_close(ratio[row, others[row]].std(), torch.tensor(0.0), rtol=0, atol=1e-5)


# --- the objective ---------------------------------------------------------------------------------------------------

ROW_TOKENS, NUM_ROWS = 12, 6
EXPERTS = {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def make_model(seed, **settings):
    return small_model(seed=seed, noise=0.15, vocab_size=50, **settings)


@pytest.fixture
def student():
    return make_model(0)


@pytest.fixture
def teacher():
    return make_model(1, hidden_size=24, num_hidden_layers=3).requires_grad_(False).eval()


def rows():
    """Rows of two documents and a padded end, each with its own number of targets, one with none."""
    generator = np.random.default_rng(0)
    made = []
    for number in range(NUM_ROWS):
        document = np.repeat([0, 1, -1], [5, 4, 3])
        weight = (generator.random(ROW_TOKENS) < number / 4).astype(np.float32) * (document >= 0)
        ids = generator.integers(0, 50, ROW_TOKENS + 1)
        made.append(Row(ids[:-1], ids[1:], document, weight.astype(np.float32)))
    return made


def groups():
    generator = np.random.default_rng(1)

    def ids(low, high):
        return generator.integers(1, 50, generator.integers(low, high)).tolist()

    made = []
    for number in range(NUM_ROWS):
        answer = ids(2, 9)
        made.append(
            Group(
                prompt=ids(2, 6), answers=[Answer(ids=answer, values={"from_data": [float(number % 2)] * len(answer)})]
            )
        )
    return made


def with_teacher(batch, teacher, settings, count=6):
    with torch.no_grad():
        hidden = teacher.hidden(batch.ids_BT, batch.document_BT).flatten(0, 1)[batch.scored_N]
    ids, logps = top_k_log_probs(
        hidden,
        teacher.head_weight_VD,
        torch.float32,
        count=count,
        num_ids=50,
        temperature=settings.temperature,
    )
    return DistillBatch(**vars(batch), top_id_NK=ids, top_logp_NJ=logps)


def batches_of(kind, splits, teacher, settings):
    made = groups() if kind == "own" else rows()
    first, batches = 0, []
    for size in splits:
        part = made[first : first + size]
        batch = pack(part, 32) if kind == "own" else collate(part)
        batches.append(with_teacher(batch, teacher, settings) if kind == "stored" else batch)
        first += size
    assert first == NUM_ROWS
    return batches


def gradients(objective, model, batches):
    units = sum(objective.weight(batch) for batch in batches)
    model.zero_grad(set_to_none=True)
    parts = {}
    for batch in batches:
        loss = objective(model, batch)
        (loss.total / units).backward()
        for name, value in {"total": loss.total.detach(), **loss.parts}.items():
            assert not value.requires_grad
            parts[name] = parts.get(name, 0) + value
    return units, parts, [parameter.grad.clone() for parameter in model.parameters()]


SETTINGS = Distill(teacher="t", divergence="jsd", temperature=1.5, ce_weight=0.3)


@pytest.mark.parametrize("kind", ["live", "stored", "own"])
@pytest.mark.parametrize("splits", [(3, 3), (1, 5), (1, 1, 1, 1, 1, 1)])
def test_any_split_into_micro_batches_gives_the_same(student, teacher, kind, splits):
    settings = replace(SETTINGS, mode="on_policy", on_policy_fraction=0.5) if kind == "own" else SETTINGS
    objective = Distillation(settings, None if kind == "stored" else teacher, num_ids=50)
    units, parts, expected = gradients(objective, student, batches_of(kind, (NUM_ROWS,), teacher, settings))
    split_units, split_parts, found = gradients(objective, student, batches_of(kind, splits, teacher, settings))
    assert units == split_units > 0
    assert parts.keys() == split_parts.keys()
    for name in parts:
        torch.testing.assert_close(split_parts[name], parts[name], rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm()


def test_mixtures_of_experts_in_any_split(teacher):
    """Balance by sequence and z-loss are sums over rows; balance by batch is not, with any objective."""
    from penjing.objective.router import RouterSettings

    student = make_model(2, **EXPERTS)
    objective = Distillation(SETTINGS, teacher, RouterSettings(balance="sequence", z_loss_coef=0.01))
    for kind in ("live", "own"):
        settings = replace(SETTINGS, mode="on_policy", on_policy_fraction=0.5) if kind == "own" else SETTINGS
        objective.settings = settings
        # One group a row: a row's balance would otherwise depend on who shares it.
        whole = batches_of(kind, (NUM_ROWS,) if kind == "live" else (1,) * NUM_ROWS, teacher, settings)
        _, parts, expected = gradients(objective, student, whole)
        _, split_parts, found = gradients(objective, student, batches_of(kind, (1,) * NUM_ROWS, teacher, settings))
        assert parts["router_balance"] > 0
        assert parts["total"] > parts["kl"] * 0
        torch.testing.assert_close(split_parts["total"], parts["total"], rtol=1e-5, atol=1e-5)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= 3e-5 * other.norm()


@pytest.mark.parametrize("sharing", [32, 200])
def test_the_objective_is_that_of_both_models_run_plainly(student, teacher, sharing):
    settings = replace(SETTINGS, mode="on_policy", on_policy_fraction=0.5)
    made = groups()
    batch = pack(made, sharing)
    total, kl, agreed = 0.0, 0.0, 0.0
    for group in made:
        (answer,) = group.answers
        ids = torch.tensor([[*group.prompt, *answer.ids]])
        at = torch.arange(len(group.prompt) - 1, ids.shape[1] - 1)
        with torch.no_grad():
            q, p = student(ids)[0, at], teacher(ids)[0, at]
        logp, logq = (p / 1.5).log_softmax(-1), (q / 1.5).log_softmax(-1)
        nats = functional.cross_entropy(q, torch.tensor(answer.ids), reduction="sum")
        total += 0.7 * 1.5**2 * plain_divergence(logp, logq, settings.divergence_config).sum()
        total += 0.3 * nats * answer.values["from_data"][0]
        kl += plain_divergence(logp, logq, DivergenceConfig()).sum()
        agreed += (p.argmax(-1) == q.argmax(-1)).sum()
    loss = Distillation(settings, teacher)(student, batch)
    torch.testing.assert_close(loss.total, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.parts["kl"], kl, rtol=1e-4, atol=1e-4)
    assert loss.parts["agreement"] == agreed
    assert "loss" not in loss.parts


def test_a_stored_teacher_needs_no_model_and_is_near_the_live_one(student, teacher):
    (batch,) = batches_of("live", (NUM_ROWS,), teacher, SETTINGS)
    live = Distillation(SETTINGS, teacher)(student, batch)
    stored = Distillation(SETTINGS, None, num_ids=50)(student, with_teacher(batch, teacher, SETTINGS, count=49))
    torch.testing.assert_close(stored.total, live.total, rtol=1e-4, atol=1e-4)
    assert stored.parts["agreement"] == live.parts["agreement"]


def test_overfits_its_teacher(student, teacher):
    teacher.embed.weight.data *= 4  # so that it has a mind of its own at every position
    (batch,) = batches_of("live", (NUM_ROWS,), teacher, SETTINGS)
    objective = Distillation(Distill(teacher="t"), teacher)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0)
    for _ in range(200):
        loss = objective(student, batch)
        optimizer.zero_grad()
        (loss.total / objective.weight(batch)).backward()
        optimizer.step()
    units = objective.weight(batch)
    assert loss.parts["kl"] / units < 0.05
    assert loss.parts["agreement"] / units > 0.95


def test_the_teacher_gets_no_gradient(student, teacher):
    teacher.requires_grad_(True)
    (batch,) = batches_of("live", (NUM_ROWS,), teacher, SETTINGS)
    Distillation(SETTINGS, teacher)(student, batch).total.backward()
    assert all(value.grad is None for value in teacher.parameters())


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"jsd_beta": 1.0}, "objective.jsd_beta"),
        ({"temperature": 0.0}, "objective.temperature"),
        ({"ce_weight": 1.5}, "objective.ce_weight"),
        ({"top_k": 0, "mode": "top_k"}, "objective.top_k"),
        ({"top_k": 8}, "objective.top_k"),
        ({"on_policy_fraction": 0.5}, "objective.on_policy_fraction"),
        ({"jsd_beta": 0.2, "divergence": "reverse"}, "objective.jsd_beta"),
        ({"mode": "on_policy", "ce_weight": 0.1}, "objective.ce_weight"),
        ({"mode": "on_policy", "sample_temperature": -1.0}, "objective.sample_temperature"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(wrong, where):
    with raises_user_error(where=where):
        Distill(teacher="t", **wrong)


def test_the_generalised_jsd_is_trls(monkeypatch):
    """TRL counts beta as our mixture, and takes means without T^2."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 7, V, generator=generator)
    student.requires_grad_()
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=1.7, reduction="sum")
        kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
        measure = DivergenceConfig(divergence=kind, temperature=1.7, mixture=beta if kind == "jsd" else 0.5)
        eye, ones = torch.eye(V), torch.ones(21)
        flat = LiveTeacher(teacher.flatten(0, 1), eye, torch.float32)
        sums = fused_distillation_loss(
            student.flatten(0, 1), eye, torch.float32, ones.long(), ones, ones, flat, measure
        )
        ours = sums[0] / 1.7**2
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        one, other = (torch.autograd.grad(value, student, retain_graph=True)[0] for value in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

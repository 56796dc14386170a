"""Parameter groups, one step of each optimizer against a plain twin, and their states."""

from __future__ import annotations

import copy
import math
from typing import get_args, get_type_hints

import pytest
import torch
from small_models import small_model
from user_errors import raises_user_error

from penjing.kernels.cpu import library
from penjing.kernels.orthogonalize import NORM_MARGIN, ROUNDS, orthogonalize
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon
from penjing.optim.param_groups import group_parameters
from penjing.train.config import Run

OPTIMIZERS = get_args(get_type_hints(Run)["optimizer"])


def make_model(tie_word_embeddings=True):
    return small_model(noise=0.1, vocab_size=40, tie_word_embeddings=tie_word_embeddings)


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def take_steps(model, optimizers, seeds):
    for seed in seeds:
        set_gradients(model, seed)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(kind, tie_word_embeddings):
    model = make_model(tie_word_embeddings)
    settings = kind(weight_decay=0.25)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = []
    for optimizer in settings.build(model):
        for part in optimizer.param_groups:
            assert part["lr"] == part["peak"] > 0
            for parameter in part["params"]:
                name = names[id(parameter)]
                listed.append(name)
                is_matrix = parameter.ndim == 2 and name not in ("embed.weight", "head.weight")
                assert part["weight_decay"] == (0.25 if is_matrix else 0.0), name
    assert sorted(listed) == sorted(names.values())


def test_groups_of_a_tied_and_an_untied_model():
    tied, untied = group_parameters(make_model()), group_parameters(make_model(tie_word_embeddings=False))
    assert len(tied.tables) == 1
    assert len(untied.tables) == 2
    assert len(tied.matrices) == 2 * 7
    assert len(tied.gains) == 2 * 4 + 1


def test_frozen_parameters_are_left_out():
    model = make_model()
    model.embed.weight.requires_grad_(False)
    assert group_parameters(model).tables == []
    take_steps(model, AdamW().build(model), [1])


def test_adamw_against_a_plain_twin():
    model, twin = make_model(), make_model()
    settings = AdamW(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    take_steps(model, settings.build(model), [1, 2, 3])
    decays = {id(parameter) for parameter in group_parameters(twin).matrices}
    first = [torch.zeros_like(parameter) for parameter in twin.parameters()]
    second = [torch.zeros_like(parameter) for parameter in twin.parameters()]
    for step, seed in enumerate([1, 2, 3], start=1):
        set_gradients(twin, seed)
        with torch.no_grad():
            for m, v, w in zip(first, second, twin.parameters(), strict=True):
                m.copy_(0.8 * m + 0.2 * w.grad)
                v.copy_(0.9 * v + 0.1 * w.grad**2)
                m_hat, v_hat = m / (1 - 0.8**step), v / (1 - 0.9**step)
                decay = 0.3 if id(w) in decays else 0.0
                w -= 0.01 * (m_hat / (v_hat.sqrt() + 1e-6) + decay * w)
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_the_rounds_bring_all_singular_values_near_one():
    values = torch.cat([torch.logspace(-2, 0, 2000, dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)])
    for a, b, c in ROUNDS:
        values = a * values + b * values**3 + c * values**5
    assert 0.70 < values.min() < 0.71 < 1.29 < values.max() < 1.30  # no polynomial of these degrees is nearer


SPECTRA = {
    "all alike": torch.ones(48),
    "falling": torch.arange(1, 49) ** -0.5,
    "one above the others": torch.cat([torch.ones(1), torch.full((47,), 0.05)]),
    "two orders": torch.logspace(0, -1.9, 48),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 48), (48, 130), (130, 48)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_orthogonalize_makes_singular_values_near_one(spectrum, shape, dtype):
    chance = torch.Generator().manual_seed(sum(shape))
    u_MK, v_NK = (torch.linalg.qr(torch.randn(side, 48, generator=chance))[0] for side in shape)
    matrix_MN = 3e-5 * (u_MK * SPECTRA[spectrum]) @ v_NK.T
    found_MN = orthogonalize(matrix_MN[None], dtype)[0].float()
    values = torch.linalg.svdvals(found_MN)
    assert 0.69 < values.min() <= values.max() < 1.31
    alignment = (found_MN * (u_MK @ v_NK.T)).sum() / 48
    assert alignment > 0.7, "not the nearest orthogonal matrix but another one"


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)])
def test_a_stack_is_worked_on_as_single_matrices(shape):
    stack_EMN = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    stack_EMN[3] *= 1e3
    together = orthogonalize(stack_EMN)
    for index, matrix_MN in enumerate(stack_EMN):
        torch.testing.assert_close(together[index], orthogonalize(matrix_MN), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(orthogonalize(stack_EMN.mT), together.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_zero_matrix_stays_zero(dtype):
    assert not orthogonalize(torch.zeros(1, 4, 6), dtype).any()


def plain_muon_update(momentum, gradient, share):
    """Matrix by matrix, as the paper writes it."""
    direction = (1 - share) * gradient + share * momentum
    x = direction / (NORM_MARGIN * torch.linalg.svdvals(direction).pow(8).sum() ** 0.125)
    flipped = x.shape[0] > x.shape[1]
    x = x.T if flipped else x
    for a, b, c in ROUNDS:
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    x = x.T if flipped else x
    return x * math.sqrt(max(1, direction.shape[0] / direction.shape[1]))


@pytest.mark.parametrize("kernels", ["ours", "torch"])
def test_muon_against_a_plain_twin(kernels, monkeypatch):
    """Also without kernels of our own, as on every GPU."""
    if kernels == "torch":
        monkeypatch.setattr(library, "kernels", lambda: None)
    model, twin = make_model(tie_word_embeddings=False), make_model(tie_word_embeddings=False)
    settings = Muon(learning_rate=0.03, momentum=0.9, adamw_learning_rate=0.01, weight_decay=0.2)
    take_steps(model, settings.build(model), [1, 2, 3])
    matrices = group_parameters(twin).matrices
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    (rest,) = AdamW(learning_rate=0.01, beta1=0.9, beta2=0.95, weight_decay=0.0).build(twin)
    for seed in [1, 2, 3]:
        set_gradients(twin, seed)
        with torch.no_grad():
            for momentum, matrix in zip(momenta, matrices, strict=True):
                momentum.copy_(0.9 * momentum + 0.1 * matrix.grad)
                update = plain_muon_update(momentum, matrix.grad, 0.9)
                matrix -= 0.03 * (update + 0.2 * matrix)
                matrix.grad = None
        rest.step()
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kernels", ["ours", "torch"])
@pytest.mark.parametrize(("shape", "scale"), [((12, 3), 2.0), ((3, 12), 1.0), ((4, 4), 1.0)])
def test_a_step_of_muon_has_the_size_of_its_paper(shape, scale, kernels, monkeypatch):
    """sqrt(max(1, rows / columns)) times the orthogonal matrix: its singular values are near one."""
    if kernels == "torch":
        monkeypatch.setattr(library, "kernels", lambda: None)
    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    before_MN = layer.weight.detach().clone()
    (optimizer,) = Muon(learning_rate=0.1, weight_decay=0.0).build(layer)
    layer.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    values = torch.linalg.svdvals(before_MN - layer.weight.detach()) / (0.1 * scale)
    assert 0.69 < values.min() <= values.max() < 1.31


@pytest.mark.parametrize("kernels", ["ours", "torch"])
def test_muon_s_decay_is_the_rate_times_the_weight(kernels, monkeypatch):
    if kernels == "torch":
        monkeypatch.setattr(library, "kernels", lambda: None)
    layer = torch.nn.Linear(4, 4, bias=False)
    before_MN = layer.weight.detach().clone()
    (optimizer,) = Muon(learning_rate=0.1, weight_decay=0.5).build(layer)
    layer.weight.grad = torch.zeros(4, 4)  # whose orthogonal matrix is zero
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), 0.95 * before_MN)


@pytest.mark.parametrize(
    "settings",
    [
        Muon(learning_rate=0.1, weight_decay=0.5),
        Muon(learning_rate=0.1, weight_decay=0.5, state_dtype="bfloat16"),
        AdamW(learning_rate=0.1, weight_decay=0.5, state_dtype="bfloat16"),
        AdamW(learning_rate=0.1, weight_decay=0.5, state_dtype="int8"),
    ],
    ids=lambda settings: f"{settings.name}-{settings.state_dtype}",
)
def test_a_step_that_is_found_to_be_bad_does_not_even_decay(settings):
    layer = torch.nn.Linear(64, 64, bias=False)
    (optimizer,) = settings.build(layer)
    layer.weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.full((64, 64), math.nan)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(layer.weight.detach(), before)


def test_muon_leaves_parameters_without_gradient_alone():
    model = make_model()
    optimizers = Muon().build(model)
    set_gradients(model, 0)
    still = model.blocks[0].mlp.up_proj.weight
    still.grad = None
    before = still.detach().clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(still, before)


@pytest.mark.parametrize("settings", [kind() for kind in OPTIMIZERS])
def test_a_restored_state_goes_on_bit_for_bit(settings):
    model = make_model()
    optimizers = settings.build(model)
    take_steps(model, optimizers, [1, 2])
    other = copy.deepcopy(model)
    restored = settings.build(other)
    for optimizer, old in zip(restored, optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(old.state_dict()))
    take_steps(model, optimizers, [3, 4])
    take_steps(other, restored, [3, 4])
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
    fresh = make_model()
    take_steps(fresh, settings.build(fresh), [3, 4])
    assert not torch.equal(fresh.norm.weight, model.norm.weight)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
    ],
)
@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_bad_settings_are_refused(kind, options, name):
    with raises_user_error(where=f"optimizer.{name}"):
        kind(**options)


def test_muon_s_own_settings_are_checked():
    with raises_user_error(where="optimizer.momentum", got=1.0):
        Muon(momentum=1.0)
    with raises_user_error(where="optimizer.adamw_learning_rate", got=-1):
        Muon(adamw_learning_rate=-1)


@pytest.mark.parametrize(("rate", "said"), [(0.02, 0), (0.005, 0), (5e-4, 1)])
def test_a_rate_of_adamws_size_is_doubted(rate, said):
    doubts = Muon(learning_rate=rate).warnings()
    assert len(doubts) == said and all("optimizer=adamw" in line for line in doubts)

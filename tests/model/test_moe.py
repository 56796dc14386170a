"""Mixtures of experts: grouped matmuls equal the plain twin, routing counts what it should, padding is left out."""

from __future__ import annotations

import pytest
import torch
from user_errors import raises_user_error

from penjing.base import config
from penjing.kernels import experts
from penjing.kernels.experts import dispatch_to_experts
from penjing.model import moe
from penjing.model.config import ModelConfig
from penjing.model.kernel_selection import check_expert_sizes
from penjing.model.linear import set_compute_dtype
from penjing.model.moe import MoELayer, moe_layers
from penjing.objective.next_token import NextToken
from penjing.objective.router import RouterSettings

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": (1,)},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    "mixtral": EXPERTS,
    "glm4_moe": {
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": (0,),
        "routed_scaling_factor": 1.5,
    },
}
IDS_BT = torch.randint(0, 61, (3, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=KINDS)
def model(request, make_model):
    made = make_model(architecture=request.param, **KINDS[request.param])
    for layer in moe_layers(made):
        layer.down_proj.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(5))
        if layer.router.correction is not None:
            layer.router.correction += torch.linspace(-0.3, 0.3, 6)
    return made


def gradients(model):
    model.zero_grad(set_to_none=True)
    model(IDS_BT).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("grouped", [False, True], ids=["by-expert", "with-gaps"])
def test_grouped_products_equal_the_plain_twin(model, monkeypatch, grouped):
    plain = {}
    for layer in moe_layers(model):
        layer.run_all_experts = True
    plain["logits"], plain["gradients"] = model(IDS_BT).detach(), gradients(model)
    for layer in moe_layers(model):
        layer.run_all_experts = False
    monkeypatch.setattr(
        experts,
        "dispatch_to_experts",
        lambda expert, num, on_host: dispatch_to_experts(expert, num, on_host=not grouped),
    )
    assert (model(IDS_BT) - plain["logits"]).abs().max() < 1e-5
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain["gradients"][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("choices", [[[0, 1], [0, 2], [0, 1]], [[5, 5], [5, 5]], [[3, 0]]])
def test_groups_hold_every_pair_once_and_in_order(monkeypatch, choices, on_host, tile):
    monkeypatch.setattr(experts, "rows_per_tile", lambda pairs, experts: tile)
    monkeypatch.setattr(experts, "GROUP_ALIGNMENT", tile)
    expert_Nk = torch.tensor(choices)
    made = dispatch_to_experts(expert_Nk, 6, on_host=on_host)
    starts = [0, *made.end_E.tolist()]
    assert made.ends == (starts[1:] if on_host else None)
    assert all(end % tile == 0 for end in starts)
    rows = made.row_Nk.flatten().tolist()
    assert len(set(rows)) == expert_Nk.numel()
    for token, chosen in enumerate(choices):
        for expert, row in zip(chosen, made.row_Nk[token].tolist(), strict=True):
            assert starts[expert] <= row < starts[expert + 1]
            assert made.token_R[row] == token
    assert all(made.token_R[row] == 0 for row in set(range(len(made.token_R))) - set(rows))


def test_tiles_are_no_larger_than_what_an_expert_gets():
    for pairs in (1, 40, 600, 5000, 100_000):
        for num_experts in (4, 32):
            assert experts.rows_per_tile(pairs, num_experts) <= max(1, pairs // num_experts)


def test_an_expert_without_tokens_gets_a_zero_gradient(make_model):
    model = make_model(architecture="glm4_moe", **EXPERTS)
    for layer in moe_layers(model):
        layer.router.correction[:] = torch.tensor([9.0, 9.0, 0, 0, 0, 0])
    grads = gradients(model)
    assert grads["blocks.0.mlp.gate_proj"][2:].abs().max() == 0
    assert grads["blocks.1.mlp.down_proj"][:2].abs().max() > 0


@pytest.mark.parametrize("grouped", [False, True], ids=["by-expert", "with-gaps"])
@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj"])
def test_one_frozen_matrix_leaves_the_others_their_gradients(make_model, monkeypatch, frozen, grouped):
    model = make_model(architecture="qwen3_moe", **KINDS["qwen3_moe"])
    for layer in moe_layers(model):
        layer.down_proj.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(5))
    wanted = gradients(model)
    monkeypatch.setattr(
        experts,
        "dispatch_to_experts",
        lambda expert, num, on_host: dispatch_to_experts(expert, num, on_host=not grouped),
    )
    for layer in moe_layers(model):
        getattr(layer, frozen).requires_grad_(False)
    model.zero_grad(set_to_none=True)
    model(IDS_BT).square().mean().backward()
    for layer in moe_layers(model):
        assert getattr(layer, frozen).grad is None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_correction_changes_the_choice_and_not_the_weight(make_model):
    router = moe_layers(make_model(architecture="glm4_moe", **EXPERTS))[0].router
    x_ND = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    router.correction[:] = torch.tensor([5.0, 0, 0, 0, 0, 0])
    routed = router(x_ND)
    assert (routed.expert_Nk == 0).any(dim=1).all()
    score_NE = routed.logit_NE.sigmoid()
    chosen_Nk = score_NE.gather(1, routed.expert_Nk)
    torch.testing.assert_close(routed.weight_Nk, chosen_Nk / chosen_Nk.sum(1, keepdim=True))


def test_balance_means_against_counting(make_model):
    layer = moe_layers(make_model(architecture="qwen3_moe", **EXPERTS))[0]
    x_BTD = torch.randn(2, 10, 24, generator=torch.Generator().manual_seed(2))
    document_BT = torch.zeros(2, 10, dtype=torch.long)
    document_BT[1, 6:] = -1
    _, means = layer(x_BTD, document_BT)
    probability = (x_BTD @ layer.router.weight.T).softmax(-1)
    real = [[(b, t) for t in range(10) if document_BT[b, t] >= 0] for b in range(2)]

    def balance(places):
        share, mean = torch.zeros(6), torch.zeros(6)
        for b, t in places:
            mean += probability[b, t] / len(places)
            for expert in probability[b, t].topk(2).indices:
                share[expert] += 1 / (2 * len(places))
        return 6 * (share * mean).sum()

    torch.testing.assert_close(means.batch, balance(real[0] + real[1]))
    torch.testing.assert_close(means.sequence_B, torch.stack([balance(places) for places in real]))
    z = [torch.stack([(x_BTD[b, t] @ layer.router.weight.T).logsumexp(0) ** 2 for b, t in p]).mean() for p in real]
    torch.testing.assert_close(means.z_B, torch.stack(z))
    assert layer.load_E.sum() == 2 * 16  # two choices of each real position


def test_batch_balance_is_that_of_transformers(make_model):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    layer = moe_layers(make_model(architecture="qwen3_moe", **EXPERTS))[0]
    x_BTD = torch.randn(2, 10, 24, generator=torch.Generator().manual_seed(2))
    _, means = layer(x_BTD)
    theirs = modeling.load_balancing_loss_func((x_BTD.flatten(0, 1) @ layer.router.weight.T,), 6, 2)
    torch.testing.assert_close(means.batch, theirs / 2)  # there the shares of a token's k choices add to k


def test_even_routing_costs_one():
    torch.manual_seed(0)
    means = moe.RouterStats(torch.tensor(1.0), torch.ones(2), torch.tensor([4.0, 9.0]))
    settings = RouterSettings(balance="sequence", aux_loss_coef=0.5, z_loss_coef=0.1)
    total, parts = settings.loss(means, torch.tensor([3.0, 1.0]))
    assert float(total) == pytest.approx(0.5 * 4 + 0.1 * (3 * 4 + 9))
    assert {name: float(value) for name, value in parts.items()} == {"router_balance": 4.0, "router_z": 21.0}
    by_bias = RouterSettings().for_model(config.resolve(ModelConfig, {"preset": "tiny-moe"}))
    assert float(by_bias.loss(means, torch.ones(2))[0]) == 0.0


def test_the_sequence_loss_does_not_depend_on_how_a_step_is_cut(make_model):
    from penjing.loader.batch import Batch

    model = make_model(architecture="qwen3_moe", **EXPERTS)
    objective = NextToken(RouterSettings(balance="sequence", aux_loss_coef=0.7, z_loss_coef=0.3))
    weight_BT = torch.rand(3, 20, generator=torch.Generator().manual_seed(4)).round()

    def batch(rows):
        scored_N = weight_BT[rows].flatten().nonzero()[:, 0]
        target_N = IDS_BT[rows].flatten()[scored_N]
        ids_BT = IDS_BT[rows]
        return Batch(
            ids_BT=ids_BT,
            document_BT=torch.zeros_like(ids_BT),
            scored_N=scored_N,
            target_N=target_N,
            weight_N=torch.ones(len(scored_N)),
            num_tokens=ids_BT.numel(),
        )

    whole = objective(model, batch([0, 1, 2]))
    cut = [objective(model, batch([row])) for row in range(3)]
    torch.testing.assert_close(whole.total, torch.stack([part.total for part in cut]).sum())
    for name in ("router_balance", "router_z"):
        torch.testing.assert_close(whole.parts[name], torch.stack([part.parts[name] for part in cut]).sum())


def test_bfloat16_is_near_float32(model):
    exact = model(IDS_BT).detach()
    for layer in moe_layers(model):
        layer.run_all_experts = False
    set_compute_dtype(model, torch.bfloat16)
    rough = model(IDS_BT).detach()
    # A token on the border between two experts may take the other one; most do not.
    off = (rough - exact).abs().amax(dim=-1) / exact.std()
    assert off.median() < 0.1


def test_nothing_is_counted_without_gradients(model):
    with torch.no_grad():
        model(IDS_BT)
    assert all(layer.load_E.sum() == 0 for layer in moe_layers(model))
    assert isinstance(model.blocks[0].mlp, MoELayer) or isinstance(model.blocks[1].mlp, MoELayer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_whose_rows_no_grouped_product_takes_are_refused_on_cuda(make_model, dtype):
    odd = make_model(architecture="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10)
    check_expert_sizes(odd, torch.device("cpu"), dtype)
    tile = 16 // dtype.itemsize
    with raises_user_error(where="model.moe_intermediate_size", got=10, wanted=str(tile)):
        check_expert_sizes(odd, torch.device("cuda"), dtype)
    even = make_model(architecture="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    check_expert_sizes(even, torch.device("cuda"), dtype)


def test_several_layers_count_as_their_mean():
    one = moe.RouterStats(torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.0]))
    other = moe.RouterStats(torch.tensor(3.0), torch.tensor([3.0, 2.0]), torch.tensor([0.0, 2.0]))
    found = moe.mean_of_layers([one, other])
    assert found.batch.item() == 2.0
    assert (found.sequence_B.tolist(), found.z_B.tolist()) == ([2.0, 2.0], [2.0, 1.0])


@pytest.mark.parametrize(("scaling", "total"), [(1.0, 1.0), (2.5, 2.5)])
def test_weights_of_the_chosen_add_up_to_the_scaling(make_model, scaling, total):
    """Renormalised, then scaled: `norm_topk_prob` and `routed_scaling_factor` of GLM-4.5 and DeepSeek-V3."""
    model = make_model(architecture="glm4_moe", **EXPERTS, routed_scaling_factor=scaling)
    routed = moe_layers(model)[0].router(torch.randn(20, 24, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(routed.weight_Nk.sum(dim=1), torch.full((20,), total))

"""Adapters: nothing at first, equal to their plain formula, merged, many on one base."""

from __future__ import annotations

import json

import pytest
import torch
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.convert.peft import write_peft
from penjing.infer.generate import generate, sample_batch
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.model import lora
from penjing.model.freeze import freeze
from penjing.model.linear import packed_linear, set_compute_dtype
from penjing.model.lora import Lora, add_adapter, attach, merge, set_adapter
from penjing.model.score import CrossEntropy
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon

KINDS = [
    Lora(rank=4),
    Lora(rank=4, use_rslora=True),
    Lora(rank=4, use_dora=True),
    Lora(rank=2, alpha=3, use_dora=True, use_rslora=True),
]
NAMES = ["standard", "rank_stabilised", "dora", "dora_rank_stabilised"]
IDS_BT = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(1))
TARGET_N = IDS_BT[:, 1:].flatten()
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def nats(model):
    return model(IDS_BT[:, :-1], score=CrossEntropy(TARGET_N, torch.ones(len(TARGET_N))))


@torch.no_grad()
def teach(model, name, seed=7):
    """Give an adapter something to say: B begins at zero."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora.adapted(model).values():
        if name not in layer.adapters:
            continue
        adapter = layer.adapters[name]
        adapter.B.normal_(0, 0.1, generator=generator)
        if adapter.magnitude is not None:
            adapter.magnitude.mul_(1 + 0.2 * torch.rand(adapter.magnitude.shape, generator=generator))


@pytest.fixture(params=KINDS, ids=NAMES)
def settings(request):
    return request.param


def test_a_fresh_adapter_changes_nothing(make_model, settings):
    model = make_model()
    before = model(IDS_BT)
    add_adapter(model, settings)
    torch.testing.assert_close(model(IDS_BT), before, rtol=0, atol=2e-6)


def test_only_adapters_learn_and_the_base_stays_bitwise(make_model, settings):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    add_adapter(model, settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    first = nats(model).item()
    for _ in range(15):
        nats(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert nats(model).item() < 0.9 * first
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learned
    assert all(".adapters.default." in name for name in learned)


def base_layer(model, settings, ids_BT):
    """The model with W + s B A (and DoRA's rows) written into a copy of its weights, differentiable in A, B and m."""
    weights = {}
    for name, layer in lora.adapted(model).items():
        adapter = layer.adapters["default"]
        whole = layer.weight + settings.scale * adapter.B @ adapter.A
        if adapter.magnitude is not None:
            whole = whole * (adapter.magnitude / whole.detach().norm(dim=1))[:, None]
        weights[f"{name}.weight"] = whole
    set_adapter(model, None)
    loss = torch.func.functional_call(model, weights, (ids_BT[:, :-1],), _targets())
    set_adapter(model, "default")
    return loss


def _targets():
    return {"score": CrossEntropy(TARGET_N, torch.ones(len(TARGET_N)))}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2"])
def test_loss_and_gradients_equal_the_formula(make_model, settings, architecture):
    model = make_model(architecture=architecture).double()
    add_adapter(model, settings)
    model.double()
    teach(model, "default")
    expected = base_layer(model, settings, IDS_BT)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected_grads = torch.autograd.grad(expected, learned)
    got = nats(model)
    grads = torch.autograd.grad(got, learned)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)  # the loss itself is summed in float32
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_merged_model_is_a_plain_one(make_model, settings):
    model = make_model()
    names = list(model.state_dict())
    base = model(IDS_BT)
    add_adapter(model, settings)
    teach(model, "default")
    beside = model(IDS_BT)
    assert (beside - base).abs().max() > 0.01
    merge(model, "default")
    assert list(model.state_dict()) == names
    assert not lora.adapted(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(model(IDS_BT), beside, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "glm4_moe"])
def test_many_adapters_in_one_batch_equal_each_alone(make_model, architecture):
    more = {**MOE, "shared_expert_intermediate_size": 16, "mlp_only_layers": (0,)} if architecture == "glm4_moe" else {}
    model = make_model(architecture=architecture, **more).eval()
    add_adapter(model, Lora(rank=4), name="one", seed=1)
    add_adapter(model, Lora(rank=2, use_dora=True), name="two", seed=2)
    add_adapter(model, Lora(rank=3, target_modules=("attention.q_proj",)), name="three", seed=3)
    for number, name in enumerate(lora.names(model)):
        teach(model, name, seed=number)
    ids_BT = torch.randint(61, (6, 9), generator=torch.Generator().manual_seed(2))
    chosen = ["two", "one", None, "two", "three", "one"]
    with torch.no_grad():
        set_adapter(model, chosen)
        together = model(ids_BT)
        for row, name in enumerate(chosen):
            set_adapter(model, name)
            torch.testing.assert_close(model(ids_BT[row : row + 1])[0], together[row], rtol=1e-4, atol=1e-4)
        set_adapter(model, None)
        base = model(ids_BT)
    assert (together[0] - base[0]).abs().max() > 0.01
    assert (together[4] - base[4]).abs().max() > 0.01


def answered(model, prompts, adapters, settings):
    requests = [Request(prompt=prompt, adapter=name or "") for prompt, name in zip(prompts, adapters, strict=True)]
    return [one.ids for (one,) in sample_batch(model, requests, sampling=Sampling(), **settings)]


def test_answers_of_many_adapters_are_written_in_one_batch(make_model):
    """Prompts and answers of unlike length, each with its own adapter, equal each adapter alone."""
    model = make_model().eval()
    for number, name in enumerate(["one", "two"]):
        add_adapter(model, Lora(rank=4), name=name)
        teach(model, name, seed=number)
    set_adapter(model, "two")
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5, 6, 7, 8, 9], [1, 2, 3]]
    chosen = ["one", "two", None, "one", "two"]
    settings = {"max_new_tokens": 12, "stop": {0, 1, 2, 3}}
    together = answered(model, prompts, chosen, settings)
    assert len({tuple(together[row]) for row in (0, 2, 4)}) == 3
    assert len({len(written) for written in together}) > 1
    for prompt, name, written in zip(prompts, chosen, together, strict=True):
        assert answered(model, [prompt], [name], settings) == [written]
        with lora.adapter_scope(model, name):
            assert generate(model, [prompt], **settings) == [written[:-1] if written[-1] < 4 else written]
    assert all(layer.active == "two" and layer.by_row is None for layer in lora.adapted(model).values())


def test_rows_by_adapter_are_differentiable(make_model):
    model = make_model()
    add_adapter(model, Lora(rank=4), name="one")
    add_adapter(model, Lora(rank=4), name="two")
    model.requires_grad_(True)
    teach(model, "one")
    teach(model, "two")
    set_adapter(model, ["one", None, "two"])
    nats(model).backward()
    layer = model.blocks[1].mlp.down_proj
    assert layer.adapters["one"].A.grad.abs().max() > 0
    assert layer.adapters["two"].B.grad.abs().max() > 0


def test_fewer_names_than_rows_are_refused(make_model):
    model = make_model()
    add_adapter(model, Lora(rank=4), name="one")
    set_adapter(model, ["one", None])
    with raises_user_error(where="use", got=2):
        model(IDS_BT)


@pytest.mark.parametrize("pattern", ["attention.?_proj", "blocks.1.mlp.up_proj", "*"])
def test_patterns_choose_layers(make_model, pattern):
    model = make_model()
    add_adapter(model, Lora(rank=2, target_modules=(pattern,)))
    found = set(lora.adapted(model))
    attention = {f"blocks.{n}.attention.{p}_proj" for n in range(2) for p in "qkvo"}
    mlp = {f"blocks.{n}.mlp.{p}_proj" for n in range(2) for p in ("gate", "up", "down")}
    expected = {"attention.?_proj": attention, "blocks.1.mlp.up_proj": {"blocks.1.mlp.up_proj"}, "*": attention | mlp}
    assert found == expected[pattern]


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (("q_proj",), ["attention.q_proj"]),
        (("q_proj", "v_proj"), ["attention.q_proj", "attention.v_proj"]),
        (("self_attn.k_proj", "gate_proj"), ["attention.k_proj", "mlp.gate_proj"]),
        (("model.layers.*.mlp.down_proj",), ["mlp.down_proj"]),
        (("all-linear",), [f"attention.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]),
    ],
)
def test_targets_have_the_names_of_other_programs(make_model, tmp_path, targets, parts):
    model = make_model()
    add_adapter(model, Lora(rank=2, target_modules=targets))
    assert set(lora.adapted(model)) == {f"blocks.{n}.{part}" for n in range(2) for part in parts}
    with torch.no_grad():  # each adapted layer alone changes the outputs, though q, k and v share a matmul
        before = model(IDS_BT)
        for layer in lora.adapted(model).values():
            layer.adapter("default").B.fill_(0.5)
            assert not torch.equal(model(IDS_BT), before)
            layer.adapter("default").B.zero_()
        assert torch.equal(model(IDS_BT), before)
    write_peft(tmp_path, model, "default", base_name="base")
    named = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert named == sorted(part.rpartition(".")[2] for part in parts)


@pytest.mark.parametrize(
    ("target", "next_step"),
    [
        ("qkv_proj", "q_proj,k_proj,v_proj"),
        ("attention.c_attn", "q_proj,k_proj,v_proj"),
        ("gate_up_proj", "gate_proj,up_proj"),
        ("lm_head", "all-linear"),
        ("embed_tokens", "all-linear"),
        ("qproj", "q_proj"),
        ("layers.7.self_attn.q_proj", "q_proj"),
    ],
)
def test_a_layer_that_cannot_be_adapted_names_what_can(make_model, target, next_step):
    with raises_user_error(where="lora.target_modules", got=target, next_step=next_step):
        add_adapter(make_model(), Lora(rank=2, target_modules=(target,)))


def test_a_pattern_that_matches_nothing_names_the_nearest(make_model):
    with raises_user_error(where="lora.target_modules", got="attention.qproj"):
        add_adapter(make_model(), Lora(rank=2, target_modules=("attention.qproj",)))


def test_routed_experts_stay_as_they_are(make_model):
    model = make_model(architecture="qwen3_moe", **MOE)
    add_adapter(model, Lora(rank=2))
    assert {name.split(".", 2)[2] for name in lora.adapted(model)} == {f"attention.{p}_proj" for p in "qkvo"}
    with raises_user_error(where="lora.target_modules", got="mlp.*_proj"):
        add_adapter(make_model(architecture="qwen3_moe", **MOE), Lora(rank=2, target_modules=("mlp.*_proj",)))


def test_a_mixture_learns_through_its_adapters(make_model):
    model = make_model(architecture="qwen2_moe", **MOE, shared_expert_intermediate_size=24)
    add_adapter(model, Lora(rank=2))
    assert "blocks.0.mlp.shared.up_proj" in lora.adapted(model)
    loss = nats(model)
    (loss.total if hasattr(loss, "total") else loss[0] if isinstance(loss, tuple) else loss).backward()
    assert model.blocks[0].mlp.gate_proj.grad is None
    assert model.blocks[0].mlp.shared.up_proj.adapters["default"].B.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["", "a.b", "keys", "training", "-x", "a b"])
def test_names_that_cannot_be(make_model, name):
    with pytest.raises(UserError):
        attach(make_model(), name, {})


def test_no_such_adapter(make_model):
    model = make_model()
    add_adapter(model, Lora(rank=2), name="stories")
    with raises_user_error(next_step="stories"):
        set_adapter(model, "story")
    with raises_user_error(where="stories"):
        add_adapter(model, Lora(rank=2), name="stories")


@pytest.mark.parametrize(
    "wrong", [{"rank": -1}, {"rank": 4, "alpha": 0}, {"rank": 4, "dropout": 1.0}, {"alpha": 8}, {"use_dora": True}]
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(UserError, match="lora"):
        Lora(**wrong)


def test_the_same_seed_gives_the_same_adapter_and_leaves_the_random_state(make_model):
    models = [make_model() for _ in range(3)]
    state = torch.get_rng_state()
    for model, seed in zip(models, (5, 5, 6), strict=True):
        add_adapter(model, Lora(rank=4), seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, same, other = (model.blocks[0].attention.q_proj.adapters["default"].A for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_dropout_is_for_learning_only_and_can_be_taken_up_again(make_model):
    model = make_model()
    add_adapter(model, Lora(rank=4, dropout=0.5))
    teach(model, "default")
    with torch.no_grad():
        assert torch.equal(model(IDS_BT), model(IDS_BT))
    saved = {name: value.clone() for name, value in lora.trainable_state_dict(model).items()}
    first, second = model(IDS_BT), model(IDS_BT)
    assert not torch.equal(first, second)
    model.load_state_dict(saved, strict=False)
    assert torch.equal(model(IDS_BT), first)
    assert torch.equal(model(IDS_BT), second)


def test_dropout_keeps_the_mean_and_has_matching_gradients(make_model):
    """The masked matmul equals the plain formula with the same mask, in value and gradient."""
    model = make_model()
    add_adapter(model, Lora(rank=4, dropout=0.3))
    teach(model, "default")
    layer = model.blocks[0].attention.q_proj
    adapter = layer.adapters["default"]
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(3), requires_grad=True)
    grads = []
    for compute in (lambda: layer(x), lambda: adapter.adapted_output(x, x @ layer.weight.T, layer.weight)):
        adapter.draws = 0
        out = compute()
        grads.append((out, *torch.autograd.grad(out.square().sum(), (x, adapter.A, adapter.B))))
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    masks = torch.stack([adapter.mask(torch.ones(64, 64)) for _ in range(20)]).float()
    assert abs(float(masks.mean()) - 0.7) < 0.01


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_bfloat16_keeps_adapters_in_float32_and_the_base_as_it_is_multiplied(make_model, kind):
    model = make_model()
    add_adapter(model, Lora(rank=4, use_dora=kind))
    teach(model, "default")
    set_compute_dtype(model, torch.bfloat16)
    cast_each_time = nats(model).detach()
    lora.cast_frozen_base(model, torch.bfloat16)
    loss = nats(model)
    torch.testing.assert_close(loss.detach(), cast_each_time, rtol=1e-3 if kind == "dora" else 0, atol=0)
    loss.backward()
    layer = model.blocks[1].mlp.gate_proj
    assert layer.weight.dtype == torch.bfloat16
    assert model.embed.weight.dtype == model.norm.weight.dtype == torch.float32
    adapter = layer.adapters["default"]
    assert adapter.A.grad.dtype == adapter.A.dtype == adapter.B.grad.dtype == torch.float32
    set_compute_dtype(model, None)


def test_what_is_kept_for_the_gradient_is_shared(make_model):
    """q, k and v keep one copy of what they read for the backward pass, not three, and none of frozen weights."""
    model = make_model()
    add_adapter(model, Lora(rank=4))
    set_compute_dtype(model, torch.bfloat16)
    lora.cast_frozen_base(model, torch.bfloat16)
    x = torch.randn(2, 5, 24, dtype=torch.bfloat16, requires_grad=True)
    block = model.blocks[0]
    frozen = {parameter.data_ptr() for parameter in model.parameters() if not parameter.requires_grad}
    pointers = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pointers.add((t.data_ptr(), t.numel())) or t, lambda t: t):
        for layer in (block.attention.q_proj, block.attention.k_proj, block.attention.v_proj):
            layer(x)
    assert len([size for _, size in pointers if size == x.numel()]) == 1
    weights = {block.attention.q_proj.weight.numel(), block.attention.k_proj.weight.numel()}
    assert all(pointer in frozen for pointer, size in pointers if size in weights)


def test_doras_norm_follows_its_adapter(make_model):
    model = make_model().eval()
    add_adapter(model, Lora(rank=4, use_dora=True))
    with torch.no_grad():
        before = model(IDS_BT)
        teach(model, "default")
        changed = model(IDS_BT)
        merge(model, "default")
        torch.testing.assert_close(model(IDS_BT), changed, rtol=1e-5, atol=1e-5)
    assert (changed - before).abs().max() > 0.01


@pytest.mark.parametrize("optimizer", [AdamW(learning_rate=0.1), Muon(learning_rate=0.1)], ids=["adamw", "muon"])
def test_doras_norm_follows_a_step(make_model, optimizer):
    """Also one of kernels that change weights without torch's counting it."""
    model = make_model()
    add_adapter(model, Lora(rank=4, use_dora=True))
    teach(model, "default")
    optimizers = optimizer.build(model)
    model.eval()
    with torch.no_grad():
        before = model(IDS_BT)
    model.train()
    nats(model).backward()
    for each in optimizers:
        each.step()
    model.eval()
    with torch.no_grad():
        after = model(IDS_BT)
        for layer in lora.adapted(model).values():
            layer.adapters["default"]._gain = None
        assert torch.equal(model(IDS_BT), after)
    assert (after - before).abs().max() > 0.01


def test_what_a_run_saves_is_all_but_the_base(make_model):
    model = make_model(architecture="glm4_moe", **MOE, shared_expert_intermediate_size=16)
    base = lora.fingerprint(model)
    add_adapter(model, Lora(rank=4))
    state = lora.trainable_state_dict(model)
    assert {name for name in state if ".adapters." not in name} == {
        "blocks.0.mlp.router.correction",
        "blocks.1.mlp.router.correction",
    }
    assert lora.fingerprint(model) == base
    model.blocks[0].mlp.gate_proj.data[0, 0, 0] += 1
    assert lora.fingerprint(model) != base


def test_freezing_by_pattern(make_model):
    model = make_model()
    freeze(model, ("embed.*", "blocks.[0].*", "*norm.weight"))
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learned == {
        f"blocks.1.{part}.weight"
        for part in (*(f"attention.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
    }
    nats(model).backward()
    assert model.embed.weight.grad is None
    assert model.blocks[1].mlp.up_proj.weight.grad is not None


def test_freezing_nothing_or_everything_is_refused(make_model):
    with raises_user_error(where="freeze", got="embed.wieght"):
        freeze(make_model(), ("embed.wieght",))
    with raises_user_error(where="freeze", got="*"):
        freeze(make_model(), ("*",))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj")])
def test_layers_side_by_side_equal_each_alone(make_model, dtype, names):
    model = make_model()
    add_adapter(model, Lora(rank=4))
    teach(model, lora.DEFAULT)
    set_compute_dtype(model, dtype)
    layers = [getattr(model.blocks[0].attention, name) for name in names]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, layers[0].in_features, generator=generator).to(dtype or torch.float32).requires_grad_()
    got, wanted = packed_linear(x, *layers), torch.cat([layer(x) for layer in layers], dim=-1)
    bound = 2e-2 if dtype else 1e-5
    if dtype is None:  # as in runs, whose base is in the matmuls' dtype: no copy of it is kept
        kept = [each.data_ptr() for each in got.grad_fn.saved_tensors]
        assert {layer.weight.data_ptr() for layer in layers} <= set(kept)
        largest = max(each.numel() for each in got.grad_fn.saved_tensors)
        assert largest == max(layer.weight.numel() for layer in layers)
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)
    learned = [x, *(part for layer in layers for part in (layer.adapters["default"].A, layer.adapters["default"].B))]
    upstream = torch.randn(got.shape, generator=generator).to(got.dtype)
    slopes = [torch.autograd.grad(out, learned, upstream) for out in (got, wanted)]
    for mine, its in zip(*slopes, strict=True):
        assert mine.dtype == its.dtype
        assert (mine - its).norm() < bound * its.norm()


def test_side_by_side_without_adapters_the_base_speaks(make_model):
    model = make_model()
    add_adapter(model, Lora(rank=4))
    teach(model, lora.DEFAULT)
    layers = (model.blocks[0].mlp.gate_proj, model.blocks[0].mlp.up_proj)
    x = torch.randn(3, layers[0].in_features)
    set_adapter(model, None)
    torch.testing.assert_close(
        packed_linear(x, *layers), torch.cat([layer.base_layer()(x) for layer in layers], dim=-1)
    )


@pytest.mark.parametrize("settings", [Lora(rank=4, use_dora=True), Lora(rank=4, dropout=0.5)], ids=["dora", "dropout"])
def test_side_by_side_what_has_its_own_way_keeps_it(make_model, settings):
    model = make_model()
    add_adapter(model, settings)
    teach(model, lora.DEFAULT)
    attention = model.blocks[0].attention
    layers, x = (attention.k_proj, attention.v_proj), torch.randn(3, attention.k_proj.in_features)
    assert lora.AdaptedLinear.packed(x, *layers) is None
    assert packed_linear(x, *layers).shape == (3, 2 * attention.k_proj.out_features)
    assert lora.AdaptedLinear.packed(x, attention.k_proj, layers[1].base_layer()) is None


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 8.0)])
def test_the_scale_is_alpha_over_the_rank_or_over_its_root(make_model, use_rslora, scale):
    """arXiv:2106.09685 section 4.1 and arXiv:2312.03732: 32 / 16, and 32 / 4."""
    model = make_model()
    plain_OI = model.blocks[1].mlp.up_proj.weight.detach().clone()
    add_adapter(model, Lora(rank=16, alpha=32, use_rslora=use_rslora, target_modules=("mlp.up_proj",)))
    teach(model, "default")
    layer = model.blocks[1].mlp.up_proj
    x_NI = torch.randn(3, 24, generator=torch.Generator().manual_seed(2))
    adapter = layer.adapters["default"]
    wanted = x_NI @ (plain_OI + scale * adapter.B @ adapter.A).T
    torch.testing.assert_close(layer(x_NI), wanted, rtol=1e-4, atol=1e-4)


def test_an_adapter_begins_as_published(make_model):
    """B at zero; A uniform within one over the root of its inputs, as `peft` and Microsoft's own code draw it."""
    model = make_model(hidden_size=64)
    add_adapter(model, Lora(rank=32, target_modules=("attention.q_proj",)))
    for layer in lora.adapted(model).values():
        assert not layer.adapters["default"].B.any()
        largest = layer.adapters["default"].A.abs().max().item()
        assert 0.95 / 8 < largest <= 1 / 8

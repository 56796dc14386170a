"""The C forward pass foretells what the model foretells, for every architecture, adapter and way of scaling."""

import numpy as np
import pytest
import torch
from small_models import small_model

from penjing.infer.cpu_forward import CpuForward, supports
from penjing.infer.generate import generate
from penjing.kernels.cpu import library
from penjing.model import lora
from penjing.model.linear import Linear, set_compute_dtype
from penjing.model.moe import MoELayer

pytestmark = pytest.mark.skipif(
    bool(library.unavailable_decode_reason()), reason=f"no kernels here: {library.unavailable_decode_reason()}"
)
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHAPES = {
    "qwen3": {},
    "qwen2": {"architecture": "qwen2", "tie_word_embeddings": False},
    "llama": {"architecture": "llama", "rope_scaling": "llama3", "rope_factor": 4.0},
    "bias and norm": {"attention_bias": "qkv", "qk_norm": "head", "head_dim": 12},
    "window": {"architecture": "qwen2", "sliding_window": 6, "sliding_window_layers": (1,)},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0},
    "linear": {"rope_scaling": "linear", "rope_factor": 2.0},
    "qwen3_moe": {"architecture": "qwen3_moe", **EXPERTS, "mlp_only_layers": (1,)},
    "mixtral": {"architecture": "mixtral", **EXPERTS},
    "qwen2_moe": {
        "architecture": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 28, "norm_topk_prob": False,
    },
    "glm4_moe": {
        "architecture": "glm4_moe", **EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": (0,),
        "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.5, "head_dim": 12,
    },
}  # fmt: skip
ADAPTERS = {
    "plain": lora.Lora(rank=4, alpha=8.0),
    "scaled": lora.Lora(rank=20, use_rslora=True, target_modules=("attention.q_proj", "mlp.up_proj")),
    "dora": lora.Lora(rank=3, use_dora=True, target_modules=("*.v_proj", "mlp.*_proj")),
}
IDS = np.random.default_rng(0).integers(0, 37, 50)


def make_model(name="qwen3", **changes):
    shape = {
        "vocab_size": 37, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
        "intermediate_size": 72, "num_hidden_layers": 3, "rope_original_max_position_embeddings": 32,
        **SHAPES[name], **changes,
    }  # fmt: skip
    model = small_model(seed=3, noise=0.1, sharpen=2, **shape).eval()
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.router.correction is not None:
            layer.router.correction += torch.tensor([0.3, -0.2, 0.0, 0.1, -0.3])
    return model


def foretold(model, ids=IDS):
    with torch.no_grad():
        return model.logits(model.hidden(torch.from_numpy(ids)[None]))[0]


def read(model, ids=IDS, adapter=None, **settings):
    forward = CpuForward(model, num_slots=2, max_tokens=64, **settings)
    places = np.arange(len(ids))
    speaks = None if adapter is None else np.full(len(ids), adapter)
    return forward(np.ones(len(ids), dtype=int), places, ids, places, speaks)


def difference(got, wanted):
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", SHAPES)
def test_as_the_model_in_float32(name):
    model = make_model(name)
    assert supports(model) == ""
    assert difference(read(model), foretold(model)) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "window", "yarn", "qwen3_moe", "qwen2_moe", "glm4_moe", "adapters"])
@torch.no_grad()
def test_bfloat16_is_no_farther_from_float32_than_torchs(name):
    model = make_model("qwen3" if name == "adapters" else name, tie_word_embeddings=False)
    for layer in model.modules():  # to numbers that bfloat16 has
        for weight in layer.parameters(recurse=False) if isinstance(layer, Linear | MoELayer) else ():
            weight.copy_(weight.bfloat16())
    if name == "adapters":
        lora.add_adapter(model, ADAPTERS["plain"], name=name, seed=0)
        for layer in lora.adapted(model).values():
            layer.adapter(name).B.fill_(0.125)
        model.eval()
    wanted = foretold(model)
    set_compute_dtype(model, torch.bfloat16)
    got, torchs = read(model), foretold(model).float()
    # By rows: an expert whose score is all but another's may be chosen by one and not by the other.
    error, torchs_error = ((logits - wanted).norm(dim=1).median() for logits in (got, torchs))
    assert error <= torchs_error


@pytest.mark.parametrize("name", ["qwen2", "glm4_moe"])
def test_weights_that_are_bfloat16_themselves(name):
    rounded, model = make_model(name), make_model(name).bfloat16()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for layer in rounded.modules():
        if isinstance(layer, MoELayer) and layer.router.correction is not None:
            layer.router.correction = layer.router.correction.bfloat16().float()
    set_compute_dtype(rounded, torch.bfloat16)
    assert torch.equal(read(model), read(rounded))


def quantised(weight_OI):
    """int8 with a bfloat16 scale per output and 32 inputs, no value beyond 127."""
    parts = []
    for part in weight_OI.split(32, dim=-1):
        exact = part.abs().amax(-1, keepdim=True) / 127
        scale = exact.bfloat16().float()
        scale = torch.where(
            scale < exact, torch.nextafter(scale.bfloat16(), torch.tensor(9.0).bfloat16()).float(), scale
        )
        parts.append((part * (1 / scale)).round() * scale)
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe"])
def test_int8_is_the_model_with_quantised_weights(name):
    model = make_model(name, tie_word_embeddings=False)
    exact, got = foretold(model), read(model, weights="int8")
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                for weight in (layer.gate_proj, layer.up_proj, layer.down_proj):
                    weight.copy_(quantised(weight))
            elif isinstance(layer, Linear) and layer.out_features > 1:  # the shared expert's gate stays
                layer.weight.copy_(quantised(layer.weight))
    assert difference(got, foretold(model)) < 1e-5
    assert difference(got, exact) > 1e-4


def test_every_row_hears_its_own_adapter():
    model = make_model("bias and norm")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        lora.add_adapter(model, settings, name=name, seed=seed)
    generator = torch.Generator().manual_seed(1)
    for layer in lora.adapted(model).values():
        for adapter in layer.adapters.values():
            adapter.B.data += 0.3 * torch.randn(adapter.B.shape, generator=generator)
    model.eval()
    lora.set_adapter(model, None)
    alone = {None: foretold(model)}
    for number, name in enumerate(ADAPTERS):
        lora.set_adapter(model, name)
        alone[name] = foretold(model)
        assert difference(alone[name], alone[None]) > 0.01
        assert difference(read(model), alone[name]) < 1e-5, name  # the one in use
        lora.set_adapter(model, None)
        assert difference(read(model, adapter=number), alone[name]) < 1e-5, name
    who = (None, "scaled", "plain", "dora", "dora")
    forward = CpuForward(model, num_slots=5, max_tokens=64)
    number_B = np.array([-1 if name is None else forward.adapters.index(name) for name in who])
    for place in range(20):
        got = forward(np.arange(5), np.full(5, place), np.full(5, IDS[place]), np.arange(5), number_B)
        for row, name in enumerate(who):
            assert difference(got[row], alone[name][place]) < 1e-5
    assert supports(model) == ""


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe"])
def test_the_same_greedy_text(name):
    model = make_model(name)
    prompt = IDS[:9].tolist()
    (wanted,) = generate(model, [prompt], max_new_tokens=40, stop=())
    forward = CpuForward(model, num_slots=1, max_tokens=64)
    written = [*prompt]
    logits_RV = forward(np.zeros(9, dtype=int), np.arange(9), np.array(prompt), np.array([8]))
    while len(written) < 49:
        written.append(int(logits_RV[0].argmax()))
        logits_RV = forward(np.array([0]), np.array([len(written) - 1]), np.array(written[-1:]), np.array([0]))
    assert written[9:] == wanted


def test_what_it_does_not_take():
    model = make_model()
    set_compute_dtype(model, torch.float16)
    assert "float16" in supports(model)
    assert "not on a CPU" in supports(make_model().to("meta"))


def test_without_a_compiler(without_cpu_kernels):
    without_cpu_kernels()
    assert "switched off" in supports(make_model())

"""Stock models become ours and ours become stock, with the same numbers; what has no counterpart is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as functional
from small_models import sizes
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.convert import hf
from penjing.convert.hf import read_hf
from penjing.convert.hf_config import hf_config
from penjing.convert.names import from_hf, to_hf
from penjing.convert.shape import CLASSES, DEFAULT_THETA, DEFAULTS, PARTIAL_ROTARY, config_from_hf
from penjing.infer.generate import generate
from penjing.model.cache import Cache
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

IDS = SimpleNamespace(end_of_text=0, message_end=2)
# Id 0 is left out: it is the padding id, and transformers gives its embedding no gradient.
IDS_BT = torch.randint(1, 61, (3, 29), generator=torch.Generator().manual_seed(1))
BASE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "rope_theta": 500.0,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
VARIANTS = [  # class, what differs from BASE
    ("llama", {}),
    ("llama", {"head_dim": None, "tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": LLAMA3, "num_key_value_heads": 4}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {**WINDOW, "max_window_layers": 1}),
    ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 1.3}}),
    ("qwen2", {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2}}),
    ("qwen2", {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("qwen3_moe", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True, "rope_scaling": YARN}),
    ("qwen3_moe", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("qwen3_moe", {**EXPERTS, **WINDOW, "num_experts": 5, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("qwen2_moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 12}),
    (
        "qwen2_moe",
        {
            **EXPERTS,
            **WINDOW,
            "num_experts": 4,
            "shared_expert_intermediate_size": 20,
            "qkv_bias": False,
            "norm_topk_prob": True,
        },
    ),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ("glm4_moe", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    (
        "glm4_moe",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 1.0,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
            "rope_scaling": YARN,
        },
    ),
    (
        "glm4_moe",
        {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 0, "use_qk_norm": True, "tie_word_embeddings": True},
    ),
]
NAMES = [f"{name}-{index}" for index, (name, _) in enumerate(VARIANTS)]


def stock_model(architecture, options):
    kind = getattr(transformers, CLASSES[architecture])
    torch.manual_seed(3)
    model = kind(kind.config_class(**{**BASE, **options}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.12 * torch.randn(value.shape, generator=generator)
        for name, value in model.named_buffers():
            if name.endswith("correction_bias"):
                value += torch.randn(value.shape, generator=generator)
    return model.float().eval()


@pytest.fixture(scope="module", params=VARIANTS, ids=NAMES)
def pair(request, tmp_path_factory):
    """A stock model, the folder it was saved in, and what we read there."""
    theirs = stock_model(*request.param)
    folder = tmp_path_factory.mktemp("stock")
    theirs.save_pretrained(folder)
    found = read_hf(folder)
    ours = Transformer(found.config)
    ours.load_state_dict(found.weights)
    return theirs, folder, ours.eval()


def test_logits_of_stock_weights(pair):
    theirs, _, ours = pair
    with torch.no_grad():
        expected_BTV = theirs(IDS_BT).logits
        assert (expected_BTV - ours(IDS_BT)).abs().max() < 1e-5
        assert expected_BTV.std() > 0.1


def test_padding_there_is_nothing_here(pair):
    theirs, _, ours = pair
    lengths = (29, 11, 4)
    ids_BT, attended_BT = torch.zeros_like(IDS_BT), torch.zeros_like(IDS_BT)
    for row, length in enumerate(lengths):  # padding on the left, as for generation
        ids_BT[row, 29 - length :], attended_BT[row, 29 - length :] = IDS_BT[row, :length], 1
    position_BT = (attended_BT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected_BTV = theirs(ids_BT, attention_mask=attended_BT, position_ids=position_BT).logits
        for row, length in enumerate(lengths):
            difference = expected_BTV[row, 29 - length :] - ours(IDS_BT[row : row + 1, :length])[0]
            assert difference.abs().max() < 1e-5


def test_a_cache_changes_nothing(pair):
    theirs, _, ours = pair
    with torch.no_grad():
        cache = Cache(ours.config, 3, 32, device="cpu", dtype=torch.float32)
        parts = [ours.hidden(IDS_BT[:, :10], cache=cache)]
        parts += [ours.hidden(IDS_BT[:, place : place + 1], cache=cache) for place in range(10, 29)]
        step_by_step_BTV = ours.logits(torch.cat(parts, dim=1))
        assert (step_by_step_BTV - theirs(IDS_BT).logits).abs().max() < 1e-5


def test_greedy_text_of_stock_weights(pair):
    """By the engine, all prompts at once; theirs one after another."""
    theirs, _, ours = pair
    prompts = [row[:length].tolist() for row, length in zip(IDS_BT, (29, 11, 4), strict=True)]
    written = generate(ours, prompts, max_new_tokens=12, stop=())
    for prompt, text in zip(prompts, written, strict=True):
        expected_BT = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert text == expected_BT[0, len(prompt) :].tolist()


def test_gradients_of_stock_weights(pair):
    theirs, _, ours = pair
    target_N = IDS_BT[:, 1:].flatten()
    loss = functional.cross_entropy(theirs(IDS_BT).logits[:, :-1].flatten(0, 1), target_N)
    theirs.zero_grad()
    loss.backward()
    ours.train().zero_grad()
    logits_BTV = ours(IDS_BT)
    functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), target_N).backward()
    ours.eval()
    gradients = {name: value.grad for name, value in theirs.named_parameters()}
    config = ours.config
    tied = config.tie_word_embeddings
    state, _ = from_hf(
        {name: torch.zeros_like(value) if value is None else value for name, value in gradients.items()}
        | {name: value for name, value in theirs.named_buffers() if name.endswith("correction_bias")}
        | ({"lm_head.weight": gradients["model.embed_tokens.weight"]} if tied else {}),
        config,
    )
    for name, value in ours.named_parameters():
        got = torch.zeros_like(value) if value.grad is None else value.grad
        assert (got - state[name]).abs().max() < 1e-4, name


def test_back_to_stock_in_a_file(pair, tmp_path):
    """config.json and weights of ours load in the stock class without a missing or further name, and compute the same.

    Through transformers' own reading of a folder: this is what users do.
    """
    theirs, _, ours = pair
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ours.config, IDS)))
    from penjing.checkpoint.tensors import write_tensors

    write_tensors(tmp_path / "model.safetensors", to_hf(ours.state_dict(), ours.config), metadata={"format": "pt"})
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert type(again) is type(theirs)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        assert (again.eval()(IDS_BT).logits - ours(IDS_BT)).abs().max() < 1e-5
    ours_again = read_hf(tmp_path)
    untied = {"tie_word_embeddings": False} if ours.config.architecture == "glm4_moe" else {}
    assert ours_again.config == replace(ours.config, **untied)
    for name, value in ours.state_dict().items():
        assert torch.equal(ours_again.weights[name], value)


def test_the_spelling_of_transformers_4(pair):
    """`rope_theta` and `rope_scaling` beside each other, as files of before 2026 have it, are the same shape."""
    theirs, folder, ours = pair
    settings = json.loads((folder / "config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        settings["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope["rope_type"] != "default":
        settings["rope_scaling"] = rope
    assert config_from_hf(settings, "config.json") == replace(
        ours.config, tie_word_embeddings=config_from_hf(settings, "config.json").tie_word_embeddings
    )


@pytest.mark.parametrize("architecture", CLASSES)
def test_fields_left_out_are_the_classes_own(architecture):
    kind = transformers.CONFIG_MAPPING[architecture]
    for name, value in DEFAULTS[architecture].items():
        assert getattr(kind, name) == value, name
    assert kind.default_theta == DEFAULT_THETA.get(architecture, 1e4)
    rope = kind().rope_parameters
    assert rope["rope_theta"] == DEFAULT_THETA.get(architecture, 1e4)
    assert rope.get("partial_rotary_factor", 1.0) == PARTIAL_ROTARY.get(architecture, 1.0)
    # glm4_moe's own defaults leave heads of 42, half of which cannot be turned in pairs.
    width = {"head_dim": 64} if architecture == "glm4_moe" else {}
    shape = config_from_hf({"model_type": architecture, **width}, "config.json")
    again = kind(**hf_config(shape, IDS))
    stock = kind()
    for name in (*DEFAULTS[architecture], "rope_parameters"):
        if name in ("head_dim", "num_key_value_heads", "max_window_layers", "sliding_window", "rope_parameters"):
            continue
        assert getattr(again, name) == getattr(stock, name), name


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe"])
def test_fused_experts_are_read_too(architecture):
    options = next(options for name, options in VARIANTS if name == architecture)
    theirs = stock_model(architecture, options)
    tensors = dict(theirs.state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    config = config_from_hf(json.loads(theirs.config.to_json_string(use_diff=False)), "config.json")
    state, config = from_hf(tensors, config)
    ours = Transformer(config).eval()
    ours.load_state_dict(state)
    with torch.no_grad():
        assert (theirs(IDS_BT).logits - ours(IDS_BT)).abs().max() < 1e-5


# ----------------------------------------------------------------------------------------------------------- refusals

REFUSED = [
    ({"model_type": "gpt2"}, "kind of model is not supported; got gpt2; wanted one of Qwen3ForCausalLM, Qwen2"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "class is not supported; got LlamaForSequence"),
    ({"hidden_act": "gelu"}, "hidden_act is not supported here; got 'gelu'; wanted 'silu'"),
    ({"attention_bias": True}, "attention_bias is not supported here; got True"),
    ({"mlp_bias": True}, "mlp_bias is not supported here; got True"),
    ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported here; got 0.5; wanted 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is not supported here; got dynamic"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is not supported here; got longrope"),
    ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate is not supported here; got False"),
    ({"rope_scaling": {"type": "linear"}}, "field rope_scaling.factor is missing"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
    ({"hidden_size": "24"}, "field hidden_size is no count; got '24'"),
    ({"rms_norm_eps": None}, "field rms_norm_eps is no number"),
    ({"num_key_value_heads": 3}, "query heads must be a whole multiple"),
]


@pytest.mark.parametrize(("change", "line"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_what_would_compute_otherwise_is_refused(change, line):
    with pytest.raises(UserError) as refused:
        config_from_hf({"model_type": "llama", **BASE, **change}, "x/config.json")
    assert line in refused.value.line()


@pytest.mark.parametrize(
    ("architecture", "change", "line"),
    [
        ("glm4_moe", {"n_group": 2}, "n_group is not supported here; got 2; wanted 1"),
        (
            "qwen3",
            {"layer_types": ["chunked_attention"] * 3},
            "here; got chunked_attention; wanted full_attention",
        ),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "no window is in use"),
        ("qwen3", {"layer_types": ["full_attention"]}, "not one entry a layer"),
        ("qwen3_moe", {**EXPERTS, "num_experts": 2, "num_experts_per_tok": 3}, "more than there are"),
    ],
)
def test_what_other_classes_have_is_refused(architecture, change, line):
    with pytest.raises(UserError) as refused:
        config_from_hf({"model_type": architecture, **BASE, **change}, "x/config.json")
    assert line in refused.value.line()


SMALL = sizes(61, 24, 2, 4, 2, 8, 40)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"architecture": "qwen3", "qk_norm": "none"}, "Qwen3ForCausalLM cannot express this shape; got none"),
        ({"architecture": "llama", "qk_norm": "head"}, "LlamaForCausalLM cannot express this shape; got head"),
        ({"architecture": "llama", "attention_bias": "qkv"}, "model.attention_bias: LlamaForCausalLM cannot"),
        (
            {"architecture": "qwen3", "partial_rotary_factor": 0.5},
            "model.partial_rotary_factor: Qwen3ForCausalLM cannot",
        ),
        (
            {"architecture": "qwen3_moe", **MOE, "sliding_window": 8, "sliding_window_layers": (0,)},
            "model.sliding_window_layers: Qwen3MoeForCausalLM cannot express this shape; got (0,); wanted all layers",
        ),
    ],
)
def test_shapes_that_no_stock_class_has_are_not_written(options, line):
    with pytest.raises(UserError) as refused:
        hf_config(ModelConfig(**{**SMALL, **options}), IDS)
    assert line in refused.value.line()


@pytest.fixture
def tiny(tmp_path):
    """A folder with a stock llama in bfloat16, in two shards."""
    model = stock_model("llama", {}).bfloat16()
    model.save_pretrained(tmp_path / "tiny", max_shard_size="10KB")
    assert (tmp_path / "tiny" / "model.safetensors.index.json").is_file()
    return model, tmp_path / "tiny"


def test_shards_in_half_precision(tiny):
    _, folder = tiny
    found = read_hf(folder)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {value.dtype for value in found.weights.values()} == {torch.float32}
    ours = Transformer(found.config).eval()
    ours.load_state_dict(found.weights)
    with torch.no_grad():
        assert (theirs(IDS_BT).logits - ours(IDS_BT)).abs().max() < 1e-5


def test_a_missing_shard_is_named(tiny):
    _, folder = tiny
    gone = sorted(folder.glob("*.safetensors"))[-1]
    gone.unlink()
    with raises_user_error(got=gone.name):
        read_hf(folder)


def test_a_cut_shard_is_one_line(tiny):
    _, folder = tiny
    cut = sorted(folder.glob("*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        read_hf(folder)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **BASE}))
    with raises_user_error(wanted="model.safetensors"):
        read_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with raises_user_error(where="pytorch_model.bin", wanted="model.safetensors"):
        read_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "is missing; got no model.layers.1.mlp.up_proj",
        ),
        (lambda t: t.update({"model.layers.1.mlp.bias": torch.ones(2)}), "does not have; got model.layers.1.mlp.bias"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), "model.norm.weight has another shape"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)}),
            "quantised or of another type",
        ),
        (lambda t: t.pop("lm_head.weight"), "a tensor is missing; got no lm_head.weight"),
    ],
)
def test_names_and_shapes_must_be_those_of_the_class(change, line):
    model = stock_model("llama", {})
    tensors = dict(model.state_dict())
    change(tensors)
    with pytest.raises(UserError) as refused:
        from_hf(tensors, config_from_hf({"model_type": "llama", **BASE}, "x"), "folder")
    assert line in refused.value.line()


def test_a_tied_head_that_is_another_table_becomes_untied():
    model = stock_model("llama", {})
    config = config_from_hf({"model_type": "llama", **BASE, "tie_word_embeddings": True}, "x")
    state, found = from_hf(dict(model.state_dict()), config)
    assert not found.tie_word_embeddings and "head.weight" in state
    same = {**model.state_dict(), "lm_head.weight": model.state_dict()["model.embed_tokens.weight"].clone()}
    state, found = from_hf(same, config)
    assert found.tie_word_embeddings and "head.weight" not in state


def test_rotary_tables_and_further_prediction_layers_are_passed_over():
    options = dict(VARIANTS[-3][1])
    model = stock_model("glm4_moe", options)
    config = config_from_hf({"model_type": "glm4_moe", **BASE, **options}, "x")
    tensors = {
        **model.state_dict(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.3.eh_proj.weight": torch.ones(4),
    }
    from_hf(tensors, config)
    with raises_user_error(got="model.layers.2.eh_proj.weight"):
        from_hf({**tensors, "model.layers.2.eh_proj.weight": torch.ones(4)}, config)


def test_a_hub_name_without_the_package_or_the_network(tmp_path, monkeypatch):
    assert hf.find_hf(str(tmp_path)) is None
    assert hf.find_hf("not/a/hub/name") is None
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with raises_user_error(where="someone/some-model", next_step="penjing[hub]"):
        hf.find_hf("someone/some-model")
    monkeypatch.undo()
    hub = pytest.importorskip("huggingface_hub")

    class ProxyError(Exception):
        """As the hub's transport has them: neither an OSError nor a ValueError."""

    for kind in (OSError, ProxyError):

        def offline(*args, kind=kind, **options):
            raise kind("no route to host")

        monkeypatch.setattr(hub, "snapshot_download", offline)
        with pytest.raises(UserError, match="the download failed: no route to host"):
            hf.find_hf("someone/some-model")


def test_a_hub_name_is_fetched_without_code(tiny, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(tiny[1])

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert hf.find_hf("someone/some-model") == tiny[1]
    assert asked["name"] == "someone/some-model"
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked["patterns"])

"""MiniMind's bare weights become models of stock classes that compute the same."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.convert.minimind import from_minimind, infer_config, read_tensors, tokenizer_folder
from penjing.convert.peft import attach_peft, read_peft
from penjing.data.tokenizer.train import train_tokenizer
from penjing.export.adapter import attach_adapters, export_adapter
from penjing.model.lora import set_adapter
from penjing.model.transformer import Transformer
from penjing.train.load_model import load_trained

IDS_BT = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(1))


def random_weights(
    width=512, layers=2, heads=8, kv_heads=2, head_dim=64, mlp=96, normalised=False, experts=0, shared=0
) -> dict[str, Tensor]:
    """A state dict with MiniMind's names, in float16 as it saves them."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return (torch.randn(shape, generator=generator) * 0.05).half()

    weights = {"model.embed_tokens.weight": draw(50, width) * 4, "model.norm.weight": 1 + draw(width)}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for layer in range(layers):
        place = f"model.layers.{layer}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights[f"{place}self_attn.{name}_proj.weight"] = draw(rows * head_dim, width)
        weights[place + "self_attn.o_proj.weight"] = draw(width, heads * head_dim)
        if normalised:
            weights[place + "self_attn.q_norm.weight"] = 1 + draw(head_dim)
            weights[place + "self_attn.k_norm.weight"] = 1 + draw(head_dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{place}{name}.weight"] = 1 + draw(width)
        inner = [f"experts.{index}." for index in range(experts)] or [""]
        inner += [f"shared_experts.{index}." for index in range(shared)]
        if experts:
            weights[place + "mlp.gate.weight"] = draw(experts, width)
        for one in inner:
            weights[f"{place}mlp.{one}gate_proj.weight"] = draw(mlp, width)
            weights[f"{place}mlp.{one}up_proj.weight"] = draw(mlp, width)
            weights[f"{place}mlp.{one}down_proj.weight"] = draw(width, mlp)
    return weights


def plain(weights, config, top_k=0) -> Tensor:
    """What MiniMind computes, written down once more the slow way: logits_BTV."""
    weights = {name: value.float() for name, value in weights.items()}

    def norm(x, gain):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * gain

    size = config.head_dim
    angle = torch.arange(17)[:, None] * (1e6 ** (-torch.arange(0, size, 2).float() / size))
    cosine, sine = (torch.cat((value, value), -1) for value in (angle.cos(), angle.sin()))

    def turn(x_BHTK):
        half = torch.cat((-x_BHTK[..., size // 2 :], x_BHTK[..., : size // 2]), -1)
        return x_BHTK * cosine + half * sine

    def swiglu(x, place):
        inner = functional.silu(x @ weights[place + "gate_proj.weight"].T) * (x @ weights[place + "up_proj.weight"].T)
        return inner @ weights[place + "down_proj.weight"].T

    x_BTD = weights["model.embed_tokens.weight"][IDS_BT]
    for layer in range(config.num_hidden_layers):
        place = f"model.layers.{layer}."
        h = norm(x_BTD, weights[place + "input_layernorm.weight"])
        q, k, v = (
            (h @ weights[f"{place}self_attn.{name}_proj.weight"].T).view(2, 17, -1, size).transpose(1, 2)
            for name in "qkv"
        )
        if place + "self_attn.q_norm.weight" in weights:
            q, k = (norm(value, weights[f"{place}self_attn.{n}_norm.weight"]) for n, value in (("q", q), ("k", k)))
        repeat = q.shape[1] // k.shape[1]
        k, v = turn(k).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = functional.scaled_dot_product_attention(turn(q), k, v, is_causal=True)
        x_BTD = x_BTD + mixed.transpose(1, 2).flatten(2) @ weights[place + "self_attn.o_proj.weight"].T
        h = norm(x_BTD, weights[place + "post_attention_layernorm.weight"])
        if not config.num_experts:
            x_BTD = x_BTD + swiglu(h, place + "mlp.")
            continue
        chance = (h @ weights[place + "mlp.gate.weight"].T).softmax(-1)
        share, chosen = chance.topk(top_k, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        for expert in range(config.num_experts):
            part = (share * (chosen == expert)).sum(-1, keepdim=True)
            x_BTD = x_BTD + part * swiglu(h, f"{place}mlp.experts.{expert}.")
        for index in range(4):
            if f"{place}mlp.shared_experts.{index}.up_proj.weight" in weights:
                x_BTD = x_BTD + swiglu(h, f"{place}mlp.shared_experts.{index}.")
    return norm(x_BTD, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


@pytest.mark.parametrize(
    ("options", "architecture", "top_k"),
    [
        ({}, "llama", 0),
        ({"normalised": True, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}, "qwen3", 0),
        (
            {"normalised": True, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 24, "experts": 4},
            "qwen3_moe",
            1,
        ),
        ({"experts": 4, "shared": 1}, "qwen2_moe", 2),
        ({"experts": 3, "shared": 2}, "qwen2_moe", 2),
    ],
)
def test_the_same_numbers(tmp_path, options, architecture, top_k):
    weights = random_weights(**options)
    torch.save(weights, tmp_path / "full_sft.pth")
    tensors = read_tensors(tmp_path / "full_sft.pth")
    config = infer_config(tensors, {}, "full_sft.pth")
    assert (config.architecture, config.tie_word_embeddings, config.num_experts_per_tok) == (
        architecture,
        True,
        top_k,
    )
    state, config = from_minimind(tensors, config, "full_sft.pth")
    model = Transformer(config).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        expected_BTV = plain(weights, config, top_k)
        assert (model(IDS_BT) - expected_BTV).abs().max() < 1e-5 * max(1.0, float(expected_BTV.std()))


def test_what_the_weights_do_not_show_is_asked_for():
    weights = random_weights(width=64, heads=4, kv_heads=2, head_dim=16, layers=1)
    with raises_user_error(where="x.pth", got="q_proj of 64 rows, k_proj of 32"):
        infer_config(weights, {}, "x.pth")
    config = infer_config(weights, {"num_attention_heads": 4, "max_position_embeddings": 512}, "x.pth")
    assert (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.max_position_embeddings,
    ) == (4, 2, 16, 512)
    with raises_user_error(where="model.num_attention_heads", got=3):
        infer_config(weights, {"num_attention_heads": 3}, "x.pth")
    mixture = random_weights(layers=1, experts=4, shared=1)
    assert infer_config(mixture, {"num_experts_per_tok": 1}, "x.pth").num_experts_per_tok == 1


def test_files_to_resume_from_and_wrapped_names(tmp_path):
    weights = random_weights(layers=1)
    wrapped = {"model": {f"_orig_mod.{name}": value for name, value in weights.items()}, "epoch": 3, "step": 7}
    torch.save(wrapped, tmp_path / "resume.pth")
    assert read_tensors(tmp_path / "resume.pth").keys() == weights.keys()


class Trap:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_a_pickle_is_never_run(tmp_path, capsys):
    torch.save({"model.embed_tokens.weight": Trap()}, tmp_path / "trap.pth")
    (tmp_path / "old.pth").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "cut.pth").write_bytes((tmp_path / "trap.pth").read_bytes()[:200])
    for name in ("trap.pth", "old.pth", "cut.pth"):
        with pytest.raises(UserError, match=f"{name}: cannot be read as plain weights"):
            read_tensors(tmp_path / name)
    assert capsys.readouterr().out == ""


def test_other_weights_are_refused(tmp_path):
    torch.save({"tok_embeddings.weight": torch.ones(2, 2)}, tmp_path / "one.pth")
    with raises_user_error(where="one.pth", got="tok_embeddings.weight"):
        read_tensors(tmp_path / "one.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with raises_user_error(where="list.pth", wanted="a state dict"):
        read_tensors(tmp_path / "list.pth")
    with raises_user_error(where="x.pth", got="no model.embed_tokens.weight"):
        infer_config({"transformer.wte.weight": torch.ones(2, 2)}, {}, "x.pth")
    weights = random_weights(layers=1)
    weights["model.layers.0.self_attn.q_proj.lora.A.weight"] = torch.ones(2, 2)
    with raises_user_error(where="x.pth", got="model.layers.0.self_attn.q_proj.lora.A.weight"):
        from_minimind(weights, infer_config(weights, {}, "x.pth"), "x.pth")


def test_the_tokenizer_lies_beside_or_in_the_folder_above(tmp_path):
    for name in ("out", "model"):
        (tmp_path / name).mkdir()
    path = tmp_path / "out" / "full_sft_512.pth"
    assert tokenizer_folder(path) is None
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(path) == tmp_path / "model"
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(path) == tmp_path / "out"


def lora_weights(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Of the square layers, as MiniMind trains them."""
    generator, lora = torch.Generator().manual_seed(7), {}
    for name, value in weights.items():
        if value.ndim == 2 and value.shape[0] == value.shape[1] and "self_attn" in name:
            layer = prefix + name.removeprefix("model.").removesuffix(".weight")
            lora[f"{layer}.lora.A.weight"] = 0.1 * torch.randn(4, value.shape[1], generator=generator)
            lora[f"{layer}.lora.B.weight"] = 0.1 * torch.randn(value.shape[0], 4, generator=generator)
    return lora


@pytest.mark.parametrize("prefix", ["", "model.", "module.model.", "_orig_mod.model."])
def test_a_lora_file_computes_w_plus_b_a(tmp_path, prefix):
    weights = random_weights(layers=2)
    state, config = from_minimind(weights, infer_config(weights, {}, "x.pth"), "x.pth")
    lora = lora_weights(weights, prefix)
    assert len(lora) == 2 * 2 * 2, "q_proj and o_proj of two layers"
    torch.save(lora, tmp_path / "lora_medical_64.pth")
    model = Transformer(config).eval()
    model.load_state_dict(state)
    attach_peft(model, "medical", read_peft(tmp_path / "lora_medical_64.pth"))
    set_adapter(model, "medical")
    merged = dict(weights)
    for name, a in lora.items():
        if name.endswith(".A.weight"):
            layer = "model." + name.removeprefix(prefix).removesuffix(".lora.A.weight") + ".weight"
            merged[layer] = weights[layer] + lora[name.replace(".A.", ".B.")] @ a
    with torch.no_grad():
        actual_BTV, expected_BTV, base_BTV = model(IDS_BT), plain(merged, config), plain(weights, config)
    assert (actual_BTV - expected_BTV).abs().max() < 1e-5 * max(1.0, float(expected_BTV.std()))
    assert (actual_BTV - base_BTV).abs().max() > 0.1


def test_a_lora_file_is_no_model_and_must_fit_its_base(tmp_path):
    weights = random_weights(layers=2)
    config, path = infer_config(weights, {}, "x.pth"), tmp_path / "lora_medical_64.pth"
    model = Transformer(config)
    good = lora_weights(weights)
    torch.save(good, path)
    with raises_user_error(where=path.name, got="lora", next_step=f"--adapter {path}"):
        read_tensors(path)
    name = next(iter(good))
    wrong = {
        "another depth": {key: value for key, value in good.items() if "layers.1" not in key},
        "not a LoRA": {**good, name: torch.ones(4, 512, dtype=torch.int32)},
        "wrong adapter": {**good, **dict.fromkeys((name, name.replace(".A.", ".B.")), torch.ones(0, 0))},
        "not a LoRA adapter": {**good, "layers.0.self_attn.q_proj.weight": torch.ones(2, 2)},
        "wrong adapter tensors": {key: value for key, value in good.items() if key != name},
        "another shape": {**good, name: torch.ones(4, 3)},
        "no such linear layer": {key.replace("layers.1", "layers.9"): value for key, value in good.items()},
    }
    for reason, tensors in wrong.items():
        torch.save(tensors, path)
        with pytest.raises(UserError, match=reason) as refused:
            attach_peft(model, "medical", read_peft(path))
        assert path.name in str(refused.value)


def test_a_lora_file_becomes_a_folder_that_computes_the_same(tmp_path, penjing):
    tokenizer = train_tokenizer(["some words to read, and some more words"] * 9, 300)
    tokenizer.save(tmp_path)
    weights = random_weights(layers=2)
    embedding = torch.randn(tokenizer.size, 512, generator=torch.Generator().manual_seed(3))
    weights |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), embedding)
    base, lora, folder = (tmp_path / name for name in ("full_sft.pth", "lora_medical.pth", "folder"))
    torch.save(weights, base)
    torch.save(lora_weights(weights), lora)
    penjing("adapter", "export", base, folder, "--adapter", lora)
    outputs = []
    for path in (lora, folder):
        trained = load_trained(base)
        ((name, adapter),) = attach_adapters(trained, [str(path)]).items()
        assert (name, adapter.is_chat_tuned) == (path.stem, True)
        with torch.no_grad():
            outputs.append(trained.model(IDS_BT))
    assert torch.equal(*outputs)
    torch.save({**weights, "model.norm.weight": weights["model.norm.weight"] + 1}, base)
    with raises_user_error(where="folder", got="a base with hash"):
        attach_adapters(load_trained(base), [str(folder)])
    with raises_user_error(where="full_sft.pth", next_step="--adapter"):
        export_adapter(base, [], tmp_path / "none")
    with raises_user_error(where="nope.pth"):
        attach_adapters(load_trained(base), [str(tmp_path / "nope.pth")])

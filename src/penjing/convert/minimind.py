"""MiniMind's `.pth` weights: a bare state dict, loaded without running code; its config is inferred.

The file holds neither config nor tokenizer. Widths and layers follow from the tensors. The rest (heads without
query/key norms, experts per token) comes from a table of the published models or from settings.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.convert.names import EMBEDDING, HEAD, from_hf
from penjing.devices import HOST
from penjing.model.config import ModelConfig

SUFFIXES = (".pth", ".pt")
# (width, rows of k_proj): query heads, key/value heads of the shapes published without query/key norms.
_KNOWN_HEADS = {(512, 128): (8, 2), (640, 160): (8, 2), (768, 192): (8, 2)}
_WRAPPERS = re.compile(r"^(_orig_mod\.|module\.)+")
_VERSION_1_NAMES = re.compile(r"^(tok_embeddings\.|layers\.\d+\.(attention|feed_forward)\.)")
_SHARED = re.compile(r"^(model\.layers\.\d+\.mlp\.)shared_experts\.(?:(\d+)\.)?(\w+_proj\.weight)$")
_LORA_NAME = re.compile(r"^(?:model\.)?(layers\.\d+\.\S+)\.lora\.([AB])\.weight$")
_LAYER = "model.layers.{}."


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights of a model in a `.pth` file by their transformers-like names, memory-mapped."""
    tensors = _load(path)
    lora = next((name for name in tensors if ".lora." in name), None)
    if lora is not None:
        wanted = "the weights of a model"
        hint = f"Give its base model, and --adapter {path} in `penjing chat`, `serve` or `adapter merge`."
        raise UserError("a LoRA adapter of MiniMind, not a model", where=path, got=lora, wanted=wanted, next_step=hint)
    first = next((name for name in tensors if _VERSION_1_NAMES.match(name)), None)
    if first is not None:
        what = "weights of MiniMind's first version, which has another rotary layout"
        raise UserError(what, where=path, got=first, wanted="version 2 or 3")
    return tensors


def read_lora(path: Path) -> dict[str, dict[str, Tensor]]:
    """A LoRA adapter in a `.pth` file: the matrices A [rank, in] and B [out, rank] by layer; W + B A is computed."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in _load(path).items():
        match = _LORA_NAME.match(name)
        if match is None or value.ndim != 2 or not value.is_floating_point():
            wanted = "layers.N.self_attn.q_proj.lora.A.weight and the like, matrices"
            raise UserError("not a LoRA adapter of MiniMind", where=path, got=name, wanted=wanted)
        layers.setdefault(f"model.{match[1]}", {})[match[2]] = value.float()
    return layers


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.pth` file. Only tensors and plain values are unpickled; any other file is refused."""
    try:
        loaded = torch.load(path, map_location=HOST, weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError("no such file", where=path) from None
    # torch raises several classes without a common base for damage, old formats and refused pickles.
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"cannot be read as plain weights: {reason}", where=path) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("model"), dict):  # a training checkpoint
        loaded = loaded["model"]
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError("not a file of named tensors", where=path, wanted="a state dict")
    return {_WRAPPERS.sub("", str(name)): value for name, value in loaded.items()}


def infer_config(tensors: Mapping[str, Tensor], hints: Mapping[str, Any], where: object) -> ModelConfig:
    """The config of a MiniMind model, from its tensors.

    hints: the user's `model.*` settings, for what the tensors do not determine; they must agree with the tensors.
    Raises UserError if the number of heads cannot be determined; the message names the setting to add.
    """
    shape = partial(_shape, tensors, where)
    vocab_size, hidden_size = shape(EMBEDDING)
    layers = {int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    first_layer = _LAYER.format(0)
    query_rows, _ = shape(first_layer + "self_attn.q_proj.weight")
    key_rows, _ = shape(first_layer + "self_attn.k_proj.weight")
    has_qk_norm = first_layer + "self_attn.q_norm.weight" in tensors
    if has_qk_norm:
        head_dim = shape(first_layer + "self_attn.q_norm.weight")[0]
        heads = (query_rows // head_dim, key_rows // head_dim)
    else:
        heads = _heads(hidden_size, query_rows, key_rows, hints, where)
        head_dim = query_rows // heads[0]
    fields: dict[str, Any] = {
        "preset": "",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": max(layers) + 1,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6 if has_qk_norm else 1e-5,
        "tie_word_embeddings": HEAD not in tensors or torch.equal(tensors[HEAD], tensors[EMBEDDING]),
    }
    fields |= _mlp(tensors, has_qk_norm, first_layer + "mlp.", hints, where)
    overridable = {"max_position_embeddings", "rope_theta", "rms_norm_eps"}
    return ModelConfig(**{**fields, **{name: value for name, value in hints.items() if name in overridable}})


def _shape(tensors: Mapping[str, Tensor], where: object, name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise UserError("not the weights of a MiniMind model", where=where, got=f"no {name}")
    return tuple(tensors[name].shape)


def _heads(
    hidden_size: int, query_rows: int, key_rows: int, hints: Mapping[str, Any], where: object
) -> tuple[int, int]:
    """The numbers of query and key/value heads, which these weights do not determine."""
    if "num_attention_heads" in hints:
        num_attention_heads = int(hints["num_attention_heads"])
        head_dim = query_rows // max(1, num_attention_heads)
        if num_attention_heads > 0 and query_rows % num_attention_heads == 0 and key_rows % head_dim == 0:
            return num_attention_heads, key_rows // head_dim
        what = "does not fit the weights"
        wanted = f"a divisor of {query_rows} whose head size also divides {key_rows}"
        raise UserError(what, where="model.num_attention_heads", got=num_attention_heads, wanted=wanted)
    if (hidden_size, key_rows) in _KNOWN_HEADS and query_rows == hidden_size:
        return _KNOWN_HEADS[hidden_size, key_rows]
    what = "the weights do not determine the number of heads"
    hint = "Add model.num_attention_heads=N, or model=PRESET with the same sizes."
    raise UserError(what, where=where, got=f"q_proj of {query_rows} rows, k_proj of {key_rows}", next_step=hint)


def _mlp(
    tensors: Mapping[str, Tensor], has_qk_norm: bool, prefix: str, hints: Mapping[str, Any], where: object
) -> dict[str, Any]:
    if prefix + "gate.weight" not in tensors:
        size = _shape(tensors, where, prefix + "gate_proj.weight")[0]
        return {"architecture": "qwen3" if has_qk_norm else "llama", "intermediate_size": size}
    num_experts = tensors[prefix + "gate.weight"].shape[0]
    size = _shape(tensors, where, prefix + "experts.0.gate_proj.weight")[0]
    shared = [
        value.shape[0]
        for key, value in tensors.items()
        if key.startswith(prefix) and (match := _SHARED.match(key)) and match[3] == "gate_proj.weight"
    ]
    # Version 3 routes a token to one expert; version 2 to two, plus the shared ones.
    fields: dict[str, Any] = {
        "num_experts": int(num_experts),
        "num_experts_per_tok": int(hints.get("num_experts_per_tok", 2 if shared else 1)),
        "moe_intermediate_size": size,
        "intermediate_size": size,
    }
    if not shared:
        if not has_qk_norm:
            raise UserError("experts without query/key norms and without shared experts", where=where, got="not known")
        return {**fields, "architecture": "qwen3_moe"}
    if has_qk_norm:
        raise UserError("shared experts beside query/key norms", where=where, got="not known")
    fields |= {"architecture": "qwen2_moe", "attention_bias": "none"}
    return {**fields, "shared_expert_intermediate_size": sum(shared)}


def from_minimind(
    tensors: Mapping[str, Tensor], config: ModelConfig, where: object
) -> tuple[dict[str, Tensor], ModelConfig]:
    """A MiniMind state dict as one of ours, in float32, and its config.

    Version 2's shared experts have no gate, but their transformers class (qwen2_moe) has one. A gate of zeros halves
    the experts' output, since sigmoid(0) = 1/2. The output projection is doubled, which gives the same numbers exactly.
    """
    if config.architecture != "qwen2_moe":
        return from_hf(tensors, config, where)
    hf_tensors: dict[str, Tensor] = {}
    shared_parts: dict[str, list[Tensor]] = {}
    for name in sorted(tensors):
        match = _SHARED.match(name)
        if match is None:
            hf_tensors[name] = tensors[name]
        else:
            shared_parts.setdefault(f"{match[1]}shared_expert.{match[3]}", []).append(tensors[name].float())
    for name, values in shared_parts.items():
        is_down_proj = name.endswith("down_proj.weight")
        hf_tensors[name] = 2 * torch.cat(values, dim=1) if is_down_proj else torch.cat(values)
    for layer in range(config.num_hidden_layers):
        hf_tensors[_LAYER.format(layer) + "mlp.shared_expert_gate.weight"] = torch.zeros(1, config.hidden_size)
    return from_hf(hf_tensors, config, where)


def tokenizer_folder(path: Path) -> Path | None:
    """The folder of MiniMind's tokenizer: beside the weights, or ../model; None if neither has one."""
    folders = (path.parent, path.parent.parent / "model")
    return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)

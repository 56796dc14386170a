"""Our weights under the names of the stock `transformers` classes, and theirs under ours.

Experts are stacked here ([E, F, D]) and lie one by one in files (`mlp.experts.3.gate_proj.weight`); transformers 5 also
holds and sometimes writes gate and up projection fused ([E, 2F, D]). All three are read; one by one is written, as
every other engine reads that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer

_RENAMED = (
    ("embed.", "model.embed_tokens."),
    ("blocks.", "model.layers."),
    (".input_norm.", ".input_layernorm."),
    (".attention.", ".self_attn."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".mlp.router.correction", ".mlp.gate.e_score_correction_bias"),
    (".mlp.router.weight", ".mlp.gate.weight"),
    ("head.", "lm_head."),
)
_SHARED = {"glm4_moe": "shared_experts", "qwen2_moe": "shared_expert"}
_STACKED = re.compile(r"^(?P<mlp>blocks\.\d+\.mlp)\.(?P<which>gate_proj|up_proj|down_proj)$")
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_ROTARY = re.compile(r"rotary_emb\.|\.inv_freq$|^freqs_(cos|sin)$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def hf_name(name: str, architecture: str = "") -> str:
    """One of our names as `transformers` calls it; stacked experts have no single name there (`to_hf` splits them)."""
    if name.startswith("norm."):
        return "model." + name
    shared = _SHARED.get(architecture, "shared_experts")
    name = name.replace(".mlp.shared_gate.", ".mlp.shared_expert_gate.").replace(".mlp.shared.", f".mlp.{shared}.")
    for ours, theirs in _RENAMED:
        if ours.startswith("."):
            name = name.replace(ours, theirs)
        elif name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return name.replace(".mlp.", ".block_sparse_moe.") if architecture == "mixtral" else name


def _expert_names(mlp: str, which: str, config: ModelConfig) -> list[str]:
    """The file's names of one stacked parameter, in the order of the experts."""
    inner = f"{hf_name(mlp + '.', config.architecture)}experts"
    part = _MIXTRAL[which] if config.architecture == "mixtral" else which
    return [f"{inner}.{expert}.{part}.weight" for expert in range(config.num_experts)]


# --- ours to theirs --------------------------------------------------------------------------------------------------


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A state dict of ours as the tensors of a stock class's file: float32, contiguous, on the CPU.

    A tied head is not repeated, except in glm4_moe, whose config.json is always untied (see `hf_config`).
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.detach().cpu().float()
        stacked = _STACKED.match(name)
        if stacked and value.ndim == 3:
            for theirs, expert in zip(_expert_names(stacked["mlp"], stacked["which"], config), value, strict=True):
                found[theirs] = expert.contiguous()
        else:
            found[hf_name(name, config.architecture)] = value.contiguous()
    if config.architecture == "glm4_moe":
        if HEAD not in found:
            found[HEAD] = found[EMBEDDING].clone()
        found |= _empty_shared_experts(config)
    return found


def _empty_shared_experts(config: ModelConfig) -> dict[str, Tensor]:
    """Without shared experts the stock glm4_moe class still has their layers, of width 0."""
    if config.shared_expert_intermediate_size:
        return {}
    width = config.hidden_size
    shapes = {"gate_proj": (0, width), "up_proj": (0, width), "down_proj": (width, 0)}
    return {
        f"model.layers.{layer}.mlp.shared_experts.{name}.weight": torch.zeros(shape)
        for layer in range(config.num_hidden_layers)
        if not config.is_dense_layer(layer)
        for name, shape in shapes.items()
    }


# --- theirs to ours --------------------------------------------------------------------------------------------------


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every name of our state dict with its shape; nothing is allocated."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def from_hf(
    tensors: Mapping[str, Tensor], config: ModelConfig, where: object = None
) -> tuple[dict[str, Tensor], ModelConfig]:
    """The tensors of a stock class's file as a state dict of ours in float32, and the shape they have.

    The shape differs from `config` in one case only: a model said to be tied whose file holds another head becomes
    untied, as it does there. Rotary tables and further prediction layers (multi-token prediction) are passed over.
    Raises UserError naming the first tensor that is missing, of another shape or type, or not known.
    """
    config = with_real_head(tensors, config)
    state: dict[str, Tensor] = {}
    used = {HEAD}
    for ours, shape in expected_shapes(config).items():
        parts = _parts(ours, shape, tensors, config)
        missing = next((name for name in parts if name not in tensors), None)
        if missing is not None:
            raise UserError("a tensor is missing", where=where, got=f"no {missing}")
        used.update(parts)
        state[ours] = _assemble(ours, shape, parts, tensors, where)
    _refuse_unknown(tensors, used, config, where)
    return state, config


def with_real_head(tensors: Mapping[str, Tensor], config: ModelConfig) -> ModelConfig:
    """`config`, untied if the file holds a head of its own that is not the embedding table."""
    if config.tie_word_embeddings and HEAD in tensors and EMBEDDING in tensors:
        head, embedding = tensors[HEAD], tensors[EMBEDDING]
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            return replace(config, tie_word_embeddings=False)
    return config


def _parts(ours: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor], config: ModelConfig) -> list[str]:
    """The names that one of our tensors is made of, in whichever layout the file has."""
    stacked = _STACKED.match(ours)
    if stacked is None or len(shape) != 3:
        plain, inside = hf_name(ours, config.architecture), hf_name(ours)
        return [inside if plain not in tensors and inside in tensors else plain]
    inner = hf_name(stacked["mlp"] + ".")  # fused experts are always called mlp.experts, in mixtral too
    fused = f"{inner}experts.{'down_proj' if stacked['which'] == 'down_proj' else 'gate_up_proj'}"
    return [fused] if fused in tensors else _expert_names(stacked["mlp"], stacked["which"], config)


def _assemble(
    ours: str, shape: tuple[int, ...], parts: list[str], tensors: Mapping[str, Tensor], where: object
) -> Tensor:
    values = [_floats(name, tensors[name], where) for name in parts]
    value = values[0] if len(values) == 1 and values[0].ndim == len(shape) else torch.stack(values)
    if parts[0].endswith(".gate_up_proj") and value.shape[1] == 2 * shape[1]:
        value = value.chunk(2, dim=1)[ours.endswith(".up_proj")]
    if tuple(value.shape) != shape:
        raise UserError(
            f"{parts[0]} has another shape than config.json says",
            where=where,
            got=tuple(tensors[parts[0]].shape),
            wanted=shape if len(parts) == 1 else shape[1:],
        )
    return value.contiguous()


def _floats(name: str, value: Tensor, where: object) -> Tensor:
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UserError(
            f"{name} is quantised or of another type",
            where=where,
            got=str(value.dtype).removeprefix("torch."),
            wanted="float32, bfloat16 or float16",
        )
    return value.float()


def _refuse_unknown(tensors: Mapping[str, Tensor], used: set[str], config: ModelConfig, where: object) -> None:
    for name in sorted(tensors):
        if name in used or _ROTARY.search(name):
            continue
        layer = _LAYER.match(name)
        if layer and config.architecture == "glm4_moe" and int(layer[1]) >= config.num_hidden_layers:
            continue  # layers that predict further tokens: the stock class passes them over as well
        if tensors[name].numel() == 0:
            continue
        raise UserError(
            "a tensor that this class does not have",
            where=where,
            got=name,
            next_step="It would change what the model computes, so nothing is read.",
        )

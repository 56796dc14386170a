"""Convert state dicts between our parameter names and those of the `transformers` classes.

Our experts are stacked ([E, F, D]). Files hold one tensor per expert (`mlp.experts.3.gate_proj.weight`); transformers 5
sometimes writes gate and up projection fused ([E, 2F, D]). All three layouts are read. One tensor per expert is
written, since every other engine reads that.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer

_RENAMES = (
    ("embed.", "model.embed_tokens."), ("blocks.", "model.layers."), (".input_norm.", ".input_layernorm."),
    (".attention.", ".self_attn."), (".mlp_norm.", ".post_attention_layernorm."),
    (".mlp.router.correction", ".mlp.gate.e_score_correction_bias"), (".mlp.router.weight", ".mlp.gate.weight"),
    ("head.", "lm_head."),
)  # fmt: skip
_SHARED = {"glm4_moe": "shared_experts", "qwen2_moe": "shared_expert"}
_STACKED = re.compile(r"^(?P<mlp>blocks\.\d+\.mlp)\.(?P<which>gate_proj|up_proj|down_proj)$")
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_ROTARY = re.compile(r"rotary_emb\.|\.inv_freq$|^freqs_(cos|sin)$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def hf_name(name: str, architecture: str = "") -> str:
    """Our parameter name as in `transformers`; stacked experts have no single name there (`to_hf` splits them)."""
    if name.startswith("norm."):
        return "model." + name
    shared = _SHARED.get(architecture, "shared_experts")
    name = name.replace(".mlp.shared_gate.", ".mlp.shared_expert_gate.").replace(".mlp.shared.", f".mlp.{shared}.")
    for our_part, hf_part in _RENAMES:
        if our_part.startswith("."):
            name = name.replace(our_part, hf_part)
        elif name.startswith(our_part):
            name = hf_part + name.removeprefix(our_part)
    return name.replace(".mlp.", ".block_sparse_moe.") if architecture == "mixtral" else name


def _expert_names(mlp: str, which: str, config: ModelConfig) -> list[str]:
    """The names in the file of one stacked parameter, one per expert."""
    prefix = f"{hf_name(mlp + '.', config.architecture)}experts"
    part = _MIXTRAL[which] if config.architecture == "mixtral" else which
    return [f"{prefix}.{expert}.{part}.weight" for expert in range(config.num_experts)]


# --- our names to transformers ---------------------------------------------------------------------------------------


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict as the tensors of a `transformers` file: float32, contiguous, on the CPU. A tied head is left out,
    except in glm4_moe, whose config.json is always untied (see `hf_config`)."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.detach().cpu().float()
        stacked = _STACKED.match(name)
        if stacked and value.ndim == 3:
            for expert_name, expert in zip(_expert_names(stacked["mlp"], stacked["which"], config), value, strict=True):
                tensors[expert_name] = expert.contiguous()
        else:
            tensors[hf_name(name, config.architecture)] = value.contiguous()
    if config.architecture == "glm4_moe":
        if HEAD not in tensors:
            tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors |= _empty_shared_experts(config)
    return tensors


def _empty_shared_experts(config: ModelConfig) -> dict[str, Tensor]:
    """The glm4_moe class has shared-expert layers even without shared experts, of width 0."""
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


# --- transformers names to ours --------------------------------------------------------------------------------------


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of our state dict; on the meta device, so no memory is allocated."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def from_hf(
    tensors: Mapping[str, Tensor], config: ModelConfig, where: object = None
) -> tuple[dict[str, Tensor], ModelConfig]:
    """The tensors of a `transformers` file as our state dict in float32, and their config.

    The config differs from `config` in one case: a tied model whose file holds a different head becomes untied, as in
    transformers. Rotary tables and multi-token prediction layers are ignored.
    Raises UserError naming the first tensor that is missing, unknown, or of another shape or type.
    """
    config = untie_if_head_differs(tensors, config)
    state: dict[str, Tensor] = {}
    used = {HEAD}
    for ours, shape in expected_shapes(config).items():
        parts = _source_names(ours, shape, tensors, config)
        missing = next((name for name in parts if name not in tensors), None)
        if missing is not None:
            raise UserError("a tensor is missing", where=where, got=f"no {missing}")
        used.update(parts)
        state[ours] = _assemble(ours, shape, parts, tensors, where)
    _refuse_unknown(tensors, used, config, where)
    return state, config


def untie_if_head_differs(tensors: Mapping[str, Tensor], config: ModelConfig) -> ModelConfig:
    """`config`, untied if the file has a head that differs from the embedding."""
    if config.tie_word_embeddings and HEAD in tensors and EMBEDDING in tensors:
        head, embedding = tensors[HEAD], tensors[EMBEDDING]
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            return replace(config, tie_word_embeddings=False)
    return config


def _source_names(name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor], config: ModelConfig) -> list[str]:
    """The tensors in the file that make up one of ours, whichever layout the file has."""
    stacked = _STACKED.match(name)
    if stacked is None or len(shape) != 3:
        usual_name, alternative = hf_name(name, config.architecture), hf_name(name)
        return [alternative if usual_name not in tensors and alternative in tensors else usual_name]
    prefix = hf_name(stacked["mlp"] + ".")  # fused experts are always called mlp.experts, in mixtral too
    fused = f"{prefix}experts.{'down_proj' if stacked['which'] == 'down_proj' else 'gate_up_proj'}"
    return [fused] if fused in tensors else _expert_names(stacked["mlp"], stacked["which"], config)


def _assemble(
    name: str, shape: tuple[int, ...], sources: list[str], tensors: Mapping[str, Tensor], where: object
) -> Tensor:
    values = [_to_float32(name, tensors[name], where) for name in sources]
    value = values[0] if len(values) == 1 and values[0].ndim == len(shape) else torch.stack(values)
    if sources[0].endswith(".gate_up_proj") and value.shape[1] == 2 * shape[1]:
        value = value.chunk(2, dim=1)[name.endswith(".up_proj")]
    if tuple(value.shape) != shape:
        what = f"{sources[0]} has another shape than config.json says"
        raise UserError(
            what, where=where, got=tuple(tensors[sources[0]].shape), wanted=shape if len(sources) == 1 else shape[1:]
        )
    return value.contiguous()


def _to_float32(name: str, value: Tensor, where: object) -> Tensor:
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        what = f"{name} is quantised or of another type"
        wanted = "float32, bfloat16 or float16"
        raise UserError(what, where=where, got=str(value.dtype).removeprefix("torch."), wanted=wanted)
    return value.float()


def _refuse_unknown(tensors: Mapping[str, Tensor], used: set[str], config: ModelConfig, where: object) -> None:
    for name in sorted(tensors):
        if name in used or _ROTARY.search(name):
            continue
        layer = _LAYER.match(name)
        if layer and config.architecture == "glm4_moe" and int(layer[1]) >= config.num_hidden_layers:
            continue  # multi-token prediction layers: the transformers class ignores them as well
        if tensors[name].numel() == 0:
            continue
        hint = "The tensor would change what the model computes, so nothing is loaded."
        raise UserError("a tensor that this class does not have", where=where, got=name, next_step=hint)

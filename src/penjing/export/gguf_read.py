"""Read a GGUF file back into our model, from the file alone: the first half of the check.

Keys are repeated here rather than shared with the writer, so that a mistake in the writer shows; the names of tensors
are the gguf package's.
"""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.convert.names import expected_shapes, hf_name
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.gguf_vocabulary import Vocabulary, tokenizer_of
from penjing.model.config import ModelConfig
from penjing.model.rope import frequencies
from penjing.model.transformer import Transformer

if TYPE_CHECKING:
    import gguf

MAGIC = b"GGUF"
VERSION_KEY = b"penjing.version"
_ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen2": "qwen2",
    "llama": "llama",
    "qwen3moe": "qwen3_moe",
    "qwen2moe": "qwen2_moe",
    "glm4moe": "glm4_moe",
}


def is_ours(path: Path) -> bool:
    """Whether this file was written by `penjing export gguf`."""
    if not path.is_file():
        return False
    with open(path, "rb") as stream:
        beginning = stream.read(4096)
    return beginning.startswith(MAGIC) and VERSION_KEY in beginning


def rebuild(path: Path) -> tuple[Transformer, Tokenizer]:
    """The model (weights dequantised to float32) and the tokenizer of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    weights = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    config = read_config(values, weights)
    model = Transformer(config)
    model.load_state_dict(_state_dict(config, weights, values["general.architecture"]))
    return model.eval(), tokenizer_of(read_vocabulary(values))


def read_vocabulary(values: dict[str, Any]) -> Vocabulary:
    """The tokenizer, from the metadata."""
    return Vocabulary(
        tokens=values["tokenizer.ggml.tokens"],
        token_types=values["tokenizer.ggml.token_type"],
        merges=values["tokenizer.ggml.merges"],
        pre_tokenizer=values["tokenizer.ggml.pre"],
        bos=values["tokenizer.ggml.bos_token_id"],
        end_of_text=values["tokenizer.ggml.padding_token_id"],
        message_end=values["tokenizer.ggml.eos_token_id"],
        add_bos=values["tokenizer.ggml.add_bos_token"],
        chat_template=values.get("tokenizer.chat_template", ""),
    )


def read_config(values: dict[str, Any], weights: dict[str, Tensor]) -> ModelConfig:
    """The config, from the metadata and the names of the tensors."""
    arch = values["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        return values.get(f"{arch}.{key}", default)

    num_experts = value("expert_count", 0)
    architecture: Any = "mixtral" if arch == "llama" and num_experts else _ARCHITECTURES[arch]
    moe_intermediate_size = value("expert_feed_forward_length", value("feed_forward_length")) if num_experts else 0
    scaling = value("rope.scaling.type", "none")
    factor = value("rope.scaling.factor", 1.0)
    rotary_size, head_dim = value("rope.dimension_count"), value("attention.key_length")
    llama3 = {}
    if "rope_freqs.weight" in weights:
        scaling, factor = "llama3", values["penjing.rope.factor"]
        llama3 = {
            "rope_original_max_position_embeddings": values["penjing.rope.original_tokens"],
            "rope_low_freq_factor": values["penjing.rope.low_frequency"],
            "rope_high_freq_factor": values["penjing.rope.high_frequency"],
        }
    yarn = {}
    if scaling == "yarn":
        # llama.cpp multiplies the factor in the file by the default one.
        default_factor = 0.1 * math.log(max(factor, 1.0)) + 1
        yarn = {
            "rope_original_max_position_embeddings": value("rope.scaling.original_context_length"),
            "rope_attention_factor": value("rope.scaling.attn_factor", 1.0) * default_factor,
        }
    config = ModelConfig(
        architecture=architecture,
        vocab_size=len(values["tokenizer.ggml.tokens"]),
        hidden_size=value("embedding_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=head_dim,
        intermediate_size=value("feed_forward_length"),
        max_position_embeddings=value("context_length"),
        rope_theta=value("rope.freq_base"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in weights,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in weights else "none",
        attention_bias="qkv" if "blk.0.attn_q.bias" in weights else "none",
        # The 0.5 prevents that rounding down loses one dimension.
        partial_rotary_factor=1.0 if rotary_size == head_dim else (rotary_size + 0.5) / head_dim,
        rope_scaling=scaling,
        rope_factor=factor,
        **llama3,
        **yarn,
        num_experts=num_experts,
        num_experts_per_tok=value("expert_used_count", 0),
        moe_intermediate_size=moe_intermediate_size,
        shared_expert_intermediate_size=value(
            "expert_shared_feed_forward_length", value("expert_shared_count", 0) * moe_intermediate_size
        ),
        mlp_only_layers=tuple(range(value("leading_dense_block_count", 0))),
        norm_topk_prob=bool(value("expert_weights_norm", arch != "qwen2moe")),
        routed_scaling_factor=value("expert_weights_scale", 1.0),
    )
    if "rope_freqs.weight" in weights:
        unscaled = frequencies(dataclasses.replace(config, rope_scaling="none", rope_factor=1.0))
        if not torch.allclose(unscaled / weights["rope_freqs.weight"], frequencies(config)):
            raise UserError("the rope_freqs in the file do not match its rotary scaling")
    return config


def _tensor(tensor: gguf.ReaderTensor) -> Tensor:
    """A tensor of any stored type as float32, with dimensions in torch's order."""
    import gguf

    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(array.astype("float32", copy=True)).reshape([int(n) for n in reversed(tensor.shape)])


def _state_dict(config: ModelConfig, weights: dict[str, Tensor], arch: str) -> dict[str, Tensor]:
    """Our state dict. Raises KeyError for a tensor that is not in the file."""
    state = {}
    for name in expected_shapes(config):
        value = weights[tensor_name(name, arch, config.num_hidden_layers)]
        if arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            value = deinterleaved(value, config.head_dim)
        state[name] = value[None] if name.endswith("shared_gate.weight") else value
    return state


def tensor_name(name: str, arch: str, num_layers: int) -> str:
    """llama.cpp's name of our parameter, from the gguf package's table of names in `transformers`."""
    theirs = re.sub(r"\.mlp\.(gate|up|down)_proj$", r".mlp.experts.\1_proj.weight", hf_name(name))
    theirs = theirs.replace("correction_bias", "correction.bias")
    found: str | None = _tensor_names(arch, num_layers).get_name(theirs, try_suffixes=(".weight", ".bias"))
    assert found, f"{arch} has no {name}"
    return found


@cache
def _tensor_names(arch: str, num_layers: int) -> gguf.TensorNameMap:
    import gguf

    known = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[arch], num_layers)


def deinterleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of a head, reordered from 0, K/2, 1, K/2 + 1, ... to 0, 1, 2, ..."""
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)

"""A GGUF file read back into our own model, from what the file says and nothing else: the first half of the check.

Names and keys are spelt out here once more instead of shared with the writer, so that a mistake there shows.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.gguf_vocabulary import Vocabulary, tokenizer_of
from penjing.model.config import ModelConfig
from penjing.model.rope import frequencies
from penjing.model.transformer import Transformer

if TYPE_CHECKING:
    import gguf

MAGIC = b"GGUF"
MARK = b"penjing.version"
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
    return beginning.startswith(MAGIC) and MARK in beginning


def rebuild(path: Path) -> tuple[Transformer, Tokenizer]:
    """The model (weights dequantised to float32) and the tokenizer of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    weights = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    config = read_config(values, weights)
    model = Transformer(config)
    model.load_state_dict(_state(config, weights, values["general.architecture"]))
    return model.eval(), tokenizer_of(read_vocabulary(values))


def read_vocabulary(values: dict[str, Any]) -> Vocabulary:
    """The tokenizer's part of the metadata."""
    return Vocabulary(
        tokens=values["tokenizer.ggml.tokens"],
        kinds=values["tokenizer.ggml.token_type"],
        merges=values["tokenizer.ggml.merges"],
        split=values["tokenizer.ggml.pre"],
        begin=values["tokenizer.ggml.bos_token_id"],
        end_of_text=values["tokenizer.ggml.padding_token_id"],
        message_end=values["tokenizer.ggml.eos_token_id"],
        adds_begin=values["tokenizer.ggml.add_bos_token"],
        template=values.get("tokenizer.chat_template", ""),
    )


def read_config(values: dict[str, Any], weights: dict[str, Tensor]) -> ModelConfig:
    """The shape, from the metadata and from which tensors there are."""
    theirs = values["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        return values.get(f"{theirs}.{key}", default)

    experts = value("expert_count", 0)
    architecture: Any = "mixtral" if theirs == "llama" and experts else _ARCHITECTURES[theirs]
    moe_intermediate_size = value("expert_feed_forward_length", value("feed_forward_length")) if experts else 0
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
        # llama.cpp multiplies the factor of the file by the usual one.
        usual = 0.1 * math.log(max(factor, 1.0)) + 1
        yarn = {
            "rope_original_max_position_embeddings": value("rope.scaling.original_context_length"),
            "rope_attention_factor": value("rope.scaling.attn_factor", 1.0) * usual,
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
        # The half keeps the division from rounding down to one dimension less.
        partial_rotary_factor=1.0 if rotary_size == head_dim else (rotary_size + 0.5) / head_dim,
        rope_scaling=scaling,
        rope_factor=factor,
        **llama3,
        **yarn,
        num_experts=experts,
        num_experts_per_tok=value("expert_used_count", 0),
        moe_intermediate_size=moe_intermediate_size,
        shared_expert_intermediate_size=value(
            "expert_shared_feed_forward_length", value("expert_shared_count", 0) * moe_intermediate_size
        ),
        mlp_only_layers=tuple(range(value("leading_dense_block_count", 0))),
        norm_topk_prob=bool(value("expert_weights_norm", theirs != "qwen2moe")),
        routed_scaling_factor=value("expert_weights_scale", 1.0),
    )
    if "rope_freqs.weight" in weights:
        plain = frequencies(dataclasses.replace(config, rope_scaling="none", rope_factor=1.0))
        if not torch.allclose(plain / weights["rope_freqs.weight"], frequencies(config)):
            raise UserError("the frequencies in the file are not those of its rotary scaling")
    return config


def _tensor(tensor: gguf.ReaderTensor) -> Tensor:
    """Any stored type as float32, in the usual order of dimensions."""
    import gguf

    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(array.astype("float32", copy=True)).reshape([int(n) for n in reversed(tensor.shape)])


def _state(config: ModelConfig, weights: dict[str, Tensor], theirs: str) -> dict[str, Tensor]:
    """Our parameters by our names. Raises KeyError for a tensor that is not in the file."""
    state = {"embed.weight": weights["token_embd.weight"], "norm.weight": weights["output_norm.weight"]}
    if not config.tie_word_embeddings:
        state["head.weight"] = weights["output.weight"]
    mlp_norm = "post_attention_norm" if theirs == "glm4moe" else "ffn_norm"
    for layer in range(config.num_hidden_layers):
        ours, blk = f"blocks.{layer}.", f"blk.{layer}."
        state[ours + "input_norm.weight"] = weights[blk + "attn_norm.weight"]
        state[ours + "mlp_norm.weight"] = weights[f"{blk}{mlp_norm}.weight"]
        state[ours + "attention.o_proj.weight"] = weights[blk + "attn_output.weight"]
        for part in ("weight", "bias") if config.has_qkv_bias else ("weight",):
            for letter in "qkv":
                rows = weights[f"{blk}attn_{letter}.{part}"]
                if theirs == "llama" and letter != "v":
                    rows = halved(rows, config.head_dim)
                state[f"{ours}attention.{letter}_proj.{part}"] = rows
        if config.normalises_heads:
            for letter in "qk":
                state[f"{ours}attention.{letter}_norm.weight"] = weights[f"{blk}attn_{letter}_norm.weight"]
        for matrix in ("gate", "up", "down"):
            if config.is_dense_layer(layer):
                state[f"{ours}mlp.{matrix}_proj.weight"] = weights[f"{blk}ffn_{matrix}.weight"]
                continue
            state[f"{ours}mlp.{matrix}_proj"] = weights[f"{blk}ffn_{matrix}_exps.weight"]
            if config.shared_expert_intermediate_size:
                state[f"{ours}mlp.shared.{matrix}_proj.weight"] = weights[f"{blk}ffn_{matrix}_shexp.weight"]
        if not config.is_dense_layer(layer):
            state[ours + "mlp.router.weight"] = weights[blk + "ffn_gate_inp.weight"]
            if config.architecture == "glm4_moe":
                state[ours + "mlp.router.correction"] = weights[blk + "exp_probs_b.bias"]
            if config.architecture == "qwen2_moe":
                state[ours + "mlp.shared_gate.weight"] = weights[blk + "ffn_gate_inp_shexp.weight"][None]
    return state


def halved(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of a head from the order 0, K/2, 1, K/2 + 1, ... back to 0, 1, 2, ..."""
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)

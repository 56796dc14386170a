"""Write a model config as a Hugging Face config.json; `convert/shape.py` reads one."""

from typing import Any

from penjing.base.errors import UserError
from penjing.convert.shape import CLASSES, PARTIAL_ROTARY
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.config import ModelConfig

# Fields that are called alike here and there.
SAME_NAMES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


def hf_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json for the transformers class of this architecture, with the field names of transformers 5 and 4. Raises
    UserError if that class cannot express the config."""
    check_hf_support(config)
    # glm4_moe is always untied: with tied embeddings vLLM generates token 0 for ever (measured, version 0.32).
    tied = config.tie_word_embeddings and config.architecture != "glm4_moe"
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        **{name: getattr(config, name) for name in SAME_NAMES},
        "intermediate_size": config.moe_intermediate_size
        if config.architecture == "mixtral"
        else config.intermediate_size,
        **_rotary_fields(config),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        **_bias_fields(config),
        **_window_fields(config),
        **_moe_fields(config),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.end_of_text,
        "eos_token_id": tokenizer.message_end,
        "pad_token_id": tokenizer.end_of_text,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def check_hf_support(config: ModelConfig) -> None:
    """Raise UserError if the transformers class of this architecture cannot compute this config."""
    name, hf_class = config.architecture, CLASSES[config.architecture]
    has_head_norm = {"qwen3": True, "qwen3_moe": True, "glm4_moe": config.normalises_heads}.get(name, False)
    has_qkv_bias = {"qwen2": True, "qwen2_moe": config.has_qkv_bias, "glm4_moe": config.has_qkv_bias}.get(name, False)
    windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
    rules = [  # setting, whether it is unsupported, the allowed value
        ("qk_norm", config.normalises_heads != has_head_norm, "head" if has_head_norm else "none"),
        ("attention_bias", config.has_qkv_bias != has_qkv_bias, "qkv" if has_qkv_bias else "none"),
        ("partial_rotary_factor", config.partial_rotary_factor != 1 and name not in PARTIAL_ROTARY, 1),
        ("sliding_window", config.sliding_window > 0 and name in ("llama", "glm4_moe"), 0),
        ("sliding_window_layers", len(windows) > 1 and name in ("qwen3_moe", "mixtral"), "all layers"),
    ]
    for setting, unsupported, allowed in rules:
        if unsupported:
            got = getattr(config, setting)
            raise UserError(f"{hf_class} cannot express this shape", where=f"model.{setting}", got=got, wanted=allowed)


def _rotary_fields(config: ModelConfig) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    if config.rope_scaling != "none":
        scaling = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = config.rope_original_max_position_embeddings
    if config.rope_scaling == "llama3":
        scaling["low_freq_factor"] = config.rope_low_freq_factor
        scaling["high_freq_factor"] = config.rope_high_freq_factor
    if config.rope_scaling == "yarn":
        scaling["beta_fast"] = config.rope_beta_fast
        scaling["beta_slow"] = config.rope_beta_slow
        if config.rope_attention_factor:
            scaling["attention_factor"] = config.rope_attention_factor
    partial = {"partial_rotary_factor": config.partial_rotary_factor} if config.architecture in PARTIAL_ROTARY else {}
    fields: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        **partial,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **partial, **scaling},
    }
    if scaling:  # transformers 5 prefers rope_scaling to rope_parameters, so it must be complete
        fields["rope_scaling"] = {**scaling, **partial, "rope_theta": config.rope_theta}
    return fields


def _bias_fields(config: ModelConfig) -> dict[str, Any]:
    if config.architecture == "qwen2_moe":
        return {"qkv_bias": config.has_qkv_bias}
    if config.architecture == "glm4_moe":
        return {"attention_bias": config.has_qkv_bias, "use_qk_norm": config.normalises_heads}
    if config.architecture == "llama":
        return {"attention_bias": False, "mlp_bias": False}
    return {"attention_bias": False} if config.architecture in ("qwen3", "qwen3_moe") else {}


def _window_fields(config: ModelConfig) -> dict[str, Any]:
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    if config.architecture in ("llama", "glm4_moe"):
        return {}
    if config.architecture == "mixtral":
        return {"sliding_window": windows[0] or None}
    has_windows = any(windows)
    fields: dict[str, Any] = {
        "use_sliding_window": has_windows,
        "sliding_window": config.sliding_window if has_windows else None,
    }
    if config.architecture == "qwen3_moe":
        return fields
    layer_types = ["sliding_attention" if window else "full_attention" for window in windows]
    first = windows.index(config.sliding_window) if has_windows else config.num_hidden_layers
    return {**fields, "max_window_layers": first, "layer_types": layer_types}


def _moe_fields(config: ModelConfig) -> dict[str, Any]:
    name = config.architecture
    if not config.is_mixture:
        return {}
    fields: dict[str, Any] = {"num_experts_per_tok": config.num_experts_per_tok, "output_router_logits": False}
    if config.hidden_size % 8 or config.moe_intermediate_size % 8:  # torch's grouped matmul reads 16 bytes at a time
        fields["experts_implementation"] = "eager"
    if name == "mixtral":
        return {**fields, "num_local_experts": config.num_experts, "router_jitter_noise": 0.0}
    fields["moe_intermediate_size"] = config.moe_intermediate_size
    fields["norm_topk_prob"] = config.norm_topk_prob
    if name == "glm4_moe":
        return {
            **fields,
            "n_routed_experts": config.num_experts,
            "n_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
            "routed_scaling_factor": config.routed_scaling_factor,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": len(config.mlp_only_layers),
            "num_nextn_predict_layers": 0,
        }
    fields |= {"num_experts": config.num_experts, "decoder_sparse_step": 1}
    fields["mlp_only_layers"] = list(config.mlp_only_layers)
    if name == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    return fields

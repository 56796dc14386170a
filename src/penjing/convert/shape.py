"""Read a model config from a Hugging Face `config.json`; `convert/hf_config.py` writes one.

Every field that changes the result must be read or refused: one that we cannot compute is a `UserError` that names it.
Fields that only matter in training (dropout, router noise, loss coefficients) are ignored.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig

CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}


def _sizes(*, vocabulary: int, width: int, mlp: int, layers: int, heads: int, kv: int | None) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv}


# The defaults of each class for fields that config.json leaves out (transformers 5.23; tested). Only fields we read.
_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
}  # fmt: skip
_WINDOWED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_QWEN_DENSE = {**_COMMON, **_WINDOWED, **_sizes(vocabulary=151936, width=4096, mlp=22016, layers=32, heads=32, kv=32)}
_QWEN_MOE = {**_COMMON, "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {**_QWEN_DENSE, "head_dim": 128, "attention_bias": False},
    "qwen2": _QWEN_DENSE,
    "llama": {
        **_COMMON, **_sizes(vocabulary=32000, width=4096, mlp=11008, layers=32, heads=32, kv=None),
        "max_position_embeddings": 2048, "head_dim": None, "attention_bias": False, "mlp_bias": False,
    },
    "qwen3_moe": {
        **_QWEN_MOE, **_sizes(vocabulary=151936, width=2048, mlp=6144, layers=24, heads=32, kv=4),
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    },
    "qwen2_moe": {
        **_QWEN_MOE, **_WINDOWED, **_sizes(vocabulary=151936, width=2048, mlp=5632, layers=24, heads=16, kv=16),
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
        "num_experts": 60, "qkv_bias": True,
    },
    "mixtral": {
        **_COMMON, **_sizes(vocabulary=32000, width=4096, mlp=14336, layers=32, heads=32, kv=8), "rms_norm_eps": 1e-5,
        "head_dim": None, "max_position_embeddings": 131072, "sliding_window": None,
        "num_experts_per_tok": 2, "num_local_experts": 8,
    },
    "glm4_moe": {
        **_COMMON, **_sizes(vocabulary=151552, width=4096, mlp=10944, layers=46, heads=96, kv=8), "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "attention_bias": False, "use_qk_norm": False,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
}  # fmt: skip
COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
DEFAULT_THETA = {"mixtral": 1e6}  # rope_theta; the other classes have 10,000
PARTIAL_ROTARY = {"glm4_moe": 0.5}  # fraction of each head that RoPE rotates; the other classes always rotate all of it
# Alternative names of one field; the key is the name that DEFAULTS uses.
_SPELLINGS = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_local_experts": ("num_experts",),
    "n_routed_experts": ("num_local_experts", "num_experts"),
}


class _Fields:
    """A config.json, completed by the defaults of its class."""

    def __init__(self, raw: Mapping[str, Any], architecture: str, where: object) -> None:
        self.raw, self.defaults, self.where = raw, DEFAULTS[architecture], where

    def __getitem__(self, name: str) -> Any:
        for spelling in (name, *_SPELLINGS.get(name, ())):
            if spelling in self.raw:
                return self.raw[spelling]
        return self.defaults[name]

    def has(self, name: str) -> bool:
        return name in self.defaults

    def count(self, name: str) -> int:
        """A whole number of 0 or more."""
        value: Any = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"field {name} is no count", where=self.where, got=repr(value))
        return int(value)

    def number(self, name: str) -> float:
        return number(self[name], name, self.where)

    def unsupported(self, name: str, got: object, allowed: object) -> UserError:
        return UserError(f"{name} is not supported here", where=self.where, got=got, wanted=allowed)

    def require(self, name: str, expected: object) -> None:
        """Raise UserError if the class has the field and its value is not `expected`."""
        if self.has(name) and self[name] != expected:
            raise self.unsupported(name, repr(self[name]), repr(expected))


def number(value: object, name: str, where: object) -> float:
    """A finite number of a config.json."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"field {name} is no number", where=where, got=repr(value))
    return float(value)


def architecture_of(raw: Mapping[str, Any], where: object) -> str:
    """Our architecture for a config.json. Raises UserError that lists the supported ones for any other."""
    supported = ", ".join(CLASSES.values())
    name = str(raw.get("model_type"))
    classes = raw.get("architectures")
    if name not in CLASSES:
        got = classes[0] if isinstance(classes, list) and classes else name
        raise UserError("this kind of model is not supported", where=where, got=got, wanted=f"one of {supported}")
    if classes is not None and classes != [CLASSES[name]]:
        got = ", ".join(map(str, classes)) if isinstance(classes, list) else repr(classes)
        raise UserError("this class is not supported", where=where, got=got, wanted=CLASSES[name])
    return name


def config_from_hf(raw: Mapping[str, Any], where: object) -> ModelConfig:
    """The model config of a parsed config.json; a missing field has its class's default.

    where: the file, for messages. Raises UserError naming a field that we would compute differently: other activations,
    biases, rotary scalings, grouped routing, quantised weights.
    """
    architecture = architecture_of(raw, where)
    fields = _Fields(raw, architecture, where)
    if raw.get("quantization_config"):
        hint = "Use the model's original, unquantised weights."
        raise UserError("quantised weights are not supported", where=where, got="quantization_config", next_step=hint)
    fields.require("hidden_act", "silu")
    fields.require("mlp_bias", False)
    fields.require("n_group", 1)
    fields.require("topk_group", 1)
    if architecture != "glm4_moe":
        fields.require("attention_bias", False)
    counts: dict[str, Any] = {name: fields.count(name) for name in COUNTS}
    num_attention_heads = fields.count("num_attention_heads")
    num_key_value_heads = fields["num_key_value_heads"]
    head_dim = raw.get("head_dim", fields.defaults.get("head_dim"))
    if head_dim is None and num_attention_heads:
        head_dim = fields.count("hidden_size") // num_attention_heads
    return ModelConfig(
        preset="",
        architecture=architecture,  # type: ignore[arg-type]  # one of CLASSES
        **counts,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads if num_key_value_heads is None else fields.count("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        qk_norm="none" if architecture == "glm4_moe" and not fields["use_qk_norm"] else "auto",
        attention_bias=_attention_bias(fields, architecture),
        **_rotary(fields, architecture),
        **_windows(fields, architecture),
        **_moe(fields, architecture),
    )


def _attention_bias(fields: _Fields, architecture: str) -> Literal["auto", "qkv", "none"]:
    if architecture == "glm4_moe" and fields["attention_bias"]:
        return "qkv"
    return "none" if architecture == "qwen2_moe" and not fields["qkv_bias"] else "auto"


def _rotary(fields: _Fields, architecture: str) -> dict[str, Any]:
    """The rotary settings, from transformers 4's `rope_theta` and `rope_scaling` or 5's `rope_parameters`."""
    raw, where = fields.raw, fields.where
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = raw.get(field) or {}
    if not isinstance(scaling, Mapping):
        raise UserError(f"field {field} is no table", where=where, got=repr(scaling))
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UserError(f"{field} that differs between layers is not supported here", where=where)
    if scaling.get("mrope_section"):
        raise fields.unsupported(f"{field}.mrope_section", scaling["mrope_section"], "no such field")
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    default_fraction = PARTIAL_ROTARY.get(architecture, 1.0)
    fraction = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    fraction = default_fraction if fraction is None else number(fraction, "partial_rotary_factor", where)
    if architecture not in PARTIAL_ROTARY and fraction != 1:
        raise fields.unsupported("partial_rotary_factor", fraction, 1)
    theta = DEFAULT_THETA.get(architecture, 1e4) if theta is None else number(theta, "rope_theta", where)
    rope_type = scaling.get("rope_type", scaling.get("type")) or "default"
    settings: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": fraction}
    if rope_type == "default":
        return settings
    if rope_type not in ("linear", "llama3", "yarn"):
        raise fields.unsupported(f"{field}.rope_type", rope_type, "default, linear, llama3 or yarn")

    def scaling_value(name: str, default: float | None = None) -> float:
        value = scaling.get(name)
        if value is None and default is None:
            raise UserError(f"field {field}.{name} is missing", where=where)
        return number(default if value is None else value, f"{field}.{name}", where)

    max_tokens = fields.count("max_position_embeddings")
    settings["rope_scaling"] = rope_type
    if rope_type != "linear":
        original = raw.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
        original = max_tokens if original is None else original
        settings["rope_original_max_position_embeddings"] = int(
            number(original, "original_max_position_embeddings", where)
        )
    if rope_type != "yarn":
        settings["rope_factor"] = scaling_value("factor")
    if rope_type == "llama3":
        settings["rope_low_freq_factor"] = scaling_value("low_freq_factor")
        settings["rope_high_freq_factor"] = scaling_value("high_freq_factor")
    if rope_type == "yarn":
        if scaling.get("truncate", True) is not True:
            raise fields.unsupported(f"{field}.truncate", scaling["truncate"], True)
        factor = scaling_value("factor", max_tokens / max(1, settings["rope_original_max_position_embeddings"]))
        settings["rope_factor"] = factor
        # in transformers, too, 0 and null mean the defaults
        settings["rope_beta_fast"] = scaling_value("beta_fast", 32.0) or 32.0
        settings["rope_beta_slow"] = scaling_value("beta_slow", 1.0) or 1.0
        settings["rope_attention_factor"] = _attention_factor(scaling, factor, scaling_value)
    return settings


def _attention_factor(scaling: Mapping[str, Any], factor: float, scaling_value: Any) -> float:
    """YaRN's scale of queries and keys; 0 if it follows from the factor (arXiv:2309.00071, equation 22)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling_value("attention_factor"))
    if factor <= 1:
        return 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        upper, lower = (0.1 * scaling_value(name) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
        return float(upper / lower)
    return 0.0


def _windows(fields: _Fields, architecture: str) -> dict[str, Any]:
    """Sliding windows: in all layers or none for mixtral and qwen3_moe, per layer for the others."""
    if not fields.has("sliding_window"):
        return {}
    size = fields["sliding_window"]
    if fields.has("use_sliding_window") and not fields["use_sliding_window"]:
        size = None
    if fields.has("layer_types"):
        return _layer_windows(fields, architecture, size)
    return {"sliding_window": int(number(size, "sliding_window", fields.where))} if size is not None else {}


def _layer_windows(fields: _Fields, architecture: str, size: Any) -> dict[str, Any]:
    num_hidden_layers, layer_types = fields.count("num_hidden_layers"), fields["layer_types"]
    if layer_types is None:
        if size is None:
            return {}
        first_layer = fields.count("max_window_layers")
        if architecture == "qwen2_moe":  # every other layer, up to that one
            windowed = [layer for layer in range(num_hidden_layers) if layer % 2 == 0 and layer < first_layer]
        else:
            windowed = [layer for layer in range(num_hidden_layers) if layer >= first_layer]
    else:
        if not isinstance(layer_types, list) or len(layer_types) != num_hidden_layers:
            what = "field layer_types is not one entry a layer"
            raise UserError(what, where=fields.where, got=layer_types, wanted=f"{num_hidden_layers}")
        for layer_type in layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise fields.unsupported("layer_types", layer_type, "full_attention or sliding_attention")
        windowed = [layer for layer, layer_type in enumerate(layer_types) if layer_type == "sliding_attention"]
    if not windowed:
        return {}
    if size is None:
        raise UserError(
            "layer_types lists sliding_attention but no window is in use", where=fields.where, got="sliding_window null"
        )
    settings: dict[str, Any] = {"sliding_window": int(number(size, "sliding_window", fields.where))}
    if len(windowed) < num_hidden_layers:
        settings["sliding_window_layers"] = tuple(windowed)
    return settings


def _moe(fields: _Fields, architecture: str) -> dict[str, Any]:
    if architecture not in ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe"):
        return {}
    settings: dict[str, Any] = {"num_experts_per_tok": fields.count("num_experts_per_tok")}
    if architecture == "mixtral":
        return {
            **settings,
            "num_experts": fields.count("num_local_experts"),
            "moe_intermediate_size": fields.count("intermediate_size"),
        }
    settings["moe_intermediate_size"] = fields.count("moe_intermediate_size")
    settings["norm_topk_prob"] = bool(fields["norm_topk_prob"])
    num_hidden_layers = fields.count("num_hidden_layers")
    if architecture == "glm4_moe":
        num_dense = min(fields.count("first_k_dense_replace"), num_hidden_layers)
        return {
            **settings,
            "num_experts": fields.count("n_routed_experts"),
            "shared_expert_intermediate_size": fields.count("n_shared_experts") * settings["moe_intermediate_size"],
            "mlp_only_layers": tuple(range(num_dense)),
            "routed_scaling_factor": fields.number("routed_scaling_factor"),
        }
    sparse_step, dense_layers = fields.count("decoder_sparse_step") or 1, fields["mlp_only_layers"] or ()
    if architecture == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = fields.count("shared_expert_intermediate_size")
    return {
        **settings,
        "num_experts": fields.count("num_experts"),
        "mlp_only_layers": tuple(i for i in range(num_hidden_layers) if i in dense_layers or (i + 1) % sparse_step),
    }

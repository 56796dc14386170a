"""A model's shape from its `config.json`, for every stock class we equal; `convert/hf_config.py` writes one.

What a stock class computes must be read or refused: a field that changes the result and has no counterpart here is a
`UserError` that names it. Fields that only matter while training there (dropout, router noise, loss coefficients) are
not part of the shape and are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

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
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }


# What a class takes for a field that config.json leaves out (transformers 5.23; a test compares). Only fields we read.
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
_WINDOWED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_QWEN_DENSE = {
    **_COMMON,
    **_WINDOWED,
    **_sizes(vocabulary=151936, width=4096, mlp=22016, layers=32, heads=32, kv=32),
}
_QWEN_MIXTURE = {
    **_COMMON,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {**_QWEN_DENSE, "head_dim": 128, "attention_bias": False},
    "qwen2": _QWEN_DENSE,
    "llama": {
        **_COMMON,
        **_sizes(vocabulary=32000, width=4096, mlp=11008, layers=32, heads=32, kv=None),
        "max_position_embeddings": 2048,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen3_moe": {
        **_QWEN_MIXTURE,
        **_sizes(vocabulary=151936, width=2048, mlp=6144, layers=24, heads=32, kv=4),
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    "qwen2_moe": {
        **_QWEN_MIXTURE,
        **_WINDOWED,
        **_sizes(vocabulary=151936, width=2048, mlp=5632, layers=24, heads=16, kv=16),
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    "mixtral": {
        **_COMMON,
        "rms_norm_eps": 1e-5,
        **_sizes(vocabulary=32000, width=4096, mlp=14336, layers=32, heads=32, kv=8),
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "glm4_moe": {
        **_COMMON,
        "rms_norm_eps": 1e-5,
        **_sizes(vocabulary=151552, width=4096, mlp=10944, layers=46, heads=96, kv=8),
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
    },
}
DEFAULT_THETA = {"mixtral": 1e6}  # of the rotary frequencies; the others 10,000
PARTIAL_ROTARY = {"glm4_moe": 0.5}  # share of each head that is turned; the others turn all of it, and can do no less
# One thing, several names: the first is what DEFAULTS uses.
_SPELLINGS = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_local_experts": ("num_experts",),
    "n_routed_experts": ("num_local_experts", "num_experts"),
}


class ControlIds(Protocol):
    """What a config.json says of the tokenizer."""

    @property
    def end_of_text(self) -> int: ...

    @property
    def message_end(self) -> int: ...


class _Fields:
    """A config.json beside its class's defaults."""

    def __init__(self, given: Mapping[str, Any], architecture: str, where: object) -> None:
        self.given, self.defaults, self.where = given, DEFAULTS[architecture], where

    def __getitem__(self, name: str) -> Any:
        for spelling in (name, *_SPELLINGS.get(name, ())):
            if spelling in self.given:
                return self.given[spelling]
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

    def refuse(self, name: str, got: object, wanted: object) -> UserError:
        return UserError(f"{name} is not supported here", where=self.where, got=got, wanted=wanted)

    def must_be(self, name: str, wanted: object) -> None:
        """Refuse the field if the class has it and it says something else."""
        if self.has(name) and self[name] != wanted:
            raise self.refuse(name, repr(self[name]), repr(wanted))


def number(value: object, name: str, where: object) -> float:
    """A finite number of a config.json."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"field {name} is no number", where=where, got=repr(value))
    return float(value)


def architecture_of(given: Mapping[str, Any], where: object) -> str:
    """Which of our architectures a config.json describes; raises UserError that lists them if none."""
    supported = ", ".join(CLASSES.values())
    name = str(given.get("model_type"))
    classes = given.get("architectures")
    if name not in CLASSES:
        listed = classes[0] if isinstance(classes, list) and classes else name
        raise UserError("this kind of model is not supported", where=where, got=listed, wanted=f"one of {supported}")
    if classes is not None and classes != [CLASSES[name]]:
        got = ", ".join(map(str, classes)) if isinstance(classes, list) else repr(classes)
        raise UserError("this class is not supported", where=where, got=got, wanted=CLASSES[name])
    return name


def config_from_hf(given: Mapping[str, Any], where: object) -> ModelConfig:
    """The shape that a parsed config.json describes; a field left out has its class's default.

    where: the file, for messages. Raises UserError naming the field for everything that would be computed otherwise
    here: other activations, biases, rotary scalings, grouped routing, quantised weights.
    """
    architecture = architecture_of(given, where)
    fields = _Fields(given, architecture, where)
    if given.get("quantization_config"):
        raise UserError(
            "quantised weights are not supported",
            where=where,
            got="quantization_config",
            next_step="Use the model's original, unquantised weights.",
        )
    fields.must_be("hidden_act", "silu")
    fields.must_be("mlp_bias", False)
    fields.must_be("n_group", 1)
    fields.must_be("topk_group", 1)
    if architecture != "glm4_moe":
        fields.must_be("attention_bias", False)
    num_attention_heads = fields.count("num_attention_heads")
    num_key_value_heads = fields["num_key_value_heads"]
    head_dim = given.get("head_dim", fields.defaults.get("head_dim"))
    if head_dim is None and num_attention_heads:
        head_dim = fields.count("hidden_size") // num_attention_heads
    return ModelConfig(
        preset="",
        architecture=architecture,  # type: ignore[arg-type]  # one of CLASSES
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        num_hidden_layers=fields.count("num_hidden_layers"),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads if num_key_value_heads is None else fields.count("num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        qk_norm=_query_key_norm(fields, architecture),
        attention_bias=_attention_bias(fields, architecture),
        **_rotary(fields, architecture),
        **_windows(fields, architecture),
        **_mixture(fields, architecture),
    )


def _query_key_norm(fields: _Fields, architecture: str) -> Literal["auto", "none"]:
    return "none" if architecture == "glm4_moe" and not fields["use_qk_norm"] else "auto"


def _attention_bias(fields: _Fields, architecture: str) -> Literal["auto", "qkv", "none"]:
    if architecture == "glm4_moe" and fields["attention_bias"]:
        return "qkv"
    return "none" if architecture == "qwen2_moe" and not fields["qkv_bias"] else "auto"


def _rotary(fields: _Fields, architecture: str) -> dict[str, Any]:
    """The rotary settings, from transformers 4's `rope_theta` and `rope_scaling` or 5's `rope_parameters`."""
    given, where = fields.given, fields.where
    named = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    scaling = given.get(named) or {}
    if not isinstance(scaling, Mapping):
        raise UserError(f"field {named} is no table", where=where, got=repr(scaling))
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UserError(f"{named} that differs between layers is not supported here", where=where)
    if scaling.get("mrope_section"):
        raise fields.refuse(f"{named}.mrope_section", scaling["mrope_section"], "no such field")
    theta = scaling.get("rope_theta", given.get("rope_theta"))
    whole = PARTIAL_ROTARY.get(architecture, 1.0)
    fraction = scaling.get("partial_rotary_factor", given.get("partial_rotary_factor"))
    fraction = whole if fraction is None else number(fraction, "partial_rotary_factor", where)
    if architecture not in PARTIAL_ROTARY and fraction != 1:
        raise fields.refuse("partial_rotary_factor", fraction, 1)
    theta = DEFAULT_THETA.get(architecture, 1e4) if theta is None else number(theta, "rope_theta", where)
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    found: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": fraction}
    if kind == "default":
        return found
    if kind not in ("linear", "llama3", "yarn"):
        raise fields.refuse(f"{named}.rope_type", kind, "default, linear, llama3 or yarn")

    def part(name: str, default: float | None = None) -> float:
        value = scaling.get(name)
        if value is None and default is None:
            raise UserError(f"field {named}.{name} is missing", where=where)
        return number(default if value is None else value, f"{named}.{name}", where)

    max_tokens = fields.count("max_position_embeddings")
    found["rope_scaling"] = kind
    if kind != "linear":
        original = given.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
        original = max_tokens if original is None else original
        found["rope_original_max_position_embeddings"] = int(
            number(original, "original_max_position_embeddings", where)
        )
    if kind != "yarn":
        found["rope_factor"] = part("factor")
    if kind == "llama3":
        found["rope_low_freq_factor"] = part("low_freq_factor")
        found["rope_high_freq_factor"] = part("high_freq_factor")
    if kind == "yarn":
        if scaling.get("truncate", True) is not True:
            raise fields.refuse(f"{named}.truncate", scaling["truncate"], True)
        factor = part("factor", max_tokens / max(1, found["rope_original_max_position_embeddings"]))
        found["rope_factor"] = factor
        # 0 and null stand for the usual values there too
        found["rope_beta_fast"] = part("beta_fast", 32.0) or 32.0
        found["rope_beta_slow"] = part("beta_slow", 1.0) or 1.0
        found["rope_attention_factor"] = _attention_factor(scaling, factor, part)
    return found


def _attention_factor(scaling: Mapping[str, Any], factor: float, part: Any) -> float:
    """YaRN's scale of queries and keys; 0 where it follows from the factor (arXiv:2309.00071, equation 22)."""
    if scaling.get("attention_factor") is not None:
        return float(part("attention_factor"))
    if factor <= 1:
        return 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        upper, lower = (0.1 * part(name) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
        return float(upper / lower)
    return 0.0


def _windows(fields: _Fields, architecture: str) -> dict[str, Any]:
    """Sliding windows: mixtral and qwen3_moe have them everywhere or nowhere, the others by layer."""
    if not fields.has("sliding_window"):
        return {}
    size = fields["sliding_window"]
    if fields.has("use_sliding_window") and not fields["use_sliding_window"]:
        size = None
    if fields.has("layer_types"):
        return _layer_windows(fields, architecture, size)
    return {"sliding_window": int(number(size, "sliding_window", fields.where))} if size is not None else {}


def _layer_windows(fields: _Fields, architecture: str, size: Any) -> dict[str, Any]:
    num_hidden_layers, kinds = fields.count("num_hidden_layers"), fields["layer_types"]
    if kinds is None:
        if size is None:
            return {}
        first = fields.count("max_window_layers")
        if architecture == "qwen2_moe":  # every other layer, up to that one
            windowed = [layer for layer in range(num_hidden_layers) if layer % 2 == 0 and layer < first]
        else:
            windowed = [layer for layer in range(num_hidden_layers) if layer >= first]
    else:
        if not isinstance(kinds, list) or len(kinds) != num_hidden_layers:
            raise UserError(
                "field layer_types is not one entry a layer",
                where=fields.where,
                got=kinds,
                wanted=f"{num_hidden_layers}",
            )
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.refuse("layer_types", kind, "full_attention or sliding_attention")
        windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not windowed:
        return {}
    if size is None:
        raise UserError(
            "layer_types lists sliding_attention but no window is in use", where=fields.where, got="sliding_window null"
        )
    found: dict[str, Any] = {"sliding_window": int(number(size, "sliding_window", fields.where))}
    if len(windowed) < num_hidden_layers:
        found["sliding_window_layers"] = tuple(windowed)
    return found


def _mixture(fields: _Fields, architecture: str) -> dict[str, Any]:
    if architecture not in ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe"):
        return {}
    found: dict[str, Any] = {"num_experts_per_tok": fields.count("num_experts_per_tok")}
    if architecture == "mixtral":
        return {
            **found,
            "num_experts": fields.count("num_local_experts"),
            "moe_intermediate_size": fields.count("intermediate_size"),
        }
    found["moe_intermediate_size"] = fields.count("moe_intermediate_size")
    found["norm_topk_prob"] = bool(fields["norm_topk_prob"])
    num_hidden_layers = fields.count("num_hidden_layers")
    if architecture == "glm4_moe":
        leading = min(fields.count("first_k_dense_replace"), num_hidden_layers)
        return {
            **found,
            "num_experts": fields.count("n_routed_experts"),
            "shared_expert_intermediate_size": fields.count("n_shared_experts") * found["moe_intermediate_size"],
            "mlp_only_layers": tuple(range(leading)),
            "routed_scaling_factor": fields.number("routed_scaling_factor"),
        }
    every, dense = fields.count("decoder_sparse_step") or 1, fields["mlp_only_layers"] or ()
    if architecture == "qwen2_moe":
        found["shared_expert_intermediate_size"] = fields.count("shared_expert_intermediate_size")
    return {
        **found,
        "num_experts": fields.count("num_experts"),
        "mlp_only_layers": tuple(layer for layer in range(num_hidden_layers) if layer in dense or (layer + 1) % every),
    }

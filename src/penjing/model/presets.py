"""Known model shapes by name, and a ladder of sizes. `penjing show models` prints them with their exact counts."""

import math
from functools import lru_cache

from penjing.base.errors import UserError

_COLUMNS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip


def _shape(*sizes: int, **more: object) -> dict[str, object]:
    """sizes: in the order of _COLUMNS. more: further settings that differ from ModelConfig's defaults."""
    return {**dict(zip(_COLUMNS, sizes, strict=True)), **more}


def _llama(*sizes: int, **more: object) -> dict[str, object]:
    return _shape(*sizes, architecture="llama", **more)


_TINY = {"rope_theta": 1e4, "rms_norm_eps": 1e-6}
_LLAMA_3 = {"rope_theta": 5e5, "rope_scaling": "llama3", "rope_factor": 32.0}
_MINIMIND_3 = (6400, 768, 8, 8, 4, 96, 2432, 32768)

PRESETS: dict[str, dict[str, object]] = {
    # For the quickstart, on two CPU cores. Query heads as wide as the model instead of narrow ones: they can match any
    # token with itself, and copying from context is learned far sooner. Two of them, which share keys and values, learn
    # more from a token than one with a wider MLP, and cost 9 % more time (docs/log.md).
    "tiny": _shape(2048, 128, 4, 2, 1, 128, 256, 1024, **_TINY),
    # A mixture of experts of its size: each token uses an inner width of 384, a third of it in the shared expert.
    "tiny-moe": _shape(
        *(2048, 128, 4, 1, 1, 128, 384, 1024), **_TINY, architecture="glm4_moe", num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, mlp_only_layers=(0,),
    ),
    "27m": _llama(6400, 512, 8, 16, 8, 32, 1408, 512, rope_theta=1e4),  # MiniMind 1 small: 26.88 M
    "26m": _llama(6400, 512, 8, 8, 2, 64, 1408, 32768),  # MiniMind 2 small: 25.83 M
    "64m": _shape(*_MINIMIND_3, rms_norm_eps=1e-6),  # MiniMind 3: 63.91 M
    "104m": _llama(6400, 768, 16, 8, 2, 96, 2048, 32768),  # MiniMind 2: 104.03 M
    # MiniMind 2 MoE: 145.03 M, four routed experts (two a token) and a shared one. Its router is a softmax; this one
    # is a sigmoid balanced by bias, as in the stock class that vLLM and llama.cpp support.
    "145m-moe": _shape(
        *(6400, 640, 8, 8, 2, 80, 1728, 32768), architecture="glm4_moe", qk_norm="none", num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=1728, shared_expert_intermediate_size=1728,
    ),
    # MiniMind 3 MoE: 198.42 M, of which a token uses 63.94 M: four routed experts, one a token, none shared.
    "198m-moe": _shape(
        *_MINIMIND_3, rms_norm_eps=1e-6, architecture="qwen3_moe", num_experts=4, num_experts_per_tok=1,
        moe_intermediate_size=2432,
    ),
    # GPT-2's width, depth, heads and vocabulary, in the Llama layout: 123.55 M.
    "gpt2-124m": _llama(50257, 768, 12, 12, 12, 64, 2048, 1024, rope_theta=1e4),
    "smollm2-135m": _llama(49152, 576, 30, 9, 3, 64, 1536, 8192, rope_theta=1e5),
    "qwen3-0.6b": _shape(151936, 1024, 28, 16, 8, 128, 3072, 40960, rms_norm_eps=1e-6),
    "tinyllama-1.1b": _llama(32000, 2048, 22, 32, 4, 64, 5632, 2048, rope_theta=1e4, tie_word_embeddings=False),
    # Llama 3.2's 1B: 1.24 B.
    "llama3.2-1b": _llama(
        *(128256, 2048, 16, 32, 8, 64, 8192, 131072), **_LLAMA_3, rope_original_max_position_embeddings=8192
    ),
}  # fmt: skip

LADDER = ("1m", "3m", "10m", "30m", "100m", "300m", "1b")
_LADDER_PREFIX = "ladder-"
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9}
# (largest number of parameters, vocabulary). The best vocabulary grows with the model, but more slowly
# (arXiv:2407.13623: as N^0.83).
_VOCABULARIES = ((2e6, 2048), (5e6, 4096), (2e8, 6400), (6e8, 16384), (math.inf, 32768))
_ASPECT = 64  # width / depth; better than 128 on small models (nanochat's log)
_MIN_LAYERS = 4


def named(name: str) -> dict[str, object] | None:
    """The settings of a preset or a ladder size; None if the name is unknown."""
    if name.startswith(_LADDER_PREFIX):
        return ladder(read_size(name.removeprefix(_LADDER_PREFIX)))
    return PRESETS.get(name)


def names() -> list[str]:
    """All names, the ladder's last; other ladder sizes, such as `ladder-45m`, are valid too."""
    return [*PRESETS, *(_LADDER_PREFIX + rung for rung in LADDER)]


def read_size(text: str) -> float:
    """`30m` -> 30 million parameters. Raises UserError unless it is a size from 500k to 3b."""
    try:
        size = float(text[:-1]) * _SUFFIXES[text[-1:].lower()]
    except (ValueError, KeyError):
        size = 0.0
    if not 5e5 <= size <= 3e9:
        raise UserError("no such size", where="model.preset", got=repr(text), wanted="500k to 3b, such as 30m")
    return size


@lru_cache(maxsize=64)
def ladder(num_parameters: float) -> dict[str, object]:
    """The shape of a model of about this total number of parameters.

    Width is 64 times depth, with at least 4 layers; the MLP is 8/3 times the width; heads have 128 dimensions (64 in
    narrow models), and up to four share a key/value head. The nearest such shape is within 8 % of the requested size.
    """
    vocabulary = next(size for limit, size in _VOCABULARIES if num_parameters <= limit)

    def shape(layers: int, width: int) -> dict[str, object]:
        head = 128 if width >= 512 else 64
        heads = width // head
        groups = next(kv for kv in range(1, heads + 1) if heads % kv == 0 and heads // kv <= 4)
        inner, positions = round(width * 8 / 3 / 64) * 64, 32768 if num_parameters > 5e6 else 4096
        return _shape(vocabulary, width, layers, heads, groups, head, inner, positions, rms_norm_eps=1e-6)

    def count(layers: int, width: int) -> float:
        config = shape(layers, width)
        heads, kv = int(str(config["num_attention_heads"])), int(str(config["num_key_value_heads"]))
        attention = 2 * width * (heads + kv) * (128 if width >= 512 else 64)
        return vocabulary * width + layers * (attention + 3 * width * int(str(config["intermediate_size"])))

    def distance(candidate: tuple[int, int]) -> float:
        layers, width = candidate
        error = abs(math.log(count(layers, width) / num_parameters))
        return 8 * error + abs(math.log(width / layers / _ASPECT))

    widths = [*range(64, 512, 64), *range(512, 4096, 128)]
    layers, width = min(((layers, width) for layers in range(_MIN_LAYERS, 49) for width in widths), key=distance)
    return shape(layers, width)

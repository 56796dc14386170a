"""Twenty models, counted by closed form, by `numel` and by torch's FLOP counter: the same to the last one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from published_rows import MaterialisedWork
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from penjing.kernels import experts
from penjing.model import block
from penjing.model.config import ModelConfig
from penjing.model.lora import Lora, add_adapter
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer
from penjing.plan.flops import components, mean_keys, parameters, training_flops_per_token, windowed_keys
from penjing.plan.shape import shape_of
from penjing.plan.step_workload import Workload
from penjing.plan.trainable import trainable_of

ROWS, TOKENS = 2, 32
BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TWENTY = {
    "plain": {},
    "llama": {"architecture": "llama"},
    "qwen2 with biases": {"architecture": "qwen2"},
    "untied": {"tie_word_embeddings": False},
    "untied llama": {"architecture": "llama", "tie_word_embeddings": False},
    "two key heads": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 24},
    "narrow heads, grouped": {"head_dim": 8, "num_key_value_heads": 2},
    "one layer": {"num_hidden_layers": 1},
    "deep and thin": {"num_hidden_layers": 7, "hidden_size": 32, "intermediate_size": 80},
    "large vocabulary": {"vocab_size": 1021},
    "window": {"sliding_window": 8},
    "window in one layer": {"sliding_window": 8, "sliding_window_layers": (1,), "num_key_value_heads": 2},
    "window, untied": {"architecture": "qwen2", "sliding_window": 16, "tie_word_embeddings": False},
    "experts": {"architecture": "qwen3_moe", **EXPERTS},
    "experts, first layer dense": {
        "architecture": "qwen3_moe",
        **EXPERTS,
        "mlp_only_layers": (0,),
        "num_key_value_heads": 2,
    },
    "shared experts": {
        "architecture": "glm4_moe",
        **EXPERTS,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": (0,),
    },
    "two shared experts, untied": {
        "architecture": "glm4_moe",
        **EXPERTS,
        "shared_expert_intermediate_size": 96,
        "tie_word_embeddings": False,
    },
    "mixtral": {"architecture": "mixtral", **EXPERTS, "tie_word_embeddings": False, "num_key_value_heads": 2},
}


def counted(model: Transformer, vocabulary: int) -> float:
    """FLOPs of one forward and backward pass. The plain attention kernel works on all T x T pairs."""
    ids_BT = torch.randint(0, vocabulary, (ROWS, TOKENS))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        found = model(ids_BT, score=CrossEntropy(ids_BT.flatten(), torch.ones(ids_BT.numel())))
        (found[0] if isinstance(found, tuple) else found).backward()
    return counter.get_total_flops()


@pytest.fixture
def no_padding(monkeypatch):
    """Rows that only fill up a lot are not work the model asks for."""
    monkeypatch.setattr(experts, "rows_per_tile", lambda pairs, num_experts: 1)


def full_square(config: ModelConfig) -> float:
    return training_flops_per_token(config, TOKENS, window_keys=TOKENS) * ROWS * TOKENS


@pytest.mark.parametrize("name", TWENTY)
def test_twenty_models_are_counted_exactly(name, no_padding):
    config = ModelConfig(**{**BASE, **TWENTY[name]})
    model = Transformer(config)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert numel == parameters(config).total == sum(components(config).values()) == shape_of(config).parameters
    assert components(config)["embedding"] == model.embed.weight.numel()
    assert counted(model, config.vocab_size) == full_square(config)
    assert shape_of(config).matrices == parameters(config).matrices


def test_there_are_twenty():
    assert len(TWENTY) == 20


@pytest.mark.parametrize("name", ["plain", "shared experts", "window in one layer"])
def test_checkpointed_blocks_are_computed_once_more(name, no_padding, monkeypatch):
    config = ModelConfig(**{**BASE, **TWENTY[name]})
    model = Transformer(config)
    forward = block.Block.forward

    def twice(self, *given, **named):
        return checkpoint(forward, self, *given, use_reentrant=False, **named)

    monkeypatch.setattr(block.Block, "forward", twice)
    plain = {"shape": shape_of(config), "tokens": ROWS * TOKENS, "seq_len": TOKENS, "keys": TOKENS}
    work = MaterialisedWork(**plain, recompute="block")
    with set_checkpoint_early_stop(False):  # else torch leaves out the block's last matmul, whose result nobody reads
        assert counted(model, config.vocab_size) == work.matmul_flops() + work.attention_flops()


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2}, {"tie_word_embeddings": False}])
def test_the_workload_has_the_same_products(options):
    """What the time of a step is made of holds the same FLOPs as the count of the model."""
    config = ModelConfig(**{**BASE, **options})
    work = Workload(shape=shape_of(config), tokens=ROWS * TOKENS, seq_len=TOKENS, keys=TOKENS / 2)
    assert work.matmul_flops() == 6 * parameters(config).matrices * ROWS * TOKENS
    plain = MaterialisedWork(**vars(work))
    assert plain.matmul_flops() + plain.attention_flops() == full_square(config)
    # A fused kernel does the causal half, and its two forward matmuls are five backward ones and not four.
    assert work.attention_flops() == 7 / 6 * plain.attention_flops() / 2


def test_the_workload_of_a_mixture_and_of_adapters():
    config = ModelConfig(**{**BASE, **TWENTY["shared experts"]})
    work = Workload(shape=shape_of(config), tokens=64, seq_len=32, keys=16)
    assert work.matmul_flops() == 6 * parameters(config).matrices * 64
    config = ModelConfig(**BASE)
    model = Transformer(config)
    add_adapter(model, Lora(rank=4), seed=0)
    adapters = sum(p.numel() for name, p in model.named_parameters() if ".adapters." in name)
    part = trainable_of(model, config)
    frozen = Workload(shape=shape_of(config), tokens=64, seq_len=32, keys=16, trainable=part)
    # Two passes of the frozen matrices, but of the first layer's q, k and v, which pass no gradient on, one; the
    # adapters' own matmuls are too small for a term of their own.
    first = (
        sum(
            layer.weight.numel()
            for layer in vars(model.blocks[0].attention)["_modules"].values()
            if getattr(layer, "in_features", 0)
        )
        - model.blocks[0].attention.o_proj.weight.numel()
    )
    assert frozen.matmul_flops() == pytest.approx((4 * parameters(config).matrices - 2 * first) * 64)
    assert frozen.trained == adapters


def keys_seen(lengths: list[int], seq_len: int, window: int) -> float:
    """On average, each query counted: documents are cut at the row, and a window hides what lies before it."""
    seen = [position % seq_len + 1 for length in lengths for position in range(length)]
    return sum(min(keys, window or keys) for keys in seen) / len(seen)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 31, 100])
@pytest.mark.parametrize("length", [1, 5, 16, 32])
def test_windowed_keys_of_documents_of_one_length_are_exact(length, window):
    mean = mean_keys(np.array([length] * 3), 32)
    assert windowed_keys(mean, window) == pytest.approx(keys_seen([length] * 3, 32, window))


@pytest.mark.parametrize("window", [2, 8, 16])
def test_windowed_keys_of_other_documents_are_an_upper_bound(window):
    lengths = [3, 40, 16, 1, 17]
    plain = mean_keys(np.array(lengths), 64)
    assert keys_seen(lengths, 64, window) < windowed_keys(plain, window) < min(plain, window)


def test_a_window_is_counted_in_the_layers_that_have_it():
    config = ModelConfig(**{**BASE, **TWENTY["window in one layer"]})
    whole, inside = (keys_seen([TOKENS], TOKENS, window) for window in (0, config.sliding_window))
    work = Workload(shape=shape_of(config), tokens=TOKENS, seq_len=TOKENS, keys=whole)
    assert work.layer_keys() == pytest.approx([whole, inside, whole])
    assert training_flops_per_token(config, whole) == training_flops_per_token(config, whole, window_keys=inside)
    assert inside < config.sliding_window < whole


def test_both_conventions_on_a_known_model():
    """nanoGPT's rule, 6 N + 12 L H K T with N without positions, on GPT-2's width, depth and vocabulary."""
    config = ModelConfig(**ModelConfig.named("gpt2-124m"))
    matrices, per_key = parameters(config).matrices, 12 * 12 * 768
    assert training_flops_per_token(config, 1024) == 6 * matrices + per_key * 1024
    assert training_flops_per_token(config, 1025 / 2) == 6 * matrices + per_key * 1025 / 2

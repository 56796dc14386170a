"""The closed forms against what a counter sees in the built model, and against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from penjing.model.config import ModelConfig
from penjing.model.freeze import freeze
from penjing.model.lora import Lora, add_adapter
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer
from penjing.plan.flops import mean_keys, training_flops_per_token
from penjing.plan.trainable import trainable_from_settings, trainable_of

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}


def test_flops_of_adapters_leave_out_the_frozen_matrices():
    """Three passes of attention and adapters, two of the frozen matrices; the frozen table gets no gradient either."""
    config = ModelConfig(**SMALL)
    model = Transformer(config)
    add_adapter(model, Lora(rank=4), seed=0)
    ids_BT = torch.randint(0, 300, (2, 32))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids_BT, score=CrossEntropy(ids_BT.flatten(), torch.ones(64))).backward()
    stated = training_flops_per_token(config, num_keys=32, trainable=trainable_of(model, config)) * 64
    # The counter does not know matmuls that are added in place: B in the forward pass, A's in the gradient of x.
    outputs, inputs = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64), 2 * (4 * 64 + 2 * 64 + 96) - 3 * 64
    assert counter.get_total_flops() + 2 * 64 * 4 * (outputs + inputs) == stated
    one_more = training_flops_per_token(config, num_keys=32, extra_forwards=1.0)
    assert one_more == pytest.approx(training_flops_per_token(config, num_keys=32) * 4 / 3)


FROZEN = {
    "nothing": (),
    "the table, which is also the head": ("embed.*",),
    "what lies below the second block": ("embed.*", "blocks.0.*"),
    "all but the head's norm": ("embed.*", "blocks.*"),
    "all but the last mlp's output": (
        "embed.*",
        "blocks.0.*",
        "blocks.1.*norm*",
        "blocks.1.*[qkvoe]_proj*",
        "*up_proj*",
    ),
    "matrices above one that learns": ("blocks.1.mlp.*",),
}


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("what", FROZEN)
def test_flops_with_frozen_parameters_are_what_a_counter_counts(what, tie_word_embeddings):
    config = ModelConfig(**{**SMALL, "tie_word_embeddings": tie_word_embeddings})
    model = Transformer(config)
    freeze(model, FROZEN[what])
    ids_BT = torch.randint(0, 300, (2, 32))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids_BT, score=CrossEntropy(ids_BT.flatten(), torch.ones(64))).backward()
    stated = training_flops_per_token(config, num_keys=32, trainable=trainable_of(model, config)) * 64
    assert stated == counter.get_total_flops()
    assert trainable_from_settings(config, Lora(), FROZEN[what]) == (
        trainable_of(model, config) if FROZEN[what] else None
    )


@given(
    some.lists(some.integers(1, 40), min_size=1, max_size=12),
    some.integers(1, 17),
)
@settings(max_examples=80, deadline=None)
def test_mean_keys_counts_every_query(lengths, seq_len):
    seen = [position % seq_len + 1 for length in lengths for position in range(length)]
    assert mean_keys(np.array(lengths), seq_len) == pytest.approx(sum(seen) / len(seen))


def test_mean_keys_of_one_long_document_is_half_a_row():
    assert mean_keys(np.array([1 << 20]), 1024) == 1025 / 2
    assert mean_keys(np.array([], dtype=np.int64), 1024) == 1025 / 2


def test_more_keys_cost_only_attention():
    config = ModelConfig(**SMALL)
    per_key = training_flops_per_token(config, 101) - training_flops_per_token(config, 100)
    assert per_key == 3 * 2 * 2 * 2 * 4 * 16  # three passes, scores and mixing, 2 per multiply-add, L, H, K

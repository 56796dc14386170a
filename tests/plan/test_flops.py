"""The closed forms against what a counter sees in the built model, and against counting one by one."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from penjing.kernels import experts
from penjing.model.config import ModelConfig
from penjing.model.freeze import freeze
from penjing.model.lora import Lora, add_adapter
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer
from penjing.plan.flops import mean_keys, parameters, training_flops_per_token
from penjing.plan.run_estimate import ProbeTimings, RunEstimate, RunSize, estimate_memory_bytes, estimate_run
from penjing.plan.step_time import LinearFit
from penjing.plan.time_interval import ProbeNoise, time_interval
from penjing.plan.trainable import trainable_by, trainable_of

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}


@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 4}, {"architecture": "llama", "tie_word_embeddings": False}, {"head_dim": 24}],
)
def test_flops_of_a_step_are_what_a_counter_counts(options):
    rows, num_tokens = 2, 32
    config = ModelConfig(**{**SMALL, **options})
    model = Transformer(config)
    ids_BT = torch.randint(0, 300, (rows, num_tokens))
    # The plain attention kernel is made of matmuls the counter knows. It works on all T x T pairs, masked or not:
    # each query is counted with T keys. Everything else must agree to the last operation.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids_BT, score=CrossEntropy(ids_BT.flatten(), torch.ones(ids_BT.numel()))).backward()
    expected = training_flops_per_token(config, num_keys=num_tokens) * rows * num_tokens
    assert counter.get_total_flops() == expected
    counts = counter.get_flop_counts()["Global"]
    matmuls = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)  # the latter add to another's gradient
    assert matmuls == 6 * parameters(config).matrices * rows * num_tokens


def test_flops_of_a_mixture_are_those_of_the_experts_a_token_goes_through(monkeypatch):
    monkeypatch.setattr(
        experts, "rows_per_tile", lambda pairs, num_experts: 1
    )  # empty rows are not work the model asks for
    options = {"architecture": "glm4_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = ModelConfig(**{**SMALL, **options, "shared_expert_intermediate_size": 48, "mlp_only_layers": (0,)})
    model = Transformer(config)
    ids_BT = torch.randint(0, 300, (2, 32))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids_BT, score=CrossEntropy(ids_BT.flatten(), torch.ones(ids_BT.numel())))[0].backward()
    assert counter.get_total_flops() == training_flops_per_token(config, num_keys=32) * 64


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
    assert trainable_by(config, Lora(), FROZEN[what]) == (trainable_of(model, config) if FROZEN[what] else None)


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


def test_memory_estimate_is_of_the_right_size():
    config = ModelConfig(**ModelConfig.named("26m"))
    size = parameters(config).total
    adamw = estimate_memory_bytes(config, 8 * 512, 8)
    assert 16 * size < adamw < 16 * size + 4 * 2**30
    assert estimate_memory_bytes(config, 16 * 512, 8) > adamw
    assert adamw - estimate_memory_bytes(config, 8 * 512, 4) == 4 * size
    activations = [estimate_memory_bytes(config, tokens, 8) for tokens in (0, 1000, 2000)]
    assert activations[2] - activations[1] == activations[1] - activations[0]


def test_the_estimate_covers_what_the_backward_pass_keeps():
    """Every tensor autograd saves, in float32, counted once; the estimate may exceed it by no more than half."""
    config = ModelConfig(**{**SMALL, "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 352})
    model = Transformer(config)
    ids_BT = torch.randint(0, 300, (4, 64))
    mine = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        total = model(ids_BT, score=CrossEntropy(ids_BT.flatten(), torch.ones(256)))
    assert total.requires_grad
    estimate = estimate_memory_bytes(config, 256, 8) - estimate_memory_bytes(config, 0, 8)
    assert 0.7 < estimate / sum(storages.values()) < 1.5


def test_a_bill_by_hand():
    config = ModelConfig(**SMALL)
    bill = estimate_run(
        config,
        trainable=10,
        flops_per_token=training_flops_per_token(config, 9.0),
        flops_per_token_full_square=training_flops_per_token(config, 16.0),
        size=RunSize(
            units_per_epoch=50,
            tokens_per_unit=16.0,
            units_per_step=4,
            micro_tokens=64,
            steps=25,
            validations=2,
            checkpoints=4,
            samples=8,
        ),
        timings=ProbeTimings(
            step_seconds=2.0,
            wait_seconds=0.5,
            validation_seconds=3.0,
            checkpoint_seconds=1.0,
            last_checkpoint_seconds=3.0,
            sample_seconds=0.25,
            startup_seconds=9.0,
            noise=ProbeNoise(spread=0.4, num_timed=16),
            line=LinearFit(0.5, 0.75),
        ),
        optimizer_bytes_per_parameter=8,
        errors=[0.3],
    )
    assert bill.tokens_per_step == 64
    assert bill.tokens == 1600
    assert bill.tokens_per_epoch == 800
    assert bill.epochs == 2.0
    assert bill.predicted_seconds == 25 * 2 + 2 * 3 + (3 * 1 + 3) + 8 * 0.25 == 64
    assert bill.parts_seconds == {"training": 50, "validation": 6, "checkpoint": 6, "sample": 2}
    assert bill.step_parts_seconds == {"compute": 1.5, "data_wait": 0.5}
    interval = time_interval(64, ProbeNoise(spread=0.4, num_timed=16), [0.3])
    assert (bill.predicted_seconds_low, bill.predicted_seconds_high) == interval
    assert (bill.probe["fixed_seconds"], bill.probe["pass_seconds"], bill.probe["spread"]) == (0.5, 0.75, 0.4)
    assert bill.tokens_per_second == 32
    assert bill.flops == 1600 * training_flops_per_token(config, 9.0)
    assert bill.predicted_peak_memory_bytes == estimate_memory_bytes(config, 64, 8)
    assert bill.parameters == parameters(config).total
    assert bill.level == "L2"
    assert RunEstimate.from_dict(asdict(bill)) == bill

"""One object decides the number formats of a run; plans ask it about cards that are not here."""

import pytest
import torch

from penjing import devices
from penjing.base.errors import UserError
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer
from penjing.train.config import ComputeSettings
from penjing.train.precision import Precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
T4, A100, H100 = (7, 5), (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("dtype", "capability", "dtype_of_matmuls", "scales"),
    [
        ("auto", A100, torch.bfloat16, False),
        ("auto", T4, torch.float16, True),
        ("tf32", A100, torch.float32, False),
        ("float16", H100, torch.float16, True),
        ("float32", T4, torch.float32, False),
    ],
)
def test_what_settings_come_to_on_a_card(dtype, capability, dtype_of_matmuls, scales):
    found = Precision.resolve(ComputeSettings(dtype=dtype), CUDA, capability=capability)
    found.require(CUDA, capability)
    assert found.dtype == dtype_of_matmuls and (found.loss_scaler(CPU) is not None) == scales
    assert Precision.resolve(ComputeSettings(dtype=found.matmul), CPU) == found  # nothing decides again


@pytest.mark.parametrize(
    ("settings", "device", "capability", "where"),
    [
        ({"dtype": "tf32"}, CPU, None, "compute.dtype"),
        ({"dtype": "tf32"}, CUDA, T4, "compute.dtype"),
        ({"dtype": "bfloat16", "fp8": "tensorwise"}, CUDA, A100, "compute.fp8"),
        ({"dtype": "float32", "fp8": "tensorwise"}, CPU, None, "compute.fp8"),
    ],
)
def test_a_format_that_the_device_lacks_is_refused(settings, device, capability, where):
    with pytest.raises(UserError) as refused:
        Precision.resolve(ComputeSettings(**settings), device, capability=capability).require(device, capability)
    assert refused.value.where == where


def test_a_run_goes_on_in_what_it_was_begun_in_where_that_is_there():
    auto = ComputeSettings(dtype="auto")
    assert Precision.resolve(auto, CPU, resumed_dtype="float16").matmul == "float16"
    assert Precision.resolve(auto, CPU, resumed_dtype="tf32").matmul == "float32"
    assert Precision.resolve(auto, CUDA, resumed_dtype="tf32").matmul == "tf32"
    assert Precision.resolve(ComputeSettings(dtype="bfloat16"), CPU, resumed_dtype="float16").matmul == "bfloat16"


def test_it_is_applied_to_matmuls_and_to_frozen_weights_only():
    model = Transformer(
        ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    )
    model.blocks[0].requires_grad_(False)
    precision = Precision("bfloat16", "tensorwise")
    precision.cast_frozen(model)
    precision.apply(model, model)
    first, second = (block.attention.q_proj for block in model.blocks)
    assert (first.weight.dtype, second.weight.dtype) == (torch.bfloat16, torch.float32)
    assert first.compute_dtype == second.compute_dtype == torch.bfloat16 and second.float8
    Precision("tf32").apply(model)
    assert first.compute_dtype is None


def test_tf32_is_switched_on_and_off():
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for matmul in ("tf32", "float32"):
            devices.set_tf32(Precision(matmul).matmul == "tf32")
            assert torch.backends.cuda.matmul.allow_tf32 == (matmul == "tf32")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

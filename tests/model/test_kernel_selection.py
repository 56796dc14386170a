"""Kernels are tried before they are used, and switched off where they compute something else."""

from dataclasses import replace

import pytest
import torch
from small_models import sizes

from penjing.kernels.cpu import library
from penjing.kernels.cpu import ops as cpu
from penjing.model.config import ModelConfig
from penjing.model.kernel_selection import check_kernels
from penjing.model.transformer import Transformer

SHAPE = ModelConfig(**sizes(64, 32, 2, 2, 1, 16, 64))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_cpu_are_tried(architecture, dtype, monkeypatch):
    model, device = Transformer(replace(SHAPE, architecture=architecture)), torch.device("cpu")
    if library.unavailable_reason():
        assert library.unavailable_reason() in check_kernels(model, device, dtype)
        return
    said = check_kernels(model, device, dtype)
    assert "norms, " in said and said.endswith("SwiGLU and the head's softmax")
    assert ("weight gradients" in said) == cpu.supports_weight_grad_in(dtype)
    assert ("attention" in said) == (not cpu.attention_reason(dtype, 16, 99))
    assert check_kernels(model, device, torch.float16) == ""  # which they do not take
    right, switched = cpu._run, []

    def wrong(name, tensors, *given):
        right(name, tensors, *given)
        if name == broken:
            written = {"cross_entropy": -1, "rms_norm": 2, "swiglu": 2, "apply_rope": 1, "attention": 5}[name]
            tensors[written].mul_(1.2)

    monkeypatch.setattr(cpu, "_run", wrong)
    monkeypatch.setattr(library, "switch_off", lambda: switched.append(broken))
    tried = ["cross_entropy", "rms_norm", "swiglu", *(["apply_rope", "attention"] if "attention" in said else [])]
    for broken in tried:  # noqa: B007 (read by `wrong`)
        with pytest.warns(UserWarning, match="kernels of our own are not used, torch's are: off by"):
            assert check_kernels(model, device, dtype) == ""
    assert switched == tried

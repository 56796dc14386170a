"""Tests kernels on a small case before a run uses them: kernels that fail on this machine, or give wrong results, are
switched off with a warning. Unsupported expert sizes are an error."""

import warnings
from collections.abc import Iterable

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing import devices
from penjing.base.errors import UserError
from penjing.kernels import ops, reference
from penjing.kernels.attention_metadata import document_mask
from penjing.kernels.cpu import library
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.select import find
from penjing.kernels.triton import ops as gpu
from penjing.model.config import ModelConfig
from penjing.model.moe import moe_layers
from penjing.model.rope import rotary_table
from penjing.model.transformer import Transformer

TEST_TOKENS = 200  # of each of two rows
MAX_DIFFERENCE = 0.05  # in bfloat16, of values and gradients of size 1


def check_expert_sizes(model: Transformer, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if grouped matmuls do not support the expert sizes: on a GPU rows are multiples of 16 bytes."""
    multiple = 16 // dtype.itemsize
    for layer in () if devices.of(device).is_host else moe_layers(model):
        _, inner, width = layer.gate_proj.shape
        for where, size in (("model.moe_intermediate_size", inner), ("model.hidden_size", width)):
            if size % multiple:
                raise UserError(
                    f"not on {device.type}", where=where, got=size, wanted=f"a multiple of {multiple} in {dtype}"
                )


def check_kernels(model: Transformer, device: torch.device, dtype: torch.dtype) -> str:
    """Test the kernels with the model's heads and vocabulary on this device. Returns a line on what they are used for,
    or on a CPU why they are not; empty where there are no kernels."""
    config, on_cpu = model.config, _on_cpu(device, dtype)
    if (on_cpu and dtype not in cpu.TYPES) or (not on_cpu and gpu.reason(device, dtype)):
        return ""
    if on_cpu and (why := library.unavailable_reason()):
        return f"the C kernels for this CPU are missing, so steps are slower: {why}"
    try:
        backend, diff = _attention_difference(config, device, dtype)
        diff = max(diff, _head_difference(config.vocab_size, device, dtype), _layer_difference(dtype) if on_cpu else 0)
    except Exception as error:  # from a compiler or a driver
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        if diff <= MAX_DIFFERENCE:
            used = ["attention"] if not backend.startswith("torch") else []
            used += ["norms"] if on_cpu else []
            used += ["weight gradients"] if on_cpu and cpu.supports_weight_grad_in(dtype) else []
            return f"kernels of our own for {', '.join([*used, 'SwiGLU'])} and the head's softmax"
        reason = f"off by {diff:.2g}"
    warnings.warn(f"kernels of our own are not used, torch's are: {reason}", stacklevel=2)
    (library if on_cpu else gpu).switch_off()
    return ""


def _on_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    return devices.of(device).is_host and bool(gpu.reason(device, dtype))  # with Triton's interpreter it is empty


def _difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference between tensors that should be equal, relative to the largest value."""
    return max(float((actual.float() - expected).abs().max() / expected.abs().max()) for actual, expected in pairs)


def _attention_difference(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[str, float]:
    """The backend, and the difference of values and gradients from the reference in float32."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = max(2, -(-torch.get_num_threads() // (2 * groups)))  # with fewer the C kernel leaves threads idle
    generator, shape = torch.Generator().manual_seed(1), (rows, TEST_TOKENS)
    document_BT = (torch.rand(shape, generator=generator) < 0.02).long().cumsum(1).to(device)
    position_BT = torch.arange(TEST_TOKENS, device=device)[None]
    metadata = ops.make_attention_metadata(
        position_BT=position_BT, document_BT=document_BT, heads=(groups, size), dtype=dtype
    )
    if metadata.backend.startswith("torch"):
        return metadata.backend, 0.0
    packed_BTJ = torch.randn(*shape, (heads + 2 * groups) * size, generator=generator).to(device, dtype)
    upstream_BTHK = torch.randn(*shape, heads, size, generator=generator).to(device, dtype)
    rotary = rotary_table(position_BT, config)

    def run(dtype: torch.dtype, kernel: bool) -> list[Tensor]:
        input_BTJ = packed_BTJ.to(dtype).requires_grad_()
        gains = [torch.ones(size, device=device).requires_grad_() for _ in range(2 * config.normalises_heads)]
        norm = ops.QKNorm(gains[0], gains[1], config.rms_norm_eps) if gains else None
        parts = torch.split(input_BTJ, [heads * size, groups * size, groups * size], dim=-1)
        qkv = tuple(x.contiguous() for x in parts)
        if kernel:
            packed = ops.takes_packed(metadata, input_BTJ, dtype)
            out = ops.fused_attention((input_BTJ,) if packed else qkv, heads, groups, norm, rotary, metadata)
            assert out is not None
        else:
            q, k, v = ops.split_heads(qkv, heads, groups)
            if norm is not None:
                q, k = (reference.rms_norm(x, gain, norm.epsilon, dtype) for x, gain in ((q, gains[0]), (k, gains[1])))
            q, k = ops.apply_rope(q, *rotary), ops.apply_rope(k, *rotary)
            out = reference.masked_attention(q, k.transpose(1, 2), v.transpose(1, 2), document_mask(document_BT))
        return [out.detach(), *torch.autograd.grad(out, (input_BTJ, *gains), upstream_BTHK.to(dtype))]

    return metadata.backend, _difference(zip(run(dtype, True), run(torch.float32, False), strict=True))


def _head_difference(vocab_size: int, device: torch.device, dtype: torch.dtype) -> float:
    """The difference for the cross-entropy and its gradients."""
    generator = torch.Generator().manual_seed(1)
    logits_CV = (4 * torch.randn(16, vocab_size, generator=generator)).to(device, dtype)
    target_C = torch.randint(vocab_size, (16,), generator=generator).to(device)
    wide_CV = logits_CV.to(torch.float32, copy=True).requires_grad_()
    expected_C = functional.cross_entropy(wide_CV, target_C, reduction="none")
    (grad_CV,) = torch.autograd.grad(expected_C.sum(), wide_CV)
    actual_C = find("cross_entropy_inplace", logits_CV)(logits_CV, target_C, torch.ones(16, device=device), True)
    return _difference(((actual_C, expected_C.detach()), (logits_CV, grad_CV)))


def _layer_difference(dtype: torch.dtype) -> float:
    """The same for a norm, SwiGLU and a weight gradient on a CPU."""
    generator = torch.Generator().manual_seed(1)
    x_ND, upstream_ND = torch.randn(2, 40, 96, generator=generator)

    def run(use_reference: bool) -> list[Tensor]:
        x, gain = x_ND.clone().requires_grad_(), torch.ones(96).requires_grad_()
        if use_reference:
            y = reference.rms_norm(x, gain, 1e-6, torch.float32)
            out = reference.swiglu(y, y)
        else:
            y = ops.rms_norm(x, gain, 1e-6, dtype)
            out = ops.swiglu(y, y).float()
        return [out.detach(), *torch.autograd.grad(out, (x, gain), upstream_ND)]

    pairs = [*zip(run(False), run(True), strict=True)]
    grad_out_BO, x_BN = torch.randn(2, 200, 96, generator=generator).to(dtype)
    grad_ON = find("weight_grad", grad_out_BO, x_BN, torch.float32)(grad_out_BO, x_BN, torch.float32)
    pairs.append((grad_ON, grad_out_BO.float().T @ x_BN.float()))
    return _difference(pairs)

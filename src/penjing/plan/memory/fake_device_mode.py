"""Meta tensors that report another device, so that code takes the paths it would take there.

Our code and libraries check the device of tensors. Under `FakeDeviceMode` meta
tensors report the target device, and tensors created on the target are created on the meta device. Where torch chooses
a kernel by device below Python (attention, dropout, RMSNorm), this mode chooses by the target's rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from penjing import devices
from penjing.kernels import tiled_attention
from penjing.kernels.attention_metadata import TILE
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.tiled_attention import TileGroup
from penjing.kernels.triton import ops as gpu
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.trace import note_line

META = torch.device("meta")
_autograd: Any = torch.autograd  # patched below
# torch's checks, by name, that a checkpoint recomputed what it had saved.
_recomputed_checks: dict[str, Any] = torch.utils.checkpoint._allowed_determinism_checks_to_fns
_DEVICE = torch.Tensor.device.__get__
# `x.is_cpu` and the like, by the type of the device.
_IS_TYPE = {
    getattr(torch.Tensor, f"is_{name}").__get__: name
    for name in (*devices.DEVICES, "meta")
    if hasattr(torch.Tensor, f"is_{name}")
}
# Methods that read values. Meta tensors have none: every number is 0, every bool False.
_VALUES: dict[Any, Callable[[Tensor], Any]] = {
    torch.Tensor.item: lambda x: False if x.dtype == torch.bool else 0.0 if x.is_floating_point() else 0,
    torch.Tensor.__bool__: lambda x: False,
    torch.Tensor.__float__: lambda x: 0.0,
    torch.Tensor.__int__: lambda x: 0,
    torch.Tensor.__index__: lambda x: 0,
    torch.Tensor.tolist: lambda x: _zeros(x.shape),
}
_NO_TRANSFER = tuple(getattr(torch.Tensor, name, None) for name in (*devices.DEVICES, "pin_memory"))


def _zeros(shape: Any) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if len(shape) else 0


_CONSTRUCTORS = _device_constructors()  # functions that create a tensor on the current device
_GROUPED = getattr(torch, "_grouped_mm", None)  # behind `functional.grouped_mm`


def _group_tiles(document_BT: Tensor, mask: Tensor | None, window: int, dtype: torch.dtype) -> list[TileGroup]:
    """The groups of rows that hold one document each, the largest that there are: documents have no values here."""
    rows, num_tiles = document_BT.shape[0], -(-document_BT.shape[1] // TILE)
    first_N = [max(0, tile * TILE + 1 - window) // TILE if window else 0 for tile in range(num_tiles)]
    groups = []
    for needed, count in Counter(tile + 1 - first for tile, first in enumerate(first_N)).items():
        key_tile_NM = torch.empty(rows * count, needed, dtype=torch.long)
        bias_NTS = torch.empty(rows * count, TILE, needed * TILE, dtype=dtype)
        groups.append(TileGroup(torch.empty_like(key_tile_NM[:, 0]), key_tile_NM, bias_NTS))
    return groups


class _HostGenerator(torch.Generator):
    """A CPU generator, whatever device was requested."""

    def __new__(cls, device: Any = None) -> _HostGenerator:
        return super().__new__(cls)


class FakeDeviceMode(TorchFunctionMode):
    """While active, meta tensors report the target device; the autograd graph stores each result's source line."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.device = devices.HOST if target.device.is_host else torch.device(target.kind, 0)
        self._engine_run_backward = _autograd._engine_run_backward
        self._patches = ExitStack()

    def __enter__(self) -> FakeDeviceMode:
        for patched in (
            # A device's generator cannot be created without the device, and meta tensors need none.
            patch.object(torch, "Generator", _HostGenerator),
            self.target.device.pretend_capability(self.target.capability),
            patch.object(_autograd, "_engine_run_backward", self._run_backward),
            # A checkpoint's saved tensors are checked below Python, outside this mode; recomputed ones inside it.
            patch.dict(_recomputed_checks, default=lambda x: {"shape": x.shape, "dtype": x.dtype}),
            patch.object(gpu, "has_triton", self.target.triton_kernels),
            arena.disabled(),
            patch.object(tiled_attention, "group_tiles", _group_tiles),
        ):
            self._patches.enter_context(patched)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """torch disables this mode during `backward()`, but our autograd functions and checkpoints need it."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return self._engine_run_backward(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:  # not a tensor: torch looks up the target's module by it
            return func(*args, **kwargs)
        if self.target.device.is_host and func in _CONSTRUCTORS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": META}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.device == META:
            if func == _DEVICE:
                return self.device
            if func in _IS_TYPE:
                return _IS_TYPE[func] == self.target.kind
            if func in _VALUES:
                return _VALUES[func](first)
            if func in _NO_TRANSFER:
                return first
            if func is torch.bincount:  # it has no meta function; the result has the requested length
                return torch.empty(kwargs.get("minlength", 1), dtype=torch.long, device=META)
            if kwargs.get("generator") is not None:
                kwargs = {**kwargs, "generator": None}
        args = tuple(self._to_meta(value) for value in args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._to_meta(kwargs["device"])}
            if kwargs["device"] == META and kwargs.get("generator") is not None:
                kwargs["generator"] = None
        result = self._call(func, args, kwargs)
        if torch.is_grad_enabled():
            note_line(result)
        return result

    def _to_meta(self, value: Any) -> Any:
        """Replace the target device by the meta device."""
        if isinstance(value, torch.device):
            return META if value.type in (self.device.type, "meta") else value
        if isinstance(value, str) and (value == self.device.type or value.startswith(self.device.type + ":")):
            return META
        return value

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is functional.scaled_dot_product_attention:
            return attention(self.target, *args, **kwargs)
        if not self.target.device.is_host:
            if func is functional.dropout:
                return _dropout(*args, **kwargs)
            if func in (functional.rms_norm, torch.rms_norm):
                return _rms_norm(*args, **kwargs)
            if func is _GROUPED and args[0].dtype != torch.bfloat16:
                return _grouped_mm_shape(*args, **kwargs)
        return func(*args, **kwargs)


def attention_kernel(target: Target, query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """The GPU kernel that torch selects for an attention: flash, cudnn, efficient or math.

    These are the checks in `sdp_utils.cpp` that apply to our shapes. flash needs half precision, sm_80 and no mask.
    cuDNN comes first on sm_90 and sm_10x and accepts masks. efficient needs as many key heads as query heads (newer
    releases lift that) and accepts masks and float32. Otherwise math materialises all attention maps.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    major, width = target.capability[0], query.shape[-1]
    if major in (9, 10) and half and width <= 128 and width % 8 == 0:
        return "cudnn"
    if major >= 8 and mask is None and half and width <= 256:
        return "flash"
    allowed = (torch.float32, torch.float16) if major < 8 else (torch.float32, torch.float16, torch.bfloat16)
    multiple = 8 if half and major >= 7 else 4 if major >= 8 else 1
    if query.dtype in allowed and query.shape[1] == key.shape[1] and width % multiple == 0:
        return "efficient"
    return "math"


def attention(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, by calling the operation of the target's kernel.

    CPUs have a flash kernel too, which accepts masks and grouped heads but no dropout.
    """
    aten = torch.ops.aten
    if target.device.is_host:
        kernel = "math" if dropout_p else "host flash"
    else:
        kernel = attention_kernel(target, query, key, attn_mask)
    if kernel == "host flash":
        out = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=_additive(attn_mask, query), scale=scale
        )[0]
    elif kernel == "flash" or (kernel == "cudnn" and attn_mask is None):
        # cuDNN saves what flash saves: the output and one float32 per query and head.
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    elif kernel in ("efficient", "cudnn"):
        if key.shape[1] != query.shape[1]:  # cuDNN reads grouped heads in place, this operation does not
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        bias = _as_bias(attn_mask, query, key)
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    else:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    assert isinstance(out, Tensor)
    return out


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A boolean mask as an additive mask, in the query's dtype."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=META).masked_fill_(mask.logical_not(), -math.inf)


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The same for the efficient kernel, with rows padded to 16."""
    mask = _additive(mask, query)
    if mask is None:
        return None
    if mask.shape[-1] % 16:
        mask = functional.pad(mask, (0, 16 - mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A GPU's dropout saves a one-byte mask; the composite one saves a mask in the input's dtype."""
    if not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return out


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One fused kernel each way; if the dtypes of input and gain differ, torch uses separate operations."""
    if weight is None or weight.dtype != input.dtype:
        return functional.rms_norm(input, normalized_shape, weight, eps)
    out: Tensor = _FusedRMSNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return out


def _grouped_mm_shape(left: Tensor, right: Tensor, offs: Tensor, **options: None) -> Tensor:
    """A GPU runs grouped matmuls in every dtype, but the meta function accepts only bfloat16."""
    rows, outputs = left.shape[0], right.shape[-1]
    return left.new_empty((rows, outputs) if right.ndim == 3 else (len(offs), rows, outputs))


class _FusedRMSNorm(torch.autograd.Function):
    """What `_fused_rms_norm` saves (the input, one float32 per row) and returns (the gradients)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=META)
        ctx.save_for_backward(x, gain, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, _ = ctx.saved_tensors
        needs_x, needs_gain = ctx.needs_input_grad
        grad_out = upstream[0].contiguous()
        grad = torch.empty_like(grad_out, dtype=x.dtype) if needs_x else None
        return grad, torch.empty_like(gain) if needs_gain else None

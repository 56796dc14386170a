"""The number formats of a run: decided once from `compute.dtype` and `compute.fp8`, and applied here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from penjing import devices
from penjing.base.errors import UserError
from penjing.kernels.fp8 import Float8, require_float8
from penjing.model.linear import set_compute_dtype, use_float8
from penjing.model.lora import cast_frozen_base
from penjing.model.transformer import Transformer
from penjing.parallel.grad_scaler import LossScaler
from penjing.train.config import ComputeSettings

SLOW_FLOAT16 = "float16 matmuls on a CPU are many times slower than float32"
Format = Literal["bfloat16", "float16", "tf32", "float32"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats of matmuls. Trainable weights, their gradients and optimizer state are float32 in all of them."""

    matmul: Format  # the resolved compute.dtype
    fp8: Float8 = "off"  # of the blocks' linear layers, in training passes

    @classmethod
    def resolve(
        cls,
        compute: ComputeSettings,
        device: torch.device,
        *,
        capability: tuple[int, int] | None = None,
        resumed_dtype: str = "",
        agree: Callable[[str], str] = str,
    ) -> Precision:
        """Resolve the settings on `device`.

        capability: of a device that is only planned for; None = query the device. resumed_dtype: what `auto` means
        for a resumed run; empty = the fastest. agree: returns rank 0's choice for `auto`.
        """
        setting = str(compute.dtype)
        if setting == "auto":
            kind = devices.of(device)
            unavailable = resumed_dtype == "tf32" and not kind.supports_tf32
            setting = agree("float32" if unavailable else resumed_dtype or kind.dtype_name("auto", device, capability))
        return cls(setting, compute.fp8)  # type: ignore[arg-type]  # one of the names

    def require(self, device: torch.device, capability: tuple[int, int] | None = None) -> None:
        """Raise UserError for a format that `device` does not support. capability: as in `resolve`."""
        if self.matmul != "tf32" and self.fp8 == "off":
            return
        kind = devices.of(device)
        capability = capability or kind.capability(device)
        if self.matmul == "tf32" and not kind.has_tf32(capability):
            what = "needs an NVIDIA GPU of compute capability 8.0 or later"
            raise UserError(what, where="compute.dtype", got="tf32", next_step="Use compute.dtype=auto.")
        if self.fp8 != "off":
            require_float8(device.type, capability, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matmul inputs; for tf32, which tensor cores round, it is float32."""
        return devices.of(devices.HOST).compute_dtype(self.matmul, devices.HOST)

    @property
    def name(self) -> str:
        """The dtype's name in checkpoints and plans; for tf32 it is float32."""
        return str(self.dtype).removeprefix("torch.")

    def loss_scaler(self, device: torch.device) -> LossScaler | None:
        """A scaler for float16, in which small gradients underflow; else None."""
        return LossScaler(device) if self.matmul == "float16" else None

    def cast_frozen(self, model: nn.Module) -> None:
        """Store frozen matmul weights in the dtype of the matmuls."""
        cast_frozen_base(model, self.dtype)

    def apply(self, trained: nn.Module, model: Transformer | None = None) -> None:
        """Set the dtype of all matmuls of `trained`, and fp8 in `model`, its decoder."""
        set_compute_dtype(trained, None if self.dtype == torch.float32 else self.dtype)
        if self.fp8 != "off" and model is not None:
            use_float8(model)

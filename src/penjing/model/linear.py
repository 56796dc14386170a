"""Linear layers with explicit precision: float32 master weights; inputs and weights are cast at the matmul.

No autocast: the dtype of each matmul is visible in the code and the same on every device, without look-ups.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from penjing.kernels import ops
from penjing.kernels.fp8 import fits_float8


class Linear(nn.Linear):
    """y = x W^T (+ b), the matmul in `compute_dtype` (None: the weight's own)."""

    compute_dtype: torch.dtype | None = None
    float8: bool = False  # whether matmuls with gradients run in float8 (see `use_float8`)

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or self.weight.dtype
        return ops.linear(x, self.weight, self.bias, dtype, fp8=self.float8)


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight of a layer that computes only x W^T in `compute_dtype`; None with a bias, an adapter or float8."""
    is_plain = type(layer) is Linear and not layer.float8 and layer.bias is None
    return layer.weight if is_plain else None  # type: ignore[return-value]  # mypy does not narrow by type()


def shared_input_linears(
    x: Tensor, *layers: nn.Module, consumer: ops.AttentionMetadata | str = ""
) -> tuple[Tensor, ...]:
    """Each layer's output for the same x, [..., N] -> [..., O] each, in its `compute_dtype`; in one tensor where the op
    that takes them, the consumer, prefers it."""
    plain, dtype = _plain_linears(*layers)
    if consumer and ops.takes_packed(consumer, x, dtype or getattr(layers[0], "compute_dtype", None)):
        return (packed_linear(x, *layers),)
    if dtype is None:
        return tuple(layer(x) for layer in layers)
    return ops.linears(x, dtype, [layer.weight for layer in plain], [layer.bias for layer in plain])


def packed_linear(x: Tensor, *layers: nn.Module) -> Tensor:
    """The layers' outputs concatenated, [..., N] -> [..., sum of O]: in one matmul if possible."""
    plain, dtype = _plain_linears(*layers)
    biases: list[Tensor] = [layer.bias for layer in plain if layer.bias is not None]
    if dtype is None or 0 < len(biases) < len(plain):
        pack = getattr(layers[0], "packed", lambda *_: None)  # layers with adapters have a method for it
        out: Tensor | None = pack(x, *layers)
        return torch.cat([layer(x) for layer in layers], dim=-1) if out is None else out
    weight = torch.cat([layer.weight.to(dtype) for layer in plain])
    return functional.linear(x.to(dtype), weight, torch.cat(biases).to(dtype) if biases else None)


def _plain_linears(*layers: nn.Module) -> tuple[list[Linear], torch.dtype | None]:
    """The plain layers, and the dtype of their matmuls if all layers are plain and share one; else None."""
    plain = [layer for layer in layers if type(layer) is Linear and not layer.float8]
    dtypes = {layer.compute_dtype or layer.weight.dtype for layer in plain}
    return plain, dtypes.pop() if len(plain) == len(layers) and len(dtypes) == 1 else None


def set_compute_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Set the dtype of every matmul in `model`; parameters keep theirs."""
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            setattr(module, "compute_dtype", dtype)  # noqa: B010 (typed as a tensor or a module by torch)


def use_float8(model: nn.Module) -> None:
    """Run the linear layers of a decoder's blocks in float8 (kernels/fp8.py) when gradients are taken.

    Not in float8: embedding, head, routers, routed experts, and layers with a side that is not a multiple of 16.
    `compute_dtype` must be bfloat16.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith("blocks."):
            module.float8 = fits_float8(module.in_features, module.out_features)

"""Autocast by hand, for models of others: `torch.autocast` knows no meta tensors and without CUDA switches itself off.

Our own models cast where it is written (`penjing/model/linear.py`) and need none of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map_only

# From ATen/autocast_mode.h: what runs in the narrow dtype, and what in float32. All else takes what it is given.
_NARROW = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "mv",
        "addmm",
        "addbmm",
        "baddbmm",
        "einsum",
        "prelu",
        "conv1d",
        "conv2d",
        "conv3d",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
    ]
)
_WIDE = frozenset(
    [
        "__pow__",
        "__rpow__",
        "pow",
        "exp",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "rsqrt",
        "reciprocal",
        "cosh",
        "sinh",
        "tan",
        "acos",
        "asin",
        "softplus",
        "layer_norm",
        "group_norm",
        "norm",
        "cumsum",
        "cumprod",
        "sum",
        "prod",
        "dist",
        "mse_loss",
        "l1_loss",
        "cross_entropy",
        "nll_loss",
        "kl_div",
        "softmax",
        "log_softmax",
        "cosine_similarity",
        "binary_cross_entropy_with_logits",
    ]
)


class Autocast(TorchFunctionMode):
    """While entered, casts as `torch.autocast("cuda", dtype)` does.

    Copies of leaf weights are kept until the outermost context ends, as autocast's cache does: enter it once for each
    forward pass or once for a whole run, as the program does.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype
        self._cache: dict[int, Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        self._cache.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in _NARROW:
            args, kwargs = tree_map_only(Tensor, self._narrow, (args, kwargs))
        elif name in _WIDE and (resolve_name(func) or "").startswith("torch"):
            args, kwargs = tree_map_only(Tensor, self._wide, (args, kwargs))
        return func(*args, **kwargs)

    def _narrow(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dtype in (self.dtype, torch.float64):
            return value
        if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
            return value.to(self.dtype)
        if id(value) not in self._cache:
            self._cache[id(value)] = value.to(self.dtype)
        return self._cache[id(value)]

    @staticmethod
    def _wide(value: Tensor) -> Tensor:
        narrow = value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if narrow else value

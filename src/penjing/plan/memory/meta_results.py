"""Results of operations on meta tensors, remembered: most operations of a step repeat those of the first block.

torch computes the layout of a result in Python, which takes longer than all else in a trace.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_MAX_ENTRIES = 100_000
_layouts: dict[Any, list[tuple[Any, ...]]] = {}  # (shape, stride, dtype) of each result, by operation and arguments


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` below autograd; the result is made from its layout if that is known.

    Remembered are only operations of which every result is a new tensor: nothing is written, nothing is a view.
    """
    if not _makes_new_tensors(func):
        return func(*args, **kwargs)
    try:
        key = func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items()))
        known = _layouts.get(key)
    except TypeError:  # an argument that has no hash, or is a tensor of another kind
        return func(*args, **kwargs)
    if known is not None:
        made = tuple(map(_empty, known))
        return made if len(made) > 1 else made[0]
    out = func(*args, **kwargs)
    layouts = _layouts_of(out, (args, kwargs))
    if layouts and len(_layouts) < _MAX_ENTRIES:
        _layouts[key] = layouts
    return out


@cache
def _makes_new_tensors(func: Any) -> bool:
    schema = func._schema
    return bool(schema.returns) and not any(value.alias_info for value in (*schema.arguments, *schema.returns))


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or value.device.type != "meta":
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    return type(value), value  # 1, 1.0 and True give other dtypes


def _empty(layout: tuple[Any, ...]) -> Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _layouts_of(out: Any, arguments: Any) -> list[tuple[Any, ...]]:
    """Empty if the results could not be made again from their layouts alone."""
    results = out if isinstance(out, tuple) and len(out) > 1 else (out,)
    if not all(type(result) is Tensor and result.device.type == "meta" for result in results):
        return []
    storages = {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
    layouts = []
    for result in results:
        layout = (result.shape, result.stride(), result.dtype)
        storage = result.untyped_storage()
        if storage._cdata in storages or _empty(layout).untyped_storage().nbytes() != storage.nbytes():
            return []
        storages.add(storage._cdata)
        layouts.append(layout)
    return layouts

"""Results made from remembered layouts are those of torch, for every kind of operation that a step calls."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penjing.plan.memory import meta_results


class Remembered(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return meta_results.call(func, args, kwargs or {})


def tensor(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


CALLS = {
    "a scalar's type decides the dtype": lambda x: (x.long() * 2, x.long() * 2.0, x.long() * True, x.bool() * 2),
    "strides": lambda x: (x.t() + 1, x.t().contiguous(), x.t().clone(), torch.empty_like(x.t()), x.t() @ x),
    "broadcasting": lambda x: x + x[:1],
    "views": lambda x: (x.view(-1), x[1:], x.t(), x.expand(2, 4, 6), x.unbind(0), x.split(2)),
    "several results": lambda x: (torch.max(x, 1), torch.native_layer_norm(x, [6], None, None, 1e-5), x.sort()),
    "lists": lambda x: (torch.cat([x, x]), torch.stack([x, x]), torch._foreach_add([x, x], 1)),
    "written in place": lambda x: (x.clone().add_(1), x.clone().zero_(), torch.add(x, x, out=torch.empty_like(x))),
    "dtypes": lambda x: (x.bfloat16() + x, x.to(torch.float64), x.double() + 1, x > 0),
    "no change, no copy": lambda x: (x.contiguous(), x.to(torch.float32), x.reshape(4, 6)),
}


def layouts(out):
    return [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.storage_offset(), leaf.untyped_storage().nbytes())
        for leaf in tree_leaves(out)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_they_are_torch_s(name, monkeypatch):
    monkeypatch.setattr(meta_results, "_layouts", {})
    x = tensor(4, 6)
    expected = CALLS[name](x)
    for _ in range(2):  # computed, then remembered
        with Remembered():
            made = CALLS[name](x)
        assert layouts(made) == layouts(expected)
        addresses = [[leaf.untyped_storage()._cdata for leaf in tree_leaves(out)] for out in (made, expected)]
        shared = [[addresses_of.index(address) for address in addresses_of] for addresses_of in addresses]
        assert shared[0] == shared[1]


def test_a_step_computes_few_of_its_layouts(monkeypatch):
    monkeypatch.setattr(meta_results, "_layouts", {})
    with Remembered():
        x = tensor(8, 16)
        for _ in range(10):
            x = torch.tanh(x @ tensor(16, 16)) * 2
    assert len(meta_results._layouts) == 5  # two shapes of `empty`, and one of each other operation


def test_the_default_dtype_counts():
    with Remembered():
        first = tensor(2, dtype=torch.long) / 2
        torch.set_default_dtype(torch.float64)
        try:
            second = tensor(2, dtype=torch.long) / 2
        finally:
            torch.set_default_dtype(torch.float32)
    assert (first.dtype, second.dtype) == (torch.float32, torch.float64)

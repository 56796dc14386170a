"""What `torch.compile` would keep and make, without compiling anything: an estimate.

AOTAutograd takes forward and backward pass apart and its partitioner decides what is saved between them, as under
`torch.compile`. Inductor then fuses: what only feeds other elementwise work never becomes a tensor. Here the graphs
are gone through by that rule, making the tensors that are left, each until its last use. Kernels' own choices (whether
a value with several readers is stored or made again) are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

_LIBRARY = [
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_scaled_dot",
    "_flash",
    "_efficient",
    "convolution",
    "sort",
    "topk",
    "index_put",
    "scatter",
    "_embedding_bag",
    "embedding_dense",
    "_grouped_mm",
    "native_dropout",
    "multinomial",
    "_fused",
    "fused_qk_norm_rope_attention",  # ours, of kernels/triton/ops.py
    "swiglu",
    "combine_experts",
    "cross_entropy_inplace",
]
_REDUCTION = [
    "sum",
    "mean",
    "amax",
    "amin",
    "var",
    "var_mean",
    "max",
    "min",
    "any",
    "all",
    "argmax",
    "argmin",
    "prod",
    "logsumexp",
    "norm",
    "cumsum",
]
_VIEW = [
    "view",
    "_unsafe_view",
    "reshape",
    "permute",
    "transpose",
    "t",
    "expand",
    "squeeze",
    "unsqueeze",
    "slice",
    "select",
    "as_strided",
    "alias",
    "detach",
    "split",
    "split_with_sizes",
    "unbind",
    "diagonal",
]


FARTHEST_TO_2_2 = 3  # releases up to 2.2 made nothing again that stood farther from the backward pass


def compiled(module: nn.Module, *, farthest: int = 1000) -> Callable[..., Any]:
    """`module` as `torch.compile(module)` would use memory.

    Call it, and differentiate it, once before tracing, outside of both modes. farthest: the partitioner's
    `max_dist_from_bw`, 1000 in today's releases.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def partition(*args: Any, **kwargs: Any) -> Any:
        with config.patch(max_dist_from_bw=farthest):
            return min_cut_rematerialization_partition(*args, **kwargs)

    result: Callable[..., Any] = aot_module(
        module,
        fw_compiler=_Fused,
        bw_compiler=_Fused,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return result


def _name(node: fx.Node) -> str:
    target = node.target
    return getattr(target, "_overloadpacket", target).__name__ if callable(target) else ""


class _Fused:
    """A graph that makes its tensors and computes nothing."""

    _boxed_call = True

    def __init__(self, module: fx.GraphModule, example_inputs: Any = None) -> None:
        self.nodes = list(module.graph.nodes)
        self.saved = self._saved()
        self.frees = self._last_uses()

    def _is_view(self, node: fx.Node) -> bool:
        return node.op == "call_function" and _name(node) in _VIEW

    def _is_library(self, node: fx.Node) -> bool:
        return node.op == "call_function" and any(_name(node).startswith(part) for part in _LIBRARY)

    def _saved(self) -> set[fx.Node]:
        """Nodes that become tensors; of views, those whose base does."""
        needed: set[fx.Node] = set()
        for node in reversed(self.nodes):
            name = _name(node) if node.op == "call_function" else ""
            if node.op in ("placeholder", "get_attr", "output") or self._is_library(node) or name in _REDUCTION:
                needed.add(node)
            readers = [user for user in node.users if user.op == "output" or self._is_library(user)]
            through = [user for user in node.users if (self._is_view(user) or name == "") and user in needed]
            taken = [user for user in node.users if _name(user) == "getitem" and user in needed]
            if readers or through or taken:
                needed.add(node)
        return needed

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """Tensors that are read when a node is made, through views and what was fused into it."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        waiting = list(node.all_input_nodes)
        while waiting:
            source = waiting.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self.saved and not self._is_view(source):
                found.add(source)
            else:
                waiting += source.all_input_nodes
        return found

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """After which node each tensor is read no more."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            if node in self.saved and not self._is_view(node):
                last.setdefault(node, node)
                for source in self._sources(node):
                    last[source] = node
        frees: dict[fx.Node, list[fx.Node]] = {}
        for node, by in last.items():
            frees.setdefault(by, []).append(node)
        return frees

    def __call__(self, boxed: list[Any]) -> Any:
        given = iter(list(boxed))
        boxed.clear()
        made: dict[fx.Node, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "output":
                return _map(node.args[0], lambda source: self._value(source, made))
            elif node in self.saved and not self._is_view(node):
                done = [source for source in self.frees.get(node, ()) if source is not node]
                if not self._is_library(node):
                    # A fused kernel may write over what it reads for the last time.
                    for source in [source for source in done if _same_size(source, node)][:1]:
                        made.pop(source, None)
                value = node.meta["val"]
                if isinstance(value, Tensor) and _name(node) != "getitem":
                    made[node] = _empty(value)
                elif _name(node) == "getitem":
                    made[node] = _empty(value) if isinstance(value, Tensor) else value
                for source in done:
                    made.pop(source, None)
            if node in self.frees.get(node, ()) and node.op != "placeholder":
                made.pop(node, None)
        raise AssertionError("a graph ends with its output")

    def _value(self, node: fx.Node, made: dict[fx.Node, Any]) -> Any:
        base = node
        while self._is_view(base):
            base = base.all_input_nodes[0]
        value, source = node.meta["val"], made[base]
        if base is node or not isinstance(value, Tensor):
            return source
        return torch.as_strided(source, value.size(), value.stride(), value.storage_offset())


def _empty(value: Tensor) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _same_size(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.numel() == b.numel() and a.dtype.itemsize == b.dtype.itemsize


def _map(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_map(inner, function) for inner in value)
    return function(value) if isinstance(value, fx.Node) else value

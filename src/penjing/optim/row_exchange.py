"""Whole matrices where each rank holds some of their rows: an owner gets all rows of its stack, and returns them."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.tensor import DTensor


class RowExchange:
    """The ranks that together hold a parameter like `like`, each a run of its rows as torch's `chunk` cuts them.

    With several copies of the model (HSDP) those of one copy.
    """

    def __init__(self, like: Tensor) -> None:
        assert isinstance(like, DTensor)
        mesh, dim = like.device_mesh, like.device_mesh.ndim - 1
        self.group, self.rank, self.world = mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim)
        self.device = mesh.device_type

    def map(self, function: Callable[[Tensor], Tensor], parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """This rank's rows of `function` of each stack; rank i computes that of stack i.

        parts: this rank's rows of the stacks, [E, m, N] in float32, E=0 for none; they may lie on the host, beside a
        device that computes. rows: M of each.
        """
        num_matrices, _, width = parts[self.rank].shape
        heights = self._heights(rows[self.rank])
        ours = self._all_to_all(parts, [torch.Size((num_matrices, height, width)) for height in heights])
        whole_EMN = torch.cat(ours, dim=1)
        if num_matrices:
            whole_EMN = function(whole_EMN).float()
        returned = self._all_to_all(torch.split(whole_EMN, heights, dim=1), [part.shape for part in parts])
        return [rows.to(part.device) for rows, part in zip(returned, parts, strict=True)]

    def _heights(self, rows: int) -> list[int]:
        """The number of rows of each rank."""
        height = -(-rows // self.world)
        return [min(height, max(0, rows - rank * height)) for rank in range(self.world)]

    def _all_to_all(self, sent: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Send each rank its tensor; return one of `shapes` from each."""
        packed = torch.cat([part.reshape(-1) for part in sent]).to(self.device)
        sizes = [shape.numel() for shape in shapes]
        received = packed.new_empty(sum(sizes))
        distributed.all_to_all_single(received, packed, sizes, [part.numel() for part in sent], group=self.group)
        return [part.view(shape) for part, shape in zip(torch.split(received, sizes), shapes, strict=True)]

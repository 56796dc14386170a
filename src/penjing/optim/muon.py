"""Muon for block matrices, AdamW for other parameters (K. Jordan, 2024, "Muon: an optimizer for hidden layers";
arXiv:2502.16982).

Each matrix's momentum is replaced by the nearest orthogonal matrix, computed in three Newton-Schulz iterations, so that
all its directions are learned at the same speed.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from penjing.base.config import BelowOne, NonNegativeFloat, PositiveFloat, Settings
from penjing.base.seeds import derive
from penjing.devices.shards import local_part
from penjing.kernels import ops, reference
from penjing.optim.adamw import adamw, split_groups
from penjing.optim.low_precision_state import BYTES, LowPrecisionOptimizer, StateDtype, chunks
from penjing.optim.param_groups import embeddings, group_parameters
from penjing.optim.ranks import ONE_RANK, Ranks, owner_of_each

MAX_ADAMW_RATE = 2e-3  # a learning rate up to this was probably meant for AdamW


class _MuonOptimizer(LowPrecisionOptimizer):
    """w -= rate (s orthogonal(nesterov momentum) + decay w), with s = sqrt(max(1, rows / columns))."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        learning_rate: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype | None,
        state_dtype: StateDtype = "float32",
        seed: int = 0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """dtype: of the orthogonalization's matmuls. state_dtype: of the momentum. seed: of stochastic rounding.
        ranks: that share the orthogonalizations; each keeps all of the momentum, so that any number of them resumes."""
        defaults = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, state_dtype, seed)
        self.orthogonalize, self.ranks = ops.Orthogonalize(dtype), ranks

    def compile_update(self) -> None:
        """Compile the orthogonalization, once for each shape of a stack, at its first use."""
        self.orthogonalize.compile()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the existing gradients, which are freed. Closures are not supported."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            # Matrices of one shape are stacked: 28 small matmuls become 5 batched ones.
            stacks: list[list[nn.Parameter]] = []
            for parameters in by_shape.values():
                height = ops.stack_height(len(parameters), parameters[0])
                stacks += [parameters[first : first + height] for first in range(0, len(parameters), height)]
            if stacks and local_part(stacks[0][0]) is not stacks[0][0]:
                self._step_sharded(group, stacks)
                continue
            owners = owner_of_each([_cost(stack) for stack in stacks], self.ranks.world)
            for owner, stack in zip(owners, stacks, strict=True):
                self._step_stack(group, stack, is_ours=owner == self.ranks.rank)
            for owner, stack in zip(owners, stacks, strict=True):
                self.ranks.broadcast_tensors(stack, owner)

    def _step_stack(self, group: dict[str, Any], parameters: list[nn.Parameter], *, is_ours: bool) -> None:
        """Update the momentum, and the weights if they are ours. Stacks are the same with any number of ranks, and so
        are the bits."""
        stack_EMN = self._directions(group, parameters)
        if is_ours:
            self._update(group, parameters, self.orthogonalize(stack_EMN))

    def _step_sharded(self, group: dict[str, Any], stacks: list[list[nn.Parameter]]) -> None:
        """The same where each rank has some rows of each matrix. Of experts, [E, M, N], it has whole matrices."""
        from penjing.optim.row_exchange import RowExchange

        for experts in (stack for stack in stacks if stack[0].ndim > 2):
            stack_EMN = self._directions(group, experts)
            if stack_EMN.numel():
                self._update(group, experts, self.orthogonalize(stack_EMN))
        stacks = [stack for stack in stacks if stack[0].ndim == 2]
        if not stacks:
            return
        exchange, owned = RowExchange(stacks[0][0]), defaultdict[int, list[list[nn.Parameter]]](list)
        for owner, stack in zip(owner_of_each([_cost(stack) for stack in stacks], exchange.world), stacks, strict=True):
            owned[owner].append(stack)
        none = local_part(stacks[0][0]).new_empty(0, 0, 0, dtype=torch.float32)
        for at_once in zip_longest(*(owned[rank] for rank in range(exchange.world)), fillvalue=[]):
            # One stack of each owner at a time, so that the exchange takes little memory.
            parts = [self._directions(group, stack) if stack else none for stack in at_once]
            rows = [stack[0].shape[0] if stack else 0 for stack in at_once]
            for stack, update_EmN in zip(at_once, exchange.map(self.orthogonalize, parts, rows), strict=True):
                if update_EmN.numel():
                    self._update(group, stack, update_EmN)

    def _directions(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> Tensor:
        """Update the momenta with the gradients, which are freed; return Nesterov's means. Of each matrix the rows that
        are here."""
        like = local_part(parameters[0])
        stack_EMN = torch.empty((len(parameters), *like.shape), dtype=torch.float32, device=like.device)
        for parameter, direction_MN in zip(parameters, stack_EMN, strict=True):
            self._nesterov_direction(group["momentum"], parameter, direction_MN)
            parameter.grad = None
        return stack_EMN

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter], update_EMN: Tensor) -> None:
        like = parameters[0]
        scale = max(1.0, like.shape[-2] / like.shape[-1]) ** 0.5
        decay = 1 - group["lr"] * group["weight_decay"]
        here = [local_part(parameter) for parameter in parameters]
        ops.decayed_update(here, update_EMN, decay, group["lr"], scale, self.bad)

    def _nesterov_direction(self, momentum: float, parameter: nn.Parameter, out: Tensor) -> None:
        """Update the momentum with the gradient, and write Nesterov's mean of the two to `out`."""
        assert parameter.grad is not None
        generator, bad = self.init_state(parameter, "momentum"), self.bad
        gradient_N, out_N = local_part(parameter.grad).reshape(-1), out.view(-1)
        if self.state_dtype == "float32" and bad is None and len(out_N):
            mean_N = local_part(self.state[parameter]["momentum"]).view(-1)
            ops.nesterov_update(gradient_N, mean_N, out_N, momentum)
            return
        for chunk in chunks(len(out_N)):
            mean = self.read_state(parameter, "momentum", chunk, signed=True)
            gradient = gradient_N[chunk].float()
            if bad is not None:  # averaging the momentum with itself leaves it unchanged
                gradient = torch.where(bad > 0, mean, gradient)
            reference.nesterov_update(gradient, mean, out_N[chunk], momentum)
            self.write_state(parameter, "momentum", chunk, mean, generator, signed=True)


def _cost(stack: list[nn.Parameter]) -> int:
    """FLOPs of a stack's orthogonalization, up to a factor."""
    return len(stack) * stack[0].numel() * min(stack[0].shape[-2:])


@dataclass(frozen=True, kw_only=True)
class Muon(Settings, section="optimizer"):
    """Muon for the blocks' matrices, AdamW for embedding, head and norm gains."""

    removed: ClassVar = {"cautious_decay": False, "normuon_beta2": 0.0}

    name: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.02  # peak, of the matrices
    momentum: BelowOne = 0.95  # decay of the mean of gradients
    weight_decay: NonNegativeFloat = 0.0  # of the matrices
    adamw_learning_rate: PositiveFloat = 3e-3  # peak, of embedding, head and gains
    beta1: BelowOne = 0.9  # AdamW's: decay of the mean of gradients
    beta2: BelowOne = 0.95  # AdamW's: decay of the mean of squared gradients
    eps: PositiveFloat = 1e-8  # AdamW's: added to the denominator
    # Format of the momentum (4, 2 or 1 bytes per parameter) and of AdamW's moments between steps; see adamw.py.
    state_dtype: StateDtype = "float32"

    @property
    def state_bytes(self) -> int:
        """Bytes of state per parameter of the matrices, approximately."""
        return BYTES[self.state_dtype]

    def warnings(self) -> list[str]:
        """Warnings about settings that are probably mistakes."""
        if self.learning_rate > MAX_ADAMW_RATE:
            return []
        return [
            f"optimizer.learning_rate={self.learning_rate:g} is small for Muon, whose step size does not depend on the "
            "gradient's; its usual rate is 0.02. Use optimizer=adamw for AdamW"
        ]

    def build(self, model: nn.Module, seed: int = 0, ranks: Ranks = ONE_RANK) -> list[torch.optim.Optimizer]:
        """seed: of stochastic rounding. ranks: that hold the same model and gradients, and share the work."""
        groups = group_parameters(model)
        dtype = getattr(model, "compute_dtype", None)  # the dtype of the model's matmuls
        optimizers: list[torch.optim.Optimizer] = []
        matrices: list[dict[str, Any]] = [{"params": groups.matrices, "peak": self.learning_rate}]
        full, low = split_groups(matrices, self.state_dtype, set())
        settings = (self.learning_rate, self.momentum, self.weight_decay, dtype)
        variants: tuple[tuple[list[dict[str, Any]], StateDtype], ...] = ((full, "float32"), (low, self.state_dtype))
        for param_groups, state_dtype in variants:
            if param_groups[0]["params"]:  # either may be empty (torch refuses empty groups)
                optimizers.append(_MuonOptimizer(param_groups, *settings, state_dtype, derive(seed, "matrices"), ranks))
        others = [{"params": groups.tables + groups.gains, "weight_decay": 0.0}]
        rate, betas, seed = self.adamw_learning_rate, (self.beta1, self.beta2), derive(seed, "rest")
        return optimizers + adamw(others, embeddings(model), rate, betas, self.eps, self.state_dtype, seed)

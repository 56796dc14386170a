"""The work of one training step, as the operations a device has to do: matmuls, attention, bytes, launches.

Time follows in plan/step_time.py. Counts of bytes and launches are of the eager step; a compiled one moves about half
of the elementwise bytes and launches a quarter as often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penjing.plan.flops import windowed_keys
from penjing.plan.shape import Shape

if TYPE_CHECKING:  # need torch
    from penjing.model.transformer import Recompute
    from penjing.plan.trainable import Trainable

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4}
# Values read and written by elementwise kernels, forward and backward, for one token of one block: norms, residuals,
# rotation and casts by width, the nonlinearity by inner width (of a gate its product too).
WIDTH_VALUES, MLP_VALUES, GATED_VALUES = 45, 8, 14
MASTER_FACTOR = 1.5  # with float32 masters beside half matmuls: the residual stream and the casts are in float32
# Times that each value of an attention map that is kept is read or written: scores, scale, mask, softmax, mixing and
# their gradients. Dropout adds some; half matmuls beside float32 masters take the softmax in float32.
MAP_VALUES, MAP_DROPOUT_VALUES, MAP_MASTER_FACTOR = 18, 5, 1.25
LOGIT_BYTES = 40  # of each logit: matmul, float32 copy, softmax, gradient
# With kernels of our own (kernels/triton/ops.py), on an H200: 43 ms for 26 G logits and half of that for adding up
# gradients; an eager step of 26M took 13 ms more than a compiled one.
KERNEL_LOGIT_BYTES, KERNEL_SHARE = 10, 0.85
ATTENTION_MATRICES = 3  # entries of `Workload._blocks`, before those of the MLP
BLOCK_KERNELS, STEP_KERNELS = 100, 60  # launched forward and backward for one block; and once
MASTER_KERNELS = 1.5
FORWARD_SHARE = 1 / 3  # of a block's bytes and kernels
AGAIN = {"none": 1.0, "mlp": 1.15, "block": 1.3}  # estimates: bytes moved and kernels launched, as a multiple


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step on one device."""

    shape: Shape
    tokens: int  # positions of one forward pass
    seq_len: int  # T
    keys: float  # that a query sees on average
    passes: int = 1  # forward and backward passes before the optimizer steps
    dtype: str = "bfloat16"  # of matmuls
    masters: Literal["float32", "same"] = "float32"  # what the weights are kept in
    attention: Literal["fused", "materialised"] = "fused"
    attention_dropout: bool = False  # of maps that are kept
    recompute: Recompute = "none"  # what of each block is computed again going backward
    optimizer: Literal["adamw", "muon"] = "adamw"
    fused_optimizer: bool = False
    compiled: bool = False
    own_kernels: bool = False  # those of kernels/triton/ops.py
    ranks: int = 1
    sharding: Literal["none", "ddp", "zero1", "zero2", "fsdp"] = "none"
    trainable: Trainable | None = None  # what learns; None: everything
    extra_forwards: float = 0.0  # of other models of this shape

    @property
    def trained(self) -> int:
        """Parameters that learn."""
        return self.shape.parameters if self.trainable is None else self.trainable.learns

    @property
    def weight_share(self) -> float:
        """Of the matrices' work, that of those which get a gradient of their own."""
        return 1.0 if self.trainable is None else self.trainable.weights / self.shape.matrices

    @property
    def input_share(self) -> float:
        """Of the matrices' work, that of those which pass a gradient on to their input."""
        return 1.0 if self.trainable is None else self.trainable.inputs / self.shape.matrices

    @property
    def first_backward(self) -> int:
        """The lowest layer whose attention has a backward pass."""
        return 0 if self.trainable is None else self.trainable.attention_from

    def layer_keys(self) -> list[float]:
        """Keys that a query sees on average, layer by layer."""
        windows = self.shape.windows or (0,) * self.shape.layers
        return [windowed_keys(self.keys, window) for window in windows]

    def _blocks(self) -> list[tuple[int, int, int, int]]:
        """(rows, inner, outputs, how many) of the matrices of all blocks, those of attention first, each forward."""
        shape, n = self.shape, self.tokens
        blocks = [
            (n, shape.width, shape.query_size, shape.layers),
            (n, shape.width, shape.key_size, 2 * shape.layers),
            (n, shape.query_size, shape.width, shape.layers),
            (n, shape.width, shape.intermediate_size, (shape.mlp_matrices - 1) * shape.num_dense),
            (n, shape.intermediate_size, shape.width, shape.num_dense),
        ]
        if shape.experts:
            layers, share = shape.layers - shape.num_dense, max(1, n * shape.num_experts_per_tok // shape.experts)
            blocks.append((share, shape.width, shape.moe_intermediate_size, 2 * layers * shape.experts))
            blocks.append((share, shape.moe_intermediate_size, shape.width, layers * shape.experts))
            blocks.append((n, shape.width, shape.experts, layers))
            if shape.shared_size:
                blocks.append((n, shape.width, shape.shared_size, 2 * layers))
                blocks.append((n, shape.shared_size, shape.width, layers))
        return blocks

    def matmuls(self) -> Iterator[tuple[int, int, int, float]]:
        """(rows, inner, outputs, how often) of one pass, forward and backward, all blocks and the head."""
        for number, (rows, inner, outputs, count) in enumerate(self._blocks()):
            again = float(self.recompute == "block" or (self.recompute == "mlp" and number >= ATTENTION_MATRICES))
            yield from self._three(rows, inner, outputs, count, 1 + again + self.extra_forwards)
        yield from self._three(self.tokens, self.shape.width, self.shape.vocabulary, 1, 1 + self.extra_forwards)

    def _three(
        self, rows: int, inner: int, outputs: int, count: float, forwards: float
    ) -> Iterator[tuple[int, int, int, float]]:
        """y = x W forward, the gradient of x, and the gradient of W, as far as they are computed."""
        if not count:
            return
        yield rows, inner, outputs, count * forwards
        if self.input_share:
            yield rows, outputs, inner, count * self.input_share
        if self.weight_share:
            yield inner, rows, outputs, count * self.weight_share

    def matmul_flops(self) -> float:
        """Of one pass."""
        return sum(2.0 * rows * inner * outputs * count for rows, inner, outputs, count in self.matmuls())

    def attention_flops(self) -> float:
        """Of one pass as done: forward 2 matmuls, backward 5 with the scores made again (fused) or 4 on all pairs."""
        forwards = 1 + float(self.recompute == "block") + self.extra_forwards
        one, keys = 2.0 * self.tokens * self.shape.query_size, self.layer_keys()
        if self.attention == "fused":
            return one * (2 * forwards * sum(keys) + 5 * sum(keys[self.first_backward :]))
        layers = self.shape.layers
        return one * self.seq_len * (2 * forwards * layers + 4 * (layers - self.first_backward))

    def map_bytes(self) -> float:
        """Moved for attention maps that are kept, in one pass."""
        if self.attention == "fused":
            return 0.0
        values = MAP_VALUES + (MAP_DROPOUT_VALUES if self.attention_dropout else 0)
        value_bytes = VALUE_BYTES[self.dtype] * (MAP_MASTER_FACTOR if self._has_masters else 1.0)
        return self.tokens * self.seq_len * self.shape.heads * self.shape.layers * values * value_bytes

    def elementwise_bytes(self) -> float:
        """Moved in one pass by everything that is neither a matmul nor attention nor the head."""
        shape = self.shape
        inner = GATED_VALUES if shape.mlp_matrices == 3 else MLP_VALUES
        mixture = shape.num_experts_per_tok * shape.moe_intermediate_size + shape.shared_size
        layers = shape.layers - shape.num_dense
        values = WIDTH_VALUES * shape.width * shape.layers + inner * shape.intermediate_size * shape.num_dense
        values += layers * (GATED_VALUES * mixture + 12 * shape.num_experts_per_tok * shape.width)
        value_bytes = VALUE_BYTES[self.dtype] * (MASTER_FACTOR if self._has_masters else 1.0)
        share = AGAIN[self.recompute] * self._done + 0.35 * self.extra_forwards
        share *= 0.5 if self.compiled else KERNEL_SHARE if self.own_kernels else 1.0
        return self.tokens * values * value_bytes * share

    def head_bytes(self) -> float:
        """Moved in one pass between logits and loss."""
        if self.own_kernels:
            return self.tokens * self.shape.vocabulary * KERNEL_LOGIT_BYTES * (1 + 0.3 * self.extra_forwards)
        half = self.masters == "same" and VALUE_BYTES[self.dtype] == 2
        wide = (1.0 if half else VALUE_BYTES[self.dtype] / 2) * (0.6 if self.compiled else 1.0)
        return self.tokens * self.shape.vocabulary * LOGIT_BYTES * wide * (1 + 0.3 * self.extra_forwards)

    def optimizer_bytes(self) -> float:
        """Moved by clipping, the update and the casts of the weights, once a step, on one device."""
        state = 16.0 if self.masters == "same" and VALUE_BYTES[self.dtype] == 2 else 28.0
        per = state * (1.0 if self.fused_optimizer else 2.0) + (20.0 if self._has_masters else 0.0)
        return self.trained / (self.ranks if self.sharding != "none" and self.sharding != "ddp" else 1) * per

    def optimizer_flops(self) -> float:
        """Of Muon's three Newton-Schulz rounds, each 4 m^2 n + 2 m^3 for a matrix of m x n, m the smaller side."""
        if self.optimizer != "muon":
            return 0.0
        total = 0.0
        for _, inner, outputs, count in self._blocks():
            small, large = sorted((inner, outputs))
            total += count * 3 * (4.0 * small * small * large + 2.0 * small**3)
        return total * self.weight_share

    def kernels(self) -> float:
        """Launched in one pass."""
        again = AGAIN[self.recompute]
        wide = MASTER_KERNELS if self._has_masters else 1.0
        blocks = self.shape.layers * BLOCK_KERNELS * wide * (again * self._done + 0.35 * self.extra_forwards)
        return (blocks + STEP_KERNELS) / (4 if self.compiled else 1)

    def exchanged_bytes(self) -> float:
        """Each device sends in one step."""
        if self.ranks == 1 or self.sharding == "none":
            return 0.0
        share = (self.ranks - 1) / self.ranks
        if self.sharding == "fsdp":  # weights gathered forward and backward, gradients scattered, in half precision
            return 3 * 2 * self.shape.parameters * share * self.passes
        return 2 * 4 * self.trained * share

    @property
    def _done(self) -> float:
        """Of what all blocks take forward (a third) and backward."""
        return 1.0 - (1.0 - FORWARD_SHARE) * self.first_backward / self.shape.layers

    @property
    def _has_masters(self) -> bool:
        return self.masters == "float32" and VALUE_BYTES[self.dtype] == 2

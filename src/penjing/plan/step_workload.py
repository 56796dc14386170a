"""The workload of one training step: matmuls, attention, bytes moved, kernel launches.

plan/step_time.py turns it into time. Bytes and launches are those of an eager step; a compiled one moves about half
of the elementwise bytes and launches a quarter as often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penjing.plan.flops import windowed_keys
from penjing.plan.layout import ONE_RANK, Layout
from penjing.plan.shape import Shape

if TYPE_CHECKING:  # need torch
    from penjing.model.transformer import Recompute
    from penjing.plan.trainable import Trainable

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4}
# Values read and written by elementwise kernels, forward and backward, per token and block. Per unit of width: norms,
# residuals, RoPE and casts. Per unit of inner width: the activation (with a gate also its product).
WIDTH_VALUES, MLP_VALUES, GATED_VALUES = 45, 8, 14
DROPOUT_VALUES = 20  # per unit of width: hashes, masks and products of both branches; an estimate
MASTER_FACTOR = 1.5  # float32 master weights with half-precision matmuls: residual stream and casts are in float32
LOGIT_BYTES = 40  # per logit: matmul, float32 copy, softmax, gradient
# With kernels/triton/ops.py on an H200: 43 ms for 26 G logits, and half of that to accumulate gradients; an eager step
# of 26M took 13 ms more than a compiled one.
KERNEL_LOGIT_BYTES, KERNEL_SHARE = 10, 0.85
ATTENTION_MATRICES = 3  # the first entries of `Workload._block_matmuls`; the MLP's follow
BLOCK_KERNELS, STEP_KERNELS = 100, 60  # launches per block, forward and backward; and per step
MASTER_KERNELS = 1.5
ZERO_LIVE = 10**9  # numbers of gathered weights that DeepSpeed's stage 3 keeps for the backward pass
FORWARD_SHARE = 1 / 3  # forward fraction of a block's bytes and kernels
RECOMPUTE_FACTORS = {"none": 1.0, "mlp": 1.15, "block": 1.3}  # estimates: of bytes moved and kernels launched


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step on one device."""

    shape: Shape
    tokens: int  # positions of one forward pass
    seq_len: int  # T
    keys: float  # mean per query
    passes: int = 1  # forward and backward passes per optimizer step
    dtype: str = "bfloat16"  # of matmuls
    dropout: bool = False  # of the outputs of attention and MLP
    recompute: Recompute = "none"  # the part of each block that the backward pass recomputes
    optimizer: Literal["adamw", "muon"] = "adamw"
    fused_optimizer: bool = False
    compiled: bool = False
    triton_kernels: bool = False  # kernels/triton/ops.py
    layout: Layout = ONE_RANK
    trainable: Trainable | None = None  # the trainable part; None: everything
    extra_forwards: float = 0.0  # forward passes of other models of this shape

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def trained(self) -> int:
        """Number of trainable parameters."""
        return self.shape.parameters if self.trainable is None else self.trainable.num_trainable

    @property
    def weight_share(self) -> float:
        """Fraction of the matmul work whose weights get a gradient."""
        return 1.0 if self.trainable is None else self.trainable.weights / self.shape.matrices

    @property
    def input_share(self) -> float:
        """Fraction of the matmul work whose inputs get a gradient."""
        return 1.0 if self.trainable is None else self.trainable.inputs / self.shape.matrices

    @property
    def first_backward(self) -> int:
        """The lowest layer whose attention has a backward pass."""
        return 0 if self.trainable is None else self.trainable.attention_from

    def layer_keys(self) -> list[float]:
        """Mean keys per query, layer by layer."""
        windows = self.shape.windows or (0,) * self.shape.layers
        return [windowed_keys(self.keys, window) for window in windows]

    def _block_matmuls(self) -> list[tuple[int, int, int, int]]:
        """(rows, inner, outputs, count) of the forward matmuls of all blocks, attention first."""
        shape, tokens = self.shape, self.tokens
        blocks = [
            (tokens, shape.width, shape.query_size, shape.layers),
            (tokens, shape.width, shape.key_size, 2 * shape.layers),
            (tokens, shape.query_size, shape.width, shape.layers),
            (tokens, shape.width, shape.intermediate_size, (shape.mlp_matrices - 1) * shape.num_dense),
            (tokens, shape.intermediate_size, shape.width, shape.num_dense),
        ]
        if shape.experts:
            layers = shape.layers - shape.num_dense
            expert_tokens = max(1, tokens * shape.num_experts_per_tok // shape.experts)
            blocks.append((expert_tokens, shape.width, shape.moe_intermediate_size, 2 * layers * shape.experts))
            blocks.append((expert_tokens, shape.moe_intermediate_size, shape.width, layers * shape.experts))
            blocks.append((tokens, shape.width, shape.experts, layers))
            if shape.shared_size:
                blocks.append((tokens, shape.width, shape.shared_size, 2 * layers))
                blocks.append((tokens, shape.shared_size, shape.width, layers))
        return blocks

    def matmuls(self) -> Iterator[tuple[int, int, int, float]]:
        """(rows, inner, outputs, count) of one pass, forward and backward, all blocks and the head."""
        for number, (rows, inner, outputs, count) in enumerate(self._block_matmuls()):
            recomputed = float(self.recompute == "block" or (self.recompute == "mlp" and number >= ATTENTION_MATRICES))
            yield from self._passes_of(rows, inner, outputs, count, 1 + recomputed + self.extra_forwards)
        yield from self._passes_of(self.tokens, self.shape.width, self.shape.vocabulary, 1, 1 + self.extra_forwards)

    def _passes_of(
        self, rows: int, inner: int, outputs: int, count: float, forwards: float
    ) -> Iterator[tuple[int, int, int, float]]:
        """y = x W, the gradient of x, and the gradient of W, as far as they are computed."""
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
        """FLOPs of one pass: forward 2 matmuls; backward 5 with recomputed scores."""
        forwards = 1 + float(self.recompute == "block") + self.extra_forwards
        flops_per_key, keys = 2.0 * self.tokens * self.shape.query_size, self.layer_keys()
        return flops_per_key * (2 * forwards * sum(keys) + 5 * sum(keys[self.first_backward :]))

    def elementwise_bytes(self) -> float:
        """Bytes moved in one pass by all operations except matmuls, attention and the head."""
        shape = self.shape
        inner = GATED_VALUES if shape.mlp_matrices == 3 else MLP_VALUES
        mixture = shape.num_experts_per_tok * shape.moe_intermediate_size + shape.shared_size
        layers = shape.layers - shape.num_dense
        width_values = WIDTH_VALUES + DROPOUT_VALUES * self.dropout
        values = width_values * shape.width * shape.layers + inner * shape.intermediate_size * shape.num_dense
        values += layers * (GATED_VALUES * mixture + 12 * shape.num_experts_per_tok * shape.width)
        value_bytes = VALUE_BYTES[self.dtype] * (MASTER_FACTOR if self._has_masters else 1.0)
        share = RECOMPUTE_FACTORS[self.recompute] * self._computed + 0.35 * self.extra_forwards
        share *= 0.5 if self.compiled else KERNEL_SHARE if self.triton_kernels else 1.0
        return self.tokens * values * value_bytes * share

    def head_bytes(self) -> float:
        """Bytes moved in one pass between logits and loss."""
        if self.triton_kernels:
            return self.tokens * self.shape.vocabulary * KERNEL_LOGIT_BYTES * (1 + 0.3 * self.extra_forwards)
        factor = VALUE_BYTES[self.dtype] / 2 * (0.6 if self.compiled else 1.0)
        return self.tokens * self.shape.vocabulary * LOGIT_BYTES * factor * (1 + 0.3 * self.extra_forwards)

    def optimizer_bytes(self) -> float:
        """Bytes moved on one device by clipping, the update and the weight casts, once per step."""
        bytes_each = 28.0 * (1.0 if self.fused_optimizer else 2.0) + (20.0 if self._has_masters else 0.0)
        return self.trained / self.layout.parts("optimizer state") * bytes_each

    def optimizer_flops(self) -> float:
        """FLOPs of Muon's three Newton-Schulz iterations: each 4 m^2 n + 2 m^3 for an m x n matrix with m <= n."""
        if self.optimizer != "muon":
            return 0.0
        total = 0.0
        for _, inner, outputs, count in self._block_matmuls():
            small, large = sorted((inner, outputs))
            total += count * 3 * (4.0 * small * small * large + 2.0 * small**3)
        return total * self.weight_share

    def shared_weight_bytes(self, ranks: int) -> float:
        """Bytes each of `ranks` receives in one step for the float32 weights that others updated with Muon."""
        if self.optimizer != "muon":
            return 0.0
        matrices = sum(inner * outputs * count for _, inner, outputs, count in self._block_matmuls())
        return 4 * matrices * self.weight_share * (ranks - 1) / ranks

    def kernels(self) -> float:
        """Kernels launched in one pass."""
        again = RECOMPUTE_FACTORS[self.recompute]
        masters = MASTER_KERNELS if self._has_masters else 1.0
        blocks = self.shape.layers * BLOCK_KERNELS * masters * (again * self._computed + 0.35 * self.extra_forwards)
        return (blocks + STEP_KERNELS) / (4 if self.compiled else 1)

    def communication_bytes(self) -> tuple[float, float]:
        """Bytes each device sends in one step: within a group that shards, and between groups with equal parts."""
        group = self.layout.group
        share, gradients = (group - 1) / group, 4.0 * self.trained
        if "weights" in self.layout.shards:  # a pass gathers blocks forward and backward, and scatters gradients
            once = self.layout.keeps_whole or (self.layout.strategy == "zero3" and self.shape.parameters <= ZERO_LIVE)
            again = 0 if once else self.shape.parameters - self.shape.vocabulary * self.shape.width
            exchanges = 1 if self.layout.keeps_whole else self.passes
            sharded = (4.0 * (self.shape.parameters + again) + gradients) * exchanges
        else:  # ZeRO: gradients reduced, in each pass if only parts are kept; updated weights gathered
            each_pass = "gradients" in self.layout.shards and not self.layout.keeps_whole
            sharded = gradients * (1 + (self.passes if each_pass else 1))
        copies = self.ranks // group
        return sharded * share, 2 * gradients / group * (copies - 1) / copies

    @property
    def _computed(self) -> float:
        """Fraction of the blocks' forward (a third) and backward work that is computed."""
        return 1.0 - (1.0 - FORWARD_SHARE) * self.first_backward / self.shape.layers

    @property
    def _has_masters(self) -> bool:
        return VALUE_BYTES[self.dtype] == 2

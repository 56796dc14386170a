"""Dropout in training passes, against overfitting.

Its masks are a hash of the row's seed (`Batch.noise_B`), layer, branch, position and channel: the same on every device,
with any micro-batch, number of ranks or activation checkpointing, compiled or not, and after a resume. A pass without
seeds, such as every validation, has none, and nothing of it is in an exported model.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from penjing.base.config import BelowOne, Settings
from penjing.kernels import ops

_MIX_64 = (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)  # odd, so that a product keeps all bits


@dataclass(frozen=True, kw_only=True)
class Regularization(Settings, section="regularization"):
    """Noise in training against overfitting, for little data and many epochs. Costs nothing afterwards."""

    removed: ClassVar = {"stochastic_depth": 0.0, "masked_inputs": 0.0}

    # Share of the tokenizer's merges left out, others in each of the first 70 % of the epochs: words are read in
    # several ways (BPE-dropout, arXiv:1910.13267). For pretraining on little text.
    bpe_dropout: BelowOne = 0.0
    dropout: BelowOne = 0.0  # share of each attention's and MLP's outputs that is set to 0 (others are scaled up)


class BranchNoise(NamedTuple):
    """The dropout of one block's branches, 0 attention and 1 MLP. The same type of values in each block, so that all
    share one compiled graph."""

    dropout: float = 0.0
    seed_2BT1: Tensor | None = None  # int32; None: no noise

    def drop(self, out_BTD: Tensor, branch: int) -> Tensor:
        """A branch's output with its dropout, of the same mean."""
        return out_BTD if self.seed_2BT1 is None else ops.dropout(out_BTD, self.seed_2BT1[branch], self.dropout)


def branch_noise(dropout: float, noise_B: Tensor | None, num_layers: int, num_tokens: int) -> list[BranchNoise]:
    """The noise of each block in this pass."""
    if noise_B is None or not dropout:
        return [BranchNoise()] * num_layers
    branch_L2BT = torch.arange(2 * num_layers, device=noise_B.device).view(num_layers, 2, 1, 1)
    position_T = torch.arange(num_tokens, device=noise_B.device)
    value = noise_B[:, None]
    # The seeds come first: torch.compile would multiply positions as exact integers, without overflow.
    for more in (0, branch_L2BT, position_T):
        value = (value + more) * _MIX_64[0]
        value = value ^ (value >> 32)
    seed_L2BT1 = ((value * _MIX_64[1]) >> 32).to(torch.int32)[..., None]
    return [BranchNoise(dropout, seed_2BT1) for seed_2BT1 in seed_L2BT1]

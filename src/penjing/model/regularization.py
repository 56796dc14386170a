"""Random noise in training passes, against overfitting: dropout, stochastic depth and masked inputs.

All of it is a hash of the row's seed (`Batch.noise_B`), layer, branch, position and channel: the same on every device,
with any micro-batch, number of ranks or activation checkpointing, compiled or not, and after a resume. A pass without
seeds, such as every validation, has no noise, and nothing of it is in an exported model.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from penjing.base.config import BelowOne, Fraction, Settings
from penjing.kernels import ops

_MIX_64 = (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)  # odd, so that a product keeps all bits
_DEPTH, _INPUT, _RATE = -1, -2, -3  # of what else than dropout a hash is, in place of the position


@dataclass(frozen=True, kw_only=True)
class Regularization(Settings):
    """Noise in training against overfitting, for little data and many epochs. Costs nothing afterwards."""

    section: ClassVar = "regularization"

    dropout: BelowOne = 0.0  # share of each attention's and MLP's outputs that is set to 0 (others are scaled up)
    # Share of rows that skip the last block's attention, and as many its MLP; less in earlier blocks, linearly from 0
    # at the first one (arXiv:1603.09382, with rows in place of batches).
    stochastic_depth: BelowOne = 0.0
    # Largest share of a row's input tokens that is hidden (a zero vector takes the embedding's place). Each row draws
    # its share from 0 to this; targets stay as they are (after arXiv:2606.06888).
    masked_inputs: Fraction = 0.0

    @property
    def drops(self) -> bool:
        """Whether training passes have noise."""
        return bool(self.dropout or self.stochastic_depth or self.masked_inputs)


class BranchNoise(NamedTuple):
    """The noise of one block's branches, 0 attention and 1 MLP. The same type of values in each block, so that all
    share one compiled graph."""

    dropout: float = 0.0
    seed_2BT1: Tensor | None = None  # int32; None: no noise
    scale_2B11: Tensor | None = None  # 0 for a row that skips the branch, else what keeps the mean

    def drop(self, out_BTD: Tensor, branch: int) -> Tensor:
        """A branch's output with its dropout, of the same mean."""
        if self.seed_2BT1 is None or self.scale_2B11 is None:
            return out_BTD
        return ops.dropout(out_BTD, self.seed_2BT1[branch], self.scale_2B11[branch], self.dropout)


def branch_noise(settings: Regularization, noise_B: Tensor, num_layers: int, num_tokens: int) -> list[BranchNoise]:
    """The noise of each block in this pass."""
    if not (settings.dropout or settings.stochastic_depth):
        return [BranchNoise()] * num_layers
    branch_L2 = torch.arange(2 * num_layers, device=noise_B.device).view(num_layers, 2)
    position_T = torch.arange(num_tokens, device=noise_B.device)
    seed_L2BT1 = _bits(noise_B[:, None], branch_L2[..., None, None], position_T)[..., None]
    rate_L11 = torch.linspace(0, settings.stochastic_depth, num_layers, device=noise_B.device)[:, None, None]
    stays_L2B = _uniform(_bits(noise_B, branch_L2[..., None], _DEPTH)) >= rate_L11
    scale_L2B11 = (stays_L2B / ((1 - rate_L11) * (1 - settings.dropout)))[..., None, None]
    return [BranchNoise(settings.dropout, *one) for one in zip(seed_L2BT1, scale_L2B11, strict=True)]


def masked_inputs(settings: Regularization, noise_B: Tensor, num_tokens: int) -> Tensor:
    """masked_BT: which input tokens are hidden in this pass."""
    position_T = torch.arange(num_tokens, device=noise_B.device)
    rate_B = settings.masked_inputs * _uniform(_bits(noise_B, _RATE, 0))
    return _uniform(_bits(noise_B[:, None], _INPUT, position_T)) < rate_B[:, None]


def _bits(noise: Tensor, purpose: Tensor | int, index: Tensor | int) -> Tensor:
    """Random int32 for each combination of the three, broadcast against each other.

    The seeds come first: torch.compile would compute a product of positions in exact integers, without overflow.
    """
    value = noise
    for more in (0, purpose, index):
        value = (value + more) * _MIX_64[0]
        value = value ^ (value >> 32)
    return ((value * _MIX_64[1]) >> 32).to(torch.int32)


def _uniform(bits: Tensor) -> Tensor:
    """Numbers in [0, 1)."""
    return (bits >> 8).float() * 2.0**-24 + 0.5

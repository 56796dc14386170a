"""Initial weights, drawn in a fixed order from one seed."""

import math

import torch
from torch import nn

from penjing.model.block import Block
from penjing.model.transformer import Transformer


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Normal weights of standard deviation 0.02 (GPT-2), residual outputs at zero, keys equal to queries, gains at one.

    0.02 is for widths of 625 and more. Narrower models get 0.5/sqrt(D), which is larger, so that a 128-wide model does
    not start with near-zero attention scores; their embedding keeps 0.02. With o_proj and down_proj at zero every block
    starts as the identity. With each key head a copy of its first query head, a token first attends to its earlier
    occurrences (after arXiv:2305.09828). With both, copying from context is learned a third sooner (docs/log.md). The
    global random state is neither read nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix_std = max(0.02, 0.5 / math.sqrt(model.config.hidden_size))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim < 2:
            nn.init.ones_(parameter)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            nn.init.zeros_(parameter)
        else:
            std = 0.02 if name == "embed.weight" else matrix_std
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.tie_key_init()

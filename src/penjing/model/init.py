"""Starting weights, drawn in a fixed order from one seed."""

from __future__ import annotations

import math

import torch
from torch import nn

from penjing.model.transformer import Transformer


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Normal weights of standard deviation 0.02 (GPT-2), residual outputs narrowed by sqrt(2 L), gains at one.

    0.02 is for widths of 625 and more; narrower models get 0.5/sqrt(D), which is larger there, so that a 128-wide
    model does not start with near-zero attention scores. The embedding keeps 0.02. The global random state is neither
    read nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    wide = max(0.02, 0.5 / math.sqrt(config.hidden_size))
    narrow = wide / math.sqrt(2 * config.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            nn.init.ones_(parameter)
            continue
        spread = narrow if name.endswith(("o_proj.weight", "down_proj.weight")) else wide
        if name == "embed.weight":
            spread = 0.02
        drawn = torch.empty(parameter.shape).normal_(0.0, spread, generator=generator)
        parameter.copy_(drawn)

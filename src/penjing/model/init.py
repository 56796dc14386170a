"""Initial weights, drawn in a fixed order from one seed."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from penjing.devices.shards import local_part
from penjing.model.transformer import Transformer

EMBEDDING_STD = 0.02


@torch.no_grad()
def initialise(
    model: Transformer,
    seed: int,
    place: Callable[[Tensor, Tensor], Tensor] = lambda full, like: full,
    embedding_VD: Tensor | None = None,
) -> None:
    """Normal weights of standard deviation 0.02 (GPT-2), residual outputs at zero, keys equal to queries, gains at one.

    0.02 is for widths of 625 and more. Narrower models get 0.5/sqrt(D), which is larger, so that a 128-wide model does
    not start with near-zero attention scores; their embedding keeps 0.02. With o_proj and down_proj at zero every block
    starts as the identity. With each key head a copy of its first query head, a token first attends to its earlier
    occurrences (after arXiv:2305.09828). With both, copying from context is learned a third sooner (docs/log.md). The
    global random state is neither read nor changed.

    place: of a strategy whose ranks hold parts. Each tensor is drawn whole, one at a time, so all draw the same.
    embedding_VD: in place of a normal one (model/cooccurrence.py). If it is also the head, the last norm's gain makes
    the first logits as small as normal ones; the other weights stay the same.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix_std = max(0.02, 0.5 / math.sqrt(model.config.hidden_size))
    last_gain = 1.0
    if embedding_VD is not None and model.head is None:
        last_gain = EMBEDDING_STD / embedding_VD.std().item()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            local_part(parameter).zero_()
        elif parameter.ndim < 2:
            local_part(parameter).fill_(last_gain if name == "norm.weight" else 1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            local_part(parameter).zero_()
        else:
            std = EMBEDDING_STD if name == "embed.weight" else matrix_std
            whole = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            if name == "embed.weight" and embedding_VD is not None:
                whole = embedding_VD
            elif name.endswith("q_proj.weight"):
                query = whole
            elif name.endswith("k_proj.weight"):  # comes after it
                query_GRKD = query.view(model.config.num_key_value_heads, -1, model.config.head_dim, query.shape[1])
                whole = query_GRKD[:, 0].flatten(0, 1)
            parameter.copy_(place(whole, parameter))

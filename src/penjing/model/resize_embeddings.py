"""More rows for a vocabulary that has grown."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.base.errors import UserError

TABLES = ("embed.weight", "head.weight")


@torch.no_grad()
def resize_embeddings(state: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """A state dict with `vocab_size` rows of embedding and head; all else, and the old rows, as they are.

    Each new row is the mean of the old ones: a new token begins as likely as the average one, and the loss on old text
    barely moves (after Hewitt, 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    Raises UserError if there are more rows than that already: a vocabulary never shrinks here.
    """
    grown = dict(state)
    for name in TABLES:
        if name not in state:
            continue
        old_VD = state[name]
        missing = vocab_size - old_VD.shape[0]
        if missing < 0:
            raise UserError(
                "smaller than that of the weights to begin with",
                where="model.vocab_size",
                got=vocab_size,
                wanted=f"at least {old_VD.shape[0]}",
            )
        if missing:
            mean_1D = old_VD.double().mean(dim=0, keepdim=True).to(old_VD.dtype)
            grown[name] = torch.cat((old_VD, mean_1D.expand(missing, -1)))
    return grown

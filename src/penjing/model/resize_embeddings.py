"""Adds embedding rows for a larger vocabulary."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penjing.base.errors import UserError

EMBEDDINGS = ("embed.weight", "head.weight")


@torch.no_grad()
def resize_embeddings(
    state: dict[str, Tensor], vocab_size: int, pieces: Mapping[int, Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """A state dict with `vocab_size` rows of embedding and head; all else, and the old rows, unchanged.

    pieces: the old ids that the text of a new one consists of; its row is their mean, also if the matrix had an unused
    row for it. Every other new row is the mean of all old ones: a new token starts as likely as the average one, and
    the loss on old text hardly changes (after Hewitt, 2021, "Initializing New Word Embeddings for Pretrained Language
    Models").
    Raises UserError if there are already more rows: a vocabulary is never shrunk.
    """
    resized = dict(state)
    for name in EMBEDDINGS:
        if name not in state:
            continue
        old_VD = state[name]
        num_new = vocab_size - old_VD.shape[0]
        if num_new < 0:
            what = "smaller than the vocabulary of the initial weights"
            raise UserError(what, where="model.vocab_size", got=vocab_size, wanted=f"at least {old_VD.shape[0]}")
        if num_new:
            mean_1D = old_VD.double().mean(dim=0, keepdim=True).to(old_VD.dtype)
            resized[name] = torch.cat((old_VD, mean_1D.expand(num_new, -1)))
        made_of = {index: ids for index, ids in (pieces or {}).items() if ids}
        if made_of:
            resized[name] = resized[name].clone()
            for index, ids in made_of.items():
                resized[name][index] = old_VD[list(ids)].double().mean(dim=0).to(old_VD.dtype)
    return resized

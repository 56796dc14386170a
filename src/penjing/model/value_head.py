"""One number for each token: a reward or a value, read off the hidden states of a decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penjing.model.score import Score
from penjing.model.transformer import Transformer


class ScalarHead(nn.Module):
    """A decoder (`model`) with a head that gives one number for a position: v = w . hidden.

    w begins at zero, so that every answer starts out equal; it is a vector, and decays as little as gains do.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.scalar = nn.Parameter(torch.zeros(model.config.hidden_size))

    def forward(
        self,
        ids_BT: Tensor,
        document_BT: Tensor | None = None,
        *,
        scalar_N: Tensor | None = None,
        score: Score | None = None,
        scored_N: Tensor | None = None,
        **branches: Tensor | None,
    ) -> Any:
        """value_N in float32 of the positions scalar_N; with a score too, (the score, value_N), in one pass.

        scalar_N, scored_N: flat indices (row * T + position); without scalar_N the decoder alone answers. branches:
        `branch_BT` and `position_BT` as it takes them. A mixture of experts that is being trained returns at the end
        what its routers did.
        """
        if scalar_N is None:
            return self.model(ids_BT, document_BT, score=score, scored_N=scored_N, **branches)

        def values(hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Any:
            # In float32 whatever the matmuls are in: one vector costs nothing, and rewards differ in small digits.
            value_N = (hidden_ND[scalar_N].float() * self.scalar).sum(dim=-1)
            if score is None:
                return value_N
            return score(hidden_ND if scored_N is None else hidden_ND[scored_N], weight_VD, dtype), value_N

        found = self.model(ids_BT, document_BT, score=values, **branches)
        if score is not None and isinstance(found[0], tuple):  # with what the routers did
            return (*found[0], found[1])
        return found


def answer_places(scored_N: Tensor, answer_N: Tensor, num_answers: int) -> Tensor:
    """The position that predicts each answer's last token, [A]: answers' tokens stand one after the other."""
    return scored_N[torch.bincount(answer_N, minlength=num_answers).cumsum(0) - 1]

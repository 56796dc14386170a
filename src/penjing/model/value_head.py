"""One number for each token, a reward or a value, from the hidden states of a decoder."""

from typing import Any

import torch
from torch import Tensor, nn

from penjing.model.score import Score
from penjing.model.transformer import Transformer


class ScalarHead(nn.Module):
    """A decoder (`model`) with a head that gives one number per position: v = w . hidden. w starts at zero, so that all
    answers start equal. It is a vector, so it has no weight decay, like norm gains."""

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
        **places: Tensor | None,
    ) -> Any:
        """value_N in float32 of the positions scalar_N; with a score too, (the score, value_N), in one pass.

        scalar_N, scored_N: flat indices (row * T + position); without scalar_N only the decoder runs. places:
        `subtree_end_BT` and `position_BT` of the decoder. With gradients, a mixture of experts also returns its router
        statistics, at the end.
        """
        if scalar_N is None:
            return self.model(ids_BT, document_BT, score=score, scored_N=scored_N, **places)

        def values(hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Any:
            # In float32 whatever the matmuls' dtype: one vector costs nothing, and rewards differ in their last digits.
            value_N = (hidden_ND[scalar_N].float() * self.scalar).sum(dim=-1)
            if score is None:
                return value_N
            return score(hidden_ND if scored_N is None else hidden_ND[scored_N], weight_VD, dtype), value_N

        output = self.model(ids_BT, document_BT, score=values, **places)
        if score is not None and isinstance(output[0], tuple):  # with router statistics
            return (*output[0], output[1])
        return output


def last_token_indices(scored_N: Tensor, answer_N: Tensor, num_answers: int) -> Tensor:
    """The position that predicts each answer's last token, [A]; an answer's tokens are contiguous."""
    return scored_N[torch.bincount(answer_N, minlength=num_answers).cumsum(0) - 1]

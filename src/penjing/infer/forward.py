"""One pass over rows of many sequences: what an engine asks of a model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor


class Forward(Protocol):
    """Reads tokens, each into its sequence's slot, and foretells the next.

    A row is one token of one sequence. Decoding gives one row a sequence, reading a prompt many rows of one (a chunk),
    and both may be in one pass.
    """

    num_slots: int
    max_tokens: int  # of one slot
    vocab_size: int
    exact: bool  # a row's values do not depend on the other rows of the pass, to the last bit
    adapters: tuple[str, ...]  # names; `adapter_N` counts them

    def __call__(
        self,
        slot_N: np.ndarray,
        position_N: np.ndarray,
        id_N: np.ndarray,
        logits_at_R: np.ndarray,
        adapter_N: np.ndarray | None = None,
    ) -> Tensor:
        """logits_RV in float32 on the model's device, after the rows `logits_at_R`.

        Arrays of int32 or int64. Rows of one slot stand side by side, positions ascending; a row reads its slot's
        positions up to its own (its window) and writes its own. adapter_N: which adapter each row hears, -1 for the
        base alone; None: the one that was in use when the weights were packed.
        """
        ...

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy keys and values of the first `tokens` positions from one slot to another."""
        ...

"""The key/value cache: one static block per layer; each row has its own length."""

import torch
from torch import Tensor

from penjing.model.config import ModelConfig


class Cache:
    """Keys and values of the tokens so far, for `rows` sequences of up to `max_tokens` each.

    Rows may have different lengths: `length_B` counts the valid positions of each. Positions after a shorter prompt
    hold garbage; they are overwritten before any query attends to them.

    key_LBGSK, value_LBGSK: [layers, B, G, max_tokens, K] each, 4 x layers x B x G x max_tokens x K bytes in bfloat16.
    """

    def __init__(
        self, config: ModelConfig, rows: int, max_tokens: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, max_tokens, config.head_dim)
        self.key_LBGSK = torch.zeros(shape, device=device, dtype=dtype)
        self.value_LBGSK = torch.zeros(shape, device=device, dtype=dtype)
        self.length_B = torch.zeros(rows, dtype=torch.long, device=device)

    @property
    def max_tokens(self) -> int:
        return self.key_LBGSK.shape[3]

    def positions(self, num_tokens: int) -> Tensor:
        """position_BT of the next `num_tokens` tokens of every row."""
        return self.length_B[:, None] + torch.arange(num_tokens, device=self.length_B.device)

    def write(self, layer: int, position_BT: Tensor, key_BTGK: Tensor, value_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values at their positions; returns all of the layer's, block_BGSK each."""
        rows_B1 = torch.arange(position_BT.shape[0], device=position_BT.device)[:, None]
        self.key_LBGSK[layer][rows_B1, :, position_BT] = key_BTGK.to(self.key_LBGSK.dtype)
        self.value_LBGSK[layer][rows_B1, :, position_BT] = value_BTGK.to(self.value_LBGSK.dtype)
        return self.key_LBGSK[layer], self.value_LBGSK[layer]

"""What changes the logits of single answers before they are drawn: penalties, biases, and masks of grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.infer.sample import ChangedLogits, Sampling


class Penalties:
    """Per slot, how often the answer holds each id and which ids the prompt holds; made for slots that need it."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape, self._device = (num_slots, vocab_size), device
        self._sampling: dict[int, Sampling] = {}
        self._count_SV: Tensor | None = None  # of the answer's tokens
        self._prompt_SV: Tensor | None = None
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}  # ids, and what is added to their logits

    def put(self, slot: int, sampling: Sampling, prompt: Sequence[int], said: Sequence[int]) -> None:
        """A new answer in this slot. said: its tokens so far."""
        self._sampling.pop(slot, None)
        self._bias.pop(slot, None)
        if sampling.logit_bias:
            self._bias[slot] = _bias(sampling.logit_bias, self._device)
        if not sampling.has_penalty:
            return
        if self._count_SV is None or self._prompt_SV is None:
            self._count_SV = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._prompt_SV = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._sampling[slot] = sampling
        vocab_size = self._shape[1]
        count_V = torch.bincount(torch.tensor(list(said), dtype=torch.long), minlength=vocab_size)
        self._count_SV[slot] = count_V.to(self._device, torch.int32)
        self._prompt_SV[slot] = False
        self._prompt_SV[slot, torch.tensor(list(prompt), device=self._device)] = True

    def said(self, slot_R: NDArray[np.int64], id_R: Tensor) -> None:
        """These slots' answers hold one more token each."""
        if not self._sampling or self._count_SV is None:
            return
        rows = [row for row, slot in enumerate(slot_R.tolist()) if slot in self._sampling]
        if rows:
            at = torch.from_numpy(slot_R[rows]).to(self._device)
            self._count_SV[at, id_R[torch.tensor(rows, device=self._device)]] += 1

    def changed(
        self, logits_RV: Tensor, slot_R: NDArray[np.int64], masks: Mapping[int, NDArray[np.bool_]]
    ) -> ChangedLogits | None:
        """The logits with all of it; None where no row has any. masks: by row, which ids may come."""
        slots = slot_R.tolist()
        penalised = [row for row, slot in enumerate(slots) if slot in self._sampling] if self._sampling else []
        biased = [row for row, slot in enumerate(slots) if slot in self._bias] if self._bias else []
        if not (penalised or biased or masks):
            return None
        changed_RV = logits_RV.clone()
        if penalised:
            row_N = torch.tensor(penalised, device=self._device)
            changed_RV[row_N] = self._penalised(changed_RV[row_N], [slots[row] for row in penalised])
        for row in biased:
            ids, values = self._bias[slots[row]]
            changed_RV[row, ids] += values
        for row, may_V in masks.items():
            changed_RV[row].masked_fill_(~torch.from_numpy(may_V).to(self._device), -torch.inf)
        is_changed_R = np.zeros(len(slots), dtype=bool)
        is_changed_R[[*penalised, *biased, *masks]] = True
        return ChangedLogits(changed_RV, is_changed_R)

    def _penalised(self, logits_NV: Tensor, slots: list[int]) -> Tensor:
        assert self._count_SV is not None and self._prompt_SV is not None
        slot_N = torch.tensor(slots, device=self._device)
        count_NV, settings = self._count_SV[slot_N], [self._sampling[slot] for slot in slots]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=self._device)[:, None]

        repetition_N1 = column([each.repetition_penalty for each in settings])
        held_NV = (count_NV > 0) | self._prompt_SV[slot_N]
        weaker_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
        logits_NV = torch.where(held_NV, weaker_NV, logits_NV)
        logits_NV = logits_NV - column([each.frequency_penalty for each in settings]) * count_NV
        return logits_NV - column([each.presence_penalty for each in settings]) * (count_NV > 0)


def _bias(given: Mapping[int, float], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(given), device=device), torch.tensor([*map(float, given.values())], device=device)

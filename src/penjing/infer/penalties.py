"""Logits processors: penalties, biases and grammar masks, applied before sampling."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.infer.forward import ints, on_device
from penjing.infer.sample import ProcessedLogits, Sampling

LARGEST = 1e30  # a penalised logit: it stays finite when a tiny temperature divides it


class Penalties:
    """Per slot, the count of each id in the answer and the ids of the prompt; only for slots that need it."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape, self._device = (num_slots, vocab_size), device
        self._sampling: dict[int, Sampling] = {}
        self._count_SV: Tensor | None = None  # of the answer's tokens
        self._prompt_SV: Tensor | None = None
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}  # ids, and the values added to their logits

    def put(self, slot: int, sampling: Sampling, prompt: Sequence[int], generated_ids: Sequence[int]) -> None:
        """Start a new answer in this slot. generated_ids: its tokens so far."""
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
        count_V = torch.bincount(torch.tensor(list(generated_ids), dtype=torch.long), minlength=vocab_size)
        self._count_SV[slot] = count_V.to(self._device, torch.int32)
        self._prompt_SV[slot] = False
        self._prompt_SV[slot, torch.tensor(list(prompt), device=self._device)] = True

    def count(self, slot_R: NDArray[np.int64], id_R: Tensor) -> None:
        if not self._sampling or self._count_SV is None:
            return
        rows = [row for row, slot in enumerate(slot_R.tolist()) if slot in self._sampling]
        if rows:
            slot_N = on_device(slot_R[rows], self._device)
            self._count_SV[slot_N, id_R[on_device(ints(rows), self._device)]] += 1

    def apply(
        self, logits_RV: Tensor, slot_R: NDArray[np.int64], masks: Mapping[int, NDArray[np.bool_]]
    ) -> ProcessedLogits | None:
        """The processed logits; None if no row has a penalty, bias or mask. masks: by row, the allowed ids."""
        slots = slot_R.tolist()
        penalised = [row for row, slot in enumerate(slots) if slot in self._sampling] if self._sampling else []
        biased = [row for row, slot in enumerate(slots) if slot in self._bias] if self._bias else []
        if not (penalised or biased or masks):
            return None
        processed_RV = logits_RV.clone()
        if penalised:
            row_N = on_device(ints(penalised), self._device)
            processed_RV[row_N] = self._penalised(processed_RV[row_N], [slots[row] for row in penalised])
        for row in biased:
            ids, values = self._bias[slots[row]]
            processed_RV[row, ids] += values
        for row, allowed_V in masks.items():
            processed_RV[row].masked_fill_(on_device(~allowed_V, self._device), -torch.inf)
        is_processed_R = np.zeros(len(slots), dtype=bool)
        is_processed_R[[*penalised, *biased, *masks]] = True
        return ProcessedLogits(processed_RV, is_processed_R)

    def _penalised(self, logits_NV: Tensor, slots: list[int]) -> Tensor:
        assert self._count_SV is not None and self._prompt_SV is not None
        slot_N = on_device(ints(slots), self._device)
        count_NV, settings = self._count_SV[slot_N], [self._sampling[slot] for slot in slots]

        def column(values: list[float]) -> Tensor:
            return on_device(np.array(values, dtype=np.float32), self._device)[:, None]

        repetition_N1 = column([setting.repetition_penalty for setting in settings])
        seen_NV = (count_NV > 0) | self._prompt_SV[slot_N]
        penalised_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
        logits_NV = torch.where(seen_NV, penalised_NV.clamp(-LARGEST, LARGEST), logits_NV)
        logits_NV = logits_NV - column([setting.frequency_penalty for setting in settings]) * count_NV
        return logits_NV - column([setting.presence_penalty for setting in settings]) * (count_NV > 0)


def _bias(bias: Mapping[int, float], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(bias), device=device), torch.tensor([*map(float, bias.values())], device=device)

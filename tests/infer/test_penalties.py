"""Penalties of one row, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penjing.infer.penalties import Penalties
from penjing.infer.sample import Sampling

NO_MASKS: dict[int, np.ndarray] = {}


def test_each_penalty_counts_what_it_should():
    """Of ids 0 to 4 the prompt holds 0 and 1, the answer 1 once and 2 three times: OpenAI's presence and frequency
    count the answer alone, arXiv:1909.05858 both."""
    style = Sampling(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    penalties = Penalties(num_slots=2, vocab_size=5, device=torch.device("cpu"))
    penalties.put(1, style, prompt=[0, 1], generated_ids=[2, 1])
    for _ in range(2):
        penalties.count(np.array([1]), torch.tensor([2]))
    changed = penalties.apply(torch.tensor([[4.0, 4.0, 4.0, -4.0, 4.0], [-4.0, 4.0, 4.0, 4.0, 4.0]]), *at(0, 1))
    assert changed.is_processed_R.tolist() == [False, True]
    assert changed.logits_RV[0].tolist() == [4.0, 4.0, 4.0, -4.0, 4.0]
    once, three_times = 4 / 2 - 0.5 - 0.25, 4 / 2 - 3 * 0.5 - 0.25
    assert changed.logits_RV[1].tolist() == pytest.approx([-8.0, once, three_times, 4.0, 4.0])


def test_a_penalised_logit_stays_finite():
    penalties = Penalties(num_slots=1, vocab_size=2, device=torch.device("cpu"))
    penalties.put(0, Sampling(repetition_penalty=1e-38), prompt=[0], generated_ids=[])
    assert (penalties.apply(torch.tensor([[4.0, 5.0]]), *at(0)).logits_RV / 1e-6).isfinite().all()


def at(*slots):
    return np.array(slots), NO_MASKS

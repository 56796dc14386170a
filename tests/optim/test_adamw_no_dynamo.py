"""Optimizers without torch's compiler take the steps of torch's own, and are saved and loaded as they are."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy

import torch

from penjing.optim.adamw_no_dynamo import FusedAdamW

BETAS = (0.9, 0.95)


def parameters():
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (7,))]


def groups(learned):
    return [{"params": learned[:1], "weight_decay": 0.1}, {"params": learned[1:], "weight_decay": 0.0}]


def take_steps(optimizer, learned, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in learned:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in learned)


def test_steps_are_those_of_torch_s_to_the_bit_also_after_its_state_was_loaded():
    ours_learned, theirs_learned = parameters(), parameters()
    ours = FusedAdamW(groups(ours_learned), 0.01, BETAS, 1e-8)
    theirs = torch.optim.AdamW(groups(theirs_learned), lr=0.01, betas=BETAS, eps=1e-8, fused=True)
    take_steps(ours, ours_learned, [1, 2])
    take_steps(theirs, theirs_learned, [1, 2])
    again = FusedAdamW(groups(ours_learned), 1.0, BETAS, 1e-8)
    again.load_state_dict(deepcopy(theirs.state_dict()))
    take_steps(again, ours_learned, [3, 4])
    take_steps(theirs, theirs_learned, [3, 4])
    for one, other in zip(ours_learned, theirs_learned, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert str(again.state_dict()) == str(theirs.state_dict())


_RUN = """
import sys
import torch
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon
for settings in (AdamW(), AdamW(state_dtype="bfloat16"), Muon()):
    model = torch.nn.Linear(96, 96)
    for optimizer in settings.build(model):
        model(torch.ones(2, 96)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_no_optimizer_brings_the_compiler_along():
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

"""Pieces of work on several threads: each done once, to the same bits, whoever does it."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.expert_thread_pool import MIN_ITEMS, run_in_threads
from penjing.model.config import ModelConfig
from penjing.model.moe import MoELayer


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_piece_is_done_once_by_threads_of_their_own(two_threads):
    both = threading.Barrier(2, timeout=60)
    done: list[int] = []
    seen: set[tuple[str, int, bool]] = set()

    def work(pieces):
        both.wait()  # not passed unless two threads are here at the same time
        for piece in pieces:
            done.append(piece)
        seen.add((threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))

    run_in_threads(work, list(range(100)))
    assert sorted(done) == list(range(100))
    assert len(seen) == 2 and {(threads, grad) for _, threads, grad in seen} == {(1, False)}
    assert torch.get_num_threads() == 2


def test_few_pieces_stay_in_the_thread_that_asks(two_threads):
    here: set[int] = set()

    def work(pieces):
        here.add(threading.get_ident())
        list(pieces)

    run_in_threads(work, list(range(2 * MIN_ITEMS - 1)))
    assert here == {threading.get_ident()}


def test_stand_ins_stay_there_too(two_threads):
    here: set[int] = set()

    def work(pieces):
        here.add(threading.get_ident())
        list(pieces)

    with arena.disabled():
        run_in_threads(work, list(range(100)))
    assert here == {threading.get_ident()}


def test_an_error_in_a_piece_reaches_the_caller(two_threads):
    def work(pieces):
        for piece in pieces:
            if piece == 7:
                raise ValueError("piece 7")

    with pytest.raises(ValueError, match="piece 7"):
        run_in_threads(work, list(range(100)))


def test_a_forked_child_makes_threads_of_its_own(two_threads):
    run_in_threads(list, list(range(100)))
    child = os.fork()
    if child == 0:
        done: list[int] = []
        run_in_threads(done.extend, list(range(100)))
        os._exit(0 if sorted(done) == list(range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_come_to_the_same_bits_on_one_thread_and_on_two(two_threads, dtype):
    shape = ModelConfig(
        architecture="qwen3_moe",
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    )
    torch.manual_seed(3)
    mixture = MoELayer(shape)
    mixture.compute_dtype = dtype
    x_BTD = torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found: list[list[torch.Tensor]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        mixture.zero_grad()
        out_BTD, _ = mixture(x_BTD)
        out_BTD.float().square().sum().backward()
        grads = [parameter.grad for parameter in (mixture.gate_proj, mixture.up_proj, mixture.down_proj)]
        found.append([out_BTD.detach(), *[grad for grad in grads if grad is not None]])
    assert len(found[0]) == 4
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))

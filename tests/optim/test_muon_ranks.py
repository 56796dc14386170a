"""Ranks share Muon's orthogonalizations: each matrix is computed once, and every rank has the bits of one alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from penjing.optim.muon import Muon
from penjing.optim.ranks import ONE_RANK, owner_of_each

SHAPES = [(8, 16), (16, 8), (24, 24), (5, 40)]


class Threads:
    """`world` ranks that are threads of this process; `exchanged` has the sizes that each of them sent."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier = world, threading.Barrier(world, timeout=60)
        self.sent: dict[int, Sequence[Tensor]] = {}
        self.exchanged: list[list[int]] = [[] for _ in range(world)]

    def rank(self, number: int) -> Rank:
        return Rank(self, number)


class Rank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.world = threads, rank, threads.world

    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        threads = self.threads
        if source == self.rank:
            threads.sent[source] = tensors
            threads.exchanged[self.rank] += [tensor.numel() for tensor in tensors]
        threads.barrier.wait()
        if source != self.rank:
            for tensor, sent in zip(tensors, threads.sent[source], strict=True):
                tensor.copy_(sent)
        threads.barrier.wait()


class Blocks(nn.Module):
    """Matrices in `blocks`, several of most shapes, and a stack of experts."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.compute_dtype = dtype
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator))  # noqa: E731
        block = nn.ParameterList([draw(*shape) for shape in SHAPES for _ in range(3)] + [draw(4, 8, 16)])
        self.blocks = nn.ModuleList([block])


def weights_after(ranks, dtype: torch.dtype | None, state_dtype: str, steps: int = 3) -> list[Tensor]:
    model = Blocks(dtype)
    optimizers = Muon(learning_rate=0.1, state_dtype=state_dtype).build(model, 3, ranks)
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 32])
def test_every_rank_has_the_bits_of_one_alone(world, dtype, state_dtype):
    expected = weights_after(ONE_RANK, dtype, state_dtype)
    threads = Threads(world)
    with ThreadPoolExecutor(world) as pool:
        runs = [pool.submit(weights_after, threads.rank(number), dtype, state_dtype) for number in range(world)]
    for run in runs:
        assert all(torch.equal(ours, alone) for ours, alone in zip(run.result(), expected, strict=True))
    # Each matrix of each step was sent by exactly one rank.
    assert sum(map(sum, threads.exchanged)) == 3 * sum(weight.numel() for weight in expected)


@pytest.mark.parametrize(
    ("sides", "world", "expected"),
    [
        # A matrix of side 64 costs as much as eight of side 32, which have twice its numbers.
        ([64] + [32] * 8, 2, [[64**2], [32**2] * 8]),
        ([8, 16, 32, 64] * 8, 4, [[8**2] * 2 + [16**2] * 2 + [32**2] * 2 + [64**2] * 2] * 4),
        ([32, 8], 3, [[32**2], [8**2], []]),
    ],
)
def test_ranks_share_by_cost(monkeypatch, sides, world, expected):
    """The sizes of the matrices that each rank computes, none stacked with another."""
    monkeypatch.setattr("penjing.kernels.ops.stack_height", lambda count, like: 1)
    threads = Threads(world)

    def run(number):
        model = nn.Module()
        model.blocks = nn.ModuleList([nn.ParameterList([torch.ones(side, side) for side in sides])])
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        for optimizer in Muon().build(model, 1, threads.rank(number)):
            optimizer.step()

    with ThreadPoolExecutor(world) as pool:
        for done in [pool.submit(run, number) for number in range(world)]:
            done.result()
    assert [sorted(sizes) for sizes in threads.exchanged] == expected


@given(some.lists(some.integers(1, 1000), max_size=30), some.integers(1, 9))
def test_no_rank_has_more_than_a_piece_above_its_share(costs, world):
    owners = owner_of_each(costs, world)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(world)]
    assert sum(loads) == sum(costs)
    assert max(loads) <= sum(costs) / world + max(costs, default=0)
    assert len(set(owners)) == min(len(costs), world)  # nobody is idle while another has two

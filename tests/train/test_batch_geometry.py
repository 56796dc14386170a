"""How a step is cut into passes: the same for training, plans and benchmarks."""

from types import SimpleNamespace

import pytest
import torch

from penjing.base import config
from penjing.base.errors import UserError
from penjing.plan.memory import Target
from penjing.train.batch_geometry import batch_geometry, micro_sizes
from penjing.train.config import Run
from penjing.train.memory_trace.fit import TracedPasses

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def run_of(rows, micro_size=0, **more):
    return config.resolve(Run, {"batch": {"size": rows, "micro_size": micro_size}, **more})


@pytest.mark.parametrize(
    ("rows", "asked", "world", "device", "micro_size", "accumulation"),
    [
        (32, 0, 1, CPU, 16, 2),  # half of the share
        (32, 0, 2, CPU, 16, 1),
        (32, 0, 4, CPU, 8, 1),
        (7, 0, 1, CPU, 7, 1),  # no half of it
        (1, 0, 1, CPU, 1, 1),
        (32, 0, 1, CUDA, 32, 1),  # all of it
        (32, 0, 4, CUDA, 8, 1),
        (32, 4, 1, CUDA, 4, 8),
        (32, 4, 2, CPU, 4, 4),
    ],
)
def test_a_step_is_cut_into_passes(rows, asked, world, device, micro_size, accumulation):
    found = batch_geometry(run_of(rows, asked), world, device)
    assert (found.micro_size, found.accumulation) == (micro_size, accumulation)
    assert found.global_size == rows == found.micro_size * found.accumulation * found.world


@pytest.mark.parametrize(("rows", "micro_size", "world"), [(8, 0, 3), (8, 3, 1), (8, 8, 2)])
def test_units_that_do_not_divide_evenly_are_refused(rows, micro_size, world):
    with pytest.raises(UserError) as refused:
        batch_geometry(run_of(rows, micro_size), world, CUDA)
    assert refused.value.where == "batch.size" and refused.value.got == rows


def test_a_smaller_pass_holds_whole_blocks():
    assert [micro_sizes(size) for size in (8, 9, 1)] == [[8, 4, 2, 1], [9, 3, 1], [1]]
    assert [micro_sizes(24, 4), micro_sizes(12, 3), micro_sizes(4, 4)] == [[24, 12, 8, 4], [12, 6, 3], [4]]
    # Of the share, not of the pass: below the prime 73 comes 8.
    assert batch_geometry(run_of(584), 1, CPU).micro_sizes == [584, 292, 146, 73, 8, 4, 2, 1]


def test_groups_that_share_an_estimate_stay_in_one_pass():
    kto = {"name": "preference", "loss": "kto", "kl_groups": 4}
    assert batch_geometry(run_of(16, 8, objective=kto), 1, CPU).indivisible == 4
    with pytest.raises(UserError) as refused:
        batch_geometry(run_of(12, 6, objective=kto), 1, CPU)
    assert refused.value.where == "objective.kl_groups"
    assert batch_geometry(run_of(4, 0, objective=kto), 1, CPU).micro_size == 4  # half of it is no whole block
    assert batch_geometry(run_of(8, 0, objective=kto), 1, CPU).micro_size == 4


def test_gradients_of_cut_steps_are_the_same_but_for_the_balance_of_softmax_routers():
    """Their loss is taken over each pass: `batch.micro_size` then changes the gradients, and the texts say so."""
    assert batch_geometry(config.resolve(Run, {"model": "tiny"}), 1, CPU).exact
    assert batch_geometry(config.resolve(Run, {"model": "tiny-moe"}), 1, CPU).exact  # balanced by a bias
    assert not batch_geometry(config.resolve(Run, {"model": "198m-moe"}), 1, CPU).exact
    for balance in ("sequence", "none"):
        assert batch_geometry(config.resolve(Run, {"model": "198m-moe", "router": {"balance": balance}}), 1, CPU).exact


def test_a_batch_that_no_device_holds_is_planned_in_seconds():
    assert micro_sizes(96, 4) == [96, 48, 32, 24, 16, 12, 8, 4]
    assert len(micro_sizes(10**9)) == 100
    run = run_of(10**9, model={"preset": "26m"})
    passes = TracedPasses(run, Target(capability=(9, 0), memory_bytes=80 << 30))
    assert passes.full == 20_000  # larger ones are not traced


@pytest.mark.parametrize(
    ("rows", "gibibytes", "found"), [(128, 24, 4), (128, 40, 16), (128, 12, 1), (128, 400, 128), (1, 12, 1)]
)
def test_the_largest_pass_that_fits_is_found(monkeypatch, rows, gibibytes, found):
    """A single pass a step keeps no gradients of earlier ones, so its memory is below the line of the others."""
    passes = TracedPasses(
        run_of(rows, model={"preset": "26m"}), Target(capability=(9, 0), memory_bytes=gibibytes << 30)
    )
    traced = {}

    def plan(size):
        traced[size] = (13 + 1.4 * size + 2.6 * (size < rows)) * 2**30
        return SimpleNamespace(total_bytes=traced[size])

    monkeypatch.setattr(passes, "plan", plan)
    assert passes.fitting_size() == found
    assert len(traced) <= 5  # each takes seconds

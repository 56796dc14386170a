"""What a strategy asks of torch: which group carries what, how long ranks wait, which card is current."""

import threading

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from penjing.loader.batch_source import Source
from penjing.loader.prefetch import Prefetch
from penjing.parallel import ddp, process_group
from penjing.parallel.ddp import DataParallel
from penjing.parallel.process_group import SETUP_TIMEOUT, TIMEOUT
from penjing.parallel.single import Single

CARD = torch.device("meta")  # stands for a GPU: it is not the CPU
SECOND = torch.device("cuda", 1)


@pytest.fixture
def carried():
    """The group of every exchange, in order; None is the default one, which the gradients use."""
    return []


@pytest.fixture
def strategy(monkeypatch, carried):
    """One of two ranks on a card. As with NCCL the default group refuses tensors of a CPU, and gloo those of a card."""

    def all_reduce(value, group=None):
        if (group is None) != (value.device == CARD):
            raise RuntimeError(f"No backend type associated with device type {value.device.type}")
        carried.append(group)

    monkeypatch.setattr(process_group, "rendezvous", lambda url, timeout: iter([(distributed.HashStore(), 0, 2)]))
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, **options: None)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "new_group", lambda backend, timeout: (backend, timeout))
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda box, src, group: carried.append(group))
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **options: model)
    return DataParallel(CARD)


def test_a_tensor_goes_over_the_group_that_knows_its_device(strategy, carried):
    strategy.wrap(nn.Linear(1, 1))
    for value in (torch.ones(3), torch.ones(3, device=CARD)):
        added = strategy.all_reduce(value)
        assert added is not value
        assert added.device == value.device
    assert carried == [("gloo", TIMEOUT), None]


def test_ranks_wait_for_data_without_a_limit_and_for_a_step_with_one(strategy, carried):
    assert strategy.broadcast("shards") == "shards"
    assert strategy.any(True)
    strategy.wrap(nn.Linear(1, 1))
    assert strategy.broadcast("names") == "names"
    assert not strategy.any(False)
    assert carried == [("gloo", SETUP_TIMEOUT)] * 2 + [("gloo", TIMEOUT)] * 2


def test_gradients_are_the_sum_over_ranks_where_ddp_takes_the_mean(strategy):
    """Two ranks: what DDP halves has been doubled before."""
    model = nn.Linear(1, 1, bias=False)
    strategy.wrap(model)
    strategy.backward(3.0 * model.weight.sum())
    assert model.weight.grad.item() == 6.0
    strategy.clip(1.5)
    assert model.weight.grad.item() == pytest.approx(1.5, rel=1e-5)


@pytest.fixture
def current(monkeypatch):
    """The cards that were made current: whether in the main thread, and which."""
    made = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: made.append((threading.current_thread() is threading.main_thread(), device)),
    )
    return made


def test_one_process_on_the_second_card_has_it_current(current):
    Single(torch.device("cpu"))
    Single(SECOND)
    assert current == [(True, SECOND)]


class Moved(Source):
    """A source of batches that become the device they are moved to."""

    def __next__(self):
        return self

    def to(self, device):
        return device

    def state(self):
        return {}

    def restore(self, state):
        pass


def test_the_thread_that_makes_batches_ready_has_the_card_current_too(current):
    ahead = Prefetch(Moved(), SECOND)
    assert next(ahead) == SECOND
    ahead.close()
    assert current == [(False, SECOND)]

"""A rank's weights, gradients and optimizer state take the whole's bytes divided by the ranks that share them."""

import json

import pytest
import torch
import torch.multiprocessing as processes
from small_models import sizes

from penjing.devices.shards import local_part
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer
from penjing.optim.muon import Muon

WORLD = 4


def hold(rank, strategy, port, out):
    """One rank: a step of a small model; writes the bytes that it holds, beside those of one process."""
    import os

    from penjing.parallel.base import make_strategy

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    made = make_strategy("cpu", strategy)
    model = Transformer(ModelConfig(**sizes(512, 128, 2, 4, 2, 32, 256)))
    initialise(model, 0)
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    wrapped, optimizers = made.wrap(model), Muon().build(model)
    ids_BT = torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(rank))
    with made.micro_step(last=True):
        made.backward(wrapped(ids_BT).square().mean())
    parameters = list(model.parameters())
    held = {
        "weights": sum(local_part(parameter).nbytes for parameter in parameters) / whole,
        "gradients": sum(local_part(parameter.grad).nbytes for parameter in parameters) / whole,
    }
    for optimizer in optimizers:
        optimizer.step()
    states = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if value.ndim
    ]
    held["state"] = sum(local_part(value).nbytes for value in states) / sum(value.numel() * 4 for value in states)
    (out / f"{rank}.json").write_text(json.dumps(held))
    made.close()


@pytest.mark.parametrize(("strategy", "sharers"), [("fsdp2", 4), ("hsdp", 2)])
def test_a_rank_holds_its_part(tmp_path, strategy, sharers):
    from fork_server import free_port

    processes.start_processes(hold, (strategy, free_port(), tmp_path), nprocs=WORLD, start_method="fork")
    for path in tmp_path.glob("*.json"):
        for name, part in json.loads(path.read_text()).items():
            assert part == pytest.approx(1 / sharers, rel=0.01), name
    assert len(list(tmp_path.glob("*.json"))) == WORLD

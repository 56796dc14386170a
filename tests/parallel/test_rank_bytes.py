"""A rank's weights, gradients and optimizer state take the whole's bytes divided by the ranks that share them, from
the first weight on: no rank ever holds the whole model, and all draw the weights of a single device."""

import importlib.util
import json
from pathlib import Path

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
SPEC = importlib.util.spec_from_file_location("rank_bytes", Path(__file__).parents[1] / "plan" / "rank_bytes.py")
rank_bytes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rank_bytes)


def hold(rank, strategy, port, out):
    """One rank: a step of a small model; writes the bytes that it holds, beside those of one process."""
    import os

    from penjing.parallel.base import make_strategy

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    made = make_strategy("cpu", strategy)
    config = ModelConfig(**sizes(512, 128, 4, 4, 2, 32, 256))
    with torch.device("meta"):
        model = Transformer(config)
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    largest = max(parameter.numel() for parameter in model.parameters()) * 4
    with rank_bytes.Held() as watched:
        wrapped = made.wrap(model)
        initialise(model, 0, made.place)
    optimizers = Muon().build(model)
    drawn = made.full_state(model.state_dict())
    if rank == 0:
        alone = Transformer(config)
        initialise(alone, 0)
        assert all(torch.equal(value, drawn[name]) for name, value in alone.state_dict().items())
    ids_BT = torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(rank))
    with made.micro_step(last=True):
        made.backward(wrapped(ids_BT).square().mean())
    parameters = list(model.parameters())
    held = {
        "start": (watched.peak - largest) / whole,
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
        held = json.loads(path.read_text())
        assert held.pop("start") < 1 / sharers + 0.2, "more than a rank's parts and a tensor were there at once"
        for name, part in held.items():
            assert part == pytest.approx(1 / sharers, rel=0.01), name
    assert len(list(tmp_path.glob("*.json"))) == WORLD

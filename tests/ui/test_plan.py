"""The tab plan: its figures are those of the command it shows, and what training refuses is refused."""

import asyncio
import json
import os
import shlex
import time

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from penjing.cli import app as cli
from penjing.parallel import STRATEGIES
from penjing.serve.errors import ApiError
from penjing.ui import background
from penjing.ui.app import make_app
from penjing.ui.plan import SIZES, cards, estimate, sizes
from penjing.ui.site import Site

TOKEN = "token"
FIELDS = [
    {"model": "26m", "gpu": "RTX 3090", "tokens": "2B", "unique": "1B"},
    {"model": "ladder-20m", "seq_len": "1024", "batch": "48", "gpu": "H100", "gpus": "2", "price": "2.5USD"},
    {"model": "198m-moe", "gpu": "A100", "strategy": "auto"},
    {"recipe": "sft", "model": "64m", "gpu": "V100", "optimizer": "adamw", "checkpointing": "block"},
]


@pytest.fixture
def client(tmp_path):
    client = TestClient(make_app(Site(tmp_path), TOKEN), base_url="http://127.0.0.1:7861")
    client.headers["Authorization"] = f"Bearer {TOKEN}"
    return client


@pytest.mark.parametrize("fields", FIELDS)
def test_the_command_prints_the_figures_of_the_page(client, fields):
    answer = client.post("/api/plan/estimate?answer=x", json=fields).json()  # a query is no part of a request
    program, *words = shlex.split(answer["commands"]["plan"])
    assert program == "penjing" and words[-1] == "--rough"
    printed = CliRunner().invoke(cli, [*words, "--json"])
    assert json.loads(printed.stdout) == answer["plan"]


def test_the_command_to_train_makes_as_many_steps(client):
    from penjing.base import config
    from penjing.workflows.train import resolve_run

    answer = client.post("/api/plan/estimate", json=FIELDS[2]).json()
    words = shlex.split(answer["commands"]["train"])
    assert words[:3] == ["penjing", "train", "pretrain"] and words[-1] == "data.train=FILES"
    run = resolve_run("pretrain", config.parse_overrides(words[3:]))
    assert run.max_steps == answer["plan"]["steps"]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"batch": "63", "gpus": "2"}, "batch.size"),
        ({"model": "none-such"}, "model.preset"),
        ({"tokens": "many"}, "--tokens"),
        ({"gpus": "0"}, "gpus"),
        ({"batch": "1000000000"}, "batch"),
        ({"seq_len": "1000000"}, "data.seq_len"),
        ({"gpu": "RTX 9999"}, "--gpu"),
        ({"gpus": "2", "strategy": "zero3"}, "optimizer.name"),
    ],
)
def test_what_the_command_line_refuses_is_marked(fields, where):
    refused = estimate({"gpu": "RTX 3090", **fields})["refused"]
    assert refused["where"].endswith(where) and refused["message"]


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name[:4] != "zero"])
def test_one_card_may_have_any_strategy(strategy):
    assert estimate({"gpu": "RTX 3090", "strategy": strategy})["plan"]["fits"]


def test_more_tokens_take_longer_and_a_larger_batch_more_memory():
    base = {"gpu": "RTX 3090", "model": "26m", "tokens": "1B"}
    small, long, wide = (estimate({**base, **more})["plan"] for more in ({}, {"tokens": "4B"}, {"batch": "128"}))
    assert 3.5 < long["predicted_seconds"] / small["predicted_seconds"] < 4.0
    assert long["expected_loss"] < small["expected_loss"]
    assert estimate({**base, "tokens": "20M"})["plan"]["expected_loss"] is None  # too few for the law
    assert 1.6 < wide["peak_memory_bytes"] / small["peak_memory_bytes"] < 2.0
    assert sum(wide["waterfall"].values()) == wide["peak_memory_bytes"]


def test_an_answer_takes_less_than_a_fifth_of_a_second():
    estimate(FIELDS[0])  # imports
    seconds = []
    for size in range(4, 24):
        began = time.thread_time()
        estimate({**FIELDS[0], "model": f"ladder-{size}m"})
        seconds.append(time.thread_time() - began)
    assert sorted(seconds)[-3] < 0.2


def test_cards_and_sizes_are_the_same_plan():
    fields = {"model": "ladder-1b", "gpu": "RTX 3090", "tokens": "1B"}
    rows = {row["name"]: row for row in cards(fields)["rows"]}
    assert not rows["RTX 3060"]["fits"] and rows["H200"]["fits"]
    for row in (rows["RTX 4090"], next(row for row in sizes(fields)["rows"] if row["name"] == "64m")):
        alone = {**fields, **({"gpu": "RTX 4090"} if row["name"] == "RTX 4090" else {"model": "64m"})}
        assert row["predicted_seconds"] == estimate(alone)["plan"]["predicted_seconds"]
    assert set(SIZES) == {row["name"] for row in sizes(fields)["rows"]}


def test_refining_runs_the_command_itself(client, monkeypatch):
    heard = []

    async def run(request, words, folder, seconds, *, ok):
        heard.append((words, ok))
        return {**estimate({"gpu": "T4"})["plan"], "traced": True}

    monkeypatch.setattr("penjing.ui.plan.penjing_json", run)
    answer = client.post("/api/plan/refine", json={"model": "tiny", "gpu": "T4"}).json()
    assert heard == [(["plan", "pretrain", "model=tiny", "--gpu", "T4", "--json"], (0, 3))]
    assert answer["commands"]["plan"] == "penjing plan pretrain model=tiny --gpu T4"


class Asking:
    """A request whose sender leaves when the program runs, or waits."""

    def __init__(self, started, leaves):
        self.started, self.leaves = started, leaves

    async def receive(self):
        while not (self.leaves and self.started.exists()):
            await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}


@pytest.mark.parametrize(("leaves", "seconds", "error"), [(True, 60, ConnectionError), (False, 0, ApiError)])
def test_a_program_ends_with_its_request(monkeypatch, tmp_path, leaves, seconds, error):
    begun, start = [], asyncio.create_subprocess_exec

    async def recorded(*words, **more):
        begun.append(await start(*words, **more))
        return begun[0]

    package, started = tmp_path / "penjing", tmp_path / "started"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(f"import time; open({str(started)!r}, 'x'); time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    with pytest.raises(error) as refused:
        asyncio.run(background.penjing_json(Asking(started, leaves), ["x"], tmp_path, seconds))
    assert getattr(refused.value, "status", 499) == (499 if leaves else 504)
    with pytest.raises(ProcessLookupError):
        os.kill(begun[0].pid, 0)

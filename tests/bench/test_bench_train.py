"""Comparisons: trials alternate, medians and ratios are right, a missing peer is said, and both learn the same."""

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penjing.base.errors import UserError
from penjing.bench import train as bench
from penjing.bench.train import Asked, compare, trial
from penjing.commands.bench import bench_train, pair_order
from penjing.commands.train import execute, resolve_run
from penjing.loader.group_sampler import GroupSource

MEBIBYTE = 2**20


def quiet():
    return Console(file=io.StringIO(), width=200)


def printed(seconds, peak, loss):
    return {
        "step_seconds": [50.0, *seconds],
        "step_cpu_seconds": [50.0, *seconds],
        "figures": [{"loss": loss, "accuracy": 0.5}] * (len(seconds) + 1),
        "peak_bytes": peak * MEBIBYTE,
        "peak_bytes_after_imports": 100 * MEBIBYTE,
        "process_seconds": 60.0,
        "options": ["so and so"],
    }


@pytest.fixture
def peer_there(monkeypatch):
    monkeypatch.setattr(bench, "is_installed", lambda peer: peer != "none")


def test_trials_alternate_and_medians_are_compared(spec, tmp_path, peer_there):
    seen = []

    def pretend(module, given, folder):
        seen.append((module.rpartition(".")[2], folder.name))
        ours = module.endswith("ours")
        slower = 1.0 + int(folder.name[-1])
        return printed([slower, slower], 200, 0.7) if ours else printed([3 * slower, 3 * slower], 500, 0.7001)

    console = quiet()
    result = compare(Asked(method="dpo", steps=3, warmup=1), spec, tmp_path, console, pretend)
    assert [name for name, _ in seen] == ["ours", "trl_dpo", "trl_dpo", "ours", "ours", "trl_dpo"]
    assert len({folder for _, folder in seen}) == 6
    ours = result["medians"]["penjing"]["units_per_second"]
    assert (ours["median"], ours["low"], ours["high"]) == pytest.approx((2.0, 4 / 3, 4.0))
    assert result["ours_over_peer"]["units_per_second"] == pytest.approx(3.0)
    assert result["ours_over_peer"]["peak_bytes"] == pytest.approx(0.4)
    assert result["ours_over_peer"]["peak_bytes_beyond_imports"] == pytest.approx(0.25)
    assert result["largest_loss_difference"] == pytest.approx(1e-4)
    said = console.file.getvalue()
    assert "at least 2 x the speed: 3.00 x, reached" in said
    assert "at most 0.6 x the memory: 0.40 x, reached" in said
    json.dumps(result)  # it is written as data


def test_a_missed_goal_is_called_missed(spec, tmp_path, peer_there):
    def pretend(module, given, folder):
        return printed([1.0, 1.0], 300, 0.7)

    console = quiet()
    compare(Asked(method="dpo", steps=3, warmup=1, trials=1), spec, tmp_path, console, pretend)
    assert "at least 2 x the speed: 1.00 x, missed" in console.file.getvalue()
    assert "at most 0.6 x the memory: 1.00 x, missed" in console.file.getvalue()


def test_checkpointing_is_the_peers_alone(spec, tmp_path, peer_there):
    told = {}

    def pretend(module, given, folder):
        told[module.rpartition(".")[2]] = given.checkpointing
        return printed([1.0, 1.0], 300, 0.7)

    asked = Asked(method="dpo", steps=3, warmup=1, trials=1, checkpointing=True)
    compare(asked, spec, tmp_path, quiet(), pretend)
    assert told == {"ours": False, "trl_dpo": True}


def test_without_the_peer_ours_stands_alone_and_that_is_said(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "is_installed", lambda peer: False)
    console = quiet()
    asked = Asked(method="dpo", steps=3, warmup=1, trials=1)
    result = compare(asked, spec, tmp_path, console, lambda *_: printed([1.0, 1.0], 300, 0.7))
    assert list(result["medians"]) == ["penjing"]
    assert "ours_over_peer" not in result
    assert "trl is not installed, so ours stands alone: pip install 'penjing[test]'\n" in console.file.getvalue()


@pytest.mark.parametrize(
    "wrong", [{"method": "sft"}, {"peer": "other"}, {"steps": 2}, {"trials": 0}, {"warmup": -1}, {"threads": -1}]
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(UserError):
        Asked(**{"method": "dpo", **wrong})


def test_a_failed_trial_is_one_line(spec, tmp_path):
    with pytest.raises(UserError, match="a trial failed"):
        trial("penjing.bench.ours", spec, tmp_path / "one")


def test_the_peer_gets_pairs_in_the_order_of_our_steps():
    run = resolve_run("dpo", {"steps": 5, "batch": {"rows": 4}})
    taken = []

    class Asking(Exception):
        pass

    def make(index):
        taken.append(index)
        raise Asking

    from penjing.base.seeds import derive

    source = GroupSource(make, 7, micro_units=1, seed=derive(run.seed, run.stage, "order"))
    for _ in range(20):
        with pytest.raises(Asking):
            next(source)
    assert pair_order(run, 7) == taken


@pytest.fixture(scope="module")
def talker(toy, small_run, tmp_path_factory):
    """A model that has seen a few conversations: the folder of a run."""
    folder = tmp_path_factory.mktemp("talker")
    from penjing.base.config import parse_overrides

    words = [word for word in small_run if not word.startswith(("data.", "steps"))]
    more = [f"data.train={toy / 'sft.jsonl'}", "data.row_tokens=128", "steps=3", f"out={folder / 'sft'}"]
    execute(resolve_run("tiny_sft", parse_overrides([*words, *more, "compute.threads=1"])), quiet())
    return folder / "sft"


RATES = {"dpo": 3.3e-4, "grpo": 4.4e-4}  # no default of either side
SMALL = {
    "dpo": ["batch.rows=4", f"optimizer.learning_rate={RATES['dpo']}"],
    "grpo": [
        f"optimizer.learning_rate={RATES['grpo']}",
        "batch.rows=2",
        "objective.rollout.answers=2",
        "objective.rollout.max_tokens=4",
    ],
}


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_ours_alone_on_a_real_model(method, talker, toy):
    data = toy / {"dpo": "dpo.jsonl", "grpo": "rl.jsonl"}[method]
    asked = Asked(method=method, peer="none", trials=1, steps=3, warmup=1, threads=1)
    result = bench_train(talker, data, asked, quiet(), *SMALL[method])
    [one] = result["trials"]["penjing"]
    assert len(one["step_seconds"]) == len(one["figures"]) == 3
    assert one["peak_bytes"] > one["peak_bytes_after_imports"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "grpo"])
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_beside_trl_both_learn_the_same(method, talker, toy):
    data = toy / {"dpo": "dpo.jsonl", "grpo": "rl.jsonl"}[method]
    asked = Asked(method=method, trials=1, steps=3, warmup=1, threads=1)
    result = bench_train(talker, data, asked, quiet(), *SMALL[method])
    assert list(result["medians"]) == ["penjing", "trl"]
    told = result["medians"]["trl"]["settings"]
    assert (told["learning_rate"], told["dtype"], told["optimizer"]) == (
        pytest.approx(RATES[method]),
        "float32",
        "AdamW",
    )
    if method == "dpo":
        assert result["largest_loss_difference"] < 1e-5


@pytest.mark.parametrize(
    "setting",
    ["objective.loss=ipo", "optimizer.kind=muon", "lora.rank=4", "optimizer.weight_decay=0.1", "schedule.kind=cosine"],
)
def test_settings_that_the_peer_does_not_get_are_refused(setting, talker, toy):
    with pytest.raises(UserError, match="the peer is not told of it"):
        bench_train(talker, Path(toy / "dpo.jsonl"), Asked(method="dpo", peer="none"), quiet(), setting)

"""Pretraining beside others: the clock by hand, medians and equal times, real contenders on a tiny shape."""

import importlib.util
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from penjing.base import config
from penjing.base.errors import UserError
from penjing.bench import pretrain as bench
from penjing.bench.pretrain import Asked, compare
from penjing.bench.pretrain_table import equal, rows_of, verdicts
from penjing.bench.race import IGNORED, HeldOut, Race, RaceSpec
from penjing.bench.train import trial
from penjing.commands.bench import bench as asked_for
from penjing.commands.bench import write
from penjing.commands.bench_pretrain import QUICK, bench_pretrain
from penjing.train.config import Run


def quiet():
    return Console(file=io.StringIO(), width=250)


@pytest.fixture
def spec():
    return RaceSpec(
        kind="path",
        text="t",
        tokenizer="k",
        shape={},
        run="r",
        held_out="h",
        rows="p",
        out="o",
        threads=1,
        batch=2,
        row_tokens=8,
        seconds=10.0,
        looks=2,
        steps=3,
        warmup=1,
        device="cpu",
        learning_rate=1e-3,
        clip_norm=1.0,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_looking_is_nobodys_time(spec):
    clock, bits = Clock(), iter([8.0, 3.0, 2.0])

    def look():
        clock.now += 100.0
        return next(bits)

    race = Race(spec, look, age=clock, cpu_clock=clock)
    clock.now = 5.0
    race.ready()
    going = []
    for seconds in (4.0, 3.0, 3.0, 2.0, 2.0):
        clock.now += seconds
        going.append(race.step(10))
    assert going == [True, True, True, True, False]
    assert race.laps == pytest.approx([4.0, 3.0, 3.0, 2.0, 2.0])
    assert [round(point["seconds"], 6) for point in race.curve] == [5.0, 15.0, 19.0]
    assert [point["tokens"] for point in race.curve] == [0, 30, 50]
    result = race.result()
    assert result["startup_seconds"] == 5.0
    assert result["first_step_seconds"] == 4.0


@pytest.mark.parametrize(("kind", "waits"), [("path", [0, 1, 2, 4, 6]), ("step", [0, 1, 2, 8])])
def test_a_gpus_queue_is_waited_for_where_a_count_begins_or_ends(spec, kind, waits, monkeypatch):
    """0: before the first step. The path is looked at 2.5 s after its first step and ends after 5."""
    clock, done, seen = Clock(), [0], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append(done[0]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1000 + done[0])
    spec = replace(spec, kind=kind, device="cuda", warmup=2, seconds=5.0, looks=2, steps=8)
    race = Race(spec, lambda: 1.0, age=clock, cpu_clock=clock)
    race.ready()
    going = True
    while going:
        done[0] += 1
        clock.now += 1.0
        going = race.step(5)
    assert seen == waits
    assert race.result()["peak_bytes"] == 1000 + (4 if kind == "path" else 8)


@pytest.mark.parametrize("method", ["", "pretrain"])
def test_a_setting_alone_is_no_model(toy, method):
    words = dict(data=toy / "pretrain.jsonl", peer="none", quick=True, trials=1, seconds=1.0, steps=3, threads=1)
    with pytest.raises(UserError, match="rowz"):
        asked_for(quiet(), method=method, run=Path("batch.rowz=3"), settings=(), checkpointing=True, **words)


def test_a_model_that_the_peers_do_not_have_is_refused(toy):
    with pytest.raises(UserError, match="the peers train another model; got llama"):
        bench_pretrain(toy / "pretrain.jsonl", Asked(peers=()), QUICK, quiet(), "model.architecture=llama")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_gpu_that_is_not_there_is_said(toy):
    with pytest.raises(UserError, match="cannot use CUDA"):
        bench_pretrain(toy / "pretrain.jsonl", Asked(peers=()), QUICK, quiet(), "compute.device=cuda")


def test_steps_of_the_other_kind_are_counted(spec):
    race = Race(replace(spec, kind="step"), lambda: 1 / 0)
    race.ready()
    assert [race.step(7), race.step(7), race.step(7)] == [True, True, False]
    assert race.curve == []


def curve(*points):
    return {"curve": [{"seconds": s, "tokens": 0.0, "bits_per_byte": b} for s, b in points]}


def test_equal_wall_time_and_time_to_equal():
    ours, theirs = curve((2, 8.0), (6, 4.0), (10, 2.0)), curve((4, 8.0), (8, 3.0))
    found = equal([ours, theirs], ["penjing", "trainer"])
    assert found["seconds"] == 8
    assert found["bits_per_byte"] == {"penjing": pytest.approx(3.0), "trainer": 3.0}
    assert found["time_to_equal"]["trainer"] == pytest.approx(8 / 8)
    assert equal([theirs, ours], ["penjing", "trainer"])["time_to_equal"]["trainer"] is None


def test_bits_per_byte_counts_each_target_once(tmp_path):
    target_BT = np.full((3, 5), IGNORED)
    target_BT[0, :5], target_BT[1, :2], target_BT[2, :1] = 1, 1, 1
    np.savez(tmp_path / "h.npz", ids_BT=np.zeros((3, 5), dtype=np.int64), target_BT=target_BT, num_bytes=16)
    seen = []

    def nats(ids_BT, target_BT):
        seen.append(target_BT.shape)
        return float((target_BT != IGNORED).sum()) * np.log(2)

    assert HeldOut(str(tmp_path / "h.npz")).bits_per_byte(nats, rows=2) == pytest.approx(8 / 16)
    assert seen == [(2, 5), (1, 1)]


def printed(rate, peak):
    steps = [5.0, 1.0, 1.0]
    return {
        "startup_seconds": 3.0,
        "first_step_seconds": 5.0,
        "step_seconds": steps,
        "step_cpu_seconds": steps,
        "step_tokens": [rate] * 3,
        **curve((3, 8.0), (8, 8.0 - rate / 100), (10, 8.0 - rate / 50)),
        "peak_bytes": peak * 2**20,
        "peak_bytes_after_imports": 2**20,
        "process_seconds": 12.0,
        "options": ["so"],
    }


def test_trials_alternate_and_goals_are_judged(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: True)
    seen = []

    def pretend(module, given, folder):
        seen.append((given.kind, folder.name))
        if "ours" not in module:
            return printed(100, 1000)
        return printed(320, 500) if "adamw" in module else printed(310, 900)

    console = quiet()
    asked = Asked(peers=("trainer",), trials=2, steps=3, warmup=1, may_compile=False)
    about = {"machine": {"device": "cpu", "limit_tokens_per_second": 400.0}}
    result = compare(asked, spec, tmp_path, console, pretend, about=about)
    assert [name for kind, name in seen if kind == "path"] == [
        "path-penjing-0",
        "path-penjing-adamw-0",
        "path-trainer-0",
        "path-trainer-1",
        "path-penjing-adamw-1",
        "path-penjing-1",
    ]
    said = console.file.getvalue()
    assert "3.20 x" in said
    assert "penjing-adamw beside trainer: at least 3 x its tokens per second: 3.20 x (3.20-3.20), reached" in said
    assert "penjing-adamw beside trainer: at most 0.6 x its peak bytes: 0.50 x (0.50-0.50), reached" in said
    assert "2 trials of each: a claim needs 3" in said
    assert "this was shorter" not in said
    assert "this was shorter" in verdicts({**result, "asked": {**result["asked"], "seconds": 30.0}})[0]
    assert "this machine: at least 0.7 of the GEMM roofline, 400 tokens per second: 0.80, reached" in said
    assert rows_of(result, "path")[1][2] == ["fraction of the GEMM roofline, 400 tokens/s", "0.78", "0.80", "0.25"]
    json.dumps(result)


def test_a_missing_peer_is_said(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    console = quiet()
    compare(Asked(trials=1), spec, tmp_path, console, lambda *_: printed(100, 100))
    assert "trainer needs accelerate, which is not installed" in console.file.getvalue()


@pytest.mark.parametrize("wrong", [{"peers": ("other",)}, {"trials": 0}, {"steps": 2}, {"seconds": 0}])
def test_what_cannot_be_measured_is_refused_here_too(wrong):
    with pytest.raises(UserError):
        Asked(**wrong)


def test_a_model_is_not_taken_for_pretraining(tmp_path):
    words = dict(data=None, peer="none", quick=True, trials=1, seconds=1.0, steps=3, threads=1, checkpointing=True)
    with pytest.raises(UserError, match="begins with nothing"):
        asked_for(quiet(), method="pretrain", run=tmp_path, settings=(), **words)
    with pytest.raises(UserError, match="are needed"):
        asked_for(quiet(), method="dpo", run=None, settings=(), **words)


def test_trials_that_ended_are_kept_when_the_next_is_stopped(spec, tmp_path):
    kept, done, about = [], [], {"machine": {"cpu": "one", "product_flops_per_second": 1.0}}

    def pretend(module, given, _):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append((given.kind, module.split()[-1]))
        return printed(100 + len(done), 100)

    def keep(part):
        kept.append(json.loads(json.dumps(part)))

    with pytest.raises(KeyboardInterrupt):
        compare(Asked(peers=(), trials=2), spec, tmp_path, quiet(), pretend, keep, about)
    assert [each["finished"] for each in kept] == [False] * 6 and "path" not in kept[0]
    assert "medians" not in kept[1]["path"] and "step" not in kept[2]
    assert kept[2]["path"]["medians"]["penjing"]["tokens_per_second"]["median"] == 101
    path = kept[-1]["path"]
    assert {name: len(each) for name, each in path["trials"].items()} == {"penjing": 1, "penjing-adamw": 2}
    assert path["medians"]["penjing-adamw"]["tokens_per_second"]["high"] == 102  # of whole rounds alone
    assert kept[-1]["asked"]["trials"] == 2

    del done[:3]
    console, anew = quiet(), {"machine": {"cpu": "one", "product_flops_per_second": 2.0}}
    with pytest.raises(KeyboardInterrupt):  # three trials are left
        compare(Asked(peers=(), trials=3), spec, tmp_path, console, pretend, keep, anew, kept[-1])
    assert "5 trials are there, 7 are left" in console.file.getvalue()
    assert [kind for kind, _ in done[2:]] == ["path", "step", "step"]
    done.clear()
    whole = compare(Asked(peers=(), trials=2), spec, tmp_path, quiet(), pretend, keep, anew, kept[-1])
    assert whole["finished"] and not done
    assert [len(each) for kind in ("path", "step") for each in whole[kind]["trials"].values()] == [2] * 4
    assert len(whole["path"]["equal"]) == 2


def test_peers_are_added_to_a_comparison_and_none_is_lost(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "NEEDS", {"trainer": "json", "minimind-style": "json"})
    done = []

    def pretend(module, given, _):
        done.append(module)
        return printed(100, 100)

    about = {"machine": {"device": "cpu", "limit_tokens_per_second": 400.0}}
    first = Asked(peers=("litgpt",), trials=1, may_compile=False)  # which is left out, and need not be named again
    monkeypatch.setitem(bench.NEEDS, "litgpt", "nothing_so_called")
    alone = json.loads(json.dumps(compare(first, spec, tmp_path, quiet(), pretend, about=about)))
    alone["versions"].pop("transformers", None)  # as if it was installed since
    done.clear()
    slower = {"machine": {**about["machine"], "limit_tokens_per_second": 300.0}}
    asked = Asked(peers=("trainer",), trials=1, may_compile=False)
    more = compare(asked, spec, tmp_path, quiet(), pretend, about=slower, earlier=alone)
    assert more["machine"]["limit_tokens_per_second"] == 400 and more["left_out"] == {}
    assert done == [bench.PRETRAIN["trainer"]] * 2
    assert set(more["path"]["medians"]) == {"penjing", "penjing-adamw", "trainer"}
    other = Asked(peers=("minimind-style",), trials=1, may_compile=False)
    with pytest.raises(UserError, match="lose the trials of trainer; wanted --peer minimind-style,trainer"):
        compare(other, spec, tmp_path, quiet(), pretend, earlier=json.loads(json.dumps(more)))


def test_trials_of_another_comparison_are_not_added_to(spec, tmp_path):
    about = {"machine": {"cpu": "one"}, "documents": 7}
    asked, run = Asked(peers=(), trials=1), lambda *_: printed(100, 100)
    before = json.loads(json.dumps(compare(asked, spec, tmp_path, quiet(), run, about=about)))
    for where, other in (
        ("documents", dict(asked=asked, spec=spec, about=about | {"documents": 8})),
        ("machine.cpu", dict(asked=asked, spec=spec, about=about | {"machine": {"cpu": "two"}})),
        ("asked.seconds", dict(asked=replace(asked, seconds=5.0), spec=spec, about=about)),
        ("spec.batch", dict(asked=asked, spec=replace(spec, batch=spec.batch + 1), about=about)),
    ):
        saved = []
        with pytest.raises(UserError, match=where):
            compare(**other, folder=tmp_path, console=quiet(), run_trial=run, save=saved.append, earlier=before)
        assert not saved


def test_what_cannot_be_gone_on_with_is_one_line(tmp_path):
    words = dict(data=None, peer="none", quick=True, trials=1, seconds=1.0, steps=3, threads=1, checkpointing=True)
    file = tmp_path / "bench.json"
    for text in ("{", "[]", '{"method": "dpo"}'):
        file.write_text(text)
        with pytest.raises(UserError, match=r"bench\.json"):
            asked_for(quiet(), method="pretrain", run=None, settings=(), earlier=file, **words)
        assert file.read_text() == text


def test_a_record_says_the_command_and_the_versions(spec, tmp_path):
    result = compare(Asked(peers=(), trials=1), spec, tmp_path, quiet(), lambda *_: printed(100, 100))
    write(result, tmp_path / "record.json", ["bench", "train", "--data", "my text.jsonl"])
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["command"] == "penjing bench train --data 'my text.jsonl'"
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "penjing"} <= set(record["versions"])


TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 16}


@pytest.mark.slow
def test_real_contenders_learn_from_the_same(toy, monkeypatch, in_process):
    def run_trial(module, given, folder):  # one of them as all are run outside of tests
        return (trial if folder.name == "step-penjing-adamw-0" else in_process)(module, given, folder)

    monkeypatch.setattr("penjing.commands.bench_pretrain.compare", partial(compare, run_trial=run_trial))
    monkeypatch.setattr("penjing.commands.bench_pretrain._peer_dtypes", lambda device: ("float32",))
    peers = ("trainer", "trainer-packed", "minimind-style")
    if importlib.util.find_spec("accelerate") is None:
        peers = peers[2:]  # compare() says which is left out; see above
    size = replace(QUICK, model={**TINY, "mlp_size": 48, "vocabulary_size": 400}, row_tokens=64, batch=4, held_out=16)
    asked = Asked(peers=peers, trials=1, seconds=1.0, looks=2, steps=3, threads=1, may_compile=False)
    result = bench_pretrain(toy / "pretrain.jsonl", asked, size, quiet(), "compute.dtype=float32", "batch.rows=2")
    told = {name: trials[0]["settings"] for name, trials in result["path"]["trials"].items()}
    assert (told["penjing"]["optimizer"], told["penjing-adamw"]["optimizer"]) == ("muon", "adamw")
    for name, each in told.items():
        assert each["dtype"] == "float32", name
        assert each["learning_rate"] == (0.02 if name == "penjing" else 1e-3), name
    for name in ("penjing", "penjing-adamw", *asked.peers):
        [path], [step] = result["path"]["trials"][name], result["step"]["trials"][name]
        first, last = path["curve"][0]["bits_per_byte"], path["curve"][-1]["bits_per_byte"]
        assert last < first, name
        assert len(step["step_seconds"]) == 3
        assert step["step_tokens"][0] in (2 * 64, 2 * 63)  # transformers' loss leaves a row's first token out
    starts = [trials[0]["curve"][0]["bits_per_byte"] for trials in result["path"]["trials"].values()]
    assert max(starts) - min(starts) < 0.2  # an untrained model says the same of the same text


@pytest.mark.parametrize("fast", [True, False])
def test_what_auto_means_is_found_once_and_handed_to_every_trial(toy, monkeypatch, fast):
    """A trial that asks again may get another answer, and then medians are of two dtypes."""
    monkeypatch.setattr("penjing.plan.hardware.has_fast_bfloat16", lambda device: fast)
    seen = {}

    def see(asked, spec, *_, **__):
        run = config.resolve(Run, config.read_toml(Path(spec.run)))
        seen.update(run=run.compute.dtype, spec=spec.dtype)
        return {}

    monkeypatch.setattr("penjing.commands.bench_pretrain.compare", see)
    size = replace(QUICK, model={**TINY, "mlp_size": 48, "vocabulary_size": 400}, row_tokens=64, batch=4, held_out=16)
    bench_pretrain(toy / "pretrain.jsonl", Asked(peers=(), trials=1), size, quiet())
    assert seen == dict.fromkeys(("run", "spec"), "bfloat16" if fast else "float32")


def of_rates(tmp_path, monkeypatch, spec, rates):
    """Tables and verdicts of a comparison whose contenders make so many tokens a second on their own path."""
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: True)

    def pretend(module, given, folder):
        name = folder.name.removeprefix(f"{given.kind}-").rpartition("-")[0]
        told = {"optimizer": "muon" if name == "penjing" else "adamw", "dtype": given.dtype}
        return {**printed(rates[name], 100), "settings": told}

    peers = tuple(name for name in rates if not name.startswith("penjing"))
    asked = Asked(peers=peers, trials=3, steps=3, warmup=1, may_compile=False)
    return compare(asked, spec, tmp_path, quiet(), pretend)


def test_ours_is_held_against_the_faster_trainer_with_the_same_optimizer(spec, tmp_path, monkeypatch):
    rates = {"penjing": 270, "penjing-adamw": 300, "trainer": 150, "trainer-packed": 120}
    result = of_rates(tmp_path, monkeypatch, spec, rates)
    [line] = [line for line in verdicts(result) if "faster Trainer" in line]
    assert "trainer:" in line and "2.00 x" in line and "AdamW" in line and "Muon" not in line
    headings, rows = rows_of(result, "path")
    assert headings == ["", "penjing (Muon)", "penjing-adamw (AdamW)", "trainer (AdamW)", "trainer-packed (AdamW)"]
    [faster] = [row for row in rows if "faster by" in row[0]]
    assert faster == ["penjing-adamw is faster by", "", "", "2.00 x", "2.50 x"]  # no ratio of two optimizers
    assert not [line for line in verdicts(result) if "a claim needs" in line]
    to_last = {row[0]: row[1:] for row in rows if "gets to its last" in row[0]}
    assert set(to_last) == {f"{name} gets to its last in" for name in headings[1:3]}


def test_a_comparison_says_that_the_peers_rate_was_not_searched(spec, tmp_path, monkeypatch):
    result = of_rates(tmp_path, monkeypatch, spec, {"penjing": 2, "penjing-adamw": 2, "trainer": 1})
    assert any("AdamW's was not" in line for line in verdicts(result))
    result["asked"]["search"] = True
    assert not any("AdamW's was not" in line for line in verdicts(result))


def test_trials_of_two_dtypes_are_named(spec, tmp_path, monkeypatch):
    result = of_rates(tmp_path, monkeypatch, spec, {"penjing": 2, "penjing-adamw": 2})
    assert not any("different settings" in line for line in verdicts(result))
    result["path"]["trials"]["penjing"][1]["settings"]["dtype"] = "bfloat16"
    assert [line.partition(":")[0] for line in verdicts(result) if "different settings" in line] == ["penjing"]

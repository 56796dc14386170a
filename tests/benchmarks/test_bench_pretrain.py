"""Pretraining beside others: rounds, equal times and goals by hand, and real contestants on a tiny shape."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import comparison, pretrain_data
from compare.comparison import BASELINES, FOLDER, Options
from compare.pretrain import Pretrain, equal_time, time_to_equal
from compare.run import main, run_comparison, write
from compare.trial_process import run_trial
from compare.verdict import verdict
from pages import script
from user_errors import raises_user_error

from penjing.base import config
from penjing.base.errors import UserError
from penjing.devices.cpu import Cpu
from penjing.train.config import Run

PRETRAIN = Pretrain()
QUICK = {"baseline": "none", "quick": True, "trials": 1, "seconds": 1.0, "steps": 3, "threads": 1}


def start(quiet, data, *settings, method="pretrain", run=None, **more):
    return run_comparison(quiet, method=method, run=run, data=data, settings=settings, **{**QUICK, **more})


@pytest.mark.parametrize("method", ["", "pretrain"])
def test_a_setting_alone_is_no_model(toy, quiet, method):
    with raises_user_error(where="batch.rowz"):
        start(quiet, toy / "pretrain.jsonl", method=method, run=Path("batch.rowz=3"))


def test_a_model_that_the_baselines_do_not_have_is_refused(toy, quiet):
    with raises_user_error(where="model", got="llama", wanted="qwen3"):
        start(quiet, toy / "pretrain.jsonl", "model.architecture=llama")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_gpu_that_is_not_there_is_an_error(toy, quiet):
    with raises_user_error(where="device", got="cuda"):
        start(quiet, toy / "pretrain.jsonl", "compute.device=cuda")


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"steps": 2}, {"seconds": 0}, {"warmup": -1}, {"threads": -1}])
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(UserError):
        Options(**wrong)


@pytest.mark.parametrize(("method", "baseline"), [("pretrain", "other"), ("dpo", "trainer"), ("sft", "none")])
def test_a_method_or_baseline_that_is_not_there_is_refused(quiet, method, baseline):
    with pytest.raises(UserError):
        start(quiet, None, method=method, baseline=baseline)


def test_pretraining_takes_no_model_and_the_others_need_one(tmp_path, quiet):
    with raises_user_error(where="RUN", next_step="Leave it out."):
        start(quiet, None, run=tmp_path)
    with raises_user_error(where="--method dpo", wanted="RUN and --data FILE"):
        start(quiet, None, method="dpo")


def curve(*points):
    return [{"seconds": s, "tokens": 0.0, "bits_per_byte": b} for s, b in points]


def test_equal_wall_time_and_time_to_equal():
    ours, theirs = curve((2, 8.0), (6, 4.0), (10, 2.0)), curve((4, 8.0), (8, 3.0))
    assert equal_time({"ours": ours, "theirs": theirs}) == (8, {"ours": pytest.approx(3.0), "theirs": 3.0})
    assert time_to_equal(ours, theirs) == pytest.approx(8 / 8)
    assert time_to_equal(theirs, ours) is None


def printed(rate, peak):
    steps = [5.0, 1.0, 1.0]
    return {
        "startup_seconds": 3.0,
        "step_seconds": steps,
        "step_cpu_seconds": steps,
        "step_units": [rate] * 3,
        "figures": [],
        "curve": curve((3, 8.0), (8, 8.0 - rate / 100), (10, 8.0 - rate / 50)),
        "peak_bytes": peak * 2**20,
        "peak_bytes_after_imports": 2**20,
        "process_seconds": 12.0,
        "options": ["so"],
    }


def row(record, start, setting="path"):
    [found] = [row for row in PRETRAIN.table(record, setting).rows if row[0].startswith(start)]
    return found


def line(record, *words):
    [found] = [line for line in verdict(PRETRAIN, record) if all(word in line for word in words)]
    return found


def test_trials_alternate_and_goals_are_judged(spec, compare, quiet, installed):
    seen = []

    def pretend(module, given, folder):
        seen.append((given.setting, folder.name))
        if FOLDER in module:
            return printed(100, 1000)
        return printed(320, 500) if "adamw" in module else printed(310, 900)

    about = {"machine": {"device": "cpu", "limit_tokens_per_second": 400.0}}
    record = compare(PRETRAIN, spec, pretend, about, baselines=("trainer",), trials=2)
    assert [name for setting, name in seen if setting == "path"] == [
        "path-penjing-0",
        "path-penjing-adamw-0",
        "path-trainer-0",
        "path-trainer-1",
        "path-penjing-adamw-1",
        "path-penjing-1",
    ]
    assert row(record, "penjing-adamw is faster by") == ["penjing-adamw is faster by", "", "", "3.20 x"]
    assert row(record, "fraction of the GEMM roofline")[1:] == ["0.78", "0.80", "0.25"]
    assert "3.20 x (3.20-3.20)" in line(record, "penjing-adamw / trainer", "tokens/s", "at least 3 x: reached")
    assert "0.50 x" in line(record, "penjing-adamw / trainer", "memory", "at most 0.6 x: reached")
    assert line(record, "penjing / trainer", "loss", "at most 0.25 x: missed")
    assert "0.80" in line(record, "roofline", "0.7: reached")
    assert line(record, "2 trials", "3")
    goals_are_for = [line for line in verdict(PRETRAIN, record) if "600 s" in line]
    assert not goals_are_for
    assert line({**record, "options": {**record["options"], "seconds": 30.0}}, "600 s")
    for shown in (row(record, "tokens/s")[1], line(record, "penjing-adamw / trainer", "tokens/s")):
        assert shown in quiet.file.getvalue()
    json.dumps(record)


def test_a_missing_baseline_is_left_out_and_named(spec, compare, quiet, monkeypatch):
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: name != "accelerate" or None)
    record = compare(PRETRAIN, spec, lambda *_: printed(100, 100), baselines=("trainer",))
    assert list(record["path"]["medians"]) == ["penjing", "penjing-adamw"]
    assert "accelerate" in record["left_out"]["trainer"] and "accelerate" in quiet.file.getvalue()


def test_trials_that_ended_are_kept_when_the_next_is_stopped(spec, compare, quiet):
    kept, done, about = [], [], {"machine": {"cpu": "one", "matmul_flops_per_second": 1.0}}

    def pretend(module, given, _):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append((given.setting, module.split()[-1]))
        return printed(100 + len(done), 100)

    def keep(part):
        kept.append(json.loads(json.dumps(part)))

    with pytest.raises(KeyboardInterrupt):
        compare(PRETRAIN, spec, pretend, about, keep, trials=2)
    assert [each["finished"] for each in kept] == [False] * 6 and "path" not in kept[0]
    assert "medians" not in kept[1]["path"] and "step" not in kept[2]
    assert kept[2]["path"]["medians"]["penjing"]["units_per_second"]["median"] == 101
    path = kept[-1]["path"]
    assert {name: len(each) for name, each in path["trials"].items()} == {"penjing": 1, "penjing-adamw": 2}
    assert path["medians"]["penjing-adamw"]["units_per_second"]["high"] == 102  # of whole rounds alone
    assert kept[-1]["options"]["trials"] == 2

    del done[:3]
    anew = {"machine": {"cpu": "one", "matmul_flops_per_second": 2.0}}
    with pytest.raises(KeyboardInterrupt):  # three trials are left
        compare(PRETRAIN, spec, pretend, anew, keep, kept[-1], trials=3)
    assert "5 trials done, 7 remaining" in quiet.file.getvalue()
    assert [setting for setting, _ in done[2:]] == ["path", "step", "step"]
    done.clear()
    whole = compare(PRETRAIN, spec, pretend, anew, keep, kept[-1], trials=2)
    assert whole["finished"] and not done
    assert [len(each) for setting in ("path", "step") for each in whole[setting]["trials"].values()] == [2] * 4


def test_baselines_are_added_to_a_comparison_and_none_is_lost(spec, compare, monkeypatch):
    known = {"trainer": ("hf_trainer", "json"), "minimind-style": ("minimind_style", "json")}
    known["litgpt"] = ("litgpt", "nothing_so_called")
    monkeypatch.setitem(BASELINES, "pretrain", known)
    done = []

    def pretend(module, given, _):
        done.append(module)
        return printed(100, 100)

    about = {"machine": {"device": "cpu", "limit_tokens_per_second": 400.0}, "versions": {"python": "3"}}
    # litgpt is left out, and need not be named again.
    alone = json.loads(json.dumps(compare(PRETRAIN, spec, pretend, about, baselines=("litgpt",))))
    done.clear()
    slower = {"machine": {**about["machine"], "limit_tokens_per_second": 300.0}}
    slower["versions"] = {"python": "3", "transformers": "5"}  # which was installed since
    more = compare(PRETRAIN, spec, pretend, slower, earlier=alone, baselines=("trainer",))
    assert more["machine"]["limit_tokens_per_second"] == 400 and more["left_out"] == {}
    assert done == [f"{FOLDER}.hf_trainer"] * 2
    assert set(more["path"]["medians"]) == {"penjing", "penjing-adamw", "trainer"}
    with raises_user_error(where="--resume", wanted="--baseline minimind-style,trainer"):
        compare(PRETRAIN, spec, pretend, slower, earlier=json.loads(json.dumps(more)), baselines=("minimind-style",))


@pytest.mark.parametrize("where", ["documents", "machine.cpu", "options.seconds", "spec.batch"])
def test_trials_of_another_comparison_are_not_added_to(spec, compare, where):
    about = {"machine": {"cpu": "one"}, "documents": 7}
    before = json.loads(json.dumps(compare(PRETRAIN, spec, lambda *_: printed(100, 100), about)))
    other = {
        "documents": ({**about, "documents": 8}, spec, {}),
        "machine.cpu": ({**about, "machine": {"cpu": "two"}}, spec, {}),
        "options.seconds": (about, spec, {"seconds": 5.0}),
        "spec.batch": (about, replace(spec, batch=spec.batch + 1), {}),
    }
    facts, given, options = other[where]
    saved = []
    with pytest.raises(UserError, match=where):
        compare(PRETRAIN, given, lambda *_: printed(100, 100), facts, saved.append, before, **options)
    assert not saved


def test_what_cannot_be_continued_is_one_line(tmp_path, quiet):
    file = tmp_path / "bench.json"
    for text in ("{", "[]", '{"method": "dpo"}'):
        file.write_text(text)
        with raises_user_error(where="bench.json", wanted="what a comparison with --out wrote"):
            start(quiet, None, earlier=file)
        assert file.read_text() == text


def test_a_record_has_the_command_the_date_and_the_versions(spec, compare, tmp_path):
    about = pretrain_data.environment(torch.device("cpu"), torch.float32, threads=1)
    record = compare(PRETRAIN, spec, lambda *_: printed(100, 100), about)
    write(record, tmp_path / "record.json", ["penjing", "bench", "train", "--data", "my text.jsonl"])
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["command"] == "penjing bench train --data 'my text.jsonl'"
    assert written["versions"]["torch"] == torch.__version__
    assert {"python", "penjing"} <= set(written["versions"])
    assert len(written["date"]) == 10 and written["machine"]["threads"] == 1


@pytest.mark.nightly
def test_real_contestants_learn_from_the_same(toy, quiet, tiny_quick, monkeypatch, in_process):
    def trial(module, given, folder):  # one of them as all are run outside of tests
        return (run_trial if folder.name == "step-penjing-adamw-0" else in_process)(module, given, folder)

    monkeypatch.setattr(pretrain_data, "_baseline_dtypes", lambda device: ("float32",))
    baselines = ["trainer", "trainer-packed", "minimind-style"]
    if importlib.util.find_spec("accelerate") is None:
        baselines = baselines[2:]  # the others are left out; see above
    settings = ("compute.dtype=float32", "batch.size=2")
    more = {"baseline": ",".join(baselines), "may_compile": False, "trial": trial}
    record = start(quiet, toy / "pretrain.jsonl", *settings, **more)
    told = {name: trials[0]["settings"] for name, trials in record["path"]["trials"].items()}
    assert (told["penjing"]["optimizer"], told["penjing-adamw"]["optimizer"]) == ("muon", "adamw")
    for name, each in told.items():
        assert each["dtype"] == "float32", name
        assert each["learning_rate"] == (0.02 if name == "penjing" else 1e-3), name
    for name in ("penjing", "penjing-adamw", *baselines):
        [path], [step] = record["path"]["trials"][name], record["step"]["trials"][name]
        first, last = path["curve"][0]["bits_per_byte"], path["curve"][-1]["bits_per_byte"]
        assert last < first, name
        assert len(step["step_seconds"]) == 3
        assert step["step_units"][0] in (2 * 64, 2 * 63)  # transformers' loss leaves a row's first token out
    starts = [trials[0]["curve"][0]["bits_per_byte"] for trials in record["path"]["trials"].values()]
    assert max(starts) - min(starts) < 0.2  # an untrained model says the same of the same text


@pytest.mark.parametrize("fast", [True, False])
def test_what_auto_means_is_found_once_and_handed_to_every_trial(toy, quiet, tiny_quick, monkeypatch, fast):
    """A trial that asks again may get another answer, and then medians are of two dtypes."""
    monkeypatch.setattr(Cpu, "has_fast_bfloat16", lambda self, device, capability=None: fast)
    seen = []

    def see(module, spec, folder):
        run = config.resolve(Run, config.read_toml(Path(spec.run)))
        seen.append((run.compute.dtype, spec.dtype))
        return printed(100, 100)

    start(quiet, toy / "pretrain.jsonl", trial=see)
    assert set(seen) == {("bfloat16",) * 2 if fast else ("float32",) * 2}


def of_rates(compare, spec, rates, **options):
    """The record of a comparison whose contestants make so many tokens a second on their own path."""

    def pretend(module, given, folder):
        name = folder.name.removeprefix(f"{given.setting}-").rpartition("-")[0]
        settings = {"optimizer": "muon" if name == "penjing" else "adamw", "dtype": given.dtype}
        return {**printed(rates[name], 100), "settings": settings}

    baselines = tuple(name for name in rates if not name.startswith("penjing"))
    return compare(PRETRAIN, spec, pretend, baselines=baselines, trials=3, **options)


def test_penjing_is_compared_with_the_faster_trainer_with_the_same_optimizer(spec, compare, installed):
    rates = {"penjing": 270, "penjing-adamw": 300, "trainer": 150, "trainer-packed": 120}
    record = of_rates(compare, spec, rates)
    faster = line(record, "faster Trainer")
    assert "trainer:" in faster and "2.00 x" in faster and "AdamW" in faster and "Muon" not in faster
    table = PRETRAIN.table(record, "path")
    headings = ["", "penjing (Muon)", "penjing-adamw (AdamW)", "trainer (AdamW)", "trainer-packed (AdamW)"]
    assert table.headings == headings
    # No ratio of two optimizers.
    assert row(record, "penjing-adamw is faster by")[1:] == ["", "", "2.00 x", "2.50 x"]
    assert not [line for line in verdict(PRETRAIN, record) if "claim" in line]
    of_time = [row[0] for row in table.rows if row[0].startswith("time of")]
    assert [any(heading in name for name in of_time) for heading in headings[1:]] == [True, True, False, False]


@pytest.mark.parametrize("search", [True, False])
def test_a_comparison_says_whether_rates_were_searched(spec, compare, installed, search):
    record = of_rates(compare, spec, {"penjing": 2, "penjing-adamw": 2, "trainer": 1})
    record["options"]["search"] = search
    assert ("--search-rates" in line(record, "learning rates")) is not search


def test_trials_of_two_dtypes_are_named(spec, compare):
    record = of_rates(compare, spec, {"penjing": 2, "penjing-adamw": 2})
    assert not any("different settings" in line for line in verdict(PRETRAIN, record))
    record["path"]["trials"]["penjing"][1]["settings"]["dtype"] = "bfloat16"
    assert line(record, "different settings").startswith("penjing:")


def test_ctrl_c_is_one_line_and_keeps_the_trials(monkeypatch, capsys, tmp_path):
    """What had been measured by then is named."""
    out = tmp_path / "bench.json"

    def interrupted(*_, save, **__):
        out.write_text("of another day")
        save({"finished": False, "parameters": 1})
        assert out.read_text() == "of another day"  # until there is a trial
        save({"finished": False, "parameters": 1, "path": {"trials": {}}})
        raise KeyboardInterrupt

    monkeypatch.setattr("compare.run.run_comparison", interrupted)
    monkeypatch.setattr("penjing.cli.sys.argv", ["train.py", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        main(script("benchmarks/train.py").train)
    said = capsys.readouterr()
    assert stopped.value.code == 130
    assert said.err == "penjing: interrupted\n"
    assert str(out) in said.out.replace("\n", "") and "--resume" in said.out
    assert '"finished": false' in out.read_text()

"""DPO and GRPO beside TRL: alternation, ratios and goals by hand, and real models that learn the same."""

import importlib.util
import json

import pytest
from compare.alignment import Dpo, largest_loss_difference, sample_order
from compare.run import run_comparison
from compare.trial_process import run_trial
from compare.verdict import ratios, verdict
from user_errors import raises_user_error

from penjing.base.seeds import derive
from penjing.loader.group_sampler import EpochOrder, group_source
from penjing.workflows.train import execute, resolve_run

MEBIBYTE = 2**20


def printed(seconds, peak, loss):
    return {
        "startup_seconds": 1.0,
        "step_seconds": [50.0, *seconds],
        "step_cpu_seconds": [50.0, *seconds],
        "step_units": [4] * (len(seconds) + 1),
        "figures": [{"loss": loss, "accuracy": 0.5}] * (len(seconds) + 1),
        "curve": [],
        "peak_bytes": peak * MEBIBYTE,
        "peak_bytes_after_imports": 100 * MEBIBYTE,
        "process_seconds": 60.0,
        "options": ["so and so"],
    }


def name_of(folder):
    return folder.name.removeprefix("step-").rpartition("-")[0]


def goal(record, what):
    [line] = [line for line in verdict(Dpo(), record) if what in line and "goal" in line]
    return line


def test_trials_alternate_and_rounds_are_compared(alignment_spec, compare, quiet, installed):
    seen = []

    def pretend(module, given, folder):
        seen.append(folder.name)
        slower = 1.0 + int(folder.name[-1])
        ours = name_of(folder) == "penjing"
        return printed([slower, slower], 200, 0.7) if ours else printed([3 * slower, 3 * slower], 500, 0.7001)

    record = compare(Dpo(), alignment_spec, pretend, baselines=("trl",), trials=3)
    order = ["penjing-0", "trl-0", "trl-1", "penjing-1", "penjing-2", "trl-2"]
    assert seen == [f"step-{name}" for name in order]
    ours = record["step"]["medians"]["penjing"]["units_per_second"]
    assert (ours["median"], ours["low"], ours["high"]) == pytest.approx((2.0, 4 / 3, 4.0))
    assert ratios(record, "step", "penjing", "trl", "units_per_second") == pytest.approx([3.0] * 3)
    assert ratios(record, "step", "penjing", "trl", "peak_bytes") == pytest.approx([0.4] * 3)
    assert ratios(record, "step", "penjing", "trl", "peak_bytes_beyond_imports") == pytest.approx([0.25] * 3)
    firsts = [trials[0]["figures"] for trials in record["step"]["trials"].values()]
    assert largest_loss_difference(*firsts) == pytest.approx(1e-4)
    assert "3.00 x" in goal(record, "pairs/s") and goal(record, "pairs/s").endswith("at least 2 x: reached")
    assert "0.40 x" in goal(record, "memory") and goal(record, "memory").endswith("at most 0.6 x: reached")
    assert all(text in quiet.file.getvalue() for text in (goal(record, "pairs/s"), "differ by 1.0e-04"))
    json.dumps(record)  # it is written as data


def test_a_missed_goal_is_called_missed(alignment_spec, compare, installed):
    record = compare(Dpo(), alignment_spec, lambda *_: printed([1.0, 1.0], 300, 0.7), baselines=("trl",))
    assert goal(record, "pairs/s").endswith("at least 2 x: missed")
    assert goal(record, "memory").endswith("at most 0.6 x: missed")


def test_a_failed_trial_is_one_line(alignment_spec, tmp_path):
    with raises_user_error(
        where="compare.penjing_trial alignment", got="penjing.base.errors.UserError: r: no such file"
    ):
        run_trial("compare.penjing_trial alignment", alignment_spec, tmp_path / "one")


def test_the_baseline_gets_pairs_in_the_order_of_our_steps():
    run = resolve_run("dpo", {"max_steps": 5, "batch": {"size": 4}})
    taken = []

    class Asking(Exception):
        pass

    def make(index):
        taken.append(index)
        raise Asking

    source = group_source(make, EpochOrder(7, derive(run.seed, "order")), 1)
    for _ in range(20):
        with pytest.raises(Asking):
            next(source)
    assert sample_order(run, 7) == taken


@pytest.fixture(scope="module")
def talker(toy, small_run, tmp_path_factory):
    """A model that has seen a few conversations: the folder of a run."""
    from rich.console import Console

    from penjing.base.config import parse_overrides

    folder = tmp_path_factory.mktemp("talker")
    words = [word for word in small_run if not word.startswith(("data.", "max_steps"))]
    more = [f"data.train={toy / 'sft.jsonl'}", "data.seq_len=128", "max_steps=3", f"out={folder / 'sft'}"]
    execute(resolve_run("tiny_sft", parse_overrides([*words, *more, "compute.threads=1"])), Console(quiet=True))
    return folder / "sft"


RATES = {"dpo": 3.3e-4, "grpo": 4.4e-4}  # no default of either side
SMALL = {
    "dpo": ["batch.size=4", f"optimizer.learning_rate={RATES['dpo']}"],
    "grpo": [
        f"optimizer.learning_rate={RATES['grpo']}",
        "batch.size=2",
        "objective.rollout.num_generations=2",
        "objective.rollout.max_new_tokens=4",
    ],
}


def run_bench(quiet, method, talker, toy, settings, baseline):
    data = toy / {"dpo": "dpo.jsonl", "grpo": "rl.jsonl"}[method]
    words = {"quick": False, "trials": 1, "steps": 3, "warmup": 1, "threads": 1}
    return run_comparison(quiet, method=method, run=talker, data=data, baseline=baseline, settings=settings, **words)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_beside_trl_both_learn_the_same(method, talker, toy, quiet):
    has_trl = importlib.util.find_spec("trl") is not None
    record = run_bench(quiet, method, talker, toy, SMALL[method], "trl" if has_trl else "none")
    [one] = record["step"]["trials"]["penjing"]
    assert len(one["step_seconds"]) == len(one["figures"]) == 3
    assert one["peak_bytes"] > one["peak_bytes_after_imports"] > 0
    if not has_trl:
        pytest.skip("needs trl; penjing alone was measured")
    medians = record["step"]["medians"]
    assert list(medians) == ["penjing", "trl"]
    settings = medians["trl"]["settings"]
    assert settings["learning_rate"] == pytest.approx(RATES[method])
    assert (settings["dtype"], settings["optimizer"]) == ("float32", "AdamW")
    if method == "dpo":
        trials = record["step"]["trials"]
        assert largest_loss_difference(*(trials[name][0]["figures"] for name in ("penjing", "trl"))) < 1e-5
    else:
        assert {"mean_reward", "mean_answer_tokens", "mean_sampling_seconds"} <= medians["trl"].keys()


@pytest.mark.parametrize(
    "setting",
    ["objective.loss=ipo", "optimizer.name=muon", "lora.rank=4", "optimizer.weight_decay=0.1", "schedule.name=cosine"],
)
def test_settings_that_the_baseline_does_not_get_are_refused(setting, talker, toy, quiet):
    with raises_user_error(where=setting.partition("=")[0]):
        run_bench(quiet, "dpo", talker, toy, [setting], "none")

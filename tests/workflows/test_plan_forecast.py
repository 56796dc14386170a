"""The forecast of a loss: which small runs it takes, that they go on where they were, and what it refuses."""

import io

import pytest
from rich.console import Console

from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.plan.compute_optimal import LAWS
from penjing.plan.scaling_law_fit import LossPoint
from penjing.workflows import forecast as scaling
from penjing.workflows.forecast import LADDER, LOSS, _ladder, _train, forecast_loss
from penjing.workflows.train import resolve_run


def run_of(recipe, *words):
    return resolve_run(recipe, parse_overrides(["compute.device=cpu", *words]))


def silent():
    return Console(file=io.StringIO(), width=200)


def test_a_ladder_is_chosen_once_for_what_was_asked(tmp_path, monkeypatch):
    run, file = run_of("pretrain", "model=tiny", "data.train=x.txt"), tmp_path / LADDER
    chosen = _ladder(run, 60.0, file)
    monkeypatch.setattr(scaling, "proxy_runs", lambda *asked: [])
    assert _ladder(run, 60.0, file) == chosen
    longer = run_of("pretrain", "model=tiny", "data.train=x.txt", "max_steps=99")
    assert _ladder(longer, 60.0, file) == chosen  # how far is foreseen says nothing of the small runs
    assert _ladder(run, 61.0, file) == []
    other = run_of("pretrain", "model=tiny", "data.train=x.txt", "batch.size=2")
    assert _ladder(other, 61.0, file) == []


def test_a_finished_small_run_is_not_taken_for_other_data_or_settings(small_run, toy, tmp_path):
    words = [*small_run, "eval.every=0", f"out={tmp_path}"]
    run = run_of("pretrain", *words)
    model = {"num_hidden_layers": 1}
    small = scaling.ProxyRun(name="small", model=model, parameters=1, steps=2, tokens=1024, seconds=0.0)
    first = _train(run, small, tmp_path, "", silent())
    assert _train(run, small, tmp_path, "", silent()) == first and first[LOSS] > 0
    without_steps = [word for word in words if not word.startswith("max_steps=")]
    assert _train(run_of("pretrain", *without_steps, "epochs=3"), small, tmp_path, "", silent()) == first
    with pytest.raises(UserError, match="seed was"):
        _train(run_of("pretrain", *words, "seed=9"), small, tmp_path, "", silent())
    other = tmp_path / "other.jsonl"
    other.write_text("".join((toy / "pretrain.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:200]))
    with pytest.raises(UserError, match="data was"):
        _train(run_of("pretrain", *words, f"data.train={other}"), small, tmp_path, "", silent())


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("reward", [], "next-token losses only"),
        ("dpo", ["objective.loss=simpo"], "next-token losses only"),
        ("pretrain", ["init_from={run}"], "trains from scratch"),
    ],
)
def test_what_has_no_such_loss_or_begins_with_a_model_is_refused_first(recipe, words, said, tmp_path, monkeypatch):
    run = run_of(recipe, "data.train=x.jsonl", f"out={tmp_path / 'out'}", *[w for w in words if "{run}" not in w])
    if words and "{run}" in words[0]:
        run = scaling.config.resolve(type(run), scaling.config.to_dict(run), {"init_from": "runs/x"})
    with pytest.raises(UserError, match=said):
        forecast_loss(run, "1min", silent())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("bend", "noted"), [(0.0, False), (0.5, True)])
def test_a_law_that_misses_its_own_runs_is_noted(tmp_path, bend, noted):
    """As runs of a few steps do: their losses fall faster than any power of the tokens."""
    run, first = run_of("pretrain", "model=tiny", "max_steps=100", f"out={tmp_path}"), tmp_path / "scale" / "first"
    first.mkdir(parents=True)
    (first / "plan.json").write_text('{"tokens_per_epoch": 1000}')
    law = LAWS["corrected"]
    points = [
        LossPoint(size, tokens, law.loss(size, tokens) + bend * (number % 3 == 1))
        for number, (size, tokens) in enumerate(
            (size, tokens) for size in (1e5, 2e5, 4e5) for tokens in (1e6, 2e6, 4e6)
        )
    ]
    console = silent()
    scaling._predict(run, points, str(first), console)
    assert ("give a larger --budget" in console.file.getvalue()) == noted

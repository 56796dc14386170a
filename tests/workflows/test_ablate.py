"""What a source is worth: the arithmetic, and runs on two sources of which one is noise."""

import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console
from user_errors import raises_user_error

from penjing.base.files import write_json
from penjing.workflows import ablate as module
from penjing.workflows.ablate import Effect, ablate, arms_of, effects_of, print_ablation, recommended

SETTINGS = [
    "model.vocab_size=300",
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "data.seq_len=32",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "model.intermediate_size=32",
    "compute.device=cpu",
    "eval.sequences=16",
]


def test_an_interval_is_over_the_paired_differences():
    effect = Effect.of("a", [2.0, 3.0, 4.0], [1.9, 2.8, 3.7])
    assert effect.helps == pytest.approx(0.2)
    assert effect.high - effect.helps == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert effect.verdict == "no difference seen"
    assert Effect.of("a", [2.0, 3.0], [1.9, 2.9]).verdict == "helps"
    assert Effect.of("a", [1.9, 2.9], [2.0, 3.0]).verdict == "hurts"


def test_arms_of_one_two_and_three_sources():
    assert [arm.name for arm in arms_of(["a"], ["unicode"])] == ["all", "all, cleaned by unicode"]
    assert [(arm.name, arm.shares) for arm in arms_of(["a", "b"], [])] == [
        ("all", (1, 1)),
        ("only a", (1, 0)),
        ("only b", (0, 1)),
    ]
    assert {arm.name: arm.shares for arm in arms_of(["a", "b", "c"], [])}["without b"] == (1, 0, 1)


def losses(sources, loss):
    """The figures of runs whose loss depends on the shares alone."""
    return {
        arm.name: [loss(*(share / sum(arm.shares) for share in arm.shares)) + seed for seed in range(3)]
        for arm in arms_of(sources, [])
    }


@pytest.mark.parametrize("best", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_the_best_share_of_two_sources_is_found(best):
    figures = losses(["a", "b"], lambda a, b: 2 + (a - best) ** 2)
    assert recommended(["a", "b"], figures) == {
        "a": pytest.approx(best, abs=0.011),
        "b": pytest.approx(1 - best, abs=0.011),
    }


def test_a_source_that_only_hurts_gets_no_weight():
    weights = recommended(["a", "b", "c"], losses(["a", "b", "c"], lambda a, b, c: 2 + c - 0.1 * a * b))
    assert weights["c"] == 0 and weights["a"] == weights["b"] == 0.5
    effects = effects_of(["a", "b", "c"], [], losses(["a", "b", "c"], lambda a, b, c: 2 + c))
    assert [effect.verdict for effect in effects] == ["helps", "helps", "hurts"]


@pytest.fixture
def sources(tmp_path):
    rng = random.Random(0)
    sentences = ["the cat sat on the mat", "a dog ran in the park", "the bird sang in the tree"]
    for name, number in (("good", 400), ("held", 60)):
        rows = [{"text": ". ".join(rng.choices(sentences, k=6))} for _ in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    noise = [{"text": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz  ", k=120))} for _ in range(400)]
    (tmp_path / "noise.jsonl").write_text("".join(json.dumps(row) + "\n" for row in noise))
    return tmp_path


def test_runs_tell_text_from_noise_and_are_not_repeated(sources, monkeypatch):
    trained = []

    def timed(run, console):
        times = {"training_seconds": 10.0, "validation_seconds": 0.0, "checkpoint_seconds": 0.0}
        outcome = {**execute(run, console), **times}  # 1 second a step of the pilot
        write_json(Path(run.out) / "outcome.json", outcome)
        trained.append(run.out)
        return outcome

    execute = module.execute
    monkeypatch.setattr(module, "execute", timed)
    for name, value in (("PILOT_STEPS", 10), ("FEWEST_STEPS", 1), ("START_SECONDS", 0.0)):
        monkeypatch.setattr(module, name, value)

    def run():
        said = io.StringIO()
        console = Console(file=said, width=200)
        made = ablate(
            [str(sources / f"{name}.jsonl") for name in ("good", "noise")],
            [str(sources / "held.jsonl")],
            rules=["unicode"],
            seeds=2,
            budget="200s",  # 25 steps for each of 8 runs
            out=sources / "runs",
            settings=SETTINGS,
            console=console,
        )
        print_ablation(made, console)
        return made, said.getvalue()

    made, said = run()
    good, noise = made.weights.values()
    assert made.steps == 25 and good > noise
    verdicts = {effect.name.rpartition("/")[2]: effect for effect in made.effects}
    assert verdicts["noise.jsonl in the mix"].helps < 0 < verdicts["good.jsonl in the mix"].helps
    assert verdicts["rule unicode"].verdict == "no difference seen", "it changes nothing here"
    assert "data.weights=" in said and "no difference seen" in said and "left" in said
    assert len(trained) == 9
    assert run()[0] == made and len(trained) == 9, "read, not trained again"


def test_what_cannot_be_compared(sources):
    options = {"rules": [], "seeds": 2, "out": sources / "runs", "settings": [], "console": Console(quiet=True)}
    good, held = str(sources / "good.jsonl"), [str(sources / "held.jsonl")]
    for sources_of_one in ([good], [good, good]):
        with raises_user_error(wanted="two sources"):
            ablate(sources_of_one, held, budget="1min", **options)
    with raises_user_error(where="--budget"):
        ablate([good, good], held, budget="3GB", **options)

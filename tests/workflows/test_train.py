"""What a run says on the terminal, and what it reads back: whatever a model writes or a disk has kept."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.infer.requests import NotFiniteError
from penjing.parallel.single import Single
from penjing.planner.page import print_plan
from penjing.track.run_dir import RunDir
from penjing.track.run_record import RunRecord
from penjing.train.best import BestLoss
from penjing.train.loop import TrainState
from penjing.workflows import train as execute
from penjing.workflows.train import resolve_run, write_samples

NASTY = "so [/quote] and [/] and [red]he[/red] said :heart:"
TOKENIZER = SimpleNamespace(begin=0, stop={1}, encode=lambda text: [2], decode=lambda ids: NASTY)
BILL = SimpleNamespace(
    sources=(),
    parameters=10,
    trainable_parameters=10,
    rows_per_epoch=4,
    epochs=1.0,
    tokens_per_step=8,
    steps=2,
    warnings=[],
    tokens=16,
    tokens_per_epoch=16,
    flops=1e3,
    flops_per_token_full_square=1e2,
    predicted_peak_memory_bytes=1 << 20,
    memory_source="measured",
    predicted_seconds=2.0,
    predicted_seconds_low=1.0,
    predicted_seconds_high=3.0,
    level="L2",
    tokens_per_second=8.0,
    step_seconds=1.0,
    step_parts_seconds={"compute": 1.0},
    parts_seconds={"training": 2.0},
)


def console():
    return Console(file=io.StringIO(), width=200)


def run_of(*words):
    return resolve_run("pretrain", parse_overrides(["compute.device=cpu", *words]))


def test_what_a_model_writes_is_never_markup(monkeypatch):
    monkeypatch.setattr(execute, "generate", lambda model, asked, **settings: [[3] for _ in asked])
    screen = console()
    run = run_of("sample.prompts=Once [/INST],[/b]")
    written = write_samples(run, None, TOKENIZER, screen)
    assert [sample["text"] for sample in written] == [NASTY, NASTY]
    assert screen.file.getvalue().splitlines() == [f"    Once [/INST]{NASTY}", f"    [/b]{NASTY}"]


def test_samples_of_nan_logits_do_not_end_a_training(monkeypatch):
    def no_numbers(*_, **__):
        raise NotFiniteError

    monkeypatch.setattr(execute, "generate", no_numbers)
    screen = console()
    assert write_samples(run_of("sample.prompts=Once"), None, TOKENIZER, screen) == []
    assert "NaN" in screen.file.getvalue()


def plan_of(run, notes):
    stage = SimpleNamespace(describe=lambda: [("teacher", "runs/[/teacher]")], notes=["in runs/[bold]x[/b]"])
    prepared = SimpleNamespace(
        run=run,
        estimate=BILL,
        size=SimpleNamespace(unit="rows", seq_len=8, padding_fraction=0.0),
        context=SimpleNamespace(accumulate=1, strategy=Single(torch.device("cpu"))),
        stage=stage,
        notes=notes,
        resumed_from=None,
    )
    screen = console()
    print_plan(prepared, screen)
    return screen.file.getvalue()


def test_neither_are_paths_and_notes():
    said = plan_of(run_of("out=runs/[/x]"), ['pip install "penjing[hub]"', "cannot read [/a]"])
    assert "pretrain -> runs/[/x]" in said
    assert "runs/[/teacher]" in said
    assert "  in runs/[bold]x[/b]" in said
    assert '  note: pip install "penjing[hub]"\n  note: cannot read [/a]\n' in said


@pytest.mark.parametrize("words", [["sample.every=100"], ["sample.every=100", "sample.prompts=Once"], []])
def test_samples_without_prompts_are_told_of(words):
    told = "note: sample.every=100 writes nothing without sample.prompts" in plan_of(run_of(*words), [])
    assert told == (words == ["sample.every=100"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "auto"])
def test_float16_on_a_cpu_is_warned_of_before_the_first_step(dtype):
    warned = [line for line in plan_of(run_of(f"compute.dtype={dtype}"), []).splitlines() if "warning" in line]
    assert ["float16" in line and "slower" in line for line in warned] == [True] * (dtype == "float16")


def test_figures_from_before_are_found_among_lines_that_a_full_disk_cut_short(tmp_path):
    figures = '{"step": 0, "tokens": 0, "val_loss": 5.5, "val_other": 1.0}'
    (tmp_path / "metrics.jsonl").write_text(f'\n{{"step": 0, "vali\n\n{figures}\n{{"step": 3, "loss": 2.0}}\n{{"st')
    assert execute._before(RunRecord(tmp_path), {"val_loss": 2.0}) == {"val_loss": 5.5}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nTried"), MemoryError()])
def test_memory_that_does_not_suffice_is_one_line(tmp_path, monkeypatch, error):
    def fails(*given, **named):
        raise error

    monkeypatch.setattr(execute, "prepare_run", fails)
    with pytest.raises(UserError, match=r"out of memory.*plan memory") as caught:
        execute.execute(run_of(f"out={tmp_path / 'run'}"), console())
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(execute, "prepare_run", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        execute.execute(run_of(f"out={tmp_path / 'run'}"), console())


@pytest.mark.parametrize("rank", [0, 1])
def test_figures_that_are_no_number_are_left_out_and_told_once(tmp_path, rank, recwarn):
    meter = SimpleNamespace(totals=lambda: {"sample_seconds": 0.0})
    strategy = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    prepared = SimpleNamespace(
        folder=RunDir(tmp_path),
        resumed_from=None,
        resumed=0,
        stage=SimpleNamespace(fingerprint="d"),
        state=TrainState(step=3),
        context=SimpleNamespace(
            num_steps=3, meter=meter, strategy=strategy, best=BestLoss(), guard=SimpleNamespace(num_bad=0)
        ),
    )
    checkpoint = tmp_path / "checkpoints/step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"")
    (tmp_path / "metrics.jsonl").write_text("")
    figures = {"val_loss": float("nan"), "val_accuracy": 0.5}
    outcome = execute._outcome(prepared, figures, 1.0)
    assert outcome["val_accuracy"] == 0.5 and "val_loss" not in outcome
    assert [str(warning.message).split(" is NaN")[0] for warning in recwarn] == ["val_loss"] * (rank == 0)
    assert (tmp_path / "outcome.json").exists() == (rank == 0)

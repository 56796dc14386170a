"""What many tests share: one torch thread, a little corpus, and a way to run a small training."""

import atexit
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests share forks.py

from forks import ENVIRONMENT, Server

from penjing.base import malloc_tuning as heap

torch.set_num_threads(1)
# Beside other programs an example takes any time.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for tests/kernels/test_triton_kernels.py; read when Triton is first imported
HOME = tempfile.mkdtemp(prefix="penjing-home-")  # of this process: no test writes the user's history
os.environ["PENJING_HOME"] = HOME
os.environ.pop("COLUMNS", None)  # of the terminal, or set by other packages: output is as wide as where there is none


# A full garbage collection looks at all that libraries and tests have made, at the start of each of hundreds of small
# trainings: half of some tests' time. What is there when a file of tests begins is passed over instead.
heap.gc = SimpleNamespace(collect=lambda: gc.collect(1), freeze=lambda: None, unfreeze=lambda: None)


@pytest.fixture(autouse=True, scope="module")
def passed_over_by_the_garbage_collector():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_timed_steps():
    """The plan before step 1 is made from as few timed steps as can be, else it takes as long as a small training."""
    if timing := sys.modules.get("penjing.train.step_timing"):
        timing.LEAST_STEPS, timing.SHORT_RUN_SHARE = 2, 0.0


@pytest.fixture(scope="session")
def remembered_merges(toy):
    """What a tokenizer has learned from texts of the toy world is kept: many small trainings have the same."""
    from penjing.data.tokenizer import train

    texts_of_toy = {json.loads(line)["text"] for line in (toy / "pretrain.jsonl").read_text().splitlines()}
    learn, known = train._train_bpe, {}

    def learn_once(texts, split, size, show_progress):
        if not texts_of_toy.issuperset(texts):
            return learn(texts, split, size, show_progress)
        key = (tuple(texts), pickle.dumps(split), size)
        if key not in known:
            known[key] = learn(texts, split, size, show_progress)
        return list(known[key])

    train._train_bpe = learn_once


@pytest.fixture(autouse=True)
def as_at_the_start():
    """A training sets the threads of its process, and an engine that is not closed keeps compiled code from running;
    the next test has one thread again, and compiles."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("default")


@atexit.register  # again after all that a training writes at the end
def remove_home(owner=os.getpid()):
    if os.getpid() == owner:
        shutil.rmtree(HOME, ignore_errors=True)


def pytest_unconfigure():
    remove_home()
    gc.unfreeze()  # else libraries say at the end that they were not freed


FIRST = ("reliability", "parallel")  # folders whose files take minutes: begun last, one process would end long after


def pytest_collection_modifyitems(config, items):
    """The deep set runs only where `-m` names its mark. Long files before the others; the order within is as it was."""
    if "nightly" not in config.option.markexpr and "usual" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items.sort(key=lambda item: not any(folder in item.path.parts for folder in FIRST))


def pytest_terminal_summary(terminalreporter):
    """Why tests were skipped, each reason once."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}")


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A small toy world: folder with pretrain.jsonl, sft.jsonl, eval.jsonl and the others."""
    from penjing.data import synthetic as toyworld

    folder = tmp_path_factory.mktemp("toy")
    toyworld.write(folder, seed=3, documents=400, conversations=200, preferences=20, prompts=20, questions_per_kind=1)
    return folder


@pytest.fixture(scope="session")
def small_run(toy, remembered_merges):
    """Settings of a training that takes a second or two: `penjing train` arguments without the recipe and out=."""
    return [
        "model.preset=tiny",
        "model.vocab_size=400",
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "model.num_key_value_heads=1",
        "model.head_dim=16",
        "model.intermediate_size=48",
        f"data.train={toy / 'pretrain.jsonl'}",
        "data.seq_len=64",
        "batch.size=8",
        "max_steps=12",
        "compute.device=cpu",
        "compute.dtype=float32",
        "eval.every=6",
        "eval.sequences=8",
        "checkpoint.every=3",
        "log.every=1",
    ]


@pytest.fixture(scope="module")
def browser():
    """Chromium, for tests of pages; they are skipped where it or playwright is missing."""
    from chromium import CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Runs penjing in forked children; see forks.py."""
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def penjing(server):
    """Run `penjing ARGS`; returns the finished process with its output.

    In a forked child, or `ranks` of them as torchrun starts them. A process of its own, as a user's is, with
    `real=True`, and under a `launcher` such as torchrun.
    """

    def run(*words, ranks=1, real=False, launcher=(), check=True, timeout=600, cwd=None, **environment):
        if real or launcher:
            folder = {"TMPDIR": str(server.folder)} if launcher else {}  # where torchrun leaves its own
            done = subprocess.run(
                [sys.executable, "-m", *launcher, *(["-m"] if launcher else []), "penjing", *map(str, words)],
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=cwd,
                env={**os.environ, **ENVIRONMENT, **folder, **environment},
            )
        else:
            done = server.command(*words, ranks=ranks, cwd=cwd, environment=environment)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Warning: " not in done.stderr, done.stderr  # Python's own; ours are `warning: ...`
        return done

    return run


@pytest.fixture
def count():
    """Notes a count for results/ (see benchmarks/reliability.py), such as `count("runs", 200)`."""

    def note(name, value):
        path = os.environ.get("PENJING_RELIABILITY_COUNTS")
        if path:
            test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
            with open(path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"test": test, "name": name, "value": value}) + "\n")

    return note


@pytest.fixture
def outcome():
    """Read a run's outcome.json."""
    return lambda folder: json.loads((Path(folder) / "outcome.json").read_text())


@pytest.fixture
def losses():
    """A run's training losses by step."""

    def read(folder):
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    return read


@pytest.fixture
def without_cpu_kernels(monkeypatch) -> Callable[[], None]:
    """Switches kernels of our own on the CPU off for the rest of a test."""
    from penjing.kernels.cpu import library

    def switch_off() -> None:
        monkeypatch.setattr(library, "kernels", lambda: None)
        monkeypatch.setattr(library, "decode_kernels", lambda: None)
        monkeypatch.setattr(library, "unavailable_decode_reason", lambda: "they were switched off")

    return switch_off


@pytest.fixture
def make_model():
    """A model of two layers whose attention is far from even: weights four times as wide, outputs drawn too."""

    from small_models import sizes

    from penjing.model.config import ModelConfig
    from penjing.model.init import initialise
    from penjing.model.transformer import Transformer

    def make(seed: int = 0, **settings: object):
        shape = {**sizes(61, 24, 2, 4, 2, 8, 40), "rope_theta": 1e4}
        model = Transformer(ModelConfig(**{**shape, **settings}))
        initialise(model, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # they begin at zero, where a block says nothing
                parameter.data.normal_(0, 0.05, generator=generator)
            parameter.data *= 4 if parameter.ndim > 1 else 1
        return model

    return make

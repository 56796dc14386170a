"""The list of mutants fits the code; and, in the deep set, every one of them is seen by the tests that it names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import script

RUN = Path(__file__).with_name("run.py")
run = script("tests/mutants/run.py")
MUTANTS = run.load()


def test_the_list_fits_the_code():
    assert run.misfits(MUTANTS) == []
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 100


def test_what_no_longer_fits_is_named(tmp_path):
    (tmp_path / "code.py").write_text("one = 1\ntwo = 1\n")
    (tmp_path / "test_it.py").write_text("def test_one():\n    pass\n")
    there = {"file": "code.py", "new": "2", "tests": ("test_it.py::test_one",)}
    fits = run.Mutant(name="fits", **{**there, "old": "one = 1"})
    twice = run.Mutant(name="twice", **{**there, "old": "1"})
    gone = run.Mutant(name="gone", **{**there, "old": "three"})
    untested = run.Mutant(name="untested", **{**there, "old": "one = 1", "tests": ("test_it.py::test_two",)})
    broken = run.Mutant(name="broken", **{**there, "old": "one = 1", "new": "  one = 1"})
    assert run.misfits([fits], tmp_path) == []
    found = run.misfits([twice, gone, untested, broken], tmp_path)
    assert [line.partition(":")[0] for line in found] == ["twice", "gone", "untested", "broken"]


def test_only_a_failed_test_is_a_mutant_caught():
    verdicts = [
        run.Outcome(1, {"failed": 1}, ["a"]).verdict,
        run.Outcome(None).verdict,
        run.Outcome(0, {"passed": 1}).verdict,
        run.Outcome(0, {"skipped": 1}).verdict,
        run.Outcome(2, {}).verdict,
        run.Outcome(1, {}).verdict,
    ]
    assert verdicts[:3] == ["caught", "caught", "survived"]
    assert not {"caught", "survived"} & set(verdicts[3:])


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """What became of each mutant that is asked for, from one run of the script."""
    out = tmp_path_factory.mktemp("mutants") / "verdicts.jsonl"
    here = [item for item in request.session.items if item.path == Path(__file__)]
    names = [item.callspec.params["name"] for item in here if hasattr(item, "callspec")]
    done = subprocess.run([sys.executable, str(RUN), "--out", str(out), *names], capture_output=True, text=True)
    lines = out.read_text().splitlines() if out.exists() else []
    assert lines, done.stdout + done.stderr
    return {line["name"]: line["verdict"] for line in map(json.loads, lines)}


@pytest.mark.nightly
@pytest.mark.timeout(7200)  # the first of them waits for all
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_a_mutant_is_caught(verdicts, name):
    assert verdicts.get(name) == "caught", verdicts.get("(unchanged)", verdicts.get(name))

"""Which verbs start without torch, and what became of verbs that have moved."""

import json
import os
import subprocess
import sys

from typer.main import get_command

from penjing.cli import app
from penjing.data.tokenizer.train import train_tokenizer

# Runs each command line in one process, and prints its exit code and whether torch was imported by then.
CHILD = """
import contextlib, io, json, sys
from penjing import cli
for words in json.loads(sys.argv[1]):
    sys.argv = ["penjing", *words]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as stopped:
            code = stopped.code
    print(json.dumps([words, code, "torch" in sys.modules]))
"""


def run(lines, **where):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(lines)], capture_output=True, text=True, check=True, **where
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def every_verb(command, path=()):
    yield path
    for name, sub in getattr(command, "commands", {}).items():
        yield from every_verb(sub, (*path, name))


def test_help_of_every_verb_needs_no_torch():
    lines = [[*path, "--help"] for path in every_verb(get_command(app))]
    assert len(lines) > 30
    for words, code, with_torch in run(lines):
        assert code in (0, None) and not with_torch, words


def test_verbs_without_a_model_need_no_torch(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "one and two and three"}\n' * 20)
    train_tokenizer(["so it is, and so it was"] * 9, 300).save(tmp_path / "tokenizer")
    lines = [
        ["data", "list"],
        ["data", "toyworld", "--documents", "5", "--conversations", "5", "--preferences", "2", "--prompts", "2"],
        ["data", "look", "text.jsonl"],
        ["tokenizer", "train", "text.jsonl", "--vocabulary", "300", "--out", "other"],
        ["tokenizer", "show", "tokenizer", "so"],
        ["show", "models"],
        ["show", "recipes"],
        ["plan", "tokens", "--params", "64M", "--unique", "1.2B", "--hours", "2", "--gpu", "RTX 3090"],
        ["plan", "estimate", "--params", "26M", "--tokens", "10B", "--tflops", "75"],
    ]
    for words, code, with_torch in run(lines, cwd=tmp_path):
        assert code in (0, None) and not with_torch, words
    refused = [
        ["show", "nothing"],
        ["plan", "verify", "nothing"],
        ["plan", "history"],
        ["plan", "tokens", "--params", "x"],
    ]
    for words, code, with_torch in run(refused, cwd=tmp_path, env={**os.environ, "PENJING_HOME": str(tmp_path)}):
        assert code == 2 and not with_torch, words


def test_the_child_sees_torch_where_it_is_imported():
    assert run([["show", "pretrain"]]) == [[["show", "pretrain"], None, True]]

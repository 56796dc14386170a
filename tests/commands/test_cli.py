"""The command line from outside: help that teaches, real examples, mistakes that get one line and exit code 2."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from penjing.cli import app, main
from penjing.workflows.check_machine import optional_packages


def commands(command, path=()):
    for name, sub in getattr(command, "commands", {}).items():
        if not sub.hidden:
            yield (*path, name), sub
        yield from commands(sub, (*path, name))


ALL = dict(commands(get_command(app)))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_explains_itself(path):
    command = ALL[path]
    assert command.help
    if not hasattr(command, "commands") and path not in [("doctor",), ("data", "list")]:
        assert "[bold]Example" in command.help


def test_examples_name_commands_and_options_that_exist():
    examples = [
        line for command in ALL.values() for line in (command.help or "").splitlines() if line.startswith("penjing ")
    ]
    assert len(examples) >= 15
    for line in examples:
        words = line.split()[1:]
        path = tuple(words[:2]) if tuple(words[:2]) in ALL else tuple(words[:1])
        path = ("plan", "run") if path == ("plan",) else path  # what is no verb of `plan` is something to plan
        assert path in ALL, line
        known = {option for parameter in ALL[path].params for option in parameter.opts}
        for option in re.findall(r"(?<= )--?[a-z][a-z-]*", line):
            assert option in known, line


@pytest.fixture
def mistake(penjing, tmp_path):
    """Run a command that must fail as a user's mistake does; returns its one line."""

    def run(*words):
        done = penjing(*words, check=False, cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(lines) == 1, done.stderr
        assert "Traceback" not in done.stderr
        return lines[0]

    return run


def test_empty_file(mistake, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt" in mistake("train", "pretrain", "data.train=empty.txt")


def test_wrong_json_field_names_file_line_and_field(mistake, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    line = mistake("train", "pretrain", "model=tiny", "data.train=bad.jsonl")
    assert "bad.jsonl:2" in line
    assert "text" in line


def test_broken_json_names_the_line(mistake, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"text": "two"\n')
    assert "bad.jsonl:2" in mistake("train", "pretrain", "model=tiny", "data.train=bad.jsonl")


def test_vocabulary_mismatch(mistake, toy, tmp_path):
    from penjing.data.tokenizer.train import train_tokenizer

    train_tokenizer(["some words and others " * 50, "其他的字"], 300).save(tmp_path / "tokenizer")
    line = mistake(
        "train",
        "pretrain",
        "model=tiny",
        "model.vocab_size=270",
        "tokenizer.path=tokenizer",
        f"data.train={toy / 'pretrain.jsonl'}",
    )
    assert "model.vocab_size" in line


def test_cuda_absent(mistake, toy):
    assert "CUDA" in mistake("train", "pretrain", "compute.device=cuda", f"data.train={toy / 'pretrain.jsonl'}")


def test_epochs_take_the_place_of_a_recipes_steps():
    from penjing.workflows.train import resolve_run

    assert resolve_run("tiny", {"epochs": 2}).max_steps == 0
    assert resolve_run("tiny", {"max_steps": 7}).max_steps == 7


def test_chats_cannot_be_pretrained_on_as_documents(mistake, toy):
    assert "sft.jsonl" in mistake("train", "pretrain", "model=tiny", f"data.train={toy / 'sft.jsonl'}")


def test_quickstart_with_unknown_data(mistake, tmp_path):
    assert "nosuch" in mistake("quickstart", "--data", "nosuch")
    assert not (tmp_path / "runs").exists()


def test_quickstart_with_a_file_for_a_folder(mistake, tmp_path):
    (tmp_path / "my.txt").write_text("mine")
    assert "my.txt: a file, not a folder" in mistake("quickstart", "--out", "my.txt", "--fresh")


def test_where_a_tokenizer_goes_is_looked_at_before_the_text(mistake, tmp_path):
    for name in ("empty.txt", "taken"):
        (tmp_path / name).write_text("")
    assert "taken: a file, not a folder" in mistake("tokenizer", "train", "empty.txt", "--out", "taken")


def test_a_tokenizer_is_trained_on_what_is_whole(penjing, tmp_path):
    (tmp_path / "my.jsonl").write_text('{"text": "some words and others"}\n' * 20 + '{"text": "cut\n')
    done = penjing("tokenizer", "train", "my.jsonl", "--vocabulary", "300", cwd=tmp_path)
    assert "of 21 records 1 are broken" in done.stdout
    assert re.search(r"tokenizer: 2\d\d ids, not 300", done.stdout)
    assert (tmp_path / "tokenizer/tokenizer.json").is_file()
    (tmp_path / "more.jsonl").write_text('{"text": "unseen letters"}\n' * 20 + '{"text": "cut\n')
    options = ("--train", "more.jsonl", "--vocabulary", "290", "--out", "more")
    for command in (("extend", "tokenizer", *options), ("report", "tokenizer", "more.jsonl")):
        assert "of 21 records 1 are broken" in penjing("tokenizer", *command, cwd=tmp_path).stdout


def test_a_tokenizer_learns_from_conversations_and_their_thoughts(penjing, tmp_path):
    answer = {"role": "assistant", "content": "done", "reasoning_content": "thinking thoughtfully"}
    record = {"messages": [{"role": "user", "content": "please"}, answer]}
    (tmp_path / "my.jsonl").write_text((json.dumps(record) + "\n") * 20)
    penjing("tokenizer", "train", "my.jsonl", "--vocabulary", "400", cwd=tmp_path)
    assert "2 tokens" in penjing("tokenizer", "show", "tokenizer", "thinking thoughtfully", cwd=tmp_path).stdout


def test_settings_that_cannot_be_read(mistake, tmp_path):
    (tmp_path / "x.toml").symlink_to("x.toml")
    assert "x.toml: cannot be read" in mistake("train", "x.toml")


def test_wrong_option_is_exit_code_2(penjing):
    assert penjing("train", "--nonsense", check=False).returncode == 2


def test_a_warning_is_one_line_and_told_once(penjing, tmp_path):
    rows = [f'{{"text": "Mia went to river {number} and sang.", "mood": "glad"}}' for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    settings = ["model.num_hidden_layers=1", "max_steps=1", "batch.size=1", "out=run"]
    done = penjing("train", "tiny", "data.train=a.jsonl", *settings, cwd=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if "mood" in line]
    assert line.strip().startswith("warning: ") and "40 records, the first a.jsonl:1" in line
    assert "UserWarning" not in done.stderr and ".py:" not in done.stderr


def test_a_full_disk_is_one_line_and_loses_nothing(mistake, tmp_path, toy):
    """A file size limit stands for a full disk: the write is refused in the middle."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "sys.argv = ['penjing', 'data', 'toyworld', '--out', 'world']; from penjing.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "world").glob("*.jsonl"))
    assert not list((tmp_path / "world").glob(".*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("quickstart", "--nope"), "No such option: --nope. See `"),
        (("traain",), "Did you mean 'train'?"),
        (("train", "pretrain", "--learning_rate", "1e-3"), "Settings have no dashes: optimizer.learning_rate=VALUE"),
        (("train", "pretrain", "batch.rows=3"), "Did you mean batch.size?"),
        (("train",), "Missing argument"),
        (("data", "toyworld", "--documents", "many"), "--documents"),
        (("plan", "tokens", "--params", "64M", "--hours", "2", "--gpu", "A100", "--gpus", "-1"), "--gpus"),
        (("bench", "train", "--steps", "3"), "python benchmarks/train.py"),
        (("bench", "sweep", "pretrain", "--rows", "2"), "python benchmarks/sweep.py"),
        (("bench", "scale", "pretrain", "model=tiny"), "python benchmarks/scale.py"),
        (("bench", "matmul", "--sizes", "0"), "`penjing plan profile`"),
        (("report", "."), "no run in this folder"),
        (("chat", "runs/none"), "no such folder"),
        (("chat", "runs/none", "--seed", "-1"), "--seed"),
        (("chat", "runs/none", "--temperature", "-0.5"), "--temperature"),
        (("generate", "runs/none", "--prompts", "x", "--out", "y", "--seed", "-1"), "--seed"),
        (("generate", "runs/none", "--prompts", "x", "--out", "y", "--top-k", "-1"), "--top-k"),
        (("generate", "runs/none", "--prompts", "x", "--out", "y", "--temperature", "inf"), "temperature ... inf"),
        (("train", "pretain"), "Did you mean pretrain?"),
        (("train", "pretrain", "batch.siez=3"), "Did you mean batch.size?"),
        (("train", "pretrain"), "data.train"),
        (("train", "pretrain", "data.train=nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("train", "pretrain", "model=tiny", "data.seq_len=4096", "data.train=x.txt"), "data.seq_len ... 4096"),
        (("train", "tiny", "model.num_experts=4"), "qwen3 is a dense architecture"),
        (("train", "tiny", "router.z_loss_coef=0.001"), "no effect on a dense model"),
        (("train", "pretrain", "optimizer.name=adamw", "optimizer.momentum=0.9"), "optimizer.momentum"),
        (("train", "pretrain", "checkpoint.every=0", "data.train=x.txt"), "checkpoint.every"),
        (("train", "pretrain", "epochs=2", "max_steps=100", "data.train=x.txt"), "epochs, max_steps"),
    ],
)
def test_a_wrong_command_line_is_one_line(mistake, words, expected):
    line = mistake(*words)
    assert all(fact in line for fact in expected.split(" ... "))


def test_doctor_looks_for_the_packages_of_every_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"test", "dev"}
    assert set(optional_packages().values()) == extras
    assert optional_packages()["llama-cpp-python"] == "llama"
    assert "penjing" not in optional_packages()  # the extra `trackers` is made of others


@pytest.mark.parametrize(("columns", "width"), [("72", 72), ("", 160), ("0", 160)])
def test_piped_output_is_as_wide_as_columns_says(columns, width):
    words = [sys.executable, "-m", "penjing", "show", "recipes"]
    done = subprocess.run(words, env={**os.environ, "COLUMNS": columns}, capture_output=True, text=True, check=True)
    assert width - 12 <= max(map(len, done.stdout.splitlines())) <= width


@pytest.mark.skipif(not sys.prefix.isascii(), reason="Python itself cannot read such a folder's packages as ASCII")
def test_chinese_names_are_read_where_python_would_read_ascii(tmp_path):
    words = [sys.executable, "-m", "penjing", "train", "tiny", "data.train=小说.txt", "out=运行"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "小说.txt: no such file" in done.stderr


def test_another_system_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("penjing.cli.sys.platform", "win32")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "penjing: needs Linux or macOS; on Windows run it in WSL 2\n"


def test_names_between_colons_stay_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["penjing", "train", f"{tmp_path}/a:smile:b.toml"])
    with pytest.raises(SystemExit):
        main()
    assert "a:smile:b.toml" in capsys.readouterr().err


def test_what_may_not_be_read_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "closed").mkdir()

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    monkeypatch.setattr(sys, "argv", ["penjing", "watch", str(tmp_path / "closed")])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "closed" in error and "Permission denied" in error


@pytest.mark.parametrize("word", ["init_from={}", "data.train={}", "objective.teacher={}"])
def test_a_name_that_no_disk_takes_is_one_line(word, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text")
    words = ["distill" if "teacher" in word else "tiny", f"data.train={tmp_path / 'a.txt'}", word.format(400 * "x")]
    monkeypatch.setattr(sys, "argv", ["penjing", "train", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "File name too long" in error and "xxx" in error


def test_no_option_takes_an_infinite_number():
    """Of those without a largest value, `Sampling` refuses infinity."""
    options = [
        (path, option.opts[0], option.max)
        for path, command in ALL.items()
        for option in getattr(command, "params", ())
        if option.param_type_name == "option" and "float" in str(option.type_descriptor)
    ]
    assert len(options) > 5
    assert {name for _, name, largest in options if largest is None} <= {"--temperature", "--top-p"}

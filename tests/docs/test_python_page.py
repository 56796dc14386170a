"""Every example of docs/python.md runs, in the page's order, in one folder; and mistakes are told."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from pages import text_of

from penjing.api import load, plan, serve, train
from penjing.base.errors import UserError

EXAMPLES = re.findall(r"```python\n(.*?)```", text_of("docs/python.md"), flags=re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 4
    for example in EXAMPLES:
        assert len(example.splitlines()) < 20
        exec(compile(example, "docs/python.md", "exec"), {})  # noqa: S102
        assert capsys.readouterr().out
    model = load("runs/kite", device="cpu")
    text = "Tom has a red"
    assert model.logits(text).shape[0] == 1 + len(model.tokenizer.encode(text))
    greedy = model.generate([text], max_tokens=1)[0]
    assert model.tokenizer.decode([int(model.logits(text)[-1].argmax())]) == greedy
    for wrong in ("a text", [[{"role": "user", "content": "Hello"}]], [text * 10_000]):
        with pytest.raises(UserError):
            model.generate(wrong)
    with pytest.raises(UserError):
        model.logits(text * 10_000)
    with pytest.raises(UserError):
        model.generate([text], temprature=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: train("pretrian"),
        lambda: train("pretrain", {"batch": {"sise": 8}}),
        lambda: plan("pretrain", max_stepz=8),
        lambda: load("nowhere"),
        lambda: serve("nowhere", prot=8).__enter__(),
        lambda: serve("nowhere", port=0).__enter__(),
    ],
)
def test_a_mistake_is_a_user_error(call):
    with pytest.raises(UserError):
        call()


def test_settings_may_be_dotted_nested_or_keywords():
    small = {"gpu": "T4", "model": "tiny"}
    pages = [plan("pretrain", {"batch.size": 24}, **small), plan("pretrain", batch={"size": 24}, **small)]
    assert [page.rows_per_step for page in pages] == [24, 24]


@pytest.mark.nightly
def test_a_killed_run_continues_and_ends_in_the_same_weights(tmp_path, small_run):
    """kill -9 after the first checkpoint, then the same call."""
    settings = {**dict(word.split("=", 1) for word in small_run), "checkpoint.async": "false"}
    whole = train("pretrain", settings, out=tmp_path / "whole", quiet=True)
    call = f"from penjing.api import train; train('pretrain', {settings!r}, out={str(tmp_path / 'cut')!r}, quiet=True)"
    process = subprocess.Popen([sys.executable, "-c", call])
    checkpoints = tmp_path / "cut" / "checkpoints"
    while process.poll() is None and not list(checkpoints.glob("step-*")):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "cut" / "outcome.json").exists()
    continued = train("pretrain", settings, out=tmp_path / "cut", quiet=True)
    assert continued.outcome["resumed"] == 1
    assert continued.outcome["weights_sha256"] == whole.outcome["weights_sha256"]
    assert continued.figures == whole.figures


def test_a_chat_model_answers_texts_and_conversations(tmp_path):
    """It learns one answer by heart; a text is the one question of a conversation."""
    turns = [{"role": "user", "content": "What flies?"}, {"role": "assistant", "content": "A red kite."}]
    lines = [{"conversations": [{**turns[0], "content": f"What flies? {n}"}, turns[1]]} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape = {"preset": "tiny", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 400}
    settings = {"model": shape, "data.train": tmp_path / "chats.jsonl", "data.seq_len": 64, "out": tmp_path / "chat"}
    rate = {"optimizer.learning_rate": 0.01, "compute.device": "cpu", "eval.every": 0}
    train("sft", {**settings, **rate}, max_steps=60, quiet=True)
    model = load(tmp_path / "chat", device="cpu")
    assert model.is_chat_model
    question, talk = "What flies? 3", [{"role": "user", "content": "What flies? 3"}]
    answers = model.generate([question, talk], max_tokens=20)
    assert answers == ["A red kite."] * 2
    longer = [*talk, {"role": "assistant", "content": "A red kite."}, {"role": "user", "content": "What flies? 4"}]
    assert "kite" in model.generate([longer], max_tokens=20)[0]
    with pytest.raises(UserError):
        model.generate([[{"role": "user", "text": question}]])

"""Every example of docs/python.md runs, in the page's order, in one folder; and mistakes are told."""

import re

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
    pages = [plan("pretrain", {"batch.size": 24}, gpu="T4"), plan("pretrain", batch={"size": 24}, gpu="T4")]
    assert [page.rows_per_step for page in pages] == [24, 24]

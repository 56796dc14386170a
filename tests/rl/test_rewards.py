"""Each reward on answers that are right, wrong and in between."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import numpy as np
import pytest
import torch
from user_errors import raises_user_error

from penjing.agent_tools.box import Result
from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.data.chat.turn_parser import ParsedTurn, ToolCall
from penjing.data.formats import Message
from penjing.infer.tool_loop import ToolExchange
from penjing.objective.policy import Policy, RewardSettings
from penjing.rl.rewards import REWARDS, judge
from penjing.rl.rewards import code as code_reward
from penjing.rl.rewards.answer_form import repeated_fraction
from penjing.rl.rewards.base import Reward, RewardInput, RewardMix, RewardRuntime
from penjing.rl.rewards.code import extract_code
from penjing.rl.rewards.reference_answer import last_number

SETTING = RewardRuntime(device=torch.device("cpu"), max_tokens=40)


def answer(text, *truths, **changes):
    return RewardInput(
        **{
            "messages": (Message(role="user", content="What is 6 x 7?"),),
            "text": text,
            "num_tokens": len(text.split()),
            "truncated": False,
            "truths": truths,
            "where": "prompts.jsonl:3",
            **changes,
        }
    )


def score(name, *answers, **settings):
    return look_up(REWARDS, name, what="reward")(RewardSettings(**settings), SETTING)(answers)


def test_every_reward_can_be_looked_up():
    for name in REWARDS:
        assert look_up(REWARDS, name, what="reward").__call__
    with raises_user_error(next_step="exact"):
        look_up(REWARDS, "exakt", what="reward")


@pytest.mark.parametrize(
    ("text", "truths", "expected"),
    [
        ("42", ("42",), 1),
        (" The  Cat. ", ("the cat",), 1),
        ("４２", ("42",), 1),
        ("故事里没有说。", ("故事里没有说",), 1),
        ("<think>\n41?\n</think>\n\n42", ("42",), 1),
        ("a dog", ("a cat", "a dog"), 1),
        ("10²", ("10^2",), 1),
        ("10²", ("102",), 0),
        ("1½", ("11/2",), 0),
        ("1½", ("1 1/2",), 1),
        (".5", ("5",), 0),
        ("'.5.'", (".5",), 1),
        ("。", ("。",), 1),
        ("，", ("。",), 0),
        ("", ("。",), 0),
        ("", ("",), 0),
        ("<think>42", ("<think>42",), 0),
        ("it is 42", ("42",), 0),
        ("", ("42",), 0),
    ],
)
def test_exact(text, truths, expected):
    assert score("exact", answer(text, *truths)) == [expected]


def test_exact_after_a_mark_and_cut_off():
    assert score("exact", answer("so #### 41 #### 42", "42"), answer("42", "42"), answer_after="####") == [1, 0]
    solved = "He has 40 and 2 more. #### 42"  # a reference as GSM8K writes it
    assert score("exact", answer("#### 42", solved), answer("#### 40", solved), answer_after="####") == [1, 0]
    assert score("exact", answer("42", "42", truncated=True)) == [0]
    assert score("exact", answer("<think>#### 42", "42"), answer_after="####") == [0]


def test_rewards_that_compare_need_a_reference():
    for name in ("exact", "numeric"):
        with raises_user_error(where="prompts.jsonl:3", wanted="a field gt"):
            score(name, answer("42"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("about 1,234.5 in all", 1234.5),
        ("x = -3", -3),
        ("−3", -3),
        ("10 - 3", 3),
        ("3/4", 0.75),
        ("12 %", 0.12),
        ("2e5", 2e5),
        ("3×10⁵", 3e5),
        ("1,000 x 10^-2", 10),
        ("10²", 100),
        ("2^10 = 1024", 1024),
        ("9^99999", None),
        ("42 m²", 42),
        ("42 m⁻²", 42),
        ("x^2 = 4", 4),
        ("1½", 1.5),
        ("-2⅓ %", -7 / 300),
        ("½", 0.5),
        ("42¹", 42),
        ("５０ 元", 50),
        ("答案是42。", 42),
        ("1/0", None),
        ("none", None),
    ],
)
def test_numbers_in_texts(text, number):
    assert last_number(text) == (None if number is None else pytest.approx(number))


def test_numeric():
    answers = [answer(text, "42.0") for text in ("6 x 7 = 42", "42.00001", "42.1", "forty-two")]
    assert score("numeric", *answers) == [1, 1, 0, 0]
    assert score("numeric", answer("0", "6.674e-11"), answer("6.674e-11", "6.674e-11"), answer("0.0", "0")) == [0, 1, 1]
    assert score("numeric", answer("The answer is 1", "1", truncated=True)) == [0]
    assert score("numeric", answer("<think>6 x 7 = 42", "42")) == [0]
    assert score("numeric", answer("<think>6</think><think>42", "42")) == [0]


def test_regex_and_format():
    assert score("regex", answer("ab\nc"), answer("abx"), pattern=r"a.*c") == [1, 0]
    assert score("regex", answer("<think>b</think>ab", truncated=True), answer("<think>b</think>ab"), pattern="ab") == [
        0,
        1,
    ]
    with raises_user_error(where="objective.reward.pattern", got="'('"):
        score("regex", pattern="(")
    with raises_user_error(where="objective.reward.pattern"):
        score("regex")
    good = answer("<think>\nhm\n</think>\n\n42")
    assert score("format", good, answer("hm\n</think>42"), answer("42"), answer("<think></think>42")) == [1, 1, 0, 0]
    assert score("format", answer("<think>a</think>b</think>c"), answer("<think>a</think>")) == [0, 0]
    assert score("format", answer("<think>a</think>b", truncated=True)) == [0]
    assert score("format", answer("#42"), good, format_pattern=r"#\d+") == [1, 0]


def turn(*worked, content="", broken=0):
    """A turn with calls that were answered, and some that nobody ran."""
    calls = tuple(ToolCall(name="calculator") for _ in range(len(worked) + broken))
    said = ParsedTurn(reasoning="", content=content, calls=calls)
    return ToolExchange(turn=said, results=tuple(Result(text="", worked=one) for one in worked))


def test_tools():
    answers = [
        answer("", turns=(turn(True), turn(True, False), turn(content="42"))),
        answer("", turns=(turn(True), turn(content="42"))),
        answer("", turns=(turn(content="42"),)),
        answer("", turns=(turn(True), turn(broken=1))),
        answer("", turns=(turn(*[True] * 6), turn(content="42"))),
        answer("", turns=(turn(*[False] * 40), turn(content="42"))),
    ]
    assert score("tools", *answers) == pytest.approx([2 / 3, 1, 0, 1 / 2, 1 - 2 / 4, -1])
    assert score("tools", answers[4], most_calls=6) == [1]
    assert score("tools", answer("42")) == [0]


def test_of_several_turns_the_last_is_judged():
    turns = (turn(True, content="41"), turn(content="42"))
    assert score("exact", answer("<think>41</think>42", "42", turns=turns)) == [1]
    assert score("numeric", answer("42", "41", turns=turns)) == [0]
    never = ToolExchange(turn=ParsedTurn(reasoning="42", content="", calls=(), open=True))
    assert score("exact", answer("42", "42", turns=(never,))) == [0]


def test_length():
    lengths = [answer("", num_tokens=number) for number in (0, 30, 35, 40)]
    assert score("length", *lengths) == pytest.approx([0, 0, -0.5, -1])
    assert score("length", answer("", num_tokens=40, truncated=True)) == [-1]
    assert score("length", answer("", num_tokens=20), soft_length=10) == pytest.approx([-1 / 3])
    with raises_user_error(where="objective.reward.soft_length", got=40):
        score("length", soft_length=40)


def test_repetition():
    assert repeated_fraction("a b c d e", 3) == 0
    assert repeated_fraction("a b a b a b", 2) == pytest.approx(1 - 2 / 5)
    assert repeated_fraction("好好好好好好", 3) == pytest.approx(0.75)
    assert repeated_fraction("", 3) == 0
    assert score("repetition", answer("la " * 50), answer("one two three four")) == pytest.approx([-47 / 48, 0])
    assert score("repetition", answer(f"<think>{'la ' * 50}</think>42"))[0] < -0.9


LEAVES = """import os
for f in range(3, 1024):
    try: os.write(f, b'"done"\\n')
    except OSError: pass
os._exit(0)
"""


def test_code_runs_tests():
    assert extract_code("text\n```python\nx = 1\n```\nmore\n```\ny = 2\n```") == "y = 2\n"
    tests = {"record": {"tests": ["assert double(4) == 8", "assert double(-1) == -2"]}}
    good = "```python\ndef double(x):\n    return 2 * x\n```"
    try:
        found = score(
            "code",
            answer(good, **tests),
            answer("```python\ndef double(x):\n    return 8\n```", **tests),
            answer("raise SystemExit(0)", **tests),
            answer(LEAVES, **tests),
            answer("```python\nprint(int(input()) * 2)\n```", record={"cases": [{"stdin": "4", "stdout": "8"}]}),
            answer("print(8)", record={"cases": [{"stdin": s, "stdout": o} for s, o in (("4", "8"), ("5", "10"))]}),
        )
    except UserError as error:
        pytest.skip(str(error))
    assert found == [1, 0, 0, 0, 1, 0]
    with raises_user_error(where="prompts.jsonl:3", wanted='"tests": PYTHON, or "cases": [...]'):
        score("code", answer("x = 1"))
    for cases in ({"stdout": "8"}, [{"stdin": "4"}], ["8"]):
        with raises_user_error(where="prompts.jsonl:3", wanted='"cases": [{"stdin": TEXT, "stdout": TEXT}, ...]'):
            score("code", answer("x = 1", record={"cases": cases}))


def test_a_sandbox_that_is_not_there_is_found_before_the_first_answer(monkeypatch):
    def cannot(*code, **limits):
        raise UserError("cannot be shut in")

    monkeypatch.setattr(code_reward, "run", cannot)
    with pytest.raises(UserError, match="cannot be shut in"):
        RewardMix(Policy(rewards=("code",)), SETTING)


@pytest.fixture
def server(monkeypatch):
    """A local judge that says what it is told to; remembers what it was asked."""
    monkeypatch.setattr(judge, "RETRY_SECONDS", 0.001)
    replies, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers.get("Authorization"), body))
            status, text = replies.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words):
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield {"url": f"http://127.0.0.1:{running.server_port}/v1", "replies": replies, "asked": asked}
    running.shutdown()
    running.server_close()


def said(text):
    return 200, json.dumps({"choices": [{"message": {"content": text}}]})


def ask(server, *answers, **changes):
    settings = {"judge_url": server["url"], "judge_model": "big", "judge_workers": 1, **changes}
    return score("judge", *answers, **settings)


def test_the_judge_is_asked_and_its_grade_read(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server["replies"] += [said("Right. Grade: 10"), said("**Grade:** 7.5"), said("3")]
    assert ask(server, answer("42", "42"), answer("41"), answer("{truth}")) == pytest.approx([1, 0.75, 0.3])
    path, key, body = server["asked"][0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer key", "big", 0)
    text = body["messages"][0]["content"]
    assert "What is 6 x 7?" in text
    assert "42" in text
    assert "{truth}" in server["asked"][2][2]["messages"][0]["content"]


def test_a_question_with_the_name_of_a_place_stays_as_it_is(server):
    server["replies"] += [said("Grade: 10")]
    ask(server, answer("41", messages=(Message(role="user", content="What is {answer} in Python?"),)))
    assert "What is {answer} in Python?" in server["asked"][0][2]["messages"][0]["content"]


def test_thoughts_are_not_graded(server):
    server["replies"] += [said("Grade: 10"), said("Grade: 0")]
    ask(server, answer("<think>hm, 42?</think>41"), answer("<think>hm, 42?"))
    for _, _, body in server["asked"]:
        assert "hm, 42?" not in body["messages"][0]["content"]
    assert "Answer to grade:\n41\n" in server["asked"][0][2]["messages"][0]["content"]


def test_the_judge_is_asked_again_then_the_run_stops(server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server["replies"] += [(503, ""), said("no idea"), said("Grade: 4")]
    assert ask(server, answer("42")) == [0.4]
    assert server["asked"][0][1] is None
    server["replies"] += [(500, "")] * 3
    with pytest.raises(UserError, match="the judge gave no grade: HTTP 500"):
        ask(server, answer("42"))
    server["replies"] += [(401, "")]
    with pytest.raises(UserError, match="HTTP 401"):
        ask(server, answer("42"))
    server["replies"] += [(200, "not json")] * 2
    with pytest.raises(UserError, match="JSONDecodeError"):
        ask(server, answer("42"), judge_tries=2)
    with raises_user_error(where="objective.reward.judge_url, objective.reward.judge_model", got="'', 'big'"):
        score("judge", judge_model="big")


def test_several_rewards_are_weighed():
    scorer = RewardMix(Policy(rewards=("exact", "format"), reward_weights=(1.0, 0.2)), SETTING)
    score_RN = scorer([answer("<think>a</think>42", "42"), answer("42", "42"), answer("<think>a</think>41", "42")])
    np.testing.assert_allclose(score_RN, [[1, 1, 0], [1, 0, 1]])
    np.testing.assert_allclose(scorer.total(score_RN), [1.2, 1.0, 0.2])
    assert scorer([]).shape == (2, 0)
    with raises_user_error(where="objective.rewards", got="exact, exact"):
        RewardMix(Policy(rewards=("exact", "exact")), SETTING)


class Own(Reward):
    """A reward of the user's own, which gives whatever it is told."""

    gives: ClassVar = [0.5, 1]

    def __call__(self, answers):
        return self.gives


def test_a_reward_of_ones_own_is_named_by_module_and_class(monkeypatch):
    def scores():
        return RewardMix(Policy(rewards=(f"{__name__}:Own",)), SETTING)([answer("41"), answer("42")])

    assert scores().tolist() == [[0.5, 1.0]]
    monkeypatch.setattr(Own, "gives", [0.5, float("nan")])
    with raises_user_error(where="Own", got="prompts.jsonl:3"):
        scores()
    monkeypatch.setattr(Own, "gives", [0.5])
    with raises_user_error(where="Own", got=1, wanted="2 answers"):
        scores()
    for wrong, problem in (("absent:Own", {"next_step": "PYTHONPATH"}), (f"{__name__}:answer", {"wanted": "Reward"})):
        with raises_user_error(where=wrong, **problem):
            RewardMix(Policy(rewards=(wrong,)), SETTING)


class Broken(Reward):
    """A reward of the user's own with a mistake in each of its methods."""

    def __init__(self, settings, runtime):
        if settings.pattern:
            raise FileNotFoundError("words.txt")

    def check(self, context):
        context.record["level"]

    def score(self, answer):
        return answer.truths[1] if answer.truths else "good"


def test_a_mistake_in_a_reward_of_ones_own_is_one_line(monkeypatch):
    own = f"{__name__}:Broken"
    scorer = RewardMix(Policy(rewards=(own,)), SETTING)
    line = f"{__file__}:{Broken.score.__code__.co_firstlineno + 1}"
    with raises_user_error(what="IndexError: tuple index out of range", where=line, got="prompts.jsonl:3") as caught:
        scorer([answer("41", "42")])
    assert "Broken" in str(caught.value)
    with raises_user_error(where="Broken", got="prompts.jsonl:3"):  # no number
        scorer([answer("41")])
    with raises_user_error(where=f"{__file__}:{Broken.check.__code__.co_firstlineno + 1}", got="prompts.jsonl:3"):
        scorer.check([answer("41")])
    with raises_user_error(what="words.txt"):
        RewardMix(Policy(rewards=(own,), reward=RewardSettings(pattern=".")), SETTING)
    monkeypatch.setattr(Broken, "score", lambda self, answer: torch.empty(1 << 60))
    with pytest.raises(RuntimeError, match="memory"):  # training knows what to do
        scorer([answer("41")])


def test_a_model_from_outside_judges(tmp_path):
    transformers = pytest.importorskip("transformers")
    from penjing.data.tokenizer.train import train_tokenizer

    train_tokenizer(["a small text to learn from, again and again"] * 3, 300).save(tmp_path)
    shape = transformers.Qwen3Config(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForSequenceClassification(shape).save_pretrained(tmp_path)
    thought = answer("<think>41?</think>42")
    one, other, again, same = score("model", answer("42"), answer("41"), answer("42"), thought, model=str(tmp_path))
    assert [again, same] == pytest.approx([one, one])
    assert one != other
    with raises_user_error(where="objective.reward.model", wanted="a run or a directory"):
        score("model")
    with raises_user_error(where="objective.reward.model"):
        score("model", model=str(tmp_path / "absent"))

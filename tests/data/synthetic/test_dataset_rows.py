"""The five files: schema, mixture, determinism, and that they appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from penjing.data import synthetic as toyworld
from penjing.data.synthetic import dataset_rows as rows
from penjing.data.synthetic.lexicon import THINGS
from penjing.data.synthetic.surface_realization import LANGUAGES
from penjing.data.synthetic.tasks.drills import drill

english, chinese = LANGUAGES["en"], LANGUAGES["zh"]

# The corpus itself, so that it stays the same on every platform and version of Python. After a deliberate change of
# the world run test_the_corpus_has_not_changed and put here what it prints. (The rolls of the rng, in
# test_questions.py, never change.)
PINNED = {
    "pretrain": "88b35f93b37a61ec",
    "sft": "1ea10791e2e7aed7",
    "dpo": "286d5b16f538058e",
    "rl": "9b4c2ef96391b0d1",
    "eval": "cd5c1a5ce9a10145",
}

SIZES: dict[str, Any] = {
    "documents": 120,
    "conversations": 150,
    "preferences": 80,
    "prompts": 80,
    "questions_per_kind": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toyworld")
    counts = toyworld.write(path, seed=1, **SIZES)
    assert set(counts) == {"pretrain.jsonl", "sft.jsonl", "dpo.jsonl", "rl.jsonl", "eval.jsonl"}
    for name, figures in counts.items():
        assert figures["bytes"] == (path / name).stat().st_size and figures["rows"] > 0
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_turns(messages: list[dict[str, Any]]) -> None:
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    assert [turn["role"] for turn in turns] == [("user", "assistant")[at % 2] for at in range(len(turns))]
    assert all(turn["content"] or "tool_calls" in turn for turn in turns)


def pattern_of(phrases: tuple[str, ...]) -> str:
    """A pattern that fits what these phrases become, and nothing else but for the slots."""
    slot = re.compile(r"\\\{[^}]*\\\}")
    return "|".join(slot.sub(".+?" if "words" in phrase else "[^，。,.]+?", re.escape(phrase)) for phrase in phrases)


ASKED = {
    kind: re.compile("|".join(pattern_of(phrases) for table in tables for phrases in table.values()))
    for kind, tables in {
        "reading": (english.asks, chinese.asks),
        "roll_call": (english.roll_call_asks, chinese.roll_call_asks),
        "drills": (english.drills, chinese.drills),
    }.items()
}
GAMES, OTHERS = {"echo", "roll_call"}, {"story", "reading", "drills"}


def test_pretraining_texts(folder: Path, kind_of: Callable[[str], str]) -> None:
    found = read(folder / "pretrain.jsonl")
    assert len(found) == SIZES["documents"] and all(set(row) == {"text"} for row in found)
    counts: dict[str, list[int]] = {}
    for text in [row["text"] for row in found]:
        kind, lines = kind_of(text), text.split("\n")
        assert all(line and line == line.strip() for line in lines), text
        if kind in ("reading", "roll_call", "drills"):
            asked, answers = check_questions(lines if kind == "drills" else lines[1:], text, kind)
            counts.setdefault(kind, []).append(len(asked))
            if kind == "drills":
                check_sums(asked, answers)
            else:
                check_words(asked, answers, lines[0], kind)
        else:
            assert kind in ("story", "echo")
    assert set(counts["roll_call"]) | set(counts["drills"]) <= {5, 6, 7, 8}
    assert max(counts["reading"]) <= 9 and sum(counts["reading"]) / len(counts["reading"]) > 6


def check_questions(lines: list[str], text: str, kind: str) -> tuple[list[str], list[str]]:
    """Question, answer, question, answer: each a line of its own, without a label before it."""
    asked, answers = lines[::2], lines[1::2]
    assert len(asked) == len(answers) > 0, text
    pattern = ASKED[kind]
    assert all(pattern.fullmatch(line) for line in asked), (kind, asked)
    assert not any(pattern.fullmatch(line) for line in answers), (kind, answers)
    return asked, answers


def check_sums(asked: list[str], answers: list[str]) -> None:
    """The answer stands after its own question."""
    for question, answer in zip(asked, answers, strict=True):
        if sums := re.search(r"(\d+)(?: ?\+ ?|加)(\d+)", question):
            assert int(answer) == int(sums[1]) + int(sums[2])
        if sums := re.search(r"(\d+)(?: ?- ?|减)(\d+)", question):
            assert int(answer) == int(sums[1]) - int(sums[2])


def check_words(asked: list[str], answers: list[str], story: str, kind: str) -> None:
    """An answer is a number, a refusal or words of the story."""
    assert len(set(asked)) == len(asked)
    plurals = {thing.plural: thing.en for thing in THINGS}
    for answer in answers:
        bare = re.sub("^(the|an?) ", "", answer)
        refused = answer in (english.refusal, chinese.refusal)
        assert answer.isdigit() or bare in story or plurals.get(bare, "-") in story or refused, (story, answer)
        assert kind == "reading" or not (refused or answer.isdigit())


def test_plain_questions_have_no_labels() -> None:
    question = drill(0, 0, language="en", kind="sum")
    assert rows.plain(question) == f"{question.question}\n{question.answer}"


@pytest.fixture(scope="module")
def kinds(kind_of: Callable[[str], str]) -> list[str]:
    """The kind of each text of a file of 3,000."""
    return [kind_of(text) for text in rows.pretrain_documents(6, 3000)]


def test_the_curriculum_is_well_formed() -> None:
    ends = [until for until, _ in rows.CURRICULUM]
    assert ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] == 1.0
    for _, shares in rows.CURRICULUM:
        assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) > 0
        assert set(shares) <= GAMES | OTHERS


def test_games_come_first(kinds: list[str]) -> None:
    first = {kind: kinds.index(kind) for kind in set(kinds)}
    assert set(first) == GAMES | OTHERS
    games_end = len(kinds) * rows.CURRICULUM[-2][0]
    assert first["echo"] == 0 < first["roll_call"] < games_end <= min(first[kind] for kind in OTHERS)
    assert set(kinds[: first["roll_call"]]) == {"echo"}, "copying before looking up"
    assert Counter(kinds[first["roll_call"] : int(games_end)]).most_common(1)[0][0] == "roll_call"
    assert games_end <= 0.5 * len(kinds), "stories are most of it"
    # Games go on among the stories.
    for part in (kinds[int(games_end) :][:500], kinds[-500:]):
        assert set(part) == GAMES | OTHERS
        assert Counter(part).most_common(1)[0][0] == "reading"


def test_each_part_of_the_file_has_its_shares(kinds: list[str]) -> None:
    start = 0
    for until, shares in rows.CURRICULUM:
        end = round(until * len(kinds))
        found = Counter(kinds[start:end])
        assert set(found) == set(shares)
        for kind, share in shares.items():
            error = found[kind] / (end - start) - share
            assert abs(error) <= 4 * sqrt(share * (1 - share) / (end - start)), (until, kind)
        start = end
    assert start == len(kinds)


def test_both_languages_run_through_the_whole_file() -> None:
    in_english = [bool(re.match("[A-Z]", text)) for text in rows.pretrain_documents(6, 1500)]
    for start in range(0, 1500, 250):
        assert abs(sum(in_english[start : start + 250]) / 250 - 0.5) < 0.13


def test_a_longer_file_begins_with_more_games() -> None:
    whole = list(rows.pretrain_documents(6, 60))
    assert list(rows.pretrain_documents(6, 600))[59] != whole[59]


def test_conversations(folder: Path) -> None:
    found = read(folder / "sft.jsonl")
    tools = 0
    for row in found:
        messages = row["conversations"]
        check_turns(messages)
        assert messages[-1]["role"] == "assistant"
        if messages[0]["role"] == "system":
            tools += 1
            (schema,) = json.loads(messages[0]["tools"])
            assert schema["function"]["name"] == "calc"
            assert list(schema["function"]["parameters"]["properties"]) == ["expression"]
            (call,) = json.loads(messages[-1]["tool_calls"])
            assert call["name"] == "calc" and set(call["arguments"]) == {"expression"}
    assert 0 < tools < len(found) / 5


def conversation_kind(messages: list[dict[str, Any]], kind_of: Callable[[str], str]) -> str:
    if messages[0]["role"] == "system":
        return "tool"
    story, *asked = messages[0]["content"].split("\n")
    if not asked:
        return "request" if kind_of(messages[1]["content"]) == "story" else "drill"
    # An odd number of lines: without a plot it is a roll call.
    return kind_of(f"{story}\n?\n!")


def test_conversations_have_their_shares_and_many_questions(kind_of: Callable[[str], str]) -> None:
    counts: dict[str, list[int]] = {}
    for row in rows.conversations(7, 1500):
        messages = row["conversations"]
        kind = conversation_kind(messages, kind_of)
        asked = [message["content"] for message in messages if message["role"] == "user"]
        counts.setdefault(kind, []).append(len(asked))
        if kind in ("reading", "roll_call"):
            assert len(set(asked)) == len(asked)
            assert all("\n" not in question for question in asked[1:]), "the story stands once, in the first message"
    shares = rows.CONVERSATION_SHARES
    assert set(counts) == set(shares) and max(shares, key=shares.__getitem__) == "reading"
    for kind, share in shares.items():
        assert abs(len(counts[kind]) / 1500 - share) < 4 * sqrt(share * (1 - share) / 1500), kind
    assert set(counts["request"]) == set(counts["tool"]) == {1}
    assert set(counts["drill"]) == {4, 5, 6, 7, 8} and set(counts["roll_call"]) == {5, 6, 7}
    assert max(counts["reading"]) == 7 and sum(counts["reading"]) / len(counts["reading"]) > 5


def test_sums_and_look_ups_are_thought_before_they_are_answered(folder: Path) -> None:
    turns = [turn for row in read(folder / "sft.jsonl") for turn in pairwise(row["conversations"])]
    answers = [(asked["content"].split("\n")[-1], answer) for asked, answer in turns if answer["role"] == "assistant"]
    thought = {asked: answer for asked, answer in answers if "reasoning_content" in answer}
    counted = {asked for asked, answer in thought.items() if answer["reasoning_content"].endswith(" 0")}
    assert all(thought[asked]["reasoning_content"].endswith(f",{thought[asked]['content']} 0") for asked in counted)
    look_ups = {asked for asked, _ in answers if asked.startswith(("Who ", "Where ", "What colour ", "谁"))}
    assert len(look_ups) > 50 and look_ups <= set(thought) - counted
    sums = {asked for asked, answer in answers if re.search(r"\d ?[-+加减] ?\d", asked) and answer["content"]}
    assert len(sums) > 20 and sums <= counted, sums - counted
    assert 20 < len(counted - sums) < len(answers) / 8, "and questions about a story"


def test_preferences_differ_only_in_the_last_answer(folder: Path) -> None:
    for row in read(folder / "dpo.jsonl"):
        assert set(row) == {"chosen", "rejected"}
        check_turns(row["chosen"])
        check_turns(row["rejected"])
        assert row["chosen"][:-1] == row["rejected"][:-1]
        chosen, rejected = row["chosen"][-1], row["rejected"][-1]
        assert chosen == chosen | rejected | {"content": chosen["content"]} and chosen != rejected


def test_prompts(folder: Path) -> None:
    for row in read(folder / "rl.jsonl"):
        assert set(row) == {"conversations", "gt", "kind", "language"}
        assert row["conversations"][-1] == {"role": "assistant", "content": ""}
        assert len(row["gt"]) == 1 and row["gt"][0] and row["kind"] in rows.KINDS


def test_evaluation(folder: Path) -> None:
    found = read(folder / "eval.jsonl")
    keys = [(row["kind"], row["language"]) for row in found]
    assert len(keys) == len(rows.KINDS) * 2 * 3 and len(set(keys)) == len(rows.KINDS) * 2
    assert len(set(keys[: len(set(keys))])) == len(set(keys)), "any beginning of the file is balanced"
    for row in found:
        assert row["conversations"][-1]["role"] == "user" and 0 < row["chance"] <= 1
        assert bool(row["answer"]) != (row["kind"] == "story")
        assert "reasoning_content" not in json.dumps(row)
        assert ("must_contain" in row) == (row["kind"] == "story")
        assert ("tool_call" in row) == (row["kind"] == "tool") == ("tools" in row["conversations"][0])


def test_evaluation_prompts_are_not_in_training(folder: Path) -> None:
    """With the sizes of a real run: no evaluation prompt is a training prompt."""
    seen = {message["content"] for row in rows.conversations(1, 3000) for message in row["conversations"]}
    for row in read(folder / "eval.jsonl"):
        assert row["conversations"][-1]["content"] not in seen


def test_same_bytes_every_time(folder: Path, tmp_path: Path) -> None:
    toyworld.write(tmp_path, seed=1, **SIZES)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    toyworld.write(tmp_path, seed=2, **SIZES)
    assert (folder / "sft.jsonl").read_bytes() != (tmp_path / "sft.jsonl").read_bytes()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, count: int) -> Any:
        yield {"conversations": []}
        raise RuntimeError("the power went off")

    monkeypatch.setattr(rows, "conversations", broken)
    (tmp_path / ".sft.jsonl.0123abcd.tmp").touch()
    os.utime(tmp_path / ".sft.jsonl.0123abcd.tmp", (0, 0))  # of a process that was killed long ago
    with pytest.raises(RuntimeError):
        toyworld.write(tmp_path, seed=1, **SIZES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pretrain.jsonl"]


def test_the_corpus_has_not_changed() -> None:
    """The same bytes on every platform and version of Python; a deliberate change of the world changes PINNED."""
    made: dict[str, Any] = {
        "pretrain": rows.pretrain_documents(0, 60),
        "sft": rows.conversations(0, 30),
        "dpo": rows.preferences(0, 30),
        "rl": rows.prompts(0, 30),
        "eval": rows.evaluation(0, 1),
    }
    found = {}
    for name, items in made.items():
        text = json.dumps(list(items), ensure_ascii=False)
        found[name] = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    renewed = "\n".join(["PINNED = {", *(f'    "{name}": "{value}",' for name, value in found.items()), "}"])
    assert found == PINNED, f"if the change is meant, put this at the top of {Path(__file__).name}:\n{renewed}"

"""The five files: schema, mixture, determinism, and that they appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from penjing.text import toyworld
from penjing.text.toyworld import files, rows

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


def test_pretraining_texts(folder: Path) -> None:
    texts = [row["text"] for row in read(folder / "pretrain.jsonl")]
    assert len(texts) == SIZES["documents"] and all(set(row) == {"text"} for row in read(folder / "pretrain.jsonl"))
    asked = [text for text in texts if "Question: " in text or "问：" in text]
    drills = [text for text in asked if text.startswith(("Question: ", "问："))]
    assert 0.1 < len(drills) / len(texts) < 0.3 and 0.5 < len(asked) / len(texts) < 0.8
    for text in asked:
        for line in text.split("\n"):
            if line.startswith("Question: "):
                assert " Answer: " in line
            if line.startswith("问："):
                assert "答：" in line


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
    assert max(len(row["conversations"]) for row in found) >= 6


def test_preferences_differ_only_in_the_last_answer(folder: Path) -> None:
    for row in read(folder / "dpo.jsonl"):
        assert set(row) == {"chosen", "rejected"}
        check_turns(row["chosen"])
        check_turns(row["rejected"])
        assert row["chosen"][:-1] == row["rejected"][:-1] and row["chosen"][-1] != row["rejected"][-1]


def test_prompts(folder: Path) -> None:
    for row in read(folder / "rl.jsonl"):
        assert set(row) == {"conversations", "gt", "kind", "language"}
        assert row["conversations"][-1] == {"role": "assistant", "content": ""}
        assert len(row["gt"]) == 1 and row["gt"][0] and row["kind"] in toyworld.KINDS


def test_evaluation(folder: Path) -> None:
    found = read(folder / "eval.jsonl")
    keys = [(row["kind"], row["language"]) for row in found]
    assert len(keys) == len(toyworld.KINDS) * 2 * 3 and len(set(keys)) == len(toyworld.KINDS) * 2
    assert len(set(keys[: len(set(keys))])) == len(set(keys)), "any beginning of the file is balanced"
    for row in found:
        assert row["conversations"][-1]["role"] == "user" and 0 < row["chance"] <= 1
        assert bool(row["answer"]) != (row["kind"] == "story")
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

    monkeypatch.setattr(files, "conversation_rows", broken)
    with pytest.raises(RuntimeError):
        toyworld.write(tmp_path, seed=1, **SIZES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pretrain.jsonl"]


def test_progress_is_reported(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    toyworld.write(tmp_path, seed=1, progress=lambda *call: calls.append(call), **SIZES)
    assert ("sft.jsonl", SIZES["conversations"], SIZES["conversations"]) in calls


def test_corpus_has_not_changed() -> None:
    """The same bytes on every platform and version of Python; a deliberate change of the world changes this hash."""
    text = "\n".join(rows.pretrain_documents(0, 50)) + json.dumps(list(rows.evaluation(0, 1)), ensure_ascii=False)
    assert hashlib.sha256(text.encode("utf-8")).hexdigest()[:16] == GOLDEN_HASH


GOLDEN_HASH = "d8487f7a417aeea1"

"""Files in MiniMind's published schemas train in every stage as they are."""

import csv
import json

import pytest
from short_runs import train
from user_errors import raises_user_error

pytestmark = pytest.mark.filterwarnings("ignore:in the data but without effect")  # its old texts have marks of chats
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = [{"name": "add", "arguments": {"a": 1, "b": 2}}]


def turns(number, *, answer=None, **more):
    question = f"小明有{number}个苹果，又买了{number}个，一共几个？ How many are {number} and {number}?"
    answer = f"一共{2 * number}个。 They are {2 * number}." if answer is None else answer
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def tool_turns(number, *, answer="3"):
    return [
        {"role": "system", "content": "你可以用工具。", "tools": json.dumps(TOOLS)},
        {"role": "user", "content": f"{number} + 2?"},
        {"role": "assistant", "content": "", "tool_calls": json.dumps(CALL)},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": answer},
    ]


def texts(number):
    first, second = (turn["content"] for turn in turns(number))
    glued = f"<|im_start|>{first}<|im_end|> <|im_start|>{second}<|im_end|>"
    return {"text": glued if number % 2 else f"{first} {second}"}


def conversations(number):
    kinds = (turns(number), tool_turns(number), turns(number, reasoning_content="两个加起来。"))
    return {"conversations": kinds[number % 3]}


SCHEMAS = {
    "pretrain_t2t.jsonl": texts,
    "pretrain_data.csv": texts,
    "sft_t2t.jsonl": conversations,
    "sft_data_multi.csv": lambda number: {
        "history": str([["你好", "你好，我是机器人。"]] * (number % 2)),
        **dict(zip(("q", "a"), (turn["content"] for turn in turns(number)), strict=True)),
    },
    "r1_mix.jsonl": lambda number: {
        "conversations": turns(number, answer=f"<think>\n加\n</think>\n<answer>\n{number}\n</answer>")
    },
    "lora_identity.jsonl": lambda number: {"conversations": turns(number)},
    "dpo.jsonl": lambda number: {"chosen": turns(number), "rejected": turns(number, answer="不知道。")},
    "rlaif.jsonl": lambda number: {"conversations": turns(number, answer="空")},
    "agent_rl.jsonl": lambda number: {"conversations": [*tool_turns(number)[:2], turns(1, answer="")[1]], "gt": ["3"]},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peer")
    for name, schema in SCHEMAS.items():
        rows = [schema(number) for number in range(1, 31)]
        with open(folder / name, "w", encoding="utf-8", newline="") as stream:
            if name.endswith(".csv"):
                writer = csv.DictWriter(stream, rows[0])
                writer.writeheader()
                writer.writerows(rows)
            else:
                stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return folder


@pytest.fixture(scope="module")
def settings(small_run):
    """A run of two steps; without the recipe, data.train and out."""
    kept = [word for word in small_run if not word.startswith(("data.", "max_steps", "eval.", "checkpoint.", "batch."))]
    return [*kept, "data.seq_len=160", "batch.size=4", "max_steps=2", "eval.every=0", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def base(files, settings):
    out = files / "base"
    train("pretrain", *settings, f"data.train={files / 'pretrain_t2t.jsonl'}", f"out={out}")
    return out


STAGES = {
    ("pretrain", "pretrain_data.csv"): (),
    ("sft", "sft_t2t.jsonl"): (),
    ("sft", "sft_data_multi.csv"): (),
    ("sft", "r1_mix.jsonl"): (),
    ("lora", "lora_identity.jsonl"): (),
    ("distill", "sft_t2t.jsonl"): ("objective.teacher={base}", "data.format=chats"),
    ("dpo", "dpo.jsonl"): (),
    ("grpo", "rlaif.jsonl"): ("objective.rewards=length",),
    ("grpo", "agent_rl.jsonl"): ("objective.rewards=tools",),
}


@pytest.mark.filterwarnings("ignore:each prompt of a round")  # a model of 12 steps never calls a tool
@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_every_stage_trains_on_it(files, settings, base, tmp_path, recipe, name):
    words = [word.format(base=base) for word in STAGES[recipe, name]]
    if recipe == "grpo":
        words += ["batch.size=2", "objective.rollout.num_generations=2", "objective.rollout.max_new_tokens=8"]
    if recipe != "pretrain":
        words += [f"init_from={base}"]
    own = [word for word in settings if recipe == "pretrain" or not word.startswith("model.")]
    out = tmp_path / "run"
    train(recipe, *own, *words, f"data.train={files / name}", f"out={out}")
    outcome = json.loads((out / "outcome.json").read_text())
    assert outcome["tokens"] > 0
    assert not (out / "bad_records.jsonl").exists() or not (out / "bad_records.jsonl").read_text()


def test_placeholders_are_not_learned_as_answers(files, settings, base, tmp_path):
    with raises_user_error(where="rlaif.jsonl", got="空", wanted="answers"):
        train("sft", *settings, f"init_from={base}", f"data.train={files / 'rlaif.jsonl'}", f"out={tmp_path / 'run'}")

"""Preferences: what is read from files, where an answer begins, and what is stored."""

from __future__ import annotations

import json

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data import preference_shards as module
from penjing.data.chat.render import EncodedChat
from penjing.data.corpus import Split, split_key
from penjing.data.formats import BadRecords, Message, read_preferences
from penjing.data.preference_shards import (
    PreferenceShards,
    PreferenceShardWriter,
    TokenGroup,
    encode,
    prepare_groups,
)
from penjing.data.tokenizer.train import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"word{number} what is the ball by the river in the garden ?" for number in range(60)]
    return train_tokenizer(iter(words), 340)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def write(folder, *records):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(folder, *records):
    return list(read_preferences([write(folder, *records)]))


PAIR = {"chosen": [user("who?"), assistant("me")], "rejected": [user("who?"), assistant("you")]}


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {"prompt": "who?", "chosen": "me", "rejected": "you"},
        {"prompt": "who?", "chosen": [assistant("me")], "rejected": [assistant("you")]},
        {"prompt": [user("who?")], "chosen": [assistant("me")], "rejected": [assistant("you")]},
        {"prompt": [user("who?")], "chosen": "me", "rejected": "you"},
        {"prompt": "who?", **PAIR},  # the prompt once more
        {"question": "who?", "chosen": "me", "rejected": "you"},
        {
            "chosen": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}],
            "rejected": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "you"}],
        },
        {  # LLaMA-Factory's two
            "conversations": [{"from": "human", "value": "who?"}],
            "chosen": {"from": "gpt", "value": "me"},
            "rejected": {"from": "gpt", "value": "you"},
        },
        {"instruction": "who?", "input": "", "chosen": "me", "rejected": "you"},
        {"messages": [user("who?")], "chosen": "me", "rejected": [assistant("you")]},
    ],
)
def test_every_shape_of_a_pair_is_the_same_pair(tmp_path, record):
    (pair,) = read(tmp_path, record)
    asked = Message(role="user", content="who?")
    assert [chat.messages for chat in pair.chats] == [
        (asked, Message(role="assistant", content="me")),
        (asked, Message(role="assistant", content="you")),
    ]
    assert pair.is_chosen == (True, False)
    assert pair.margin == 0


def test_a_system_turn_and_a_margin_are_kept(tmp_path):
    (pair,) = read(tmp_path, {"system": "be kind", "prompt": "who?", "chosen": "me", "rejected": "you", "margin": 2})
    assert [message.role for message in pair.chats[1].messages] == ["system", "user", "assistant"]
    assert pair.margin == 2
    assert read(tmp_path, {"prompt": "who?", "chosen": "me", "rejected": "you", "margin": "2"})[0].margin == 2


def test_what_a_pair_is_asked_after_may_have_a_past(tmp_path):
    system, past = {"system": "be kind"}, [user("where?"), assistant("<think>\nhm\n</think>\n\nhere")]
    answers = {"chosen": assistant("me"), "rejected": "<think>\nhm\n</think>\n\nyou"}
    history = [[turn["content"] for turn in past]]
    (first, second) = read(
        tmp_path,
        {**system, "conversations": [*past, user("who?")], **answers},
        {**system, "instruction": "who?", "history": history, **answers},
    )
    assert [chat.messages for chat in first.chats] == [chat.messages for chat in second.chats]
    chosen, rejected = first.chats
    assert [message.role for message in chosen.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chosen.messages[2] == Message(role="assistant", content="here", reasoning_content="hm")
    assert rejected.messages[-1] == Message(role="assistant", content="you", reasoning_content="hm")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "who?", "completion": "me", "label": False},
        {"prompt": [user("who?")], "completion": [assistant("me")], "label": False},
        {"conversations": [user("who?"), assistant("me")], "label": False},
        {"messages": [user("who?"), assistant("me")], "label": 0},
        {"instruction": "who?", "output": "me", "label": False},
        {"prompt": "who?", "completion": "me", "label": "0"},  # of a table without types
        {"instruction": "who?", "input": "", "output": "me", "kto_tag": False},
    ],
)
def test_every_shape_of_a_judged_answer_is_the_same(tmp_path, record):
    (judged,) = read(tmp_path, record)
    assert [message.content for message in judged.chats[0].messages] == ["who?", "me"]
    assert judged.is_chosen == (False,)


@pytest.mark.parametrize(
    ("record", "got"),
    [
        ({"chosen": "me", "rejected": "you"}, "the fields chosen, rejected"),
        ({"prompt": "who?", "chosen": "me"}, "the fields prompt, chosen"),
        ({"prompt": "who?", "chosen": 3, "rejected": "you"}, "a number"),
        ({**PAIR, "rejected": [user("who?")]}, "user"),
        ({**PAIR, "rejected": [{"role": "cat", "content": ""}]}, "cat"),
        ({"prompt": "who?", "completion": "me", "label": "fine"}, "fine"),
        ({"prompt": "who?", "completion": "me"}, "the fields prompt, completion"),
        ({**PAIR, "margin": "much"}, "text"),
    ],
)
def test_mistakes_name_the_file_the_line_and_the_field(tmp_path, record, got):
    with raises_user_error(where="pairs.jsonl:2", got=got):
        read(tmp_path, PAIR, record)


def test_equal_and_empty_answers_are_left_out_and_counted(tmp_path):
    path = write(
        tmp_path,
        PAIR,
        {"prompt": "who?", "chosen": "me", "rejected": "me"},
        {"prompt": "who?", "chosen": "me", "rejected": " "},
        {"prompt": "who?", "completion": "", "label": True},
    )
    bad_records = BadRecords()
    assert len(list(read_preferences([path], bad_records=bad_records))) == 1
    assert bad_records.reasons == {"both answers are the same": 1, "an answer is empty": 2}


def test_the_prompt_is_read_once_and_answers_are_whole(tmp_path, tokenizer):
    # The answers begin with the same words, which still belong to the answers: lengths and rewards count them.
    (pair,) = read(
        tmp_path, {"prompt": "what is it ?", "chosen": "the ball by the river", "rejected": "the ball in the garden"}
    )
    group = encode(pair, tokenizer)
    chosen, rejected = group.answers
    assert tokenizer.decode(chosen.ids[:-1]) == "the ball by the river"
    assert tokenizer.decode(rejected.ids[:-1]) == "the ball in the garden"
    assert chosen.ids[-1] == rejected.ids[-1] == tokenizer.message_end
    assert set(chosen.weights) == {1}
    assert group.is_chosen == (True, False)


def test_earlier_turns_belong_to_the_prompt(tmp_path, tokenizer):
    before = [user("who?"), assistant("me"), user("where?")]
    (pair, judged) = read(
        tmp_path,
        {"chosen": [*before, assistant("in the garden")], "rejected": [*before, assistant("by the river")]},
        {"messages": [*before, assistant("in the garden")], "label": True},
    )
    group = encode(pair, tokenizer)
    assert tokenizer.decode(group.answers[1].ids[:-1]) == "by the river"
    single = encode(judged, tokenizer)
    assert single.prompt == group.prompt
    assert single.answers == group.answers[:1]


def test_a_trajectory_with_tools_is_one_answer_in_which_results_do_not_count(tmp_path, tokenizer):
    call = {"name": "look", "arguments": {}}
    tool = {"role": "tool", "content": "river"}
    chosen = [user("where?"), assistant("", tool_calls=[call]), tool, assistant("by the river")]
    rejected = [user("where?"), assistant("in the garden")]
    (pair, judged) = read(tmp_path, {"chosen": chosen, "rejected": rejected}, {"conversations": chosen, "label": True})
    first, second = encode(pair, tokenizer).answers
    assert set(first.weights) == {0, 1}
    assert first.weights[0] == first.weights[-1] == 1
    assert tokenizer.decode(second.ids[:-1]) == "in the garden"
    assert encode(judged, tokenizer).answers == (first,)


@pytest.mark.parametrize("past", [[], [user("hi"), assistant("oh")]])
def test_an_answer_that_a_template_leaves_out_is_set_aside(tmp_path, tokenizer, past, monkeypatch):
    """An earlier turn is never judged in its place."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    real = module.render

    def blind(tokenizer, messages, tools, **more):
        return real(tokenizer, [message for message in messages if not message.tool_calls], tools, **more)

    monkeypatch.setattr(module, "render", blind)
    (judged,) = read(tmp_path, {"prompt": [*past, user("who?")], "completion": [call], "label": True})
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: the chat template drops the answer"):
        encode(judged, tokenizer)
    (pair,) = read(tmp_path, {"prompt": [*past, user("who?")], "chosen": [assistant("me")], "rejected": [call]})
    with raises_user_error(where="pairs.jsonl:1", wanted="the same messages up to an assistant turn"):
        encode(pair, tokenizer)
    (sound,) = read(tmp_path, {"prompt": [*past, user("who?")], "completion": [assistant("me")], "label": True})
    assert tokenizer.decode(encode(sound, tokenizer).answers[0].ids) == "me"


def test_answers_to_different_questions_are_no_pair(tmp_path, tokenizer):
    (pair,) = read(tmp_path, {**PAIR, "rejected": [user("when?"), assistant("you")]})
    with raises_user_error(where="pairs.jsonl:1", wanted="the same messages up to an assistant turn"):
        encode(pair, tokenizer)


def groups():
    return [
        TokenGroup([1, 2, 3], (EncodedChat([4, 5], [1, 1]), EncodedChat([6], [1])), (True, False), 0.5),
        TokenGroup([7], (EncodedChat([8, 9, 10], [1, 0, 1]),), (False,)),
        TokenGroup([1, 1], (EncodedChat([2], [1]), EncodedChat([3, 3], [1, 1])), (True, False)),
    ]


@pytest.fixture
def stored(tmp_path):
    writer = PreferenceShardWriter(tmp_path / "train", vocab_size=300, about={"note": "mine"})
    for group in groups():
        writer.add(group)
    return writer.close()


def test_what_was_written_is_read_back(stored, tmp_path):
    again = PreferenceShards(tmp_path / "train")
    assert list(again) == groups()
    assert again.meta["note"] == "mine"
    assert not again.has_pairs
    assert not (tmp_path / "train.partial").exists()
    again.verify()


def test_damage_is_seen(stored, tmp_path):
    wanted = tmp_path / "train" / "wanted.npy"
    raw = bytearray(wanted.read_bytes())
    raw[-1] ^= 1
    wanted.write_bytes(bytes(raw))
    with pytest.raises(UserError, match=r"wanted.npy: the file is not what was written"):
        PreferenceShards(tmp_path / "train").verify()
    wanted.write_bytes(raw[:-1])
    with raises_user_error(where="wanted.npy", got=132):
        PreferenceShards(tmp_path / "train")
    with raises_user_error(where=tmp_path, wanted="a folder with groups.json"):
        PreferenceShards(tmp_path)


def test_labels_change_the_fingerprint(stored, tmp_path):
    writer = PreferenceShardWriter(tmp_path / "other", vocab_size=300, about={})
    for group in groups():
        writer.add(TokenGroup(group.prompt, group.answers, group.is_chosen[::-1], group.margin))
    assert writer.close().fingerprint != stored.fingerprint


def prepared(folder, tokenizer, path, seq_len=64):
    split = Split(share=0.3)
    return prepare_groups(
        split.placed(read_preferences([path])), tokenizer, folder, seq_len=seq_len, split=split, about={}
    )


def test_all_answers_to_a_question_are_held_out_together(tmp_path, tokenizer):
    records = [
        {"prompt": f"word{number} ?", "chosen": f"word{other}", "rejected": "the ball"}
        for number in range(40)
        for other in range(3)
    ]
    path = write(tmp_path, *records)
    made = prepared(tmp_path / "groups", tokenizer, path)
    assert len(made.train) + len(made.validation) == 120
    halves = [{tuple(group.prompt) for group in half} for half in (made.train, made.validation)]
    assert not halves[0] & halves[1]
    assert len(made.validation) % 3 == 0 < len(made.validation)
    assert made.train.has_pairs
    again = prepared(tmp_path / "again", tokenizer, path)
    assert (again.train.fingerprint, again.validation.fingerprint) == (
        made.train.fingerprint,
        made.validation.fingerprint,
    )


def test_pairs_that_differ_in_thoughts_alone_are_no_pairs_without_them(tmp_path, tokenizer):
    asked = {"role": "user", "content": "where ?"}
    answers = [{"role": "assistant", "content": "the ball", "reasoning_content": one} for one in ("me", "you")]
    path = write(tmp_path, {"chosen": [asked, answers[0]], "rejected": [asked, answers[1]]})
    (record,) = read_preferences([path])
    answers = [tokenizer.decode(one.ids) for one in encode(record, tokenizer).answers]
    assert all(one.endswith("the ball") for one in answers) and answers[0] != answers[1]
    with raises_user_error(what="thoughts only", wanted="two answers"):
        encode(record, tokenizer, thoughts=False)


def test_what_is_longer_than_a_row_is_left_out_and_counted(tmp_path, tokenizer):
    records = [{"prompt": f"word{number} ?", "chosen": "me", "rejected": "you"} for number in range(20)]
    path = write(tmp_path, *records, {"prompt": "who ?", "chosen": "me " * 60, "rejected": "you"})
    made = prepared(tmp_path / "groups", tokenizer, path)
    assert made.skipped == 1
    assert max(group.num_tokens for group in made.train) <= 64
    with raises_user_error(next_step="21 were longer than data.seq_len=8"):
        prepared(tmp_path / "none", tokenizer, path, seq_len=8)


def test_the_split_looks_at_the_question_alone(tmp_path):
    first, second = read(tmp_path, PAIR, {"prompt": "who?", "completion": "anybody", "label": True})
    assert split_key(first) == split_key(second) == "user: who?"

"""Runs of preference tuning and of reward models: references, resuming, ranks, held-out figures, what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
from short_runs import cut_back, train, weights_of
from user_errors import raises_user_error

from penjing.data.formats import Message
from penjing.data.preference_shards import PreferenceShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.lora import fingerprint
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import RewardInput, RewardRuntime
from penjing.rl.rewards.model import ModelReward
from penjing.train.average import average_models
from penjing.train.load_model import load_trained
from penjing.train.stages import preference_data
from penjing.train.stages.preference_data import PreferenceDataStage
from penjing.train.stages.reward import load_reward_model

QUICK = "objective.own_answers=0"  # for tests that do not look at how far the model has gone


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder, name):
    return {line["step"]: line[name] for line in metrics(folder) if name in line}


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_run):
    folder = tmp_path_factory.mktemp("base") / "run"
    train("pretrain", *small_run, f"out={folder}")
    return folder


def pairs_of(folder, number=48):
    """Pairs in which the answer that names the asked one is chosen."""
    names = ["Tom", "Amy", "Jack", "Lily", "Ben", "Jane"]
    records = []
    for index in range(number):
        one, other = names[index % 6], names[(index + 1 + index // 6 % 5) % 6]
        asked = [{"role": "user", "content": f"{one} has {index} cats. Who?"}]
        records.append(
            {
                "chosen": [*asked, {"role": "assistant", "content": one}],
                "rejected": [*asked, {"role": "assistant", "content": f"not {other} I think"}],
                "margin": index % 3 / 10,
            }
        )
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory, base, small_run):
    """Settings of a short run on `base`."""
    common = [word for word in small_run if word.startswith(("compute", "log"))]
    return [
        *common,
        f"init_from={base}",
        f"data.train={pairs_of(tmp_path_factory.mktemp('pairs'))}",
        "data.seq_len=128",
        "data.val_fraction=0.25",
        "batch.size=8",
        "max_steps=6",
        "checkpoint.every=2",
        "checkpoint.keep_last=9",
        "eval.every=3",
        "optimizer.learning_rate=3e-3",
    ]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("tuned") / "run"
    said = train("dpo", *words, f"out={folder}")
    return folder, said


def test_before_the_first_step_nothing_is_preferred_and_after_it_something_is(tuned):
    folder, said = tuned
    accuracy, margin = curve(folder, "val_reward_accuracy"), curve(folder, "val_reward_margin")
    assert list(accuracy) == [0, 3, 6]
    assert (accuracy[0], margin[0]) == (0.5, 0.0)
    assert margin[6] > margin[3] > 0
    assert accuracy[6] > 0.9
    assert curve(folder, "preference_loss")[6] < curve(folder, "preference_loss")[1]
    assert curve(folder, "chosen_kl_to_reference")[6] > 0
    assert "computing the reference" in said
    assert "the start model, computed once" in said
    kl = curve(folder, "val_kl_per_answer")
    assert abs(kl[0]) < 1e-6
    assert min(kl[3], kl[6]) > 1.0
    assert curve(folder, "val_own_answer_tokens")[6] > 0


def test_how_far_it_has_gone_is_the_same_whatever_the_reference_is(tuned, tmp_path, words):
    for reference in ("copy", "precomputed"):
        folder = tmp_path / reference
        train("dpo", *words, f"out={folder}", "lora.rank=4", f"objective.reference={reference}")
        found = curve(folder, "val_kl_per_answer")
        assert abs(found[0]) < 1e-6
        assert found[6] > 1e-4
    assert curve(tmp_path / "copy", "val_kl_per_answer") == pytest.approx(
        curve(tmp_path / "precomputed", "val_kl_per_answer"), abs=1e-5
    )
    train("dpo", *words, f"out={tmp_path / 'none'}", "objective.own_answers=0", "max_steps=1")
    assert not curve(tmp_path / "none", "val_kl_per_answer")


@pytest.mark.parametrize("recipe", ["dpo", pytest.param("reward", marks=pytest.mark.nightly)])
def test_the_reference_and_held_out_pairs_are_asked_in_as_few_as_there_is_room_for(
    tuned, tmp_path, words, monkeypatch, recipe
):
    real, seen = PreferenceDataStage.chunks, []

    def narrow(*given):
        for indices, batch in real(*given):
            seen.append(len(indices))
            if len(indices) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield indices, batch

    whole = tuned[0] if recipe == "dpo" else tmp_path / "whole"
    if recipe == "reward":
        train(recipe, *words, f"out={whole}")
    monkeypatch.setattr(PreferenceDataStage, "chunks", narrow)
    train(recipe, *words, f"out={tmp_path / 'narrow'}")
    assert max(seen) > 3 and 0 < min(seen) <= 3
    for name in [name for name in metrics(whole)[-1] if name.startswith("val_")]:
        assert curve(tmp_path / "narrow", name) == pytest.approx(curve(whole, name), rel=1e-4, abs=1e-6), name
    seen.clear()
    train(recipe, *words, "batch.micro_size=2", f"out={tmp_path / 'set'}")
    assert max(seen) <= 2


def test_a_resumed_run_learns_the_same_bits(tuned, tmp_path, words):
    folder = tmp_path / "run"
    cut_back(tuned[0], folder, 2)
    said = train("dpo", *words, f"out={folder}")
    assert "continues after step 2" in said
    assert "computing the reference" not in said
    expected, got = weights_of(tuned[0]), weights_of(folder)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    # Without the file the reference is asked again: the start model, and not the model as it is now.
    again = tmp_path / "again"
    cut_back(tuned[0], again, 2)
    (again / "reference.safetensors").unlink()
    assert "computing the reference" in train("dpo", *words, f"out={again}")
    got = weights_of(again)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_copy_in_every_step_says_what_was_precomputed(tuned, tmp_path, words):
    folder = tmp_path / "copy"
    train("dpo", *words, QUICK, f"out={folder}", "objective.reference=copy")
    expected, got = curve(tuned[0], "preference_loss"), curve(folder, "preference_loss")
    assert got == pytest.approx(expected, abs=1e-5)
    assert not (folder / "reference.safetensors").exists()


def test_with_adapters_the_base_is_the_reference(base, tmp_path, words):
    curves = {}
    for reference in ("precomputed", "copy", "adapter_off"):
        folder = tmp_path / reference
        train("dpo", *words, QUICK, f"out={folder}", "lora.rank=4", f"objective.reference={reference}")
        curves[reference] = curve(folder, "preference_loss")
        assert curve(folder, "val_reward_margin")[6] > 0
    assert curves["copy"] == pytest.approx(curves["precomputed"], abs=1e-5)
    assert curves["adapter_off"] == pytest.approx(curves["precomputed"], abs=1e-5)
    merged = load_trained(tmp_path / "copy", adapters="merged").model
    assert fingerprint(merged) != fingerprint(load_trained(base).model)


def test_without_a_reference_none_is_made(tmp_path, words):
    for loss in ("simpo", "orpo"):
        folder = tmp_path / loss
        said = train("dpo", *words, QUICK, f"out={folder}", f"objective.loss={loss}", "max_steps=2")
        assert "  reference  " not in said
        assert not (folder / "reference.safetensors").exists()


def test_kto_learns_from_single_answers_and_goes_on_exactly(tmp_path, words):
    records = []
    pairs = next(word.removeprefix("data.train=") for word in words if word.startswith("data.train="))
    for pair in map(json.loads, open(pairs)):
        records.append({"messages": pair["chosen"], "label": True})
        records.append({"prompt": pair["rejected"][:1], "completion": pair["rejected"][1:], "label": False})
    path = tmp_path / "judged.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    kto = [*words, QUICK, f"data.train={path}", "objective.loss=kto", "objective.kl_groups=4"]
    train("dpo", *kto, f"out={tmp_path / 'whole'}")
    signed = curve(tmp_path / "whole", "val_signed_reward")
    assert signed[0] == 0
    assert signed[6] > signed[3] > 0
    cut_back(tmp_path / "whole", tmp_path / "cut", 4)
    train("dpo", *kto, f"out={tmp_path / 'cut'}")
    expected, got = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    # More passes of a step, of whole blocks, are the same step.
    train("dpo", *kto, f"out={tmp_path / 'copy'}", "objective.reference=copy", "batch.micro_size=8")
    assert curve(tmp_path / "copy", "preference_loss") == pytest.approx(
        curve(tmp_path / "whole", "preference_loss"), abs=1e-5
    )
    with raises_user_error(where="objective.kl_groups", got=4):
        train("dpo", *kto, f"out={tmp_path / 'x'}", "batch.micro_size=2")
    with raises_user_error(next_step="objective.loss=kto"):
        train("dpo", *words, f"data.train={path}", f"out={tmp_path / 'y'}")


def test_held_out_blocks_of_kto_do_not_depend_on_the_size_of_a_pass(tmp_path, words, monkeypatch):
    pairs = map(json.loads, pairs_of(tmp_path).read_text().splitlines())
    path = tmp_path / "good.jsonl"
    path.write_text("".join(json.dumps({"messages": pair["chosen"], "label": True}) + "\n" for pair in pairs))
    kto = [*words, f"data.train={path}", "objective.loss=kto", "objective.kl_groups=5", "objective.beta=3"]
    kto += [QUICK, "batch.size=10", "max_steps=3"]
    train("dpo", *kto, f"out={tmp_path / 'one'}")
    monkeypatch.setattr(preference_data, "CHUNK", 8)
    train("dpo", *kto, f"out={tmp_path / 'two'}")
    for name in ("val_kto_z", "val_preference_loss"):
        one, two = curve(tmp_path / "one", name), curve(tmp_path / "two", name)
        assert one == pytest.approx(two, abs=1e-5)
    assert curve(tmp_path / "one", "val_kto_z")[3] > 0.1


def test_two_ranks_equal_one(tuned, tmp_path, words, penjing):
    folder = tmp_path / "two"
    penjing("train", "dpo", *words, f"out={folder}", ranks=2)
    for name in ("preference_loss", "val_reward_margin", "chosen_reward"):
        assert curve(folder, name) == pytest.approx(curve(tuned[0], name), abs=1e-5)
    expected, got = weights_of(tuned[0]), weights_of(folder)
    assert all((got[name] - expected[name]).abs().max() < 1e-5 for name in expected)


@pytest.mark.parametrize("adapters", [(), ("lora.rank=4",)], ids=["whole", "lora"])
def test_a_reward_model_is_trained_saved_resumed_and_read(tmp_path, words, adapters):
    folder = tmp_path / "run"
    train("reward", *words, *adapters, "optimizer.learning_rate=1e-2", f"out={folder}")
    accuracy = curve(folder, "val_reward_accuracy")
    assert accuracy[0] == 0.5
    assert accuracy[6] > 0.9
    assert weights_of(folder)["scalar"].any()
    cut_back(folder, tmp_path / "cut", 4)
    assert "continues after step 4" in train(
        "reward", *words, *adapters, "optimizer.learning_rate=1e-2", f"out={tmp_path / 'cut'}"
    )
    expected, got = weights_of(folder), weights_of(tmp_path / "cut")
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    judge = load_reward_model(folder)
    asked = Message(role="user", content="Tom has 99 cats. Who?")
    answers = [Message(role="assistant", content=content) for content in ("Tom", "not Amy I think")]
    good, bad = judge.rewards([([asked, answer], ()) for answer in answers])
    assert good > bad
    assert judge.rewards([([asked, answers[1]], ())]) == pytest.approx([bad], abs=1e-5)
    with pytest.warns(UserWarning, match="reward model"):  # it was not trained to write
        assert load_trained(folder, adapters="merged").answers
    with raises_user_error(where=str(folder), next_step="--last N"):
        average_models([folder, folder], tmp_path / "mean")


def test_a_reward_model_reads_in_rl_what_it_was_trained_on(tmp_path, words):
    """Of pairs with thoughts and tools: the score of an answer as RL asks for it is that of the run's validation."""
    tool = {"name": "count"}
    records = {}
    for index, line in enumerate(pairs_of(tmp_path).read_text().splitlines()):
        record = {**json.loads(line), "tools": [tool]}
        for name in ("chosen", "rejected"):
            record[name][-1]["reasoning_content"] = f"{name} it is {index}"
        records[record["chosen"][0]["content"]] = record
    path = tmp_path / "thoughts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records.values()))
    pairs, folder = (f"data.train={path}", "data.seq_len=256", "optimizer.learning_rate=1e-2"), tmp_path / "run"
    train("reward", *words, *pairs, f"out={folder}")
    reward = ModelReward(RewardSettings(model=str(folder)), RewardRuntime(device=torch.device("cpu"), max_tokens=64))
    tokenizer = Tokenizer.load(folder / "tokenizer")
    scores = {"chosen": [], "rejected": []}
    for group in PreferenceShards(folder / "groups" / "validation"):
        record = next(record for asked, record in records.items() if asked in tokenizer.decode(group.prompt))
        for name, found in scores.items():
            text = f"<think>\nof something else\n</think>\n\n{record[name][1]['content']}"
            asked = (Message(role="user", content=record[name][0]["content"]),)
            given = {"messages": asked, "tools": (tool,), "num_tokens": 9, "truncated": False}
            found += reward([RewardInput(text=text, **given)])
    assert len(scores["chosen"]) > 4
    for name, found in scores.items():
        assert sum(found) / len(found) == pytest.approx(curve(folder, f"val_{name}_reward")[6], abs=1e-5)
    with raises_user_error(where="groups/train", got="without", next_step="data.train"):
        train("dpo", *words, f"data.train={folder / 'groups'}", "data.seq_len=256", f"out={tmp_path / 'dpo'}")


def test_what_cannot_be_learned_is_refused(base, tmp_path, words):
    with raises_user_error(got="a run of pretrain", wanted="penjing train reward"):
        load_reward_model(base)
    with raises_user_error(where="init_from", next_step="init_from=RUN"):
        train("dpo", *(word for word in words if not word.startswith("init_from")), f"out={tmp_path / 'a'}")
    with raises_user_error(where="data.format", got="chats", wanted="preferences"):
        train("dpo", *words, "data.format=chats", f"out={tmp_path / 'b'}")
    with raises_user_error(where="objective.reference", got="adapter_off", next_step="lora.rank"):
        train("dpo", *words, "objective.reference=adapter_off", f"out={tmp_path / 'c'}")

"""Distillation runs: the student takes what it needs from its teacher, resumes exactly, and refuses what cannot be."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from short_runs import cut_back, train
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.parallel.single import Single
from penjing.train.load_model import load_trained
from penjing.train.stages.base import make_stage
from penjing.workflows.train import resolve_run

STUDENT = [
    "model=tiny",
    "model.num_hidden_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
]
STUDENT += ["model.head_dim=8", "model.intermediate_size=24"]


def last(folder):
    """The outcome of a run."""
    return json.loads((folder / "outcome.json").read_text())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, small_run):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    longer = ["max_steps=60", "optimizer=adamw", "optimizer.learning_rate=0.01", "eval.every=60", "checkpoint.every=60"]
    train("pretrain", *small_run, *longer, f"out={folder}")
    return folder


@pytest.fixture(scope="module")
def words(teacher, small_run):
    """Settings of a short distillation, without a mode."""
    common = [word for word in small_run if word.startswith(("batch", "compute", "data", "log"))]
    common += ["eval.sequences=8", "eval.every=3", "checkpoint.every=2", "max_steps=6", f"objective.teacher={teacher}"]
    return [*common, *STUDENT]


@pytest.fixture(scope="module")
def prompts(toy):
    """Settings that make it a run on what the student itself writes."""
    return ["objective.mode=on_policy", "objective.ce_weight=0", "objective.max_new_tokens=8", "data.format=chats",
            f"data.train={toy / 'sft.jsonl'}", "data.seq_len=192"]  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("live") / "run"
    train("distill", *words, f"out={folder}")
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("kept") / "run"
    said = train("distill", *words, "objective.mode=top_k", "objective.top_k=300", f"out={folder}")
    return folder, said


def test_a_student_from_nothing_takes_vocabulary_and_tokenizer(live, teacher):
    student, taught = load_trained(live), load_trained(teacher)
    assert student.tokenizer.fingerprint == taught.tokenizer.fingerprint
    assert student.model.config.vocab_size == taught.model.config.vocab_size == 400
    assert student.model.config.hidden_size == 16
    found = last(live)
    for name in ("val_loss", "val_kl", "val_agreement"):
        assert found[name] > 0
    assert found["val_bits_per_byte"] > 0


def test_a_student_learns_what_its_teacher_says(tmp_path, words, teacher):
    longer = ["max_steps=60", "optimizer.learning_rate=0.01", "eval.every=60", "checkpoint.every=60"]
    train("distill", *words, *longer, "eval.at_start=true", f"out={tmp_path}/run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kls = [line["val_kl"] for line in lines if "val_kl" in line]
    assert kls[-1] < 0.6 * kls[0]


def test_predictions_from_disk_teach_as_the_teacher_does(live, kept, losses):
    folder, said = kept
    assert "the teacher reads" in said
    expected, found = losses(live), losses(folder)
    assert expected.keys() == found.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) < 2e-3
    for name in ("val_kl", "val_agreement"):
        assert last(folder)[name] == pytest.approx(last(live)[name], abs=0.02)


def test_a_store_is_made_once_and_may_be_shared(tmp_path, kept, words, losses):
    folder, _ = kept
    shared = ["objective.mode=top_k", "objective.top_k=300", f"objective.store={folder / 'teacher'}"]
    said = train("distill", *words, *shared, f"out={tmp_path / 'again'}")
    assert "the teacher reads" not in said
    assert losses(tmp_path / "again") == losses(folder)
    fewer = [word.replace("top_k=300", "top_k=4") for word in shared]
    assert "the teacher reads" in train("distill", *words, *fewer, f"out={tmp_path / 'fewer'}")


@pytest.mark.parametrize("mode", ["logits", pytest.param("top_k", marks=pytest.mark.nightly), "on_policy"])
def test_taken_up_again_it_learns_the_same_bits(tmp_path, mode, live, kept, words, prompts):
    extra = {"logits": [], "top_k": ["objective.mode=top_k", "objective.top_k=300"], "on_policy": prompts}[mode]
    whole = {"logits": live, "top_k": kept[0]}.get(mode, tmp_path / "whole")
    if mode == "on_policy":
        train("distill", *words, *extra, f"out={whole}")
    cut = tmp_path / "cut"
    cut_back(whole, cut, 4)
    assert "continues after step 4" in train("distill", *words, *extra, f"out={cut}")
    assert last(cut)["weights_sha256"] == last(whole)["weights_sha256"]
    assert last(cut)["resumed"] == 1


@pytest.mark.parametrize("mode", ["logits", pytest.param("top_k", marks=pytest.mark.nightly), "on_policy"])
def test_a_student_that_is_its_teacher_begins_at_no_divergence(tmp_path, mode, words, prompts, teacher):
    """Masks, places and precisions are the same on both sides, and the first steps do not lead away."""
    extra = {"logits": [], "top_k": ["objective.mode=top_k", "objective.top_k=300"], "on_policy": prompts}[mode]
    kept = [word for word in words if not word.startswith("model")]
    train("distill", *kept, "objective.ce_weight=0", *extra, f"init_from={teacher}", "eval.at_start=true",
    "max_steps=3",
          f"out={tmp_path}/run")  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["val_kl"] for line in lines if "val_kl" in line]
    assert abs(found[0]) < (1e-4 if mode == "top_k" else 1e-6)
    assert abs(found[-1]) < 1e-3


def test_a_trained_student_and_adapters_can_be_taught_too(tmp_path, live, words):
    kept = [word for word in words if not word.startswith("model")]
    train("distill", *kept, f"init_from={live}", f"out={tmp_path / 'more'}")
    train("distill", *kept, f"init_from={live}", "lora.rank=2", f"out={tmp_path / 'adapter'}")
    assert (tmp_path / "adapter" / "adapter").is_dir()


def stage(words, out):
    run = resolve_run("distill", parse_overrides([*words, f"out={out}"]))
    made = make_stage(run, Single(torch.device("cpu")))
    made.prepare_data()
    made.prepare_rows()
    model = load_trained(Path(run.objective.teacher)).model
    made.setup(made.trainable(model))
    return made


def test_own_answers_depend_on_the_place_alone(tmp_path, words, prompts):
    made = stage([*words, *prompts, "objective.on_policy_fraction=0.5"], tmp_path / "x")
    together = made.batch(range(6))
    parts = [made.batch(range(2)), made.batch(range(2, 6))]
    torch.testing.assert_close(torch.cat([part.target_N for part in parts]), together.target_N)
    given = torch.cat([part.values["from_data"] for part in parts])
    torch.testing.assert_close(given, together.values["from_data"])
    assert set(given.tolist()) == {0.0, 1.0}
    rank, other = made.source(2, 0, 2), made.source(2, 1, 2)
    one = made.source(4, 0, 1)
    for _ in range(2):
        both = torch.cat((next(rank).target_N, next(other).target_N))
        torch.testing.assert_close(both, next(one).target_N)
    assert rank.state() == one.state() == {"next_prompt": 8}


def test_prompts_without_answers(tmp_path, words, prompts, toy):
    asked = [word for word in prompts if not word.startswith("data")]
    asked += [
        "data.format=prompts",
        f"data.train={toy / 'rl.jsonl'}",
        "data.seq_len=160",
        "data.val_fraction=0.2",
    ]
    train("distill", *words, *asked, f"out={tmp_path / 'x'}")
    assert last(tmp_path / "x")["val_kl"] > 0
    with raises_user_error(where="objective.on_policy_fraction", got=0.5, wanted="1, or data.format=chats"):
        stage([*words, *asked, "objective.on_policy_fraction=0.5"], tmp_path / "y")


@pytest.mark.nightly
def test_two_ranks_learn_what_one_does_and_share_the_store(tmp_path, kept, words, penjing, losses):
    folder = tmp_path / "two"
    more = ["objective.mode=top_k", "objective.top_k=300"]
    penjing("train", "distill", *words, *more, f"out={folder}", ranks=2)
    expected, found = losses(kept[0]), losses(folder)
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5


# --- what is refused -------------------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused_with_the_way_out(tmp_path, words, toy, small_run):
    other = tmp_path / "other"
    train("pretrain", *small_run, "max_steps=1", "tokenizer.vocab_size=390", f"out={other}")
    mine = [word for word in words if not word.startswith("model")]
    with raises_user_error(
        where="objective.teacher", wanted="the student's vocabulary of 390 ids", next_step="penjing train sft"
    ):
        train("distill", *mine, f"init_from={other}", f"out={tmp_path / 'x'}")


def test_no_teacher_is_named(tmp_path, words):
    with raises_user_error(where="objective.teacher", wanted="a run, a Hugging Face directory or a hub name"):
        train("distill", *(word for word in words if not word.startswith("objective")), f"out={tmp_path / 'x'}")


def test_a_teacher_that_changed_is_noticed(tmp_path, words, live, teacher):
    shutil.copytree(live, tmp_path / "run")
    path = tmp_path / "run" / "teacher.json"
    path.write_text(path.read_text().replace(json.loads(path.read_text())["sha256"], "0" * 64))
    with raises_user_error(wanted="000000000000", next_step="Restore the old weights"):
        train("distill", *words, f"out={tmp_path / 'run'}")


def test_a_stream_has_no_places_to_keep_predictions_for(tmp_path, words):
    with raises_user_error(where="data.packing", got="concat", wanted="best_fit, or objective.mode=logits"):
        train("distill", *words, "data.packing=concat", "objective.mode=top_k", f"out={tmp_path / 'x'}")


def test_rows_longer_than_the_teacher_reads(tmp_path, words):
    with raises_user_error(where="data.seq_len", got=4096, wanted="at most 1024"):
        train("distill", *words, "data.seq_len=4096", "model.max_position_embeddings=8192", f"out={tmp_path / 'x'}")


def test_thoughts_are_not_switched_on_policy(tmp_path, words, prompts):
    with raises_user_error(
        where="data.thinking", got="switch", wanted="it left out, or objective.mode=logits or top_k"
    ):
        stage([*words, *prompts, "data.thinking=switch"], tmp_path / "x")


@pytest.mark.parametrize("max_bad_fraction", [0.0, 0.5])
def test_a_conversation_that_the_template_refuses_is_set_aside(
    tmp_path, words, prompts, toy, monkeypatch, max_bad_fraction
):
    """And listed, as what is broken in the file is; one of which no token is learned is left out."""
    from penjing.train.stages import on_policy_distill as distill_own

    def refuses(tokenizer, messages, tools, **more):
        if messages[0].content == "refuse":
            raise UserError("the template refuses it", where="chat template")
        rendered = render(tokenizer, messages, tools, **more)
        return replace(rendered, weights=[0] * len(rendered.ids)) if messages[0].content == "silent" else rendered

    render = distill_own.render
    monkeypatch.setattr(distill_own, "render", refuses)
    lines = (toy / "sft.jsonl").read_text().splitlines()[:20]
    for asked in ("refuse", "silent"):
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "yes"}]
        lines.insert(3, json.dumps({"conversations": turns}))
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    mine = [
        *words,
        *prompts,
        f"data.train={path}",
        "data.val_fraction=0.3",
        f"data.max_bad_fraction={max_bad_fraction}",
    ]
    if not max_bad_fraction:
        with pytest.raises(UserError, match=r"1 of 22 records are broken: .*the template refuses it"):
            stage(mine, tmp_path / "x")
        return
    made = stage(mine, tmp_path / "x")
    listed = [json.loads(line) for line in (tmp_path / "x" / "bad_records.jsonl").read_text().splitlines()]
    assert [(each["line"], each["kind"]) for each in listed] == [(5, "bad")]
    assert "1 are broken" in made.notes[0]
    assert len(made._prompts) + len(made._held_out) + int(made.notes[1].split()[0]) == 21


def test_texts_ask_nothing(tmp_path, words):
    with raises_user_error(where="data.format", got="documents", wanted="chats or prompts"):
        stage([*words, "objective.mode=on_policy", "objective.ce_weight=0"], tmp_path / "x")

"""A run that trains adapters: what it saves, that it can be taken up exactly, what it refuses, and where it goes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from short_runs import cut_back, newest, train, weights_of
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.commands.chat import chat
from penjing.export.adapter import _parse_spec, attach_adapters, export_adapter, merge_adapter
from penjing.export.hf import export
from penjing.infer.conversation import GenerationOptions
from penjing.model import lora
from penjing.train.load_model import load_trained

CHATS = ["data.format=chats", "data.seq_len=256", "max_steps=6", "checkpoint.every=2", "eval.every=3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_run):
    folder = tmp_path_factory.mktemp("base") / "run"
    train("pretrain", *small_run, f"out={folder}")
    return folder


@pytest.fixture(scope="module")
def words(base, toy, small_run):
    """Settings of a short adapter run on `base`."""
    common = [word for word in small_run if word.startswith(("batch", "compute", "eval.sequences", "log"))]
    return [*common, *CHATS, f"data.train={toy / 'sft.jsonl'}", f"init_from={base}", "lora.dropout=0.1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("adapters") / "taught"
    train("lora", *words, f"out={folder}")
    return folder


def test_a_checkpoint_holds_the_adapter_only_and_names_its_base(whole, base):
    saved = weights_of(whole)
    assert saved
    assert all(".adapters.default." in name for name in saved)
    facts = json.loads((newest(whole) / "state.json").read_text())["base"]
    assert facts["init_from"] == str(base.resolve())
    assert facts["sha256"] == lora.fingerprint(load_trained(base).model)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_taken_in_two_goes_are_the_same_bitwise(tmp_path, whole, words, kind):
    more = [] if kind == "adamw" else ["optimizer.name=muon", "lora.use_dora=true"]
    if more:
        whole = tmp_path / "whole"
        train("lora", *words, *more, f"out={whole}", "checkpoint.keep_last=9")
        cut_back(whole, tmp_path / "again", 2)
    else:
        cut_back(whole, tmp_path / "again", 4)
    said = train("lora", *words, *more, f"out={tmp_path / 'again'}")
    assert "continues after step" in said
    expected, got = weights_of(whole), weights_of(tmp_path / "again")
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_loaded_it_is_the_base_with_the_adapter_in_use(whole, base):
    trained, plain = load_trained(whole), load_trained(base)
    state = trained.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.model.state_dict().items())
    ids_BT = torch.arange(40).view(2, 20)
    with torch.no_grad():
        with_adapter = trained.model(ids_BT)
        lora.set_adapter(trained.model, None)
        assert torch.equal(trained.model(ids_BT), plain.model(ids_BT))
        merged = load_trained(whole, adapters="merged").model(ids_BT)
    torch.testing.assert_close(merged, with_adapter, rtol=1e-5, atol=1e-5)
    assert not torch.equal(with_adapter, plain.model(ids_BT))


def test_it_ends_with_an_adapter_that_peft_loads_on_the_exported_base(tmp_path, whole, base):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    trained = load_trained(base)
    export(trained.model, trained.tokenizer, tmp_path / "base", card="")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(stock, whole / "adapter").eval()
    ids_BT = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(load_trained(whole).model(ids_BT), theirs(ids_BT).logits, rtol=1e-5, atol=1e-5)
    export_adapter(whole, [], tmp_path / "again")
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (whole / "adapter" / name).read_bytes()


def test_merged_it_is_a_plain_model(tmp_path, whole, base, penjing):
    transformers = pytest.importorskip("transformers")
    penjing("adapter", "merge", whole, "--out", tmp_path / "own")
    merge_adapter(base, [str(whole)], tmp_path / "given")
    ids_BT = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = load_trained(whole).model(ids_BT)
        for name in ("own", "given"):
            stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
            torch.testing.assert_close(stock(ids_BT).logits, expected, rtol=1e-5, atol=1e-5)


def test_another_stage_begins_with_the_adapter_merged(tmp_path, whole, words):
    words = [word for word in words if not word.startswith(("init_from", "lora"))]
    rate = "optimizer.learning_rate=1e-20"  # too little to move a float32
    train("sft", *words, f"init_from={whole}", "optimizer.weight_decay=0", rate, f"out={tmp_path / 'next'}")
    expected = load_trained(whole, adapters="merged").model.state_dict()
    got = load_trained(tmp_path / "next").model.state_dict()
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-9)


def test_an_adapter_on_a_run_with_an_adapter(tmp_path, whole, words):
    words = [word for word in words if not word.startswith("init_from")]
    train("lora", *words, f"init_from={whole}", f"out={tmp_path / 'next'}")
    lower = load_trained(whole, adapters="merged").model.state_dict()
    got = load_trained(tmp_path / "next").model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in lower.items())


def test_an_adapter_is_found_where_it_is_moved_with_its_base(tmp_path, base, words):
    words = [word for word in words if not word.startswith("init_from")]
    shutil.copytree(base, tmp_path / "here" / "base")
    train("lora", *words, f"init_from={tmp_path / 'here' / 'base'}", f"out={tmp_path / 'here' / 'run'}")
    weights = load_trained(tmp_path / "here" / "run").model.state_dict()
    (tmp_path / "here").rename(tmp_path / "there")
    moved = load_trained(tmp_path / "there" / "run")
    assert all(torch.equal(value, weights[name]) for name, value in moved.model.state_dict().items())
    assert moved.context_tokens == moved.run.data.seq_len
    shutil.rmtree(tmp_path / "there" / "base")
    (tmp_path / "there" / "run").rename(tmp_path / "there" / "base")
    with raises_user_error(where="base", next_step="old name"):
        load_trained(tmp_path / "there" / "base")


def test_a_run_that_has_the_name_of_its_start_is_read(tmp_path, base, words):
    words = [word for word in words if not word.startswith(("init_from", "lora"))]
    shutil.copytree(base, tmp_path / "base")
    train("sft", *words, f"init_from={tmp_path / 'base'}", f"out={tmp_path / 'sft'}", "data.seq_len=64")
    (tmp_path / "base").rename(tmp_path / "old")
    (tmp_path / "sft").rename(tmp_path / "base")
    assert load_trained(tmp_path / "base").context_tokens == 64


def test_a_changed_or_missing_base_is_refused(tmp_path, base, words, penjing):
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    words = [
        *(word for word in words if not word.startswith("init_from")),
        f"init_from={moved}",
        f"out={tmp_path / 'run'}",
    ]
    train("lora", *words)
    earlier = sorted((moved / "checkpoints").iterdir())
    shutil.rmtree(earlier[-1])  # now an earlier step's weights are the newest
    done = penjing("train", "lora", *words, check=False)
    assert done.returncode == 2
    assert "the base model of this adapter has changed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    with raises_user_error(where="step-00000006"):
        load_trained(tmp_path / "run")
    shutil.rmtree(moved)
    with pytest.raises(UserError, match="is missing"):
        load_trained(tmp_path / "run")


def test_a_base_named_from_another_folder_is_found(tmp_path, monkeypatch, base, words):
    shutil.copytree(base, tmp_path / "here" / "runs" / "base")
    monkeypatch.chdir(tmp_path / "here")
    train(
        "lora", *[word for word in words if not word.startswith("init_from")], "init_from=runs/base", "out=runs/taught"
    )
    with_adapter = weights_of(tmp_path / "here" / "runs" / "taught")
    monkeypatch.chdir(tmp_path)
    trained = load_trained(tmp_path / "here" / "runs" / "taught")
    for name, value in with_adapter.items():
        assert torch.equal(trained.model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("word", "name"),
    [("lr=1e-3", "lr_1e-3"), ("微调", "adapter"), ("_one", "one"), ("微a调", "a_"), ("two=lr=1e-3", "two")],
)
def test_what_an_adapter_is_called(tmp_path, monkeypatch, word, name):
    monkeypatch.chdir(tmp_path)
    folder = word.removeprefix("two=")
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "adapter_config.json").write_text("{}")
    assert _parse_spec(word) == (name, Path(folder))


def test_adapters_need_something_to_sit_on(small_run, tmp_path):
    with raises_user_error(where="init_from", wanted="a run, or a Hugging Face directory"):
        train("pretrain", *small_run, "lora.rank=4", f"out={tmp_path / 'run'}")


def test_any_stage_can_train_adapters(tmp_path, base, small_run):
    words = [word for word in small_run if not word.startswith("model")]
    more = [
        "lora.rank=8",
        "lora.use_dora=true",
        "lora.target_modules=attention.*_proj",
        "compute.dtype=bfloat16",
        "max_steps=3",
    ]
    train("pretrain", *words, *more, f"init_from={base}", f"out={tmp_path / 'run'}")
    saved = weights_of(tmp_path / "run")
    assert {name.split(".")[2] for name in saved} == {"attention"}
    assert all(value.dtype in (torch.float32, torch.int64) for value in saved.values())
    assert load_trained(tmp_path / "run").model.state_dict()["blocks.0.attention.q_proj.weight"].dtype == torch.float32


@pytest.mark.nightly
def test_two_ranks_train_the_adapter_that_one_does(tmp_path, words, penjing, losses):
    words = [word for word in words if not word.startswith("lora.dropout")]
    train("lora", *words, "max_steps=3", f"out={tmp_path / 'one'}")
    penjing("train", "lora", *words, "max_steps=3", f"out={tmp_path / 'two'}", ranks=2)
    expected, got = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert expected.keys() == got.keys()
    assert max(abs(got[step] - expected[step]) for step in expected) < 1e-5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_weights_stay_and_a_run_goes_on_exactly(tmp_path, base, small_run, optimizer):
    words = [word for word in small_run if not word.startswith(("model", "max_steps"))]
    patterns = "freeze=embed.*,blocks.0.*,*norm.weight" if optimizer == "muon" else "freeze=blocks.0.*"
    words += [f"init_from={base}", patterns, f"optimizer.name={optimizer}", "max_steps=6", "checkpoint.keep_last=9"]
    said = train("pretrain", *words, f"out={tmp_path / 'one'}")
    before, after = load_trained(base).model, load_trained(tmp_path / "one").model
    learned = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert learned
    assert not any(name.startswith("blocks.0.") for name in learned)
    num_learned = sum(after.state_dict()[name].numel() for name in learned)
    assert f"{num_learned:,} trainable" in said
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "outcome.json").unlink()
    shutil.rmtree(newest(tmp_path / "two"))
    train("pretrain", *words, f"out={tmp_path / 'two'}")
    expected, got = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_a_pattern_that_freezes_nothing_is_refused(tmp_path, small_run):
    with raises_user_error(where="freeze", got="embd.*"):
        train("pretrain", *small_run, "freeze=embd.*", f"out={tmp_path / 'run'}")


def test_adapters_beside_a_base_by_name(whole, base, tmp_path):
    trained = load_trained(base)
    shutil.copytree(whole / "adapter", tmp_path / "loose")
    given = attach_adapters(trained, [str(whole), f"other={tmp_path / 'loose'}", str(tmp_path / "loose")])
    assert list(given) == ["taught", "other", "loose"] == list(lora.names(trained.model))
    assert all(layer.active == "taught" for layer in lora.adapted(trained.model).values())
    with raises_user_error(where="taught", got="taught"):
        attach_adapters(load_trained(base), [str(whole), str(whole)])


def test_the_adapter_of_a_checkpoint(whole, base):
    trained = load_trained(base)
    read = attach_adapters(trained, [f"{whole}@4", f"new={whole}@6", f"old={newest(whole).with_name('step-00000004')}"])
    assert list(read) == ["taught_4", "new", "old"]
    saved = attach_adapters(load_trained(base), [str(whole)])["taught"].tensors
    for layer, parts in saved.items():
        assert torch.equal(parts["B"], read["new"].tensors[layer]["B"])
        assert torch.equal(read["taught_4"].tensors[layer]["B"], read["old"].tensors[layer]["B"])
    assert any(not torch.equal(parts["B"], read["old"].tensors[layer]["B"]) for layer, parts in saved.items())
    with raises_user_error(where=f"{whole}@5", wanted="4, 6"):
        attach_adapters(trained, [f"{whole}@5"])
    with raises_user_error(where=str(base), next_step="lora"):
        attach_adapters(trained, [str(base)])


def test_an_adapter_of_another_base_is_refused(tmp_path, whole, base, small_run):
    train("pretrain", *small_run, "seed=2", "max_steps=2", f"out={tmp_path / 'other'}")
    with raises_user_error(where="adapter", got="a base with hash"):
        attach_adapters(load_trained(tmp_path / "other"), [str(whole)])


def test_a_conversation_switches_adapters(whole, base, monkeypatch, capsys):
    lines = iter(["hello", "/adapter none", "hello", "/adapter nobody", "/adapter taught", "/adapter", ""])
    console = Console(width=200)
    monkeypatch.setattr(console, "input", lambda prompt: next(lines))
    chat(base, console, GenerationOptions(max_tokens=4), adapters=[str(whole)])
    said = capsys.readouterr().out
    assert "adapter: none" in said
    assert "adapter: taught" in said
    assert said.count("taught, none") == 2, "told of after a wrong name, and asked for"


def test_a_run_without_adapters_has_none_to_export(tmp_path, base):
    with raises_user_error(where="run"):
        export_adapter(base, [], tmp_path / "x")
    with raises_user_error(where="run"):
        merge_adapter(base, [], tmp_path / "x")

"""Settings that cannot be are one line that names them, before anything is built."""

import json
from types import SimpleNamespace

import pytest
import torch
from user_errors import raises_user_error

from penjing.base import config
from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.data.token_shards import TokenShardWriter
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon
from penjing.optim.schedule import WarmupStableDecay
from penjing.parallel.single import Single
from penjing.track.run_dir import RunDir
from penjing.train import load_model as folder
from penjing.train.config import Run
from penjing.train.foreign_settings import ABSENT, FOREIGN
from penjing.train.stages import settings_classes
from penjing.train.stages.next_token import NextTokenStage, make_rows
from penjing.train.stages.run_data import run_tokenizer, tokenized


def resolve(*words):
    return config.resolve(Run, parse_overrides(words))


@pytest.mark.parametrize(
    "word",
    [
        "max_steps=-5",
        "epochs=-1",
        "max_grad_norm=-1",
        f"seed={2**64}",
        "data.prefetch=-1",
        "compute.threads=-1",
        "eval.every=-1",
        "eval.sequences=0",
        "eval.sequences=-3",
        "sample.every=-1",
        "sample.max_new_tokens=0",
    ],
)
def test_numbers_out_of_range_are_named(word):
    name, _, value = word.partition("=")
    with pytest.raises(UserError) as refused:
        resolve(word)
    assert refused.value.where == name
    assert float(str(refused.value.got).strip("'")) == float(value)


@pytest.mark.parametrize("word", ["data.order=as_given", "data.thinking=switch"])
def test_settings_without_effect_are_refused(word):
    name, _, value = word.partition("=")
    with raises_user_error(where=name, wanted="documents" if name == "data.order" else "chats"):
        resolve(word, "data.format=prompts")


def test_a_curriculum_in_one_stream_keeps_the_files_order(tmp_path):
    writer = TokenShardWriter(tmp_path, kind="documents", vocab_size=99, about={})
    for token in range(1, 99):
        writer.add([token], 1)
    run = resolve("data.packing=concat", "data.order=as_given", "data.seq_len=8")
    rows = make_rows(run, writer.close(), SimpleNamespace(end_of_text=0))
    assert [rows.row(index).ids_T.tolist() for index in range(2)] == [
        [0, 1, 0, 2, 0, 3, 0, 4],
        [0, 5, 0, 6, 0, 7, 0, 8],
    ]


def test_nothing_to_do_is_said():
    with raises_user_error(where="epochs", got=0.0, wanted="more than 0, or max_steps=N"):
        resolve("epochs=0")
    assert resolve("epochs=0", "max_steps=3").max_steps == 3


@pytest.mark.parametrize("objective", ["policy", "preference"])
def test_where_two_passes_are_compared_nothing_is_left_out_of_one(objective):
    words = ("lora.rank=4", f"objective={objective}")
    with raises_user_error(where="lora.dropout", wanted="0"):
        resolve(*words, "lora.dropout=0.1")
    assert resolve(*words).lora.rank == 4


@pytest.mark.parametrize(
    "words", [("objective=preference", "objective.loss=simpo"), ("objective=distill",), ("objective=reward",), ()]
)
def test_elsewhere_dropout_is_as_good_as_ever(words):
    assert resolve(*words, "lora.rank=4", "lora.dropout=0.1").lora.dropout == 0.1


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads(monkeypatch):
    """How many threads are set, with eight cores, where OMP_NUM_THREADS says this."""
    asked = []
    monkeypatch.setattr(folder.torch, "set_num_threads", asked.append)
    monkeypatch.setattr(folder, "tune_malloc", lambda: None)
    monkeypatch.setattr(folder, "physical_cores", lambda: 8)

    def set_by(said, setting=0, world=2):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert folder.set_threads(setting, world) == asked[-1]
        return asked[-1]

    return set_by


@pytest.mark.parametrize(("said", "count"), [("3", 3), ("4,2", 4), (" 5 , 1", 5), ("", 4), ("0", 4)])
def test_openmp_s_variable_is_read_as_openmp_reads_it(threads, said, count):
    assert threads(said) == count
    assert threads(said, setting=7) == 7


@pytest.mark.parametrize("said", ["four", "-2", "2.5", "x,2"])
def test_what_is_no_number_of_threads_is_one_line(threads, said):
    with raises_user_error(where="OMP_NUM_THREADS", wanted="such as 4"):
        threads(said)
    assert threads(said, setting=2) == 2


def test_a_graph_of_all_of_a_pass_needs_texts():
    assert resolve("compute.compile=blocks", "data.format=chats")
    with raises_user_error(where="compute.compile", got="graphs with data.format=chats", wanted="blocks, auto or off"):
        resolve("compute.compile=graphs", "data.format=chats")


def test_halves_that_were_half_replaced_are_made_again(tmp_path):
    """A kill between the two must not leave the old note beside them."""
    (tmp_path / "a.txt").write_text("text")
    made = []

    def prepare(records, *rest, **options):
        made.append(None)
        if len(made) == 2:
            raise KeyboardInterrupt
        return SimpleNamespace(skipped=len(made), shortened=0, held_out_share=0.0)

    def ask(fraction):
        run = resolve(f"data.train={tmp_path / 'a.txt'}", f"data.val_fraction={fraction}")
        tokenizer = SimpleNamespace(fingerprint="")
        *_, note = tokenized(run, tmp_path, "shards.json", tokenizer, prepare, lambda text: None)[1]
        return int(note.partition(" ")[0])

    assert ask(0.5) == ask(0.5) == 1
    with pytest.raises(KeyboardInterrupt):
        ask(0.01)
    assert ask(0.5) == 3


def test_no_tokenizer_is_trained_on_preferences(tmp_path):
    run = resolve("objective=preference", "data.format=preferences", f"out={tmp_path}")
    with raises_user_error(
        where="init_from", got="data.format=preferences", wanted="an existing model, or tokenizer.path"
    ):
        run_tokenizer(run, print)


def test_ready_shards_that_switch_thoughts_otherwise_are_refused(tmp_path):
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"conversations": [{**turn, "content": f"{turn['content']} {row}"} for turn in asked]} for row in range(9)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(["one two three"], 300).save(tmp_path / "tokenizer")

    def stage(data, out, *words):
        common = (f"data.train={data}", f"out={tmp_path / out}", f"tokenizer.path={tmp_path / 'tokenizer'}")
        run = resolve("data.format=chats", "data.seq_len=64", "data.val_fraction=0.3", *common, *words)
        made = NextTokenStage(run, Single(torch.device("cpu")))
        made.prepare_data()
        return made

    made = stage(tmp_path / "chats.jsonl", "first", "data.thinking=switch")
    shards = RunDir(tmp_path / "first").shards
    assert stage(shards, "second", "data.thinking=switch").fingerprint == made.fingerprint
    with raises_user_error(where="data.thinking", got="as_given"):
        stage(shards, "third")
    plain = stage(tmp_path / "chats.jsonl", "fourth")
    shards = RunDir(tmp_path / "fourth").shards
    assert stage(shards, "fifth").fingerprint == plain.fingerprint != made.fingerprint
    with raises_user_error(where="data.thinking", got="switch"):
        stage(shards, "sixth", "data.thinking=switch")
    assert stage(shards, "seventh", "tokenizer.path=").fingerprint == plain.fingerprint, "by the tokenizer beside them"
    with raises_user_error(where=shards):
        stage(f"{shards},{tmp_path / 'chats.jsonl'}", "eighth")


def test_a_tokenizer_that_an_abandoned_attempt_left_is_not_taken_for_another_start(tmp_path):
    left, wanted = (train_tokenizer(["one two three"], size) for size in (300, 310))
    out = RunDir(tmp_path / "out")
    left.save(out.tokenizer)
    wanted.save(tmp_path / "wanted")
    run = resolve(f"tokenizer.path={tmp_path / 'wanted'}", f"out={out.path}")
    assert run_tokenizer(run, print).fingerprint == wanted.fingerprint
    assert Tokenizer.load(out.tokenizer).fingerprint == wanted.fingerprint
    left.save(out.tokenizer)
    (out.checkpoints / "step-00000001").mkdir(parents=True)  # a run that has begun keeps its own
    assert run_tokenizer(run, print).fingerprint == left.fingerprint


def known_settings():
    trees = [{"objective": config.to_dict(kind())} for kind in settings_classes()]
    trees += [{"optimizer": config.to_dict(kind())} for kind in (AdamW, Muon)]
    trees += [{"schedule": config.to_dict(WarmupStableDecay())}, config.to_dict(Run())]
    return {key for tree in trees for key, _ in config.flat(tree)}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("learning_rate=1", "Did you mean optimizer.learning_rate?"),
        ("dtype=bf16", "compute.dtype?"),
        ("packing=true", "data.packing?"),
        ("save_steps=5", "checkpoint.every?"),
        ("reward_model=runs/x", "objective.reward.model?"),
        ("block_size=8", "data.seq_len?"),
        ("training.lr=1", "optimizer.learning_rate?"),
        ("model.n_layer=1", "model.num_hidden_layers?"),
        ("per-device-train-batch-size=1", "batch.size?"),
        ("vocab_size=9", "model.vocab_size or tokenizer.vocab_size?"),
        ("evaluation.every=3", "eval.every or"),
        ("model.packin=1", "data.packing?"),
        ("optimizer.momentum=1", "optimizer.name=muon"),
        ("objective.kl_coef=1", "objective.name=policy"),
    ],
)
def test_a_setting_of_another_name_or_group_is_named(word, meant):
    with raises_user_error(where=word.partition("=")[0], next_step=meant):
        resolve(word)


def test_other_programs_names_lead_to_settings_that_exist():
    known = known_settings()
    assert {name for names in FOREIGN.values() for name in names} <= known
    assert not FOREIGN.keys() & {name for name in known if "." not in name}


def test_what_other_programs_have_alone_is_not_taken_for_something_similar():
    assert not ABSENT.keys() & (FOREIGN.keys() | {name.rpartition(".")[2] for name in known_settings()})
    for word in ("tensor_parallel_size=2", "data.template=qwen", "load_in_4bit=true", "from_resume=1"):
        with pytest.raises(UserError) as caught:
            resolve(word)
        assert ABSENT[word.split("=")[0].rpartition(".")[2]] in str(caught.value)

"""Any stage begins with a model from outside, which chat, eval and export take too; averages are models like others."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.base.files import read_json, write_json
from penjing.checkpoint.tensors import write_tensors
from penjing.cli import app
from penjing.commands.chat import chat
from penjing.convert.hf_config import hf_config
from penjing.convert.names import to_hf
from penjing.data.chat import CHAT_TEMPLATE
from penjing.data.tokenizer.train import train_tokenizer
from penjing.eval.suite import Suite
from penjing.export.hf import export
from penjing.export.model_card import model_card
from penjing.infer.conversation import GenerationOptions
from penjing.kernels.cpu import spinning
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer
from penjing.train import average
from penjing.train.average import average_models
from penjing.train.load_model import load_start, load_trained
from penjing.workflows.evaluate import EvalOptions, evaluate
from penjing.workflows.train import execute, resolve_run

QUIET = Console(quiet=True)
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
SMALL = [
    "data.seq_len=96",
    "batch.size=4",
    "max_steps=4",
    "compute.device=cpu",
    "compute.dtype=float32",
    "eval.every=4",
    "eval.sequences=4",
    "checkpoint.every=2",
    "checkpoint.keep_last=3",
    "log.every=1",
]


def make_model(size: int, **options: object) -> Transformer:
    torch.manual_seed(5)
    model = Transformer(ModelConfig(preset="", vocab_size=size, **{**SHAPE, **options}))
    with torch.no_grad():
        for value in model.parameters():
            value += 0.1 * torch.randn(value.shape)
    return model.eval()


def write_model(folder: Path, toy: Path, template: str, **options: object) -> Transformer:
    """A Hugging Face directory with an external tokenizer (<s> before texts, </s> after them)."""
    texts = [json.loads(line)["text"] for line in (toy / "pretrain.jsonl").read_text().splitlines()[:80]]
    trained = train_tokenizer(texts, 340)
    folder.mkdir(parents=True)
    trained.save(folder)
    (folder / "chat_template.jinja").unlink()
    renamed = (folder / "tokenizer.json").read_text()
    for ours, theirs in (("<|im_start|>", "<s>"), ("<|im_end|>", "</s>"), ("<|endoftext|>", "<pad>")):
        renamed = renamed.replace(ours, theirs)
    (folder / "tokenizer.json").write_text(renamed)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": True,
    }
    write_json(folder / "tokenizer_config.json", {**settings, **({"chat_template": template} if template else {})})
    model = make_model(340, **options)
    ids = type("Ids", (), {"end_of_text": 2, "message_end": 2})()
    write_json(folder / "config.json", hf_config(model.config, ids))
    write_tensors(folder / "model.safetensors", to_hf(model.state_dict(), model.config))
    return model


@pytest.fixture(scope="module")
def stock(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside") / "stock"
    return write_model(folder, toy, TEMPLATE), folder


@pytest.fixture(scope="module")
def base_model(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside") / "base"
    return write_model(folder, toy, "", architecture="llama"), folder


def train(recipe, *words):
    run = resolve_run(recipe, parse_overrides([*SMALL, *words]))
    execute(run, QUIET)
    return run


def test_sft_takes_shape_weights_tokenizer_and_template_along(stock, toy, tmp_path):
    model, folder = stock
    run = train("sft", f"init_from={folder}", f"data.train={toy / 'sft.jsonl'}", f"out={tmp_path / 'sft'}")
    assert run.model == model.config
    begun = load_start(run)
    for name, value in model.state_dict().items():
        assert torch.equal(begun.state_dict()[name], value)
    trained = load_trained(tmp_path / "sft")
    assert trained.tokenizer.template == TEMPLATE and trained.answers
    assert trained.tokenizer.fingerprint == load_trained(folder).tokenizer.fingerprint
    assert not torch.equal(trained.model.embed.weight, model.embed.weight)
    again = resolve_run("sft", parse_overrides([*SMALL, f"init_from={tmp_path / 'sft'}", "out=x"]))
    assert again.model == model.config


def test_documents_begin_with_the_token_that_the_model_expects(stock, toy, tmp_path):
    from penjing.data.token_shards import TokenShards

    _, folder = stock
    words = (f"init_from={folder}", f"data.train={toy / 'pretrain.jsonl'}", f"out={tmp_path / 'run'}")
    train("pretrain", *words)
    shards = TokenShards(tmp_path / "run" / "shards" / "train")
    tokenizer = load_trained(folder).tokenizer
    assert tokenizer.begin == tokenizer.control("<s>") != tokenizer.end_of_text == tokenizer.control("</s>")
    assert {int(shards.token_N[start]) for start in shards.start_D} == {tokenizer.begin}


def test_a_base_model_learns_chats_in_our_template(base_model, toy, tmp_path):
    model, folder = base_model
    assert not load_trained(folder).answers
    run = train("sft", f"init_from={folder}", f"data.train={toy / 'sft.jsonl'}", f"out={tmp_path / 'sft'}")
    assert run.model.vocab_size == 340 + 2  # <|im_start|>, <|im_end|>
    trained = load_trained(tmp_path / "sft")
    assert trained.tokenizer.template == CHAT_TEMPLATE and trained.tokenizer.size == 342
    begun = load_start(run)
    assert torch.equal(begun.embed.weight[:340], model.embed.weight)
    pytest.importorskip("transformers")
    done = export(trained.model, trained.tokenizer, tmp_path / "out", card="")
    assert done.largest_difference < 1e-4


def test_adapters_cannot_learn_tokens(base_model, stock):
    with pytest.raises(UserError, match=r"no chat template and no <\|im_start\|>, which adapters cannot learn"):
        resolve_run("lora", parse_overrides([f"init_from={base_model[1]}", *SMALL]))
    assert resolve_run("lora", parse_overrides([f"init_from={stock[1]}", *SMALL])).model.vocab_size == 340


def test_chat_eval_and_export_take_it_as_it_is(stock, toy, tmp_path):
    model, folder = stock
    seen = Console(record=True, width=200, file=io.StringIO())
    chat(folder, seen, GenerationOptions(max_tokens=5), prompt="Hello")
    evaluate([folder], Suite(names=[]), [toy / "pretrain.jsonl"], seen, EvalOptions())
    assert "bits per byte" in seen.export_text()
    trained = load_trained(folder)
    card = model_card(trained, folder)
    assert "# stock" in card and "qwen3 model, converted with penjing" in card and "step" not in card
    pytest.importorskip("transformers")
    done = export(trained.model, trained.tokenizer, tmp_path / "out", card=card)
    assert done.largest_difference < 1e-4
    again = load_trained(done.path)
    assert again.tokenizer.fingerprint == trained.tokenizer.fingerprint
    with torch.no_grad():
        ids_BT = torch.arange(20)[None]
        assert torch.equal(again.model(ids_BT), model(ids_BT))


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("model.hidden_size=64", "model.hidden_size: contradicts the shape of"),
        ("model.num_hidden_layers=3", "got 3; wanted 2"),
        ("model.architecture=llama", "model.architecture: contradicts"),
        ("model.vocab_size=300", "got 300; wanted at least 340"),
        ("model=64m", "contradicts the shape of"),
    ],
)
def test_settings_that_contradict_the_weights_are_named(stock, word, line):
    with pytest.raises(UserError) as refused:
        resolve_run("sft", parse_overrides([f"init_from={stock[1]}", word]))
    assert line in refused.value.line()


def test_settings_for_longer_texts_may_differ(stock, toy, tmp_path):
    _, folder = stock
    run = train(
        "sft",
        f"init_from={folder}",
        f"data.train={toy / 'sft.jsonl'}",
        f"out={tmp_path / 'long'}",
        "model.max_position_embeddings=512",
        "model.rope_scaling=yarn",
        "model.rope_factor=4",
        "model.rope_original_max_position_embeddings=128",
        "model.sliding_window=64",
        "model.vocab_size=352",
    )
    trained = load_trained(tmp_path / "long")
    assert (trained.model.config.max_position_embeddings, trained.model.config.rope_scaling) == (512, "yarn")
    assert run.model.vocab_size == 352


def test_what_is_no_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        resolve_run("sft", parse_overrides([f"init_from={tmp_path / 'nothing'}"]))
    (tmp_path / "text.txt").write_text("x")
    with raises_user_error(where="text.txt", wanted="a run's folder"):
        resolve_run("sft", parse_overrides([f"init_from={tmp_path / 'text.txt'}"]))
    with pytest.raises(UserError, match="not the folder of a run"):
        load_trained(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(stock, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(stock[1], folder)
    model = make_model(300)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "vocab_size": 300})
    write_tensors(folder / "model.safetensors", to_hf(model.state_dict(), model.config))
    with pytest.raises(UserError, match="the tokenizer has more ids than the model; got 340; wanted at most 300"):
        load_trained(folder)


def test_minimind_weights(stock, toy, tmp_path):
    model, folder = stock
    place = tmp_path / "full_sft_32.pth"
    torch.save({name: value.half() for name, value in to_hf(model.state_dict(), model.config).items()}, place)
    with raises_user_error(where="full_sft_32.pth", next_step="tokenizer.path=DIR"):
        load_trained(place)
    run = resolve_run("sft", parse_overrides([f"init_from={place}", f"tokenizer.path={folder}", *SMALL]))
    assert run.model.num_attention_heads == 2 and run.model.architecture == "qwen3"
    words = (f"init_from={place}", f"tokenizer.path={folder}", f"data.train={toy / 'sft.jsonl'}")
    train("sft", *words, f"out={tmp_path / 'run'}")
    assert load_trained(tmp_path / "run").tokenizer.template == TEMPLATE


# ----------------------------------------------------------------------------------------------------------- averages


def test_the_average_of_a_runs_checkpoints_and_of_models(stock, toy, tmp_path, monkeypatch):
    _, folder = stock
    out = tmp_path / "run"
    train("sft", f"init_from={folder}", f"data.train={toy / 'sft.jsonl'}", f"out={out}")
    half: list[bool] = []
    save = average.save
    monkeypatch.setattr(average, "save", lambda *g, **n: half.append((tmp_path / "mean").exists()) or save(*g, **n))
    names = average_models([out], tmp_path / "mean", last=2)
    assert half == [False]  # a kill leaves nothing of that name
    assert [Path(name).name for name in names] == ["step-00000004", "step-00000002"]
    assert load_trained(Path(f"{out}@2")).checkpoint.folder == Path(names[1])
    assert resolve_run("sft", parse_overrides([f"init_from={out}@2", *SMALL])).init_from == names[1]
    with raises_user_error(where=f"{out}@3", got="3", wanted="2, 4"):
        load_trained(Path(f"{out}@3"))
    first, second = (load_trained(Path(name)) for name in names)
    mean = load_trained(tmp_path / "mean")
    expected = (first.model.embed.weight.double() + second.model.embed.weight.double()) / 2
    assert torch.equal(mean.model.embed.weight, expected.float())
    assert mean.tokenizer.fingerprint == first.tokenizer.fingerprint and mean.answers
    average_models([Path(names[0]), folder], tmp_path / "mixed", weights=[3, 1])
    mixed = load_trained(tmp_path / "mixed").model.embed.weight
    expected = 0.75 * first.model.embed.weight.double() + 0.25 * stock[0].embed.weight.double()
    assert torch.equal(mixed, expected.float())
    begun = resolve_run("sft", parse_overrides([f"init_from={tmp_path / 'mean'}", *SMALL]))
    assert torch.equal(load_start(begun).embed.weight, mean.model.embed.weight)


@pytest.mark.parametrize("words", ["export hf {0} {1}", "export gguf {0} {1}.gguf", "average {0} {0} --out {1}"])
def test_commands_that_compute_have_the_spinning_of_their_threads_controlled(words, stock, tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(spinning, "control", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    done = CliRunner().invoke(app, [word.format(stock[1], tmp_path / "out") for word in words.split()])
    assert done.exit_code == 0, done.output
    assert set(asked) == {7}


def test_what_cannot_be_averaged(stock, base_model, tmp_path):
    folder, other = stock[1], base_model[1]
    with raises_user_error(got="1 model", wanted="at least two, or --last N"):
        average_models([folder], tmp_path / "mean")
    with raises_user_error(got="architecture llama", wanted="qwen3"):
        average_models([folder, other], tmp_path / "mean")
    with pytest.raises(UserError, match="--last takes the folder of a run"):
        average_models([folder], tmp_path / "mean", last=2)
    assert not (tmp_path / "mean").exists()
    with raises_user_error(where=str(tmp_path), next_step="--out"):
        average_models([folder, folder], tmp_path)

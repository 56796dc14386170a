"""A model goes on with a tokenizer that has more tokens: old rows are exact, new ones the mean of their pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.base.files import write_json
from penjing.checkpoint.tensors import write_tensors
from penjing.cli import app
from penjing.convert.hf_config import hf_config
from penjing.convert.names import to_hf
from penjing.data.tokenizer.extend import add_words, learn_merges, new_pieces
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.export.hf import export
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer
from penjing.train.load_model import load_start, load_trained
from penjing.workflows.train import execute, resolve_run

SIZE, ROWS = 340, 345  # ids of the tokenizer, and rows of the model: five are unused
SMALL = (
    "data.seq_len=64 batch.size=4 max_steps=2 compute.device=cpu compute.dtype=float32 eval.every=2 eval.sequences=2"
)
WORDS = ["zyzzyva", "量子纠缠"]


def texts_of(toy: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (toy / "pretrain.jsonl").read_text().splitlines()[:300]]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request, toy, tmp_path_factory):
    """A Hugging Face directory of a model with unused rows."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(texts_of(toy), SIZE)
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    built = Transformer(
        ModelConfig(
            preset="",
            vocab_size=ROWS,
            intermediate_size=48,
            max_position_embeddings=128,
            tie_word_embeddings=request.param,
            **shape,
        )
    )
    write_json(folder / "config.json", hf_config(built.config, tokenizer))
    write_tensors(folder / "model.safetensors", to_hf(built.state_dict(), built.config))
    tokenizer.save(folder)
    return built, folder, tokenizer


@pytest.fixture(scope="module")
def extended(model, toy, tmp_path_factory):
    _, folder, tokenizer = model
    out = tmp_path_factory.mktemp("extended")
    words = out / "words.txt"
    words.write_text(WORDS[1] + "\n\n", encoding="utf-8")
    command = ["tokenizer", "extend", str(folder), "--add", WORDS[0], "--add", str(words)]
    command += ["--train", str(toy / "pretrain.jsonl"), "--vocabulary", "360", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return Tokenizer.load(out), out


def run(recipe: str, *words: object):
    settings = resolve_run(recipe, parse_overrides([*SMALL.split(), *map(str, words)]))
    execute(settings, Console(quiet=True))
    return settings


def check_rows(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor], old: Tokenizer, new: Tokenizer) -> None:
    for name, value in before.items():
        if name in ("embed.weight", "head.weight"):
            assert torch.equal(state[name][:SIZE], value[:SIZE])
            for token in range(SIZE, new.size):
                pieces = old.encode(new.token(token)) if "\ufffd" not in new.token(token) else []
                if pieces:
                    mean = value[pieces].double().mean(dim=0).float()
                    assert torch.equal(state[name][token], mean), new.token(token)
        else:
            assert torch.equal(state[name], value)


def test_old_ids_stay_and_each_new_token_saves_some(extended, model, toy):
    old, (new, _) = model[2], extended
    assert new.size == 360 + 2 and {**new.vocabulary, **old.vocabulary} == new.vocabulary
    assert [len(new.encode(word)) for word in WORDS] == [1, 1]
    texts = texts_of(toy)
    assert sum(len(new.encode(text)) for text in texts) < 0.98 * sum(len(old.encode(text)) for text in texts)
    for text in [*texts, f"a{WORDS[0]}b {WORDS[1]}"]:
        assert new.decode(new.encode(text)) == text
        pieces = new_pieces(old, new)
        assert [part for index in new.encode(text) for part in pieces.get(index, [index])] != []


def test_transformers_encodes_alike(extended, toy):
    transformers = pytest.importorskip("transformers")
    new, folder = extended
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == new.size
    for text in [*texts_of(toy), f"a{WORDS[0]}b {WORDS[1]}"]:
        assert theirs.encode(text) == new.encode(text)


def test_training_starts_from_the_means_of_the_pieces_and_goes_on(extended, model, toy, tmp_path):
    built, folder, old = model
    new, path = extended
    out = tmp_path / "run"
    words = (f"init_from={folder}", f"tokenizer.path={path}", f"data.train={toy / 'pretrain.jsonl'}", f"out={out}")
    settings = run("pretrain", *words)
    assert settings.model.vocab_size == 362
    check_rows(load_start(settings).state_dict(), built.state_dict(), old, new)
    trained = load_trained(out)
    assert trained.tokenizer.vocabulary == new.vocabulary and trained.model.embed.weight.shape[0] == 362
    # a run that starts from this one takes its tokenizer; more words extend it again
    again = add_words(trained.tokenizer, ["another"])
    again.save(tmp_path / "again")
    words = [*SMALL.split(), f"init_from={out}", f"tokenizer.path={tmp_path / 'again'}", "out=x"]
    settings = resolve_run("sft", parse_overrides(words))
    assert settings.model.vocab_size == 363
    export(trained.model, trained.tokenizer, tmp_path / "hf", card="")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([trained.tokenizer.encode(f"one {WORDS[0]} two")])
    assert torch.allclose(theirs(ids).logits, trained.model(ids), atol=1e-4)


def test_adapters_keep_the_grown_base_also_when_the_run_is_moved(extended, model, toy, tmp_path):
    built, folder, old = model
    new, path = extended
    copy = tmp_path / "tokenizer"
    new.save(copy)
    data = f"data.train={toy / 'sft.jsonl'}"
    settings = run("sft", f"init_from={folder}", f"tokenizer.path={copy}", data, f"out={tmp_path / 'a'}", "lora.rank=2")
    check_rows(load_start(settings).state_dict(), built.state_dict(), old, new)
    assert not (tmp_path / "a" / "adapter").exists(), "for peft: its base lacks the new rows"
    before = load_trained(tmp_path / "a").model.state_dict()
    (tmp_path / "a").rename(tmp_path / "b")
    for file in list(copy.iterdir()):
        file.unlink()
    after = load_trained(tmp_path / "b").model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_another_tokenizer_is_refused(model, toy, tmp_path):
    _, folder, _ = model
    train_tokenizer(texts_of(toy)[::-1][:40], SIZE).save(tmp_path / "other")
    words = (f"init_from={folder}", f"tokenizer.path={tmp_path / 'other'}", f"data.train={toy / 'pretrain.jsonl'}")
    with raises_user_error(where="tokenizer.path", what="does not extend"):
        run("pretrain", *words, f"out={tmp_path / 'run'}")


def test_what_cannot_be_added_is_said(model, toy, tmp_path):
    _, folder, tokenizer = model
    with raises_user_error(where="--vocabulary", got=SIZE):
        learn_merges(tokenizer, ["text"], SIZE, 4)
    with raises_user_error(where="--train", what="often enough"):
        learn_merges(tokenizer, ["q"], SIZE + 5, 4)
    for words in ([], ["--add", "a"]):
        result = CliRunner().invoke(app, ["tokenizer", "extend", str(folder), *words, "--out", str(tmp_path / "x")])
        assert result.exit_code != 0

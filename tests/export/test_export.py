"""An export is what stock `transformers` computes, or it is not there."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from safetensors import safe_open
from small_models import sizes, small_model
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.commands import exporting as where
from penjing.convert.shape import CLASSES
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.export import gguf_vocabulary, hf
from penjing.export.hf import export
from penjing.export.model_card import model_card
from penjing.infer.generate import generate
from penjing.model.linear import set_compute_dtype
from penjing.train.config import Run

TEXT = "Mia saw a kite by the pond. 小明看见一只风筝。 Then she gave it to the frog, and the frog was glad. "


def make_model(tokenizer, **options):
    shape = sizes(tokenizer.size, 32, 2, 4, 2, 8, 48, 128)
    return small_model(seed=1, noise=0.1, sharpen=3, **{**shape, **options}).eval()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_transformers_writes_the_same_text(tmp_path, tokenizer, architecture, tie_word_embeddings):
    transformers = pytest.importorskip("transformers")
    model = make_model(tokenizer, architecture=architecture, tie_word_embeddings=tie_word_embeddings)
    verified = export(model, tokenizer, tmp_path / "out", card="# a card\n")
    assert verified.path == tmp_path / "out"
    assert 0 <= verified.largest_difference < 1e-4
    assert "greedy text equal" in verified.note
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (verified.path / "README.md").read_text() == "# a card\n"
    noted = json.loads((verified.path / "penjing_export.json").read_text())
    assert noted == {"largest_logit_difference": verified.largest_difference, "note": verified.note}

    theirs = transformers.AutoModelForCausalLM.from_pretrained(verified.path, dtype=torch.float32)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(verified.path)
    assert type(theirs).__name__ == CLASSES[architecture]
    for text in (TEXT, "kite 风筝 123  \n x<|im_end|>".replace("<|im_end|>", "")):
        ids = their_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text)
        assert their_tokenizer.decode(ids) == text
    ids = tokenizer.encode("Mia saw")
    stop = {tokenizer.message_end, tokenizer.end_of_text}
    (ours,) = generate(model, [ids], max_new_tokens=20, stop=stop)
    written = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    assert [index for index in written if index not in stop] == ours
    reloaded = Tokenizer.load(verified.path)
    assert reloaded.fingerprint == tokenizer.fingerprint


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "qwen2"},
        {
            "architecture": "qwen3",
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_max_position_embeddings": 32,
        },
        {"architecture": "qwen3_moe", **MIXTURE, "mlp_only_layers": (0,), "sliding_window": 9},
        {"architecture": "mixtral", **MIXTURE, "moe_intermediate_size": 33},  # torch's grouped matmul refuses 33
        {"architecture": "qwen2_moe", **MIXTURE, "shared_expert_intermediate_size": 16, "norm_topk_prob": False},
        {"architecture": "glm4_moe", **MIXTURE, "shared_expert_intermediate_size": 24, "mlp_only_layers": (0,)},
        {"architecture": "glm4_moe", **MIXTURE, "partial_rotary_factor": 0.5, "qk_norm": "none"},
    ],
    ids=lambda options: options["architecture"],
)
def test_every_architecture_is_written_as_its_stock_class(tmp_path, tokenizer, options):
    pytest.importorskip("transformers")
    verified = export(make_model(tokenizer, **options), tokenizer, tmp_path / "out", card="")
    assert verified.largest_difference < 1e-4
    settings = json.loads((verified.path / "config.json").read_text())
    assert settings["architectures"] == [CLASSES[options["architecture"]]]
    with safe_open(verified.path / "model.safetensors", "pt") as written:
        # vLLM reads a tied glm4_moe wrongly: its head is always written
        assert ("lm_head.weight" in written.keys()) == (options["architecture"] == "glm4_moe")  # noqa: SIM118


def test_a_shape_that_no_stock_class_has_is_refused(tmp_path, tokenizer):
    with raises_user_error(where="model.qk_norm", got="none"):
        export(make_model(tokenizer, qk_norm="none"), tokenizer, tmp_path / "out", card="")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_were_altered_on_the_way_are_refused(tmp_path, tokenizer, monkeypatch):
    pytest.importorskip("transformers")
    honest = hf.to_hf

    def perturbed(*given):
        weights = honest(*given)
        changed = weights["model.layers.1.self_attn.q_proj.weight"].clone()
        changed[3] += 0.5
        return {**weights, "model.layers.1.self_attn.q_proj.weight": changed}

    monkeypatch.setattr(hf, "to_hf", perturbed)
    with raises_user_error(where="out.partial", got="logits off by"):
        export(make_model(tokenizer), tokenizer, tmp_path / "out", card="")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_splits_otherwise_is_refused(tmp_path, tokenizer, monkeypatch):
    pytest.importorskip("transformers")
    other = train_tokenizer(["Once upon a time there was def return"] * 40, 320)
    monkeypatch.setattr(type(tokenizer), "save", lambda self, folder, save=Tokenizer.save: save(other, folder))
    with pytest.raises(UserError, match="the exported tokenizer gives different ids"):
        export(make_model(tokenizer), tokenizer, tmp_path / "out", card="")
    assert list(tmp_path.iterdir()) == []


def without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)


def test_without_transformers_the_note_says_so(tmp_path, tokenizer, monkeypatch):
    without_transformers(monkeypatch)
    verified = export(make_model(tokenizer), tokenizer, tmp_path / "out", card="")
    assert verified.largest_difference is None
    assert verified.note.startswith("not compared: transformers is not installed")
    assert (verified.path / "model.safetensors").is_file()


def test_a_foreign_folder_is_not_touched_and_an_export_is_replaced(tmp_path, tokenizer, monkeypatch):
    without_transformers(monkeypatch)
    model = make_model(tokenizer)
    external = tmp_path / "photos"
    external.mkdir()
    (external / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_text("text")
    for path in (external, tmp_path / "file"):
        with raises_user_error(next_step="another folder"):
            export(model, tokenizer, path, card="")
    assert (external / "cat.jpg").read_bytes() == b"cat"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "photos"]
    export(model, tokenizer, tmp_path / "new" / "out", card="one")
    (tmp_path / "new" / "out" / "old.txt").write_text("left from before")
    export(model, tokenizer, tmp_path / "new" / "out", card="two")
    assert (tmp_path / "new" / "out" / "README.md").read_text() == "two"
    assert not (tmp_path / "new" / "out" / "old.txt").exists()


def test_a_disk_that_refuses_is_one_line_and_keeps_the_old_export(tmp_path, tokenizer, monkeypatch):
    without_transformers(monkeypatch)
    model = make_model(tokenizer)
    export(model, tokenizer, tmp_path / "out", card="one")

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(DiskError):
        export(model, tokenizer, tmp_path / "out", card="two")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "README.md").read_text() == "one"


def test_a_second_export_does_not_disturb_the_first(tmp_path, tokenizer, monkeypatch):
    model, honest = make_model(tokenizer), hf.verify

    def beside(*given):
        monkeypatch.setattr(hf, "verify", honest)
        with raises_user_error(next_step="Wait for it"):
            export(model, tokenizer, tmp_path / "out", card="two")
        return honest(*given)

    monkeypatch.setattr(hf, "verify", beside)
    export(model, tokenizer, tmp_path / "out", card="one")
    assert (tmp_path / "out" / "README.md").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_model_is_left_as_it_was(tmp_path, tokenizer):
    pytest.importorskip("transformers")
    model = make_model(tokenizer)
    set_compute_dtype(model, torch.bfloat16)
    assert export(model, tokenizer, tmp_path / "out", card="").largest_difference < 1e-4
    assert model.compute_dtype == model.blocks[0].mlp.up_proj.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("max_tokens", [2, 16, 30])
def test_models_of_short_sequences_can_be_exported(tmp_path, tokenizer, max_tokens):
    pytest.importorskip("transformers")
    verified = export(make_model(tokenizer, max_position_embeddings=max_tokens), tokenizer, tmp_path / "out", card="")
    assert verified.largest_difference < 1e-4


def test_the_card_states_what_is_known_and_no_more(tmp_path, tokenizer):
    run = Run(stage="pretrain", model=make_model(tokenizer, max_position_embeddings=512).config)
    folder = tmp_path / "kite" / "pretrain"
    checkpoint = SimpleNamespace(step=40, folder=folder / "checkpoints" / "step-00000040")
    checkpoint.folder.mkdir(parents=True)
    (checkpoint.folder / "model.safetensors").write_bytes(b"weights")
    (folder / "run.toml").write_text("")
    trained = SimpleNamespace(run=run, checkpoint=checkpoint, tokenizer=tokenizer, external=False)
    text = model_card(trained, folder)
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "# kite-pretrain" in text
    assert "| step | 40 |" in text
    assert f"| vocabulary | {tokenizer.size} |" in text
    assert "tokens seen" not in text
    known = {"tokens": 12345, "weights_sha256": hashlib.sha256(b"weights").hexdigest(), "validation_seconds": 1.0}
    (folder / "outcome.json").write_text(json.dumps(known | {"val_loss": 2.34567}))
    (folder / "plan.json").write_text(json.dumps({"flops": 1.5e12}))
    text = model_card(trained, folder)
    assert "| tokens seen | 12,345 |" in text
    assert "| held-out loss | 2.3457 nats per token |" in text
    assert "| planned compute | 1.50e+12 FLOPs |" in text
    (folder / "outcome.json").write_text(json.dumps(known | {"val_exact_match": 0.5, "val_reward": None}))
    text = model_card(trained, folder)
    assert [line for line in text.splitlines() if "held-out" in line] == ["| held-out exact match | 0.5000 |"]
    checkpoint.folder.joinpath("model.safetensors").write_bytes(b"earlier weights")
    assert "tokens seen" not in model_card(trained, folder)


@pytest.mark.parametrize(
    ("given", "external", "name", "expected"),
    [
        ("runs/dpo", False, "export", "runs/dpo/export"),
        ("runs/dpo", False, "dpo-f16.gguf", "runs/dpo/dpo-f16.gguf"),
        ("runs/dpo/checkpoints/step-00000002", False, "onnx", "runs/dpo/onnx"),
        ("Qwen/Qwen3-0.6B", True, "export", "Qwen3-0.6B-export"),
        ("Qwen/Qwen3-0.6B", True, "Qwen3-0.6B-f16.gguf", "Qwen3-0.6B-f16.gguf"),
        ("models/full_sft_512.pth", True, "onnx", "full_sft_512-onnx"),
    ],
)
def test_where_an_export_goes(tmp_path, monkeypatch, given, external, name, expected):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "dpo" / "checkpoints" / "step-00000002"
    chosen = SimpleNamespace(folder=folder)
    monkeypatch.setattr(
        "penjing.train.load_model.checkpoint_at", lambda path: chosen if path.resolve() == folder else None
    )
    trained = SimpleNamespace(external=external)
    assert where.default_path(Path(given), trained, name).resolve() == tmp_path / expected


def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path, tokenizer):
    gguf = pytest.importorskip("penjing.export.gguf")
    pytest.importorskip("gguf")
    (tmp_path / "model.pth").write_bytes(b"theirs")
    with pytest.raises(DiskError):
        gguf.export(
            make_model(tokenizer), tokenizer, tmp_path / "model.pth" / "a.gguf", kind="f16", about={"name": "a"}
        )
    assert (tmp_path / "model.pth").read_bytes() == b"theirs"


def test_names_from_another_file_are_exported(tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "theirs")
    full = tokenizers.Tokenizer.from_file(str(tmp_path / "theirs" / "tokenizer.json"))
    full.add_special_tokens(["<s>", "</s>"])
    full.save(str(tmp_path / "theirs" / "tokenizer.json"))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "theirs" / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    (tmp_path / "theirs" / "chat_template.jinja").write_text(template)
    external = Tokenizer.load(tmp_path / "theirs")
    external.save(tmp_path / "ours")
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert (stock.bos_token, stock.eos_token) == ("<s>", "</s>")
    assert stock.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<s>a</s>"
    assert Tokenizer.load(tmp_path / "ours").roles == external.roles
    assert gguf_vocabulary.vocabulary_of(external, external.size).bos == external.control("<s>")

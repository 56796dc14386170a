"""An ONNX export is what onnxruntime computes as we do, or it is not there."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from small_models import drawn_model, sizes
from typer.testing import CliRunner
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.cli import app
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export import onnx
from penjing.model.linear import set_compute_dtype

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make_model(tokenizer, **options):
    shape = {**sizes(tokenizer.size, 32, 1, 4, 2, 8, 48, 128), "rope_theta": 1e4, **options}
    return drawn_model(seed=3, noise=0.2, **shape)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"num_hidden_layers": 2, "sliding_window": 8, "sliding_window_layers": (1,)}, marks=pytest.mark.nightly
        ),
        pytest.param({"architecture": "qwen3_moe", **EXPERTS}, marks=pytest.mark.nightly),
        {"architecture": "glm4_moe", "shared_expert_intermediate_size": 16, **EXPERTS},
        # Their experts are written as those above.
        pytest.param(
            {"architecture": "qwen2_moe", "shared_expert_intermediate_size": 16, **EXPERTS}, marks=pytest.mark.nightly
        ),
        pytest.param({"architecture": "mixtral", **EXPERTS}, marks=pytest.mark.nightly),
    ],
    ids=lambda options: options.get("architecture", "qwen3 with a window"),
)
def test_onnxruntime_computes_the_same_for_any_shape(tmp_path, tokenizer, options):
    model = make_model(tokenizer, **options)
    set_compute_dtype(model, torch.bfloat16)  # of training; the graph is float32
    verified = onnx.export(model, tokenizer, tmp_path / "out")
    assert model.compute_dtype == torch.bfloat16
    assert verified.largest_difference < 1e-4
    assert "greedy text equal" in verified.note
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    session = onnxruntime.InferenceSession(verified.path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [given.name for given in session.get_inputs()] == ["input_ids"]
    assert session.get_inputs()[0].shape == ["batch", "length"]
    set_compute_dtype(model, None)
    generator = torch.Generator().manual_seed(1)
    for shape in ((1, 1), (3, 7), (2, 100)):
        ids_BT = torch.randint(tokenizer.size, shape, generator=generator)
        (logits_BTV,) = session.run(None, {"input_ids": ids_BT.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits_BTV), model(ids_BT), atol=1e-4, rtol=0)
    assert Tokenizer.load(verified.path).fingerprint == tokenizer.fingerprint
    assert json.loads((verified.path / "config.json").read_text())["vocab_size"] == tokenizer.size
    assert str(onnx.__file__).encode() not in (verified.path / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    "apart",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["in the graph", "weights in a file of their own"],
)
def test_int8_says_what_it_costs_and_is_smaller(tmp_path, tokenizer, monkeypatch, apart):
    if apart:
        monkeypatch.setattr(onnx, "LARGEST_MESSAGE_BYTES", 0)
    model = make_model(tokenizer, architecture="llama", hidden_size=64, intermediate_size=256)
    verified = onnx.export(model, tokenizer, tmp_path / "out", kind="int8")
    assert verified.largest_difference > 0 and "KL" in verified.note
    weights = sum(value.numel() for value in model.parameters())
    assert sum(file.stat().st_size for file in verified.path.glob("model.onnx*")) < 3 * weights
    assert not list(verified.path.glob("whole*"))


def test_a_graph_that_computes_otherwise_is_refused(tmp_path, tokenizer, monkeypatch):
    honest = onnx._write

    def altered(model, folder, kind):
        model.blocks[0].attention.q_proj.weight.data[3] += 0.5
        honest(model, folder, kind)

    monkeypatch.setattr(onnx, "_write", altered)
    with pytest.raises(UserError, match="onnxruntime computes different logits; got largest difference"):
        onnx.export(make_model(tokenizer), tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_by_name(tmp_path, tokenizer):
    with raises_user_error(where="--dtype", got="int4"):
        onnx.export(make_model(tokenizer), tokenizer, tmp_path / "out", kind="int4")
    mixture = make_model(tokenizer, architecture="qwen3_moe", **EXPERTS)
    with raises_user_error(where="--dtype", got="int8"):
        onnx.export(mixture, tokenizer, tmp_path / "out", kind="int8")
    (tmp_path / "photos").mkdir()
    with raises_user_error(where="photos", next_step="another folder"):
        onnx.export(make_model(tokenizer), tokenizer, tmp_path / "photos")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_the_command_says_what_was_checked(tmp_path, tokenizer, monkeypatch):
    run, model = SimpleNamespace(stage="sft"), make_model(tokenizer, architecture="qwen2")
    trained = SimpleNamespace(model=model, tokenizer=tokenizer, run=run, external=False)
    asked = []

    def export(*given, **named):
        asked.append((given, named))
        return SimpleNamespace(path=given[2], note="largest difference 1e-6")

    monkeypatch.setattr("penjing.train.load_model.load_trained", lambda *args, **options: trained)
    monkeypatch.setattr(onnx, "export", export)
    done = CliRunner().invoke(app, ["export", "onnx", str(tmp_path), "--dtype", "int8"])
    assert done.exit_code == 0, done.output
    ((given, named),) = asked
    assert given == (model, tokenizer, tmp_path / "onnx") and named["kind"] == "int8"
    assert "largest difference 1e-6" in done.output

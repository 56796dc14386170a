"""A GGUF file holds the model and its tokenizer, or it is not there. What llama.cpp makes of it: test_llama_cpp.py."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from small_models import drawn_model, sizes
from tokenizers import normalizers
from typer.testing import CliRunner
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.cli import app
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export import gguf, gguf_read, llama_cpp
from penjing.export.equivalence_check import CHECK_TEXTS, check_rows, difference, is_greedy, row_logits
from penjing.export.gguf_vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, tokenizer_of, vocabulary_of
from penjing.infer.generate import generate

library = pytest.importorskip("gguf")

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHAPES = {
    "qwen3": {},
    "qwen3 untied": {"tie_word_embeddings": False},
    "qwen2": {"architecture": "qwen2"},
    "llama": {"architecture": "llama", "attention_bias": "qkv"},
    "llama3": {
        "architecture": "llama",
        "rope_scaling": "llama3",
        "rope_factor": 8.0,
        "rope_original_max_position_embeddings": 32,
    },
    "qwen3_moe": {"architecture": "qwen3_moe", **EXPERTS},
    "glm4_moe": {
        "architecture": "glm4_moe",
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": (0,),
        "routed_scaling_factor": 1.7,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": False,
        **EXPERTS,
    },
    "qwen2_moe": {
        "architecture": "qwen2_moe",
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        **EXPERTS,
    },
    "mixtral": {"architecture": "mixtral", **EXPERTS},
    "linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "yarn": {
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_max_position_embeddings": 32,
        "rope_attention_factor": 1.2,
    },
}


@pytest.fixture(autouse=True)
def no_llama_cpp(monkeypatch):
    """Files are checked by our own reader here."""
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)


def make_model(tokenizer, **options):
    shape = {**sizes(tokenizer.size + 3, 64, 2, 4, 2, 16, 96, 128), "rope_theta": 1e4, **options}
    return drawn_model(seed=3, noise=0.1, **shape)


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_read_back_is_the_model(tmp_path, tokenizer, name):
    model = make_model(tokenizer, **SHAPES[name])
    verified = gguf.export(model, tokenizer, tmp_path / "model.gguf", kind="f32")
    assert verified.read_back.largest < 1e-5
    assert verified.engine is None
    assert "llama.cpp not compared" in verified.note
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.Modelfile", "model.gguf"]
    rebuilt, their_tokenizer = gguf_read.rebuild(verified.path)
    weights = model.state_dict()
    if name == "qwen2_moe":  # llama.cpp does not tie this one's head
        weights["head.weight"] = weights["embed.weight"]
    assert rebuilt.state_dict().keys() == weights.keys()
    for key, value in rebuilt.state_dict().items():
        assert torch.equal(value, weights[key]), key
    for field in (
        "hidden_size",
        "num_key_value_heads",
        "max_position_embeddings",
        "num_experts",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ):
        assert getattr(rebuilt.config, field) == getattr(model.config, field)
    assert [their_tokenizer.encode(text) for text in CHECK_TEXTS] == [tokenizer.encode(text) for text in CHECK_TEXTS]


def read(path):
    reader = library.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {
        tensor.name: tensor.tensor_type.name for tensor in reader.tensors
    }


def test_what_the_file_says_of_itself(tmp_path, tokenizer):
    model = make_model(tokenizer, **SHAPES["glm4_moe"])
    about = {"name": "kite", "description": "flies", "license": "apache-2.0", "languages": ["zh", "en"]}
    values, types = read(gguf.export(model, tokenizer, tmp_path / "model.gguf", about=about).path)
    assert values["general.architecture"] == "glm4moe"
    assert values["general.name"] == "kite"
    assert values["general.license"] == "apache-2.0"
    assert values["general.languages"] == ["zh", "en"]
    assert values["general.file_type"] == 1
    assert values["glm4moe.expert_gating_func"] == 2
    assert values["glm4moe.leading_dense_block_count"] == 1
    assert values["glm4moe.expert_shared_count"] == 2
    assert values["glm4moe.rope.dimension_count"] == 8
    assert values["glm4moe.expert_weights_norm"] is False
    assert values["glm4moe.expert_weights_scale"] == pytest.approx(1.7)
    assert values["tokenizer.ggml.pre"] == "qwen2"
    assert values["tokenizer.ggml.eos_token_id"] == tokenizer.message_end
    assert values["tokenizer.ggml.add_bos_token"] is False
    assert values["tokenizer.chat_template"] == tokenizer.template
    assert types["blk.1.ffn_gate_exps.weight"] == "F16"
    assert types["blk.1.ffn_gate_inp.weight"] == types["blk.1.exp_probs_b.bias"] == "F32"
    assert types["blk.0.post_attention_norm.weight"] == "F32"


def test_what_is_not_known_is_left_out(tmp_path, tokenizer):
    values, _ = read(gguf.export(make_model(tokenizer), tokenizer, tmp_path / "model.gguf").path)
    assert not {"general.name", "general.license", "general.languages"} & values.keys()


def test_ids_beyond_the_tokenizer_are_unused_tokens(tokenizer):
    vocabulary = vocabulary_of(tokenizer, tokenizer.size + 3)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == tokenizer.size + 3
    assert vocabulary.token_types[-4:] == [NORMAL, UNUSED, UNUSED, UNUSED]
    assert vocabulary.token_types[:9] == [CONTROL] * 3 + [USER_DEFINED] * 6


@pytest.mark.parametrize(("kind", "largest"), [("q8_0", 0.01), ("q5_0", 0.1), ("q4_1", 0.3)])
def test_quantised_files_say_what_it_costs(tmp_path, tokenizer, kind, largest):
    model = make_model(tokenizer, **SHAPES["qwen3_moe"])
    verified = gguf.export(model, tokenizer, tmp_path / "model.gguf", kind=kind)
    assert 0 < verified.read_back.divergence < largest
    assert "perplexity" in verified.note
    _, types = read(verified.path)
    assert types["blk.0.attn_q.weight"] == types["blk.0.ffn_up_exps.weight"] == kind.upper()
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"


def test_rows_that_do_not_divide_stay_f16_and_are_named(tmp_path, tokenizer):
    model = make_model(tokenizer, intermediate_size=80)
    verified = gguf.export(model, tokenizer, tmp_path / "model.gguf", kind="q8_0")
    _, types = read(verified.path)
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q8_0"
    assert "rows not a multiple of 32: blk.0.ffn_down.weight and 1 more" in verified.note


def test_too_much_loss_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(gguf.BOUNDS, "q4_0", (float("inf"), 1e-4))
    with raises_user_error(where="model.gguf.partial", wanted="KL of at most 0.0001 nats"):
        gguf.export(make_model(tokenizer), tokenizer, tmp_path / "model.gguf", kind="q4_0")
    assert list(tmp_path.iterdir()) == []


def test_types_of_llama_cpps_own_tool_are_named_as_such(tmp_path, tokenizer):
    model = make_model(tokenizer)
    with raises_user_error(where="--dtype", got="q4_k_m"):
        gguf.export(model, tokenizer, tmp_path / "model.gguf", kind="q4_k_m")
    with raises_user_error(where="--dtype", got="q8", wanted="f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0"):
        gguf.export(model, tokenizer, tmp_path / "model.gguf", kind="q8")


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("sliding_window", {"sliding_window": 8}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("qk_norm", {"qk_norm": "none"}),
        ("qk_norm", {"architecture": "llama", "qk_norm": "head"}),
        ("head_dim", {"architecture": "qwen2", "head_dim": 32}),
        ("norm_topk_prob", {"architecture": "qwen3_moe", "norm_topk_prob": False, **EXPERTS}),
        ("norm_topk_prob", {"architecture": "qwen2_moe", "shared_expert_intermediate_size": 32, **EXPERTS}),
        ("mlp_only_layers", {"architecture": "qwen3_moe", "mlp_only_layers": (0,), **EXPERTS}),
        ("rope_scaling", {"rope_scaling": "llama3", "rope_factor": 2.0, "rope_original_max_position_embeddings": 64}),
        (
            "rope_beta_fast",
            {
                "rope_scaling": "yarn",
                "rope_factor": 2.0,
                "rope_original_max_position_embeddings": 64,
                "rope_beta_fast": 16.0,
            },
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused_by_name(tmp_path, tokenizer, setting, options):
    with raises_user_error(where=f"model.{setting}"):
        gguf.export(make_model(tokenizer, **options), tokenizer, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_were_altered_on_the_way_are_refused(tmp_path, tokenizer, monkeypatch):
    honest = gguf.tensors

    def swapped(model):
        found = dict(honest(model))
        found["blk.1.ffn_up.weight"], found["blk.1.ffn_gate.weight"] = (
            found["blk.1.ffn_gate.weight"],
            found["blk.1.ffn_up.weight"],
        )
        yield from found.items()

    monkeypatch.setattr(gguf, "tensors", swapped)
    with pytest.raises(UserError, match="the model read back computes different logits; got largest difference"):
        gguf.export(make_model(tokenizer), tokenizer, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_says_another_shape_is_refused(tmp_path, tokenizer, monkeypatch):
    honest = gguf.metadata
    monkeypatch.setattr(gguf, "metadata", lambda *given: {**honest(*given), "qwen3.rope.freq_base": 5e5})
    with pytest.raises(UserError, match="computes different logits"):
        gguf.export(make_model(tokenizer), tokenizer, tmp_path / "model.gguf")


def test_a_tokenizer_that_reads_back_otherwise_is_refused(tmp_path, tokenizer, monkeypatch):
    honest = gguf.vocabulary_of
    monkeypatch.setattr(
        gguf, "vocabulary_of", lambda *given: dataclasses.replace(honest(*given), merges=honest(*given).merges[5:])
    )
    with pytest.raises(UserError, match="the tokenizer read back gives different ids"):
        gguf.export(make_model(tokenizer), tokenizer, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_only_our_own_files_are_replaced(tmp_path, tokenizer):
    model = make_model(tokenizer)
    for name, content in (("photo.gguf", b"cat"), ("other.gguf", b"GGUF\x03\0\0\0somebody else's")):
        (tmp_path / name).write_bytes(content)
        with raises_user_error(next_step="another name"):
            gguf.export(model, tokenizer, tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    path = tmp_path / "model.gguf"
    gguf.export(model, tokenizer, path, kind="f32")
    size = path.stat().st_size
    gguf.export(model, tokenizer, path, kind="q8_0")
    assert path.stat().st_size < size


def test_a_disk_that_refuses_is_one_line_and_keeps_the_old_file(tmp_path, tokenizer, monkeypatch):
    model, path = make_model(tokenizer), tmp_path / "model.gguf"
    gguf.export(model, tokenizer, path)
    before = path.read_bytes()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(library.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(DiskError):
        gguf.export(model, tokenizer, path, kind="q8_0")
    assert path.read_bytes() == before
    assert sorted(found.name for found in tmp_path.iterdir()) == ["model.Modelfile", "model.gguf"]


def test_without_the_package_one_line_says_what_to_install(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with raises_user_error(next_step='pip install "penjing[gguf]"'):
        gguf.export(make_model(tokenizer), tokenizer, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "smaug-bpe", "gpt-2", "smollm"])
def test_the_split_of_an_imported_tokenizer_is_recognised(external_tokenizer, name):
    tokenizer = external_tokenizer(name)
    vocabulary = vocabulary_of(tokenizer, tokenizer.size)
    assert vocabulary.pre_tokenizer == name
    again = tokenizer_of(vocabulary)
    assert [again.encode(text) for text in CHECK_TEXTS] == [tokenizer.encode(text) for text in CHECK_TEXTS]


@pytest.mark.parametrize(
    ("name", "normaliser", "got"),
    [
        ("unknown", None, r"\p{L}+"),
        ("prefixed", None, "BPE"),
        ("metaspace", None, "BPE"),
        ("gpt-2", normalizers.Lowercase(), "Lowercase"),
    ],
)
def test_a_tokenizer_that_llama_cpp_cannot_have_is_refused(external_tokenizer, name, normaliser, got):
    with raises_user_error(where="tokenizer", got=got):
        vocabulary_of(external_tokenizer(name, normaliser), 401)


def test_the_modelfile_names_file_template_and_ends(tmp_path, tokenizer):
    verified = gguf.export(make_model(tokenizer), tokenizer, tmp_path / "kite.gguf")
    assert verified.modelfile == tmp_path / "kite.Modelfile"
    lines = verified.modelfile.read_text().splitlines()
    assert lines[0] == "FROM ./kite.gguf"
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert 'PARAMETER stop "<|endoftext|>"' in lines
    assert "PARAMETER num_ctx 128" in lines
    assert lines[1].startswith('TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}')


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}<sys>{{ m.content }}</sys>"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
NO_SYSTEM = MISTRAL.replace("<sys>{{ m.content }}</sys>", "{{ raise_exception('no system') }}")


@pytest.mark.parametrize(
    ("answers", "template", "written"),
    [
        (False, None, "{{ .Prompt }}"),
        (True, NO_SYSTEM, "[INST]{{ .Prompt }}[/INST]{{ .Response }}<|im_end|>"),
        (
            True,
            MISTRAL,
            "{{ if .System }}<sys>{{ .System }}</sys>[INST]{{ else }}[INST]{{ end }}{{ .Prompt }}[/INST]"
            "{{ .Response }}<|im_end|>",
        ),
    ],
)
def test_the_modelfile_has_the_template_that_the_model_was_trained_with(tokenizer, answers, template, written):
    if template is not None:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.definition), template, roles=tokenizer.roles)
    text = gguf.modelfile_text(Path("a.gguf"), make_model(tokenizer).config, tokenizer, answers=answers)
    assert f'TEMPLATE """{written}"""' in text.splitlines()


def test_a_difference_is_seen_against_the_spread():
    ours = [torch.tensor([[0.0, 2.0, 4.0], [1.0, 0.0, 1.0]])]
    same = difference([[0, 1]], ours, ours)
    assert (same.largest, same.divergence, same.perplexity_change) == (0, 0, 0)
    apart = difference([[0, 1]], ours, [ours[0] + torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]])])
    assert apart.largest == 0.5
    assert apart.typical == 0
    assert apart.within(0.1, 1, is_mixture=True)
    assert not apart.within(0.1, 1, is_mixture=False)
    assert not apart.within(1, 1e-9, is_mixture=True)
    assert apart.perplexity_change < 0  # the second id is likelier now
    broken = difference([[0, 1]], ours, [ours[0] * float("nan")])
    assert not broken.within(1e9, 1e9, is_mixture=True)


def test_greedy_text_may_part_only_where_two_tokens_tie(tokenizer):
    model = make_model(tokenizer)
    prompt, stop = check_rows(tokenizer, 8)[0], tokenizer.stop
    (written,) = generate(model, [prompt], max_new_tokens=6, stop=stop)
    assert len(written) == 6
    assert is_greedy(model, prompt, written, stop, max_new_tokens=6, tolerance=1e-6)
    assert not is_greedy(model, prompt, written[:3], stop, max_new_tokens=6, tolerance=1e-6)
    wrong = [*written[:2], (written[2] + 1) % tokenizer.size]
    assert not is_greedy(model, prompt, wrong, stop, max_new_tokens=3, tolerance=1e-6)
    (logits_TV,) = row_logits(model, [[*prompt, *written[:2]]])
    gap = float(logits_TV[-1].max() - logits_TV[-1, wrong[-1]])
    assert is_greedy(model, prompt, wrong, stop, max_new_tokens=3, tolerance=gap + 1e-3)


def test_the_command_writes_beside_the_run_and_says_what_was_checked(tmp_path, tokenizer, monkeypatch):
    trained = SimpleNamespace(
        model=make_model(tokenizer),
        tokenizer=tokenizer,
        run=SimpleNamespace(stage="sft"),
        external=False,
        checkpoint=SimpleNamespace(step=40),
        answers=True,
    )
    monkeypatch.setattr("penjing.train.load_model.load_trained", lambda *args, **options: trained)
    run = tmp_path / "kite"
    done = CliRunner().invoke(app, ["export", "gguf", str(run), "--dtype", "q8_0", "--licence", "mit"])
    assert done.exit_code == 0, done.output
    assert "read back: largest difference" in done.output
    values, _ = read(run / "kite-q8_0.gguf")
    assert (values["general.name"], values["general.license"]) == ("kite", "mit")
    assert "stage sft, step 40" in values["general.description"]
    assert (run / "kite-q8_0.Modelfile").is_file()

"""The real llama.cpp computes what we compute, from the files we write. Skipped without llama-cpp-python."""

from __future__ import annotations

import ctypes
import itertools
import random
import unicodedata

import pytest
import torch
from small_models import sizes

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.data.tokenizer.tokenizer import VISIBLE_TOKENS
from penjing.data.tokenizer.train import train_tokenizer
from penjing.export import gguf, gguf_read, llama_cpp
from penjing.export.equivalence_check import check_rows, difference, float_copy, row_logits
from penjing.export.gguf_vocabulary import vocabulary_of
from penjing.infer.generate import generate
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer

pytest.importorskip("gguf")
engine = pytest.importorskip("llama_cpp")

ENGLISH = "Mia saw a kite by the pond; it's red, isn't it? She'd say they'LL fly 3 kites at 10:45, or 1,024 of them. "
CHINESE = "小明看见一只红色的风筝，从前有座山，山里有座庙。他说：“你好！”价格是12.5元，２０２６年。"
CODE = "def f(x: int) -> int:\n    return x**2 + 1  # 加一\n\tif (a!=b && c<=d) { y[i]+=0x1F; }\r\n<p a='b'>\\n</p>\n\n"
EMOJI = "👍🏽👩‍👩‍👧‍👦🇨🇳😀✨❤️🏳️‍🌈①²½№™ﬁé"
LOOKALIKES = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_",
    "|>",
    "< think>",
    "</ think>",
    "<tool_cal",
    "[UNUSED3]",
)
SPACES = (" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u3000", "\u00a0", "\u200b", "\u2009")
TEXT = (ENGLISH + CHINESE + CODE) * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NUM_GREEDY = 12
SHAPES = {
    "qwen3": {},
    "qwen3 untied": {"tie_word_embeddings": False},
    "qwen2": {"architecture": "qwen2"},
    "llama": {"architecture": "llama"},
    "llama with biases": {"architecture": "llama", "attention_bias": "qkv"},
    "qwen3_moe": {"architecture": "qwen3_moe", **EXPERTS},
    "glm4_moe": {"architecture": "glm4_moe", "shared_expert_intermediate_size": 32, "mlp_only_layers": (0,), **EXPERTS},
    "glm4_moe scaled": {
        "architecture": "glm4_moe",
        "shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 1.7,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        **EXPERTS,
    },
    "glm4_moe, nothing shared": {"architecture": "glm4_moe", **EXPERTS},
    "qwen2_moe": {
        "architecture": "qwen2_moe",
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        **EXPERTS,
    },
    "mixtral": {"architecture": "mixtral", **EXPERTS},
    "linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_max_position_embeddings": 64},
    "yarn, sharper": {
        "architecture": "llama",
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_max_position_embeddings": 64,
        "rope_attention_factor": 1.3,
    },
    "yarn in a mixture": {
        "architecture": "glm4_moe",
        "shared_expert_intermediate_size": 32,
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_max_position_embeddings": 64,
        **EXPERTS,
    },
    "llama3": {
        "architecture": "llama",
        "rope_scaling": "llama3",
        "rope_factor": 4.0,
        "rope_original_max_position_embeddings": 64,
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([ENGLISH, CHINESE, CODE, EMOJI] * 10, 480)


def make_model(tokenizer, **options):
    """Random weights that say something at every place: norms, biases and corrections too.

    Rounding breaks a tie between two experts, and then logits differ by far more than rounding. So no token may come
    near one: four dimensions that only the embedding writes hold an order of the experts, and routers read those alone.
    """
    shape = {**sizes(tokenizer.size + 3, 64, 2, 4, 2, 16, 96, 256), "rope_theta": 1e4}
    model = Transformer(ModelConfig(**{**shape, **options}))
    generator = torch.Generator().manual_seed(5)
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if "norm" in name:
            value.copy_(1 + 0.2 * noise)
        elif value.ndim == 1:
            value.copy_(0.1 * noise)
        elif "router" in name:
            value.copy_(noise)
        else:
            value.copy_(noise * (0.05 if name.startswith(("embed", "head")) else value.shape[-1] ** -0.5))
    if model.config.is_mixture:
        orders = torch.tensor(list(itertools.permutations((-0.2, -0.1, 0.1, 0.2))))
        model.embed.weight.data[:, :4] = orders[torch.arange(model.config.vocab_size) % len(orders)]
        for name, value in model.state_dict().items():
            if "router.weight" in name:
                value.copy_(2 * torch.eye(*value.shape))
            elif "o_proj" in name or "down_proj" in name:
                value[..., :4, :] = 0
            elif "input_norm" in name or "mlp_norm" in name:
                value[:4] = 1
    return model.eval()


def untied_greedy(model, ids, stop):
    """A stretch of `ids` and what our model writes greedily after it, where no two tokens lie so close that rounding
    may choose between them: the first such stretch."""
    for start in range(100):
        prompt = ids[start : start + 20]
        (written,) = generate(model, [prompt], max_new_tokens=NUM_GREEDY, stop=stop)
        (logits_TV,) = row_logits(model, [[*prompt, *written]])
        best_T2 = logits_TV[len(prompt) - 1 : -1].topk(2).values
        if len(written) == NUM_GREEDY and float((best_T2[:, 0] - best_T2[:, 1]).min()) > 0.02:
            return prompt, written
    raise AssertionError("every greedy text has a tie")


def strings(seed=11, count=1000):
    """Mixed texts, drawn by seed: words, characters, code, emoji, spaces and what looks like a control token."""
    draw = random.Random(seed)
    sources = (ENGLISH, CHINESE, CODE, EMOJI)
    found = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 12)):
            source = draw.choice(sources)
            start = draw.randrange(len(source))
            parts.append(
                draw.choice(
                    (
                        source[start : start + draw.randint(1, 20)],
                        draw.choice(SPACES) * draw.randint(1, 3),
                        draw.choice(LOOKALIKES),
                        str(draw.randrange(10 ** draw.randint(1, 9))),
                        "".join(
                            chr(draw.choice((0x4E00, 0x3040, 0xAC00, 0x400, 0xC0)) + draw.randrange(64)) for _ in "abc"
                        ),
                    )
                )
            )
        text = "".join(parts)
        found.append(unicodedata.normalize(draw.choice(("NFC", "NFC", "NFD")), text))
    return found


@pytest.fixture(scope="module")
def vocabulary_file(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "tiny.gguf"
    gguf.export(make_model(tokenizer), tokenizer, path)
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_computes_the_same(tmp_path, tokenizer, name):
    model = make_model(tokenizer, **SHAPES[name])
    path = tmp_path / "model.gguf"
    verified = gguf.export(model, tokenizer, path, kind="f16")
    assert verified.engine is not None
    assert verified.engine.largest < 0.01
    assert "greedy text equal" in verified.note

    rows = check_rows(tokenizer, model.config.max_position_embeddings, [TEXT])
    assert len(rows[0]) > 3 * model.config.rope_original_max_position_embeddings
    prompt, written = untied_greedy(model, rows[0], tokenizer.stop)
    answer = llama_cpp.run_llama_cpp(path, rows, [TEXT], prompt=prompt, max_new_tokens=NUM_GREEDY, stop=tokenizer.stop)
    found = difference(rows, row_logits(float_copy(model), rows), answer.logits)
    assert found.largest < 0.01
    assert found.spread > 0.2
    assert abs(found.perplexity_change) < 0.01
    assert answer.greedy == written


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_eight_bits_run(tmp_path, tokenizer, name):
    model = make_model(tokenizer, **SHAPES[name])
    verified = gguf.export(model, tokenizer, tmp_path / "model.gguf", kind="q8_0")
    assert verified.read_back.divergence < 0.01
    assert verified.engine.divergence < 0.02
    assert abs(verified.read_back.perplexity_change) < 0.01


def test_llama_cpp_cuts_text_as_we_do(tokenizer, vocabulary_file):
    vocabulary = engine.Llama(str(vocabulary_file), vocab_only=True, n_threads=1, verbose=False)
    texts = strings()
    assert len(set(texts)) > 990
    for text in texts:
        # llama.cpp has no normaliser: it must be given what ours would make of the text.
        given = unicodedata.normalize("NFC", text)
        assert vocabulary.tokenize(given.encode(), add_bos=False, special=False) == tokenizer.encode(text), repr(text)
        assert vocabulary.detokenize(tokenizer.encode(text)).decode() == given


@pytest.mark.parametrize("name", ["llama-bpe", "smaug-bpe", "gpt-2", "smollm"])
def test_llama_cpp_cuts_text_as_imported_tokenizers_do(tmp_path, external_tokenizer, name):
    tokenizer, path = external_tokenizer(name), tmp_path / "external.gguf"
    gguf.export(make_model(tokenizer, num_hidden_layers=1), tokenizer, path)
    vocabulary = engine.Llama(str(path), vocab_only=True, n_threads=1, verbose=False)
    for text in strings(seed=12, count=300):
        ids = vocabulary.tokenize(text.encode(), add_bos=False, special=False)
        assert ids == tokenizer.encode(text), repr(text)


def test_tokens_of_an_answers_parts_are_read_in_any_text_as_in_transformers(tokenizer, vocabulary_file):
    vocabulary = engine.Llama(str(vocabulary_file), vocab_only=True, n_threads=1, verbose=False)
    for token in VISIBLE_TOKENS:
        assert vocabulary.tokenize(token.encode(), add_bos=False, special=False) == [tokenizer.control(token)]
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    ids = vocabulary.tokenize(turn.encode(), add_bos=False, special=True)
    assert ids[0] == tokenizer.control("<|im_start|>")
    assert tokenizer.message_end in ids


def test_turns_end_and_nothing_is_put_in_front(tokenizer, vocabulary_file):
    model = engine.Llama(str(vocabulary_file), n_ctx=64, n_threads=1, verbose=False)
    assert model.token_eos() == tokenizer.message_end
    assert model.tokenize(b"kite", special=False) == tokenizer.encode("kite")
    assert engine.llama_vocab_is_eog(model._model.vocab, tokenizer.end_of_text)
    assert model.metadata["tokenizer.chat_template"] == tokenizer.template


def test_llama_cpp_knows_the_template_and_writes_the_same_conversation(tokenizer):
    """Its own code for ChatML, found by what is in the template, against our rendering."""
    turns = [("system", "Be brief."), ("user", "Hi 你好"), ("assistant", "Hello!"), ("user", "  two\nlines ")]
    messages = (engine.llama_chat_message * len(turns))(
        *(engine.llama_chat_message(role=role.encode(), content=text.encode()) for role, text in turns)
    )
    buffer = ctypes.create_string_buffer(1000)
    template = tokenizer.template.encode()
    length = engine.llama_chat_apply_template(template, messages, len(turns), True, buffer, len(buffer))
    ids = render(tokenizer, [Message(role=role, content=text) for role, text in turns], ask=True).ids
    assert buffer.raw[:length].decode() == tokenizer.decode(ids, hide=False)


def test_a_file_that_llama_cpp_refuses_is_one_line(tmp_path, tokenizer, vocabulary_file):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(vocabulary_file.read_bytes()[:-20_000])
    with pytest.raises(UserError, match=r"broken.gguf: llama.cpp cannot run this file"):
        llama_cpp.run_llama_cpp(broken, [[0, 1]], ["a"], prompt=[0], max_new_tokens=2, stop=[0])


def test_a_mistake_that_reading_back_repeats_is_found_by_llama_cpp(tmp_path, tokenizer, monkeypatch):
    """Rows of the keys left in our order and read in our order: only the engine knows better."""
    monkeypatch.setattr(gguf, "interleaved", lambda rows, head_dim: rows)
    monkeypatch.setattr(gguf_read, "deinterleaved", lambda rows, head_dim: rows)
    with pytest.raises(UserError, match=r"llama.cpp computes different logits; got largest difference"):
        gguf.export(make_model(tokenizer, architecture="llama"), tokenizer, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_another_cut_is_found_by_llama_cpp(tmp_path, tokenizer, monkeypatch):
    def digits_together(*given):
        vocabulary = vocabulary_of(*given)
        object.__setattr__(vocabulary, "pre_tokenizer", "gpt-2")
        return vocabulary

    monkeypatch.setattr(gguf, "vocabulary_of", digits_together)
    monkeypatch.setattr(gguf_read, "tokenizer_of", lambda vocabulary: tokenizer)
    with pytest.raises(UserError, match=r"llama.cpp gives different ids than our tokenizer"):
        gguf.export(make_model(tokenizer), tokenizer, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []

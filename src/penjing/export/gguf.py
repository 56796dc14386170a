"""Write a GGUF file for llama.cpp, Ollama and programs built on them; it is verified before it gets its name.

Only the `gguf` package is used: llama.cpp's converter refuses tokenizers that it does not know.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from penjing import __version__
from penjing.base.errors import UserError, import_extra
from penjing.base.files import write_text
from penjing.base.lock import unfinished
from penjing.data.chat.external_templates import run_template
from penjing.data.formats import Message
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export import equivalence_check as check
from penjing.export import gguf_read, llama_cpp
from penjing.export.gguf_vocabulary import Vocabulary, vocabulary_of
from penjing.model.config import ModelConfig
from penjing.model.rope import frequencies
from penjing.model.transformer import Transformer

# Our architectures by their names in llama.cpp. mixtral is its llama with experts.
ARCHITECTURES = {
    "qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe",
    "mixtral": "llama", "glm4_moe": "glm4moe",
}  # fmt: skip
# Types that llama.cpp's tool llama-quantize writes from an f16 file; the gguf package cannot write them.
TOOL_TYPES = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq2_xs", "iq3_xs", "iq3_s",
    "iq4_nl", "iq4_xs",
)  # fmt: skip
# Bounds on the largest logit difference, for logits of spread 1, and on the KL divergence in nats per position. The
# first covers rounding: f16 rounds each weight to 2^-11 of it, bf16 to 2^-8. Random models in the tests reach half the
# bound; a wrong layout is off by the spread itself. Quantised files are checked by the second only.
BOUNDS = {
    "f32": (1e-4, 1e-6), "f16": (2e-2, 1e-3), "bf16": (0.15, 1e-2), "q8_0": (math.inf, 1e-2), "q5_1": (math.inf, 0.1),
    "q5_0": (math.inf, 0.1), "q4_1": (math.inf, 0.3), "q4_0": (math.inf, 0.3),
}  # fmt: skip
TYPES = tuple(BOUNDS)
# llama.cpp stores keys and values in f16 and rounds matmul inputs to the type of the weights.
ENGINE_BOUNDS = {"f32": (2e-2, 1e-3), "f16": (3e-2, 1e-3), "bf16": (0.2, 1e-2)}
ENGINE_QUANTISED_BOUND = (math.inf, 2e-2)
EXPERT_GATING_SIGMOID = 2


@dataclass(frozen=True, slots=True)
class VerifiedGguf:
    """The written files and the results of the checks. engine: None if llama-cpp-python is not installed."""

    path: Path
    modelfile: Path
    read_back: check.LogitDifference
    engine: check.LogitDifference | None
    note: str


def check_gguf_support(config: ModelConfig) -> None:
    """Raise UserError, with the setting's name, for a config that llama.cpp cannot compute. llama.cpp would load most
    of these and compute wrong results."""
    arch, is_glm, is_yarn = config.architecture, config.architecture == "glm4_moe", config.rope_scaling == "yarn"
    full_heads = config.num_attention_heads * config.head_dim == config.hidden_size
    has_head_norm = arch in ("qwen3", "qwen3_moe")
    reasons = [  # setting, whether it is unsupported, the allowed value
        ("sliding_window", config.sliding_window > 0, "0"),
        ("partial_rotary_factor", config.partial_rotary_factor != 1 and not is_glm, "1"),
        ("qk_norm", has_head_norm and not config.normalises_heads, "head"),
        ("qk_norm", not has_head_norm and not is_glm and config.normalises_heads, "none"),
        ("head_dim", arch in ("qwen2", "qwen2_moe") and not full_heads, "hidden_size / num_attention_heads"),
        ("norm_topk_prob", arch == "qwen3_moe" and not config.norm_topk_prob, "true"),
        ("norm_topk_prob", arch == "qwen2_moe" and config.norm_topk_prob, "false"),
        ("mlp_only_layers", bool(config.mlp_only_layers) and not is_glm, "none"),
        ("rope_scaling", config.rope_scaling == "llama3" and arch not in ("llama", "mixtral"), "yarn, linear"),
        ("rope_beta_fast", is_yarn and config.rope_beta_fast != 32, "32"),
        ("rope_beta_slow", is_yarn and config.rope_beta_slow != 1, "1"),
    ]
    for name, unsupported, allowed in reasons:
        if unsupported:
            what = f"llama.cpp's {ARCHITECTURES[arch]} cannot compute this"
            hint = "`penjing export hf` can write it."
            raise UserError(what, where=f"model.{name}", got=getattr(config, name), wanted=allowed, next_step=hint)


def _check_type(kind: str, path: Path) -> None:
    if kind in TOOL_TYPES:
        what = "the gguf package cannot write this type; llama-quantize can"
        hint = f"Export f16, then: llama-quantize FILE-f16.gguf {path.name} {kind.upper()}"
        raise UserError(what, where="--dtype", got=kind, next_step=hint)
    if kind not in TYPES:
        raise UserError("no such type", where="--dtype", got=kind, wanted=", ".join(TYPES))


def metadata(config: ModelConfig, vocabulary: Vocabulary, about: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """All keys of the file except `general.architecture`. An int is written as uint32, a float as float32."""
    import gguf

    arch = ARCHITECTURES[config.architecture]
    values: dict[str, Any] = {
        "penjing.version": __version__,
        "general.type": "model",
        **{f"general.{name}": value for name, value in about.items()},
        "general.file_type": int(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.moe_intermediate_size
        if config.architecture == "mixtral"
        else config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.dimension_count": config.rotary_size,
        f"{arch}.rope.freq_base": float(config.rope_theta),
    }
    if config.rope_scaling in ("linear", "yarn"):
        values[f"{arch}.rope.scaling.type"] = config.rope_scaling
        values[f"{arch}.rope.scaling.factor"] = float(config.rope_factor)
    if config.rope_scaling == "llama3":  # llama.cpp reads the tensor rope_freqs; these keys are for reading back
        values |= {
            "penjing.rope.factor": float(config.rope_factor),
            "penjing.rope.original_tokens": config.rope_original_max_position_embeddings,
            "penjing.rope.low_frequency": float(config.rope_low_freq_factor),
            "penjing.rope.high_frequency": float(config.rope_high_freq_factor),
        }
    if config.rope_scaling == "yarn":
        values[f"{arch}.rope.scaling.original_context_length"] = config.rope_original_max_position_embeddings
        if config.rope_attention_factor:
            default_factor = 0.1 * math.log(max(config.rope_factor, 1.0)) + 1  # llama.cpp multiplies by it
            values[f"{arch}.rope.scaling.attn_factor"] = config.rope_attention_factor / default_factor
    if config.is_mixture:
        values[f"{arch}.expert_count"] = config.num_experts
        values[f"{arch}.expert_used_count"] = config.num_experts_per_tok
    if config.architecture in ("qwen3_moe", "qwen2_moe", "glm4_moe"):
        values[f"{arch}.expert_feed_forward_length"] = config.moe_intermediate_size
    if config.architecture == "qwen2_moe":
        values[f"{arch}.expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.architecture == "glm4_moe":
        values |= {
            f"{arch}.expert_shared_count": max(
                1, config.shared_expert_intermediate_size // config.moe_intermediate_size
            ),
            f"{arch}.leading_dense_block_count": len(config.mlp_only_layers),
            f"{arch}.expert_gating_func": EXPERT_GATING_SIGMOID,
            f"{arch}.expert_weights_norm": config.norm_topk_prob,
            f"{arch}.expert_weights_scale": float(config.routed_scaling_factor),
            f"{arch}.nextn_predict_layers": 0,
        }
    values |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": vocabulary.pre_tokenizer,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.token_types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.bos_token_id": vocabulary.bos,
        "tokenizer.ggml.eos_token_id": vocabulary.message_end,
        "tokenizer.ggml.eot_token_id": vocabulary.message_end,
        "tokenizer.ggml.padding_token_id": vocabulary.end_of_text,
        "tokenizer.ggml.add_bos_token": vocabulary.add_bos,
        "tokenizer.chat_template": vocabulary.chat_template,
    }
    return {key: value for key, value in values.items() if value not in ("", [])}


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Query or key projection rows with head dimensions i and i + K/2 adjacent: llama.cpp's RoPE order for llama."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def tensors(model: Transformer) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every tensor of the file by llama.cpp's name, in float32."""
    config, arch = model.config, ARCHITECTURES[model.config.architecture]
    for name, value in model.state_dict().items():
        value = value.detach().cpu().float()
        if arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            value = interleaved(value, config.head_dim)
        if name.endswith("shared_gate.weight"):
            value = value[0]
        yield gguf_read.tensor_name(name, arch, config.num_hidden_layers), value.contiguous().numpy()
    if config.architecture == "glm4_moe" and not config.shared_expert_intermediate_size:
        yield from _empty_shared_experts(config)
    if config.architecture == "qwen2_moe" and model.head is None:  # llama.cpp ties the head of the others itself
        yield "output.weight", model.embed.weight.detach().cpu().float().numpy()
    if config.rope_scaling == "llama3":
        unscaled = frequencies(dataclasses.replace(config, rope_scaling="none", rope_factor=1.0))
        yield "rope_freqs.weight", (unscaled / frequencies(config)).numpy()


def _empty_shared_experts(config: ModelConfig) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """One shared expert of zeros per layer: llama.cpp's glm4moe requires one."""
    shape = config.moe_intermediate_size, config.hidden_size
    for layer in range(config.num_hidden_layers):
        if not config.is_dense_layer(layer):
            for name, each in (("gate", shape), ("up", shape), ("down", shape[::-1])):
                yield f"blk.{layer}.ffn_{name}_shexp.weight", np.zeros(each, np.float32)


def stored_type(name: str, shape: tuple[int, ...], kind: str) -> str:
    """The type in which a tensor is stored.

    Vectors and routers stay f32. Quantisers work on blocks of 32 values of a row; rows of another length stay f16.
    Embeddings and head have 8 bits where other tensors have 4 or 5: every token uses them, and in small models a
    coarser head costs the most accuracy.
    """
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return "f32"
    if kind.startswith("q") and shape[-1] % 32:
        return "f16"
    return "q8_0" if kind.startswith(("q4", "q5")) and name in ("token_embd.weight", "output.weight") else kind


def export(
    model: Transformer,
    tokenizer: Tokenizer,
    path: Path,
    *,
    kind: str = "f16",
    about: Mapping[str, Any] = {},
    answers: bool = True,
) -> VerifiedGguf:
    """Write `path`, a GGUF file (replaced only if this command wrote it), and a Modelfile for Ollama beside it.

    kind: one of TYPES. about: `general.*` keys of the file: name, description, license, languages. answers: the model
    was trained on conversations. The file is read back into a model, which is compared with `model`. If
    llama-cpp-python is installed, llama.cpp is compared too. Raises UserError, and leaves no file, if a check fails or
    llama.cpp cannot compute the model.
    """
    path = Path(path)
    import_extra("gguf", "gguf")
    _check_type(kind, path)
    check_gguf_support(model.config)
    if path.exists() and not gguf_read.is_ours(path):
        raise UserError("exists and was not written by this command", where=path, next_step="Choose another name.")
    vocabulary = vocabulary_of(tokenizer, model.config.vocab_size)
    modelfile = path.with_suffix(".Modelfile")
    with unfinished(path) as partial:
        f16_fallbacks = _write(partial, model, metadata(model.config, vocabulary, about, kind), kind)
        read_back, engine, note = verify(model, tokenizer, partial, kind)
        if f16_fallbacks:
            note += f"; stored in f16, rows not a multiple of 32: {f16_fallbacks[0]}" + (
                f" and {len(f16_fallbacks) - 1} more" if len(f16_fallbacks) > 1 else ""
            )
        partial.replace(path)
        write_text(modelfile, modelfile_text(path, model.config, tokenizer, answers=answers))
    return VerifiedGguf(path, modelfile, read_back, engine, note)


def _write(path: Path, model: Transformer, values: dict[str, Any], kind: str) -> list[str]:
    """Write the file; returns the tensors that could not be quantised."""
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURES[model.config.architecture])
    for key, value in values.items():
        stored_as = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, stored_as)
    f16_fallbacks = []
    for name, array in tensors(model):
        tensor_type = stored_type(name, array.shape, kind)
        if kind.startswith("q") and tensor_type == "f16":
            f16_fallbacks.append(name)
        stored_as = gguf.GGMLQuantizationType[tensor_type.upper()]
        writer.add_tensor(name, gguf.quants.quantize(array, stored_as), raw_dtype=stored_as)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return f16_fallbacks


def verify(
    model: Transformer, tokenizer: Tokenizer, path: Path, kind: str
) -> tuple[check.LogitDifference, check.LogitDifference | None, str]:
    """Read `path` back and compare it with `model`: with our code, and with llama.cpp if it is installed.

    Returns both differences (None without llama.cpp) and a line about them. Raises UserError if ids, logits or, for
    unquantised files, greedy text differ beyond BOUNDS.
    """
    float_model = check.float_copy(model)
    rebuilt, rebuilt_tokenizer = gguf_read.rebuild(path)
    for text in check.CHECK_TEXTS:
        if rebuilt_tokenizer.encode(text) != tokenizer.encode(text):
            raise UserError("the tokenizer read back gives different ids", where=path, got=repr(text))
    config = model.config
    rows = check.check_rows(tokenizer, config.max_position_embeddings)
    logits, rebuilt_logits = check.row_logits(float_model, rows), check.row_logits(rebuilt, rows)
    read_back = check.difference(rows, logits, rebuilt_logits)
    bound, divergence = BOUNDS[kind]
    if not read_back.within(bound, divergence, is_mixture=config.is_mixture):
        if math.isfinite(bound):
            raise UserError("the model read back computes different logits", where=path, got=read_back.line())
        wanted = f"KL of at most {divergence:g} nats"
        hint = "Choose a type with more bits."
        raise UserError(f"{kind} loses too much", where=path, got=read_back.line(), wanted=wanted, next_step=hint)
    note = f"read back: {read_back.line()}"
    prompt, max_new_tokens = check.greedy_prompt(rows, config.max_position_embeddings)
    stop = tokenizer.stop
    output = llama_cpp.run_llama_cpp(
        path, rows, check.CHECK_TEXTS, prompt=prompt, max_new_tokens=max_new_tokens, stop=stop
    )
    if output is None:
        return read_back, None, note + '; llama.cpp not compared (pip install "penjing[llama]")'
    for text, ids in zip(check.CHECK_TEXTS, output.ids, strict=True):
        if ids != tokenizer.encode(text):
            raise UserError("llama.cpp gives different ids than our tokenizer", where=path, got=repr(text))
    is_quantised = kind not in ENGINE_BOUNDS
    engine = check.difference(rows, rebuilt_logits if is_quantised else logits, output.logits)
    bound, divergence = ENGINE_BOUNDS.get(kind, ENGINE_QUANTISED_BOUND)
    if not engine.within(bound, divergence, is_mixture=config.is_mixture):
        raise UserError("llama.cpp computes different logits", where=path, got=engine.line())
    note += f"; llama.cpp: {engine.line()}, ids equal"
    if is_quantised:
        return read_back, engine, note
    tolerance = 2 * bound * max(1.0, engine.spread)
    if not check.is_greedy(
        float_model, prompt, output.greedy, stop, max_new_tokens=max_new_tokens, tolerance=tolerance
    ):
        raise UserError("llama.cpp generates a different text", where=path)
    return read_back, engine, note + ", greedy text equal"


def modelfile_text(path: Path, config: ModelConfig, tokenizer: Tokenizer, *, answers: bool = True) -> str:
    """The file for `ollama create NAME -f FILE`. Ollama uses the template in a GGUF file only if it knows it. answers:
    the model was trained on conversations; another one continues the prompt as it is."""
    template = "{{ .Prompt }}"
    if answers and tokenizer.is_ours:
        template = (
            "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
        )
    elif answers and tokenizer.template:
        template = _ollama_template(tokenizer)
    lines = [f"FROM ./{path.name}", f'TEMPLATE """{template}"""']
    lines += [f'PARAMETER stop "{tokenizer.token(index)}"' for index in sorted(tokenizer.stop)]
    lines += [f"PARAMETER num_ctx {config.max_position_embeddings}", ""]
    return "\n".join(lines)


def _ollama_template(tokenizer: Tokenizer) -> str:
    """An external chat template in Ollama's language, from what it writes around a system text, a question and an
    answer. Ollama applies it to each exchange. llama.cpp adds the token that begins a text."""
    system, question, answer = ("\ue010s\ue011", "\ue010q\ue011", "\ue010a\ue011")

    def written(*turns: tuple[Literal["system", "user", "assistant"], str]) -> str:
        messages = [Message(role=role, content=text) for role, text in turns]
        names, ask = dict(tokenizer.roles.names), turns[-1][0] == "user"
        text = run_template(tokenizer.template, messages, (), names, ask=ask, thinking=False)
        return text.removeprefix(tokenizer.token(tokenizer.begin))

    before, _, after = written(("user", question)).partition(question)
    _, _, end = written(("user", question), ("assistant", answer)).partition(answer)
    try:
        head, _, rest = written(("system", system), ("user", question)).partition(system)
        between = rest.partition(question)[0]
        before = f"{{{{ if .System }}}}{head}{{{{ .System }}}}{between}{{{{ else }}}}{before}{{{{ end }}}}"
    except UserError:  # a template without system texts
        pass
    return f"{before}{{{{ .Prompt }}}}{after}{{{{ .Response }}}}{end}"

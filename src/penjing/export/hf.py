"""A Hugging Face directory that stock `transformers` loads without remote code, verified before it gets its name."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import disk_error, write_json
from penjing.checkpoint.save import write_tensors
from penjing.infer.engine import generate
from penjing.model.config import ModelConfig
from penjing.model.linear import set_compute_dtype
from penjing.model.transformer import Transformer
from penjing.text.tokenizer import Tokenizer

CLASSES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# Logits of a model of this size agree to about 1e-6 in float32; a wrong layout is off by more than 1.
LARGEST_DIFFERENCE = 1e-3
_RENAMED = (
    ("embed.", "model.embed_tokens."),
    ("blocks.", "model.layers."),
    (".input_norm.", ".input_layernorm."),
    (".attention.", ".self_attn."),
    (".mlp_norm.", ".post_attention_layernorm."),
    ("head.", "lm_head."),
)


@dataclass(frozen=True, slots=True)
class Verified:
    """What the check found. `largest_difference` is None when `transformers` was not there to compare with."""

    path: Path
    largest_difference: float | None
    note: str


def hf_name(name: str) -> str:
    """Our parameter name as `transformers` calls it."""
    if name.startswith("norm."):
        return "model." + name
    for ours, theirs in _RENAMED:
        if ours.startswith("."):
            name = name.replace(ours, theirs)
        elif name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return name


def hf_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json for the stock class of this architecture."""
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_tokens,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.embeddings == "tied",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.end_of_text,
        "eos_token_id": tokenizer.message_end,
        "pad_token_id": tokenizer.end_of_text,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under their `transformers` names; a tied head is not repeated."""
    return {hf_name(name): value.detach().cpu().float().contiguous() for name, value in model.state_dict().items()}


def export(model: Transformer, tokenizer: Tokenizer, path: Path, *, card: str) -> Verified:
    """Write `path` (replaced only if it was an export before) after checking it against our own logits.

    Raises UserError if the check fails or `path` holds something else; then nothing is left behind.
    """
    path = Path(path)
    if path.exists() and not (path / "penjing_export.json").is_file():
        raise UserError("is there and was not made by this command", where=path, next_step="Choose another folder.")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_json(partial / "config.json", hf_config(model.config, tokenizer))
        write_json(
            partial / "generation_config.json",
            {
                "bos_token_id": tokenizer.end_of_text,
                "eos_token_id": [tokenizer.message_end, tokenizer.end_of_text],
                "pad_token_id": tokenizer.end_of_text,
            },
        )
        write_tensors(partial / "model.safetensors", hf_weights(model), metadata={"format": "pt"})
        tokenizer.save(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        difference, note = verify(model, tokenizer, partial)
        write_json(partial / "penjing_export.json", {"largest_logit_difference": difference, "note": note})
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(error, path) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Verified(path, difference, note)


def verify(model: Transformer, tokenizer: Tokenizer, folder: Path) -> tuple[float | None, str]:
    """Load `folder` with stock transformers and compare logits and greedy text with ours, in float32.

    Returns the largest difference of any logit, or None where transformers is not installed, and a line about it.
    Raises UserError if ids, logits or text differ. `model` is left as it is, wherever it is.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        return None, 'not compared: transformers is not installed (pip install "penjing[hf]")'
    logging.disable_progress_bar()  # a bar of its own for a model that loads in a blink
    model = copy.deepcopy(model).cpu()
    set_compute_dtype(model, None)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Once upon a time, Mia had 3 apples. 从前，小明有一只风筝。 def f(x): return x + 1"
    ids = tokenizer.encode(text)
    if their_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
        raise UserError("the exported tokenizer gives other ids than ours", where=folder)
    ids_BT = torch.tensor([[tokenizer.end_of_text, *ids]])
    with torch.no_grad():
        difference = float((theirs(ids_BT).logits - model(ids_BT)).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(
            "the exported model does not compute the same", where=folder, got=f"logits off by {difference:.3g}"
        )
    stop = {tokenizer.message_end, tokenizer.end_of_text}
    opening_BT = ids_BT[:, : min(12, model.config.max_tokens // 2)]
    length = opening_BT.shape[1]
    longest = min(24, model.config.max_tokens - length)
    ours = generate(model, opening_BT.tolist(), max_new_tokens=longest, stop=stop)[0]
    their_ids_BT = theirs.generate(opening_BT, max_new_tokens=longest, do_sample=False, eos_token_id=list(stop))
    written = their_ids_BT[0, length:].tolist()
    if [index for index in written if index not in stop] != ours:
        raise UserError("the exported model writes another text than ours", where=folder)
    return difference, f"logits equal to within {difference:.1e} of stock transformers, greedy text equal"

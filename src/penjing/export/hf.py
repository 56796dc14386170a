"""A Hugging Face directory that stock `transformers` loads without remote code, verified before it gets its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penjing.base.errors import UserError
from penjing.base.files import write_json
from penjing.checkpoint.tensors import write_tensors
from penjing.convert.hf_config import hf_config
from penjing.convert.names import to_hf
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.equivalence_check import MARK, VerifiedFolder, export_folder, float_twin, greedy_prompt, same_greedy
from penjing.infer.generate import generate
from penjing.model.transformer import Transformer

# Logits of a model of this size agree to about 1e-6 in float32; a wrong layout is off by more than 1.
LARGEST_DIFFERENCE = 1e-3


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids that generation_config.json names: what opens a text, what ends one, what fills up rows."""
    names = dict(tokenizer.roles.names)
    return {
        "bos_token_id": tokenizer.control(names["bos_token"]) if "bos_token" in names else tokenizer.begin,
        # Either ends an answer; the end of a turn comes first, for programs that read one id only.
        "eos_token_id": [tokenizer.message_end, *sorted(tokenizer.stop - {tokenizer.message_end})],
        "pad_token_id": tokenizer.control(names["pad_token"]) if "pad_token" in names else tokenizer.end_of_text,
    }


def export(model: Transformer, tokenizer: Tokenizer, path: Path, *, card: str) -> VerifiedFolder:
    """Write `path` (replaced only if it was an export before) after checking it against our own logits.

    Raises UserError if the check fails or `path` holds something else; then nothing is left behind.
    """
    path = Path(path)
    with export_folder(path) as folder:
        ids = token_ids(tokenizer)
        single = {**ids, "eos_token_id": tokenizer.message_end}
        write_json(folder / "config.json", {**hf_config(model.config, tokenizer), **single})
        write_json(folder / "generation_config.json", ids)
        write_tensors(folder / "model.safetensors", to_hf(model.state_dict(), model.config), metadata={"format": "pt"})
        tokenizer.save(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        difference, note = verify(model, tokenizer, folder)
        write_json(folder / MARK, {"largest_logit_difference": difference, "note": note})
    return VerifiedFolder(path, difference, note)


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
    model = float_twin(model)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Once upon a time, Mia had 3 apples. 从前，小明有一只风筝。 def f(x): return x + 1"
    ids = tokenizer.encode(text)
    if their_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
        raise UserError("the exported tokenizer gives other ids than ours", where=folder)
    ids_BT = torch.tensor([[tokenizer.begin, *ids]])
    with torch.no_grad():
        difference = float((theirs(ids_BT).logits - model(ids_BT)).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(
            "the exported model does not compute the same", where=folder, got=f"logits off by {difference:.3g}"
        )
    stop = tokenizer.stop
    prompt, longest = greedy_prompt(ids_BT.tolist(), model.config.max_position_embeddings)
    ours = generate(model, [prompt], max_new_tokens=longest, stop=stop)[0]
    their_ids_BT = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=longest, do_sample=False, eos_token_id=list(stop)
    )
    written = [index for index in their_ids_BT[0, len(prompt) :].tolist() if index not in stop]
    # Where two logits are all but equal rounding decides, and either text is right.
    if written != ours and not same_greedy(model, prompt, written, stop, longest=longest, tolerance=LARGEST_DIFFERENCE):
        raise UserError("the exported model writes another text than ours", where=folder)
    return difference, f"logits equal to within {difference:.1e} of stock transformers, greedy text equal"

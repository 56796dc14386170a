"""Write a Hugging Face directory that `transformers` loads without remote code; verified before it gets its name."""

from pathlib import Path
from typing import Any

import torch

from penjing.base.errors import UserError
from penjing.base.files import write_json
from penjing.checkpoint.tensors import write_tensors
from penjing.convert.hf_config import hf_config
from penjing.convert.names import to_hf
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.equivalence_check import MARKER, VerifiedFolder, export_folder, float_copy, greedy_prompt, is_greedy
from penjing.infer.generate import generate
from penjing.model.transformer import Transformer

# Logits of a model of this size agree to about 1e-6 in float32; a wrong layout is off by more than 1.
LARGEST_DIFFERENCE = 1e-3


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The special token ids of generation_config.json: start of a text, end, padding."""
    names = dict(tokenizer.roles.names)
    return {
        "bos_token_id": tokenizer.control(names["bos_token"]) if "bos_token" in names else tokenizer.begin,
        # Each of them ends an answer; the end of a turn comes first, for programs that read one id only.
        "eos_token_id": [tokenizer.message_end, *sorted(tokenizer.stop - {tokenizer.message_end})],
        "pad_token_id": tokenizer.control(names["pad_token"]) if "pad_token" in names else tokenizer.end_of_text,
    }


def export(model: Transformer, tokenizer: Tokenizer, path: Path, *, card: str) -> VerifiedFolder:
    """Write `path` (replaced only if it is an export) after comparing it with our logits. Raises UserError, and leaves
    no folder, if the check fails or `path` holds something else."""
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
        write_json(folder / MARKER, {"largest_logit_difference": difference, "note": note})
    return VerifiedFolder(path, difference, note)


def verify(model: Transformer, tokenizer: Tokenizer, folder: Path) -> tuple[float | None, str]:
    """Load `folder` with transformers and compare logits and greedy text with ours, in float32.

    Returns the largest logit difference, or None if transformers is not installed, and a line about it. Raises
    UserError if ids, logits or text differ. `model` is not changed or moved.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        return None, 'not compared: transformers is not installed (pip install "penjing[hf]")'
    logging.disable_progress_bar()  # the model loads at once
    model = float_copy(model)
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hf_tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Once upon a time, Mia had 3 apples. 从前，小明有一只风筝。 def f(x): return x + 1"
    ids = tokenizer.encode(text)
    if hf_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
        raise UserError("the exported tokenizer gives different ids", where=folder)
    ids_BT = torch.tensor([[tokenizer.begin, *ids]])
    with torch.no_grad():
        difference = float((hf_model(ids_BT).logits - model(ids_BT)).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(
            "the exported model computes different logits", where=folder, got=f"logits off by {difference:.3g}"
        )
    stop = tokenizer.stop
    prompt, max_new_tokens = greedy_prompt(ids_BT.tolist(), model.config.max_position_embeddings)
    our_ids = generate(model, [prompt], max_new_tokens=max_new_tokens, stop=stop)[0]
    hf_ids_BT = hf_model.generate(
        torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(stop)
    )
    new_ids = [index for index in hf_ids_BT[0, len(prompt) :].tolist() if index not in stop]
    # If two logits are almost equal, rounding decides, and either text is right.
    if new_ids != our_ids and not is_greedy(
        model, prompt, new_ids, stop, max_new_tokens=max_new_tokens, tolerance=LARGEST_DIFFERENCE
    ):
        raise UserError("the exported model generates a different text", where=folder)
    return difference, f"logits equal to within {difference:.1e} of stock transformers, greedy text equal"

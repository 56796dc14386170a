"""An ONNX graph, token ids to logits, for programs without torch; verified with onnxruntime before it gets its name."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from penjing.base.errors import UserError, suggest
from penjing.base.files import write_json
from penjing.convert.hf_config import hf_config
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export.equivalence_check import (
    MARK,
    LogitDifference,
    VerifiedFolder,
    check_rows,
    difference,
    export_folder,
    float_twin,
    greedy_prompt,
    row_logits,
    same_greedy,
)
from penjing.export.hf import token_ids
from penjing.model.moe import moe_layers
from penjing.model.transformer import Transformer

TYPES = ("f32", "int8")
# Largest difference of a logit of spread 1, and KL in nats per position: float32 agrees to about 1e-6 of the spread.
BOUNDS = {"f32": (1e-3, 1e-6), "int8": (float("inf"), 0.1)}
# Beyond this a protobuf message is near its limit of 2 GiB, and weights go to a file beside the graph.
LARGEST_MESSAGE_BYTES = 1_500_000_000
NAME = "model.onnx"


class _Logits(nn.Module):
    """The model as one function of its ids."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        # Whether a window is shorter than the row would be decided while tracing; with documents it is always a mask.
        document_BT = torch.zeros_like(ids_BT) if self.model.config.sliding_window else None
        logits_BTV: Tensor = self.model(ids_BT, document_BT)
        return logits_BTV


def export(model: Transformer, tokenizer: Tokenizer, path: Path, *, kind: str = "f32") -> VerifiedFolder:
    """Write the folder `path` (replaced only if it was an export before): model.onnx, tokenizer, config.json.

    The graph takes `input_ids` [batch, length] and gives `logits` [batch, length, vocabulary] in float32, for any batch
    and length, without a cache. kind: f32, or int8 for matrices of 8 bits. A mixture computes all its experts for every
    token: a graph has no sizes that depend on its data.
    Raises UserError, and leaves nothing behind, if a package is missing, the disk refuses, or the check fails.
    """
    path = Path(path)
    if kind not in TYPES:
        raise UserError("no such type", where="--type", got=kind, next_step=suggest(kind, TYPES))
    if kind == "int8" and model.config.is_mixture:
        raise UserError(
            "onnxruntime's quantiser does not read the graph of a mixture",
            where="--type",
            got=kind,
            next_step="`penjing export gguf --type q8_0` writes 8 bits.",
        )
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"the {error.name} package is needed", next_step='pip install "penjing[onnx]"') from None
    with export_folder(path) as folder:
        _write(float_twin(model), folder, kind)
        tokenizer.save(folder)
        ids = {**token_ids(tokenizer), "eos_token_id": tokenizer.message_end}
        write_json(folder / "config.json", {**hf_config(model.config, tokenizer), **ids})
        found, note = verify(model, tokenizer, folder, kind)
        write_json(folder / MARK, {"largest_logit_difference": found.largest, "note": note})
    return VerifiedFolder(path, found.largest, note)


def _write(model: Transformer, folder: Path, kind: str) -> None:
    for mixture in moe_layers(model):
        mixture.run_all_experts = True
    # Any sizes above 1 will do to trace with: both are names in the graph.
    example_BT = torch.zeros(2, 5, dtype=torch.long)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            _Logits(model).eval(),
            (example_BT,),
            dynamo=True,
            dynamic_shapes=({0: "batch", 1: "length"},),
            input_names=["input_ids"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # where in our source each came from, with the paths of this machine
    weight_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    whole = folder / "whole" if kind == "int8" else folder
    whole.mkdir(exist_ok=True)
    program.save(whole / NAME, external_data=weight_bytes > LARGEST_MESSAGE_BYTES)
    if kind == "int8":
        from onnxruntime.quantization import quantize_dynamic

        wide = weight_bytes > 4 * LARGEST_MESSAGE_BYTES
        with _quiet():
            quantize_dynamic(whole / NAME, folder / NAME, use_external_data_format=wide)
        shutil.rmtree(whole)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' talk of themselves: that torchvision is not there, that torch uses an old name of its own,
    that a graph could be prepared first. What matters is seen by the check."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "root")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def verify(model: Transformer, tokenizer: Tokenizer, folder: Path, kind: str) -> tuple[LogitDifference, str]:
    """Run `folder` in onnxruntime and compare logits, one by one and in a batch, and greedy text with ours.

    Returns the difference and a line about it. Raises UserError if they differ beyond BOUNDS.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / NAME, sess_options=options, providers=["CPUExecutionProvider"])

    def theirs(rows: list[list[int]]) -> Tensor:
        (logits_BTV,) = session.run(["logits"], {"input_ids": torch.tensor(rows).numpy()})
        return torch.from_numpy(logits_BTV)

    ours = float_twin(model)
    rows = check_rows(tokenizer, model.config.max_position_embeddings)
    shortest = min(map(len, rows))
    rows += [row[:shortest] for row in rows] + [rows[0][:1]]
    their_logits = [theirs([row])[0] for row in rows[: len(rows) // 2]]
    their_logits += list(theirs(rows[len(rows) // 2 : -1]))
    their_logits.append(theirs(rows[-1:])[0])
    found = difference(rows, row_logits(ours, rows), their_logits)
    bound, divergence = BOUNDS[kind]
    if not found.within(bound, divergence, is_mixture=False):
        raise UserError(
            "onnxruntime computes something else",
            where=folder,
            got=found.line(),
            wanted=f"KL of at most {divergence:g} nats",
        )
    note = f"onnxruntime: {found.line()}"
    if kind != "f32":
        return found, note
    prompt, longest = greedy_prompt(rows, model.config.max_position_embeddings)
    stop = tokenizer.stop
    written: list[int] = []
    while len(written) < longest and (index := int(theirs([[*prompt, *written]])[0, -1].argmax())) not in stop:
        written.append(index)
    tolerance = bound * max(1.0, found.spread)
    if not same_greedy(ours, prompt, written, stop, longest=longest, tolerance=tolerance):
        raise UserError("onnxruntime writes another text than ours", where=folder)
    return found, note + ", greedy text equal"

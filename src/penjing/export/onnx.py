"""Write an ONNX graph from token ids to logits; verified with onnxruntime before it gets its name."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from penjing.base.errors import UserError, import_extra, suggest
from penjing.base.files import write_json
from penjing.convert.hf_config import hf_config
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export import equivalence_check as check
from penjing.export.hf import token_ids
from penjing.model.moe import moe_layers
from penjing.model.transformer import Transformer

TYPES = ("f32", "int8")
# Largest difference of a logit of spread 1, and KL in nats per position: float32 agrees to about 1e-6 of the spread.
BOUNDS = {"f32": (1e-3, 1e-6), "int8": (float("inf"), 0.1)}
# Above this size weights go to a separate file: a protobuf message is limited to 2 GiB.
LARGEST_MESSAGE_BYTES = 1_500_000_000
NAME = "model.onnx"


class _Logits(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        # Tracing would fix whether a window is shorter than the row; with document ids it is always a mask.
        document_BT = torch.zeros_like(ids_BT) if self.model.config.sliding_window else None
        logits_BTV: Tensor = self.model(ids_BT, document_BT)
        return logits_BTV


def export(model: Transformer, tokenizer: Tokenizer, path: Path, *, kind: str = "f32") -> check.VerifiedFolder:
    """Write the folder `path` (replaced only if it is an export): model.onnx, tokenizer, config.json.

    The graph maps `input_ids` [batch, length] to `logits` [batch, length, vocabulary] in float32, for any batch and
    length, without a KV cache. kind: f32, or int8 for 8-bit matrices. A mixture of experts computes all experts for
    every token, since sizes in a graph cannot depend on data.
    Raises UserError, and leaves no folder, if a package is missing, the disk refuses, or the check fails.
    """
    path = Path(path)
    if kind not in TYPES:
        raise UserError("no such type", where="--dtype", got=kind, next_step=suggest(kind, TYPES))
    if kind == "int8" and model.config.is_mixture:
        what = "onnxruntime's quantiser does not support a mixture of experts"
        raise UserError(what, where="--dtype", got=kind, next_step="`penjing export gguf --dtype q8_0` writes 8 bits.")
    for module in ("onnx", "onnxruntime", "onnxscript"):
        import_extra(module, "onnx")
    with check.export_folder(path) as folder:
        _write(check.float_copy(model), folder, kind)
        tokenizer.save(folder)
        ids = {**token_ids(tokenizer), "eos_token_id": tokenizer.message_end}
        write_json(folder / "config.json", {**hf_config(model.config, tokenizer), **ids})
        logit_difference, note = verify(model, tokenizer, folder, kind)
        write_json(folder / check.MARKER, {"largest_logit_difference": logit_difference.largest, "note": note})
    return check.VerifiedFolder(path, logit_difference.largest, note)


def _write(model: Transformer, folder: Path, kind: str) -> None:
    for mixture in moe_layers(model):
        mixture.run_all_experts = True
    # Any sizes above 1 will do for tracing: both dimensions are dynamic.
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
        node.metadata_props.clear()  # source locations, with paths of this machine
    weight_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    float_folder = folder / "whole" if kind == "int8" else folder
    float_folder.mkdir(exist_ok=True)
    program.save(float_folder / NAME, external_data=weight_bytes > LARGEST_MESSAGE_BYTES)
    if kind == "int8":
        from onnxruntime.quantization import quantize_dynamic

        is_large = weight_bytes > 4 * LARGEST_MESSAGE_BYTES
        with _quiet():
            quantize_dynamic(float_folder / NAME, folder / NAME, use_external_data_format=is_large)
        shutil.rmtree(float_folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' warnings: missing torchvision, deprecated names inside torch, advice to preprocess the graph.
    The check finds real problems."""
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


def verify(model: Transformer, tokenizer: Tokenizer, folder: Path, kind: str) -> tuple[check.LogitDifference, str]:
    """Run `folder` in onnxruntime; compare logits, row by row and in a batch, and greedy text with ours. Returns the
    difference and a line about it. Raises UserError if they differ beyond BOUNDS."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / NAME, sess_options=options, providers=["CPUExecutionProvider"])

    def run_onnx(rows: list[list[int]]) -> Tensor:
        (logits_BTV,) = session.run(["logits"], {"input_ids": torch.tensor(rows).numpy()})
        return torch.from_numpy(logits_BTV)

    float_model = check.float_copy(model)
    rows = check.check_rows(tokenizer, model.config.max_position_embeddings)
    min_length = min(map(len, rows))
    rows += [row[:min_length] for row in rows] + [rows[0][:1]]
    onnx_logits = [run_onnx([row])[0] for row in rows[: len(rows) // 2]]
    onnx_logits += list(run_onnx(rows[len(rows) // 2 : -1]))
    onnx_logits.append(run_onnx(rows[-1:])[0])
    logit_difference = check.difference(rows, check.row_logits(float_model, rows), onnx_logits)
    bound, divergence = BOUNDS[kind]
    if not logit_difference.within(bound, divergence, is_mixture=False):
        what = "onnxruntime computes different logits"
        raise UserError(what, where=folder, got=logit_difference.line(), wanted=f"KL of at most {divergence:g} nats")
    note = f"onnxruntime: {logit_difference.line()}"
    if kind != "f32":
        return logit_difference, note
    prompt, max_new_tokens = check.greedy_prompt(rows, model.config.max_position_embeddings)
    stop = tokenizer.stop
    new_ids: list[int] = []
    while len(new_ids) < max_new_tokens and (index := int(run_onnx([[*prompt, *new_ids]])[0, -1].argmax())) not in stop:
        new_ids.append(index)
    tolerance = bound * max(1.0, logit_difference.spread)
    if not check.is_greedy(float_model, prompt, new_ids, stop, max_new_tokens=max_new_tokens, tolerance=tolerance):
        raise UserError("onnxruntime generates a different text", where=folder)
    return logit_difference, note + ", greedy text equal"

"""Device graphs of decoding: a pass of one token per sequence is recorded once, and then replayed in one launch.

Eagerly the CPU launches hundreds of small kernels for each token, which takes it longer than the GPU computes. A graph
has static shapes and static memory. So the numbers of rows and of keys are rounded up to a few sizes, with a graph for
each pair that is used often. All inputs are copied to the GPU in one transfer before a replay.

A graph that cannot be captured, or whose first replay does not agree with the eager pass on the same inputs, is a
warning, and decoding stays eager.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penjing import devices
from penjing.infer.forward import Ints, on_device
from penjing.model.cast_cache import casted_weights
from penjing.model.lora import adapted
from penjing.model.moe import moe_layers
from penjing.model.transformer import Transformer

# Eager passes of a pair of sizes before its capture, so that a short answer does not pay for one. An estimate: the cost
# of a capture has not been measured on a GPU.
CAPTURE_AFTER = 16
WARM_UPS = 2  # eager passes on the stream of the capture, in which libraries set up what a capture must not
ROW_MULTIPLE = 16  # number of rows above it; below it, powers of two
MIN_KEYS = 128  # least number of keys; above it, powers of two
TOLERANCE = 0.01  # largest difference of a replay from the eager pass, as a fraction of the largest value


class Decoded(NamedTuple):
    """The results of a pass, in the order of its sequences; valid until the next pass."""

    hidden_BD: Tensor
    logits_BV: Tensor


class Key(NamedTuple):
    """What is constant in a graph."""

    rows: int
    keys: int  # positions of the cache that queries attend to
    adapter: int  # index of the adapter of all rows; -1: base model


Decode = Callable[[Tensor, Key], Decoded]


def unavailable_reason(model: Transformer) -> str:
    """Why decoding of this model cannot use device graphs; empty: it can."""
    if not devices.of(model.embed.weight.device).has_graphs:
        return "the model's device records no graphs"
    return unsupported_reason(model)


def unsupported_reason(model: Transformer) -> str:
    """Why a pass of this model cannot be captured on any device; empty: it can."""
    if moe_layers(model):
        return "the data choose the experts, and with them the shapes"
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return "the weights are not plain tensors"
    if any(layer.adapter(name).size.use_dora for layer in adapted(model).values() for name in layer.adapters):
        return "DoRA's cached norms are read outside the graph"
    return ""


def num_rows(sequences: int) -> int:
    """Rows of the graph for so many sequences."""
    if sequences < ROW_MULTIPLE:
        return 1 << (sequences - 1).bit_length()
    return -(-sequences // ROW_MULTIPLE) * ROW_MULTIPLE


def max_padding(sequences: int) -> int:
    """The most padding rows that a pass over up to so many sequences has."""
    return max(num_rows(count) - count for count in range(1, sequences + 1))


def num_keys(tokens: int, max_tokens: int) -> int:
    """Keys of the graph for sequences of up to `tokens` tokens, in a cache of `max_tokens` positions."""
    return min(max_tokens, max(MIN_KEYS, 1 << (tokens - 1).bit_length()))


@dataclass(slots=True)
class _Graph:
    recording: Any  # of the recorder
    weights: list[Tensor]  # casted weights that the recording reads, which must not be freed before it
    is_checked: bool = False  # whether a replay has agreed with the eager pass


class DecodeGraphs:
    """Decoding passes by graphs, captured when a pair of sizes has been used `CAPTURE_AFTER` times.

    decode: the eager pass, from input_3B on the device: token ids, positions, and the row of each sequence. It must
    read nothing else that changes between passes.
    """

    def __init__(self, model: Transformer, decode: Decode, max_rows: int) -> None:
        self._model, self._decode = model, decode
        device = model.embed.weight.device
        self._recorder = devices.of(device).recorder(device)
        self._input = torch.zeros(3 * max_rows, dtype=torch.long, device=device)
        # All graphs write here: results of their own would take rows x vocabulary x 4 bytes for each of them.
        widths = (model.config.hidden_size, model.config.vocab_size)
        self._output = Decoded(*(torch.zeros(max_rows, width, device=device) for width in widths))
        self._num_passes: Counter[Key] = Counter()
        self._graphs: dict[Key, _Graph] = {}
        self.is_off = False  # after a failure

    def __call__(self, input_3B: Ints, key: Key) -> Decoded:
        static_3B = self._input[: input_3B.size].view(input_3B.shape)
        static_3B.copy_(on_device(input_3B, static_3B.device))
        run = partial(self._decode, static_3B, key)
        if graph := self._graphs.get(key):
            self._recorder.replay(graph.recording)
            return self._static_output(key) if graph.is_checked else self._check(graph, key, run())
        self._num_passes[key] += 1
        if not self.is_off and self._num_passes[key] > CAPTURE_AFTER:
            self._capture(key, run)
        return run()

    def _static_output(self, key: Key) -> Decoded:
        return Decoded(*(buffer[: key.rows] for buffer in self._output))

    def _capture(self, key: Key, run: Callable[[], Decoded]) -> None:
        output = self._static_output(key)

        def run_into_output() -> None:
            for static, result in zip(output, run(), strict=True):
                static.copy_(result)

        self._recorder.warm_up(run)  # an error here, such as out of memory, is the pass's own
        try:
            recording = self._recorder.capture(run_into_output)
        except Exception as error:  # of any kind: eager decoding needs nothing of it
            self._give_up(f"the capture failed: {error}")
        else:
            self._graphs[key] = _Graph(recording, casted_weights(self._model))

    def _check(self, graph: _Graph, key: Key, eager: Decoded) -> Decoded:
        """Compare a graph's first replay with the eager pass on the same inputs, which are not those of its capture.
        The eager pass comes second, so that the cache holds its keys and values."""
        pairs = zip(self._static_output(key), eager, strict=True)
        graph.is_checked = all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in pairs)
        if not graph.is_checked:
            self._give_up("a replay differed from the eager pass")
        return eager

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self.is_off = True
        warnings.warn(f"decoding uses no graphs: {reason}", stacklevel=2)

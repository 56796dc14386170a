"""A decoder's forward pass that writes text, in C (decode.c): weights packed once, then one call for a pass.

A row is one token of one sequence, whose keys and values lie in a slot. Every value of a row is summed in one order,
in float32, whatever else is in the pass. On a processor with AVX512-BF16 all matmuls in bfloat16, attention's too, take
activations rounded to it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_long, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.kernels.cpu import library
from penjing.kernels.cpu.ops import OUT_OF_RANGE, TYPES

PANEL, GROUP, KEYS, PAIR = 16, 32, 64, 2  # as in panels.h and decode.c
MIN_WORK = 1 << 21  # multiplications that are worth one more thread
LINE, LARGE_PAGE, BLOCK = 64, 2 << 20, 64 << 20  # bytes
INT8 = 2  # panels.h's number for it; TYPES has the others


def whole(size: int, of: int = PANEL) -> int:
    """The next multiple."""
    return -(-size // of) * of


# --- what C reads: the structures of decode.c, in its order ----------------------------------------------------------


class _Adapter(ctypes.Structure):
    _fields_ = (("a", c_void_p), ("b", c_void_p), ("gain", c_void_p), ("rank", c_long))


class _Linear(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("adapters", POINTER(_Adapter)),
        *((name, c_long) for name in ("inputs", "outputs", "type")),
    )


_LINEARS = ("qkv", "out", "gate_up", "down", "router", "expert_gate_up", "expert_down")
_GAINS = ("attention_gain", "mlp_gain", "qkv_bias", "query_gain", "key_gain")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in _GAINS),
        *((name, _Linear) for name in _LINEARS),
        *((name, c_long) for name in ("gate_up_step", "down_step")),
        *((name, c_void_p) for name in ("correction", "shared_gate", "keys", "values")),
        *((name, c_long) for name in ("window", "num_experts")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "gain", "cosine", "sine")),
        ("layers", POINTER(_Layer)),
        ("head", _Linear),
        *((name, c_long) for name in ("embedding_type", "cache_type", "num_layers", "width", "query_heads")),
        *((name, c_long) for name in ("key_heads", "head_dim", "pairs", "num_slots", "max_tokens", "vocab_size")),
        *((name, c_long) for name in ("num_adapters", "largest_rank", "num_chosen", "sigmoid", "normalised")),
        *((name, c_float) for name in ("epsilon", "scaling")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("slot", "position", "id", "adapter", "wanted")),
        *((name, c_long) for name in ("rows", "num_wanted")),
        ("logits", c_void_p),
    )


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One adapter of one matrix: scale B A, with A [R, I] and B [O, R]; DoRA's factor of each output."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    gain_O: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Weights of one linear layer: several matrices [O, I] of one input side by side. adapters: for each adapter, by
    number, one for each of the matrices or None."""

    weights_OI: Sequence[Tensor]
    adapters: Sequence[Sequence[LowRank | None]] = ()
    pairs: bool = False  # gate and up: their panels take turns


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture: router_ED in float32, gate_EFD, up_EFD, down_EDF; shared_gate_D of qwen2_moe."""

    router_ED: Tensor
    gate_EFD: Tensor
    up_EFD: Tensor
    down_EDF: Tensor
    correction_E: Tensor | None = None
    shared_gate_D: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One block. gate_up and down: of a dense layer or of the shared expert."""

    attention_gain_D: Tensor
    mlp_gain_D: Tensor
    qkv: Matrix
    out: Matrix
    gate_up: Matrix | None
    down: Matrix | None
    qkv_bias_O: Tensor | None = None
    query_gain_K: Tensor | None = None
    key_gain_K: Tensor | None = None
    experts: Experts | None = None
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a decoder."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    epsilon: float
    num_chosen: int = 0
    sigmoid: bool = False
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """All of a decoder. cosine_SN, sine_SN: the rotary table, a row for each position."""

    embedding_VD: Tensor
    head_VD: Tensor
    gain_D: Tensor
    layers: Sequence[LayerWeights]
    cosine_SN: Tensor
    sine_SN: Tensor


class Decoder:
    """A packed decoder and the keys and values of `num_slots` sequences of up to `max_tokens` tokens.

    precision: of the packed weights, float32, bfloat16 or int8; cache_dtype: of keys and values. threads: that a pass
    may take; as many as torch had when the weights were packed.
    The embedding and gains are the given tensors' own memory where their layout allows it.
    """

    def __init__(
        self,
        shape: Shape,
        weights: DecoderWeights,
        *,
        precision: torch.dtype,
        cache_dtype: torch.dtype,
        num_slots: int,
        max_tokens: int,
    ) -> None:
        found = library.decode_kernels()
        assert found is not None, library.unavailable_decode_reason()
        self._library = found
        self._type = INT8 if precision == torch.int8 else TYPES[precision]
        self._kept: list[Any] = []  # what C points to
        self._place = self._end = 0  # what is free of the last block for weights
        self.num_slots, self.max_tokens, self.vocab_size = num_slots, max_tokens, weights.head_VD.shape[0]
        slot = (num_slots, shape.num_key_value_heads, whole(max_tokens, KEYS))
        count, size = len(weights.layers), shape.head_dim
        pair = PAIR if cache_dtype == torch.bfloat16 else 1  # as panels.h: K / 2, KEYS, 2 and S / 2, K, 2
        self.key_LBGTKS = torch.empty(count, *slot[:2], slot[2] // KEYS, whole(size, pair), KEYS, dtype=cache_dtype)
        self.value_LBGSK = torch.empty(count, *slot, whole(size), dtype=cache_dtype)
        layers = (_Layer * count)(*(self._layer(each, index) for index, each in enumerate(weights.layers)))
        embedding_VD = weights.embedding_VD.detach().contiguous()
        self._decoder = _Decoder(
            embedding=self._keep(embedding_VD),
            gain=self._padded(weights.gain_D),
            cosine=self._keep(weights.cosine_SN.float().contiguous()),
            sine=self._keep(weights.sine_SN.float().contiguous()),
            layers=layers,
            head=self._matrix(Matrix(weights_OI=[weights.head_VD])),
            embedding_type=TYPES[embedding_VD.dtype],
            cache_type=TYPES[cache_dtype],
            num_layers=count,
            width=embedding_VD.shape[1],
            query_heads=shape.num_attention_heads,
            key_heads=shape.num_key_value_heads,
            head_dim=size,
            pairs=weights.cosine_SN.shape[1],
            num_slots=num_slots,
            max_tokens=max_tokens,
            vocab_size=self.vocab_size,
            num_adapters=len(weights.layers[0].qkv.adapters),
            largest_rank=max((whole(each.rank) for each in self._adapters()), default=0),
            num_chosen=shape.num_chosen,
            sigmoid=shape.sigmoid,
            normalised=shape.norm_topk_prob,
            epsilon=shape.epsilon,
            scaling=shape.routed_scaling_factor,
        )
        self._layers = layers
        self._work = self._multiplications(shape.num_chosen)
        self._address = ctypes.addressof(self._decoder)
        self._pass = found.decode_open(self._address)
        if not self._pass:
            raise MemoryError("no memory for a pass")
        weakref.finalize(self, _close, found, self._pass, self._decoder, self._kept)
        self.threads = torch.get_num_threads()
        self._rows = _Rows()
        self._rows_address = ctypes.addressof(self._rows)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        slot_N: np.ndarray,
        position_N: np.ndarray,
        id_N: np.ndarray,
        wanted_R: np.ndarray,
        adapter_N: np.ndarray | None = None,
    ) -> Tensor:
        """logits_RV in float32 after the rows `wanted_R`; every row's key and value are in its slot thereafter.

        Rows of one slot stand side by side, positions ascending, and what came before has been read. adapter_N: its
        number in `Matrix.adapters`, -1 for none. Raises IndexError for a number that is out of range.
        """
        given = [np.ascontiguousarray(each, dtype=np.int32) for each in (slot_N, position_N, id_N, wanted_R)]
        adapters = None if adapter_N is None else np.ascontiguousarray(adapter_N, dtype=np.int32)
        outputs = self._decoder.head.outputs
        logits_RV = torch.empty(len(wanted_R), outputs)
        rows = self._rows
        rows.slot, rows.position, rows.id, rows.wanted = (each.ctypes.data for each in given)
        rows.adapter = None if adapters is None else adapters.ctypes.data
        rows.rows, rows.num_wanted, rows.logits = len(slot_N), len(wanted_R), logits_RV.data_ptr()
        threads = max(1, min(self.threads, len(slot_N) * self._work // MIN_WORK))
        needed = self._library.decode_bytes(self._address, max(len(slot_N), len(wanted_R)), threads)
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8)
        if self._library.decode(self._pass, self._rows_address, self._memory.data_ptr(), threads) == OUT_OF_RANGE:
            raise IndexError("a slot, position, id, adapter or wanted row is out of range")
        return logits_RV if outputs == self.vocab_size else logits_RV[:, : self.vocab_size]

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy keys and values of the first `tokens` positions from one slot to another."""
        tiles, positions = whole(tokens, KEYS) // KEYS, whole(tokens, PAIR)
        self.key_LBGTKS[:, target, :, :tiles] = self.key_LBGTKS[:, source, :, :tiles]
        self.value_LBGSK[:, target, :, :positions] = self.value_LBGSK[:, source, :, :positions]

    # --- packing

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _allocate(self, size: int) -> int:
        """The address of memory for weights, in large pages where the system has them."""
        if self._place + size > self._end:
            block = torch.empty(max(size, BLOCK) + LARGE_PAGE, dtype=torch.uint8)
            self._place = whole(self._keep(block), LARGE_PAGE)
            self._end = block.data_ptr() + block.numel()
            self._library.use_large_pages(self._place, self._end - self._place)
        place, self._place = self._place, self._place + whole(size, LINE)
        return place

    def _padded(self, x: Tensor | None) -> int | None:
        """A vector in float32 with zeros up to a whole panel."""
        if x is None:
            return None
        return self._keep(functional.pad(x.detach().float(), (0, whole(len(x)) - len(x))).contiguous())

    def _multiplications(self, num_chosen: int) -> int:
        """Weights that a row meets on its way."""

        def size(linear: Any) -> int:
            return int(linear.inputs * linear.outputs)

        mixed = sum(size(each.expert_gate_up) + size(each.expert_down) for each in self._layers)
        plain = sum(size(getattr(each, name)) for each in self._layers for name in ("qkv", "out", "gate_up", "down"))
        return plain + num_chosen * mixed + size(self._decoder.head)

    def _adapters(self) -> list[_Adapter]:
        return [each for kept in self._kept if isinstance(kept, ctypes.Array) for each in kept]

    def _layer(self, given: LayerWeights, index: int) -> _Layer:
        layer = _Layer(
            attention_gain=self._padded(given.attention_gain_D),
            mlp_gain=self._padded(given.mlp_gain_D),
            qkv_bias=self._padded(given.qkv_bias_O),
            query_gain=self._padded(given.query_gain_K),
            key_gain=self._padded(given.key_gain_K),
            qkv=self._matrix(given.qkv),
            out=self._matrix(given.out),
            keys=self.key_LBGTKS[index].data_ptr(),
            values=self.value_LBGSK[index].data_ptr(),
            window=given.window,
        )
        if given.gate_up is not None and given.down is not None:
            layer.gate_up, layer.down = self._matrix(given.gate_up), self._matrix(given.down)
        if (experts := given.experts) is not None:
            layer.num_experts = len(experts.router_ED)
            layer.router = self._matrix(Matrix(weights_OI=[experts.router_ED]), TYPES[torch.float32])
            layer.expert_gate_up, layer.gate_up_step = self._stack(experts.gate_EFD, experts.up_EFD)
            layer.expert_down, layer.down_step = self._stack(experts.down_EDF)
            layer.correction = self._padded(experts.correction_E)
            layer.shared_gate = self._padded(experts.shared_gate_D)
        return layer

    def _matrix(self, given: Matrix, kind: int | None = None) -> _Linear:
        kind = self._type if kind is None else kind
        linear = self._panels([given.weights_OI], kind, pairs=given.pairs)[0]
        if given.adapters:
            adapters = (_Adapter * len(given.adapters))(*(self._adapter(given, each) for each in given.adapters))
            self._kept.append(adapters)
            linear.adapters = adapters
        return linear

    def _stack(self, *matrices_EOI: Tensor) -> tuple[_Linear, int]:
        """The first of E matrices in panels, the others behind it, and the bytes from one to the next."""
        stack = [[matrix_EOI[e] for matrix_EOI in matrices_EOI] for e in range(len(matrices_EOI[0]))]
        return self._panels(stack, self._type, pairs=len(matrices_EOI) == 2)

    def _panels(self, stack: Sequence[Sequence[Tensor]], kind: int, *, pairs: bool) -> tuple[_Linear, int]:
        """Matrices, each of several parts, in panels one after another."""
        inputs, sizes = stack[0][0].shape[1], [len(part) for part in stack[0]]
        outputs = 2 * whole(sizes[0]) if pairs else whole(sum(sizes))
        step = outputs // PANEL * _panel_bytes(inputs, kind)
        panels = self._allocate(len(stack) * step)
        if outputs > sum(sizes):
            ctypes.memset(panels, 0, len(stack) * step)
        for number, parts in enumerate(stack):
            for index, part_OI in enumerate(parts):
                source_OI = part_OI.detach().contiguous()
                place = (0, 2, index) if pairs else (sum(sizes[:index]), 1, 0)
                self._library.pack(
                    source_OI.data_ptr(),
                    *source_OI.shape,
                    TYPES[source_OI.dtype],
                    panels + number * step,
                    outputs,
                    *place,
                    kind,
                    torch.get_num_threads(),
                )
        return _Linear(panels=panels, inputs=inputs, outputs=outputs, type=kind), step

    def _adapter(self, matrix: Matrix, parts: Sequence[LowRank | None]) -> _Adapter:
        """The parts' low-rank matrices as one: all A one below another, B with zeros where another part's rank is."""
        ranks = [0 if part is None else len(part.a_RI) for part in parts]
        if not sum(ranks):
            return _Adapter()
        b_parts_OR, gains_O = [], []
        for index, (part, weight_OI) in enumerate(zip(parts, matrix.weights_OI, strict=True)):
            b_OR, gain_O = torch.zeros(len(weight_OI), sum(ranks)), torch.ones(len(weight_OI))
            if part is not None:
                start = sum(ranks[:index])
                b_OR[:, start : start + ranks[index]] = part.scale * part.b_OR.detach().float()
                gain_O = gain_O if part.gain_O is None else part.gain_O.detach().float()
            b_parts_OR.append(b_OR)
            gains_O.append(gain_O)
        a_RI = torch.cat([part.a_RI.detach().float() for part in parts if part is not None])
        plain = TYPES[torch.float32]
        gain = None
        if any(part is not None and part.gain_O is not None for part in parts):
            rows = [functional.pad(gain_O, (0, whole(len(gain_O)) - len(gain_O))).view(-1, PANEL) for gain_O in gains_O]
            gain = self._padded(torch.stack(rows, dim=1).flatten() if matrix.pairs else torch.cat(gains_O))
        return _Adapter(
            a=self._panels([[a_RI]], plain, pairs=False)[0].panels,
            b=self._panels([b_parts_OR], plain, pairs=matrix.pairs)[0].panels,
            gain=gain,
            rank=sum(ranks),
        )


def _close(found: Any, opened: int, *_kept: Any) -> None:
    """Ends a decoder's threads; what they read is kept until then."""
    found.decode_close(opened)


def _panel_bytes(inputs: int, kind: int) -> int:
    if kind == INT8:
        return whole(inputs, GROUP) // GROUP * (2 * PANEL + GROUP * PANEL)
    return PANEL * (2 * whole(inputs, PAIR) if kind == TYPES[torch.bfloat16] else 4 * inputs)

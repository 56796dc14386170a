"""A decoder's forward pass for generation, in C (decode.c): weights are packed once; then each pass is one call.

A row is one token of one sequence, whose keys and values are in a slot. Every value of a row is summed in a fixed
order, in float32, whatever else is in the batch. On processors with AVX512-BF16 all bfloat16 matmuls, attention's too,
round activations to bfloat16.
"""

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
MIN_WORK = 1 << 21  # multiplications per thread; with fewer, more threads do not pay
CACHE_LINE, LARGE_PAGE, BLOCK = 64, 2 << 20, 64 << 20  # bytes
INT8 = 2  # as panels.h numbers it; TYPES has the others


def round_up(size: int, of: int = PANEL) -> int:
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
        *((name, c_void_p) for name in ("slot", "position", "id", "adapter", "logit_row")),
        *((name, c_long) for name in ("rows", "num_logit_rows")),
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
    """Weights of one linear layer: one or more matrices [O, I] with the same input. adapters: for each adapter
    number, the low-rank part of each matrix, or None."""

    weights_OI: Sequence[Tensor]
    adapters: Sequence[Sequence[LowRank | None]] = ()
    pairs: bool = False  # gate and up: their panels alternate


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: router_ED in float32, gate_EFD, up_EFD, down_EDF; shared_gate_D of qwen2_moe."""

    router_ED: Tensor
    gate_EFD: Tensor
    up_EFD: Tensor
    down_EDF: Tensor
    correction_E: Tensor | None = None
    shared_gate_D: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One block. gate_up, down: of a dense layer or the shared expert."""

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
    """All weights of a decoder. cosine_SN, sine_SN: the rotary table, a row per position."""

    embedding_VD: Tensor
    head_VD: Tensor
    gain_D: Tensor
    layers: Sequence[LayerWeights]
    cosine_SN: Tensor
    sine_SN: Tensor


class Decoder:
    """A packed decoder with a key/value cache for `num_slots` sequences of up to `max_tokens` tokens.

    precision: of the packed weights, float32, bfloat16 or int8; cache_dtype: of keys and values. threads: the most
    of a pass; initially torch's number. Embedding and gains share the tensors' memory where their layout allows it.
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
        lib = library.decode_kernels()
        assert lib is not None, library.unavailable_decode_reason()
        self._library = lib
        self._type = INT8 if precision == torch.int8 else TYPES[precision]
        self._buffers: list[Any] = []  # memory that C points to
        self._free_start = self._free_end = 0  # the free part of the last block for weights
        self.num_slots, self.max_tokens, self.vocab_size = num_slots, max_tokens, weights.head_VD.shape[0]
        slot = (num_slots, shape.num_key_value_heads, round_up(max_tokens, KEYS))
        count, size = len(weights.layers), shape.head_dim
        pair = PAIR if cache_dtype == torch.bfloat16 else 1  # as panels.h: K / 2, KEYS, 2 and S / 2, K, 2
        self.key_LBGTKS = torch.empty(count, *slot[:2], slot[2] // KEYS, round_up(size, pair), KEYS, dtype=cache_dtype)
        self.value_LBGSK = torch.empty(count, *slot, round_up(size), dtype=cache_dtype)
        layers = (_Layer * count)(*(self._layer(layer, index) for index, layer in enumerate(weights.layers)))
        embedding_VD = weights.embedding_VD.detach().contiguous()
        self._decoder = _Decoder(
            embedding=self._hold(embedding_VD),
            gain=self._pad(weights.gain_D),
            cosine=self._hold(weights.cosine_SN.float().contiguous()),
            sine=self._hold(weights.sine_SN.float().contiguous()),
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
            largest_rank=max((round_up(adapter.rank) for adapter in self._adapters()), default=0),
            num_chosen=shape.num_chosen,
            sigmoid=shape.sigmoid,
            normalised=shape.norm_topk_prob,
            epsilon=shape.epsilon,
            scaling=shape.routed_scaling_factor,
        )
        self._layers = layers
        self._work = self._multiplications(shape.num_chosen)
        self._address = ctypes.addressof(self._decoder)
        self._pass = lib.decode_open(self._address)
        if not self._pass:
            raise MemoryError("no memory for a pass")
        weakref.finalize(self, _close, lib, self._pass, self._decoder, self._buffers)
        self.threads = torch.get_num_threads()
        self._rows = _Rows()
        self._rows_address = ctypes.addressof(self._rows)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        slot_N: np.ndarray,
        position_N: np.ndarray,
        id_N: np.ndarray,
        logit_row_R: np.ndarray,
        adapter_N: np.ndarray | None = None,
    ) -> Tensor:
        """logits_RV in float32 of the rows `logit_row_R`; writes every row's key and value to its slot.

        Rows of one slot must be adjacent, with ascending positions; earlier positions must be in the cache. adapter_N:
        number in `Matrix.adapters`, -1 for none. Raises IndexError for a number out of range.
        """
        arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in (slot_N, position_N, id_N, logit_row_R)]
        adapters = None if adapter_N is None else np.ascontiguousarray(adapter_N, dtype=np.int32)
        outputs = self._decoder.head.outputs
        logits_RV = torch.empty(len(logit_row_R), outputs)
        rows = self._rows
        rows.slot, rows.position, rows.id, rows.logit_row = (array.ctypes.data for array in arrays)
        rows.adapter = None if adapters is None else adapters.ctypes.data
        rows.rows, rows.num_logit_rows, rows.logits = len(slot_N), len(logit_row_R), logits_RV.data_ptr()
        threads = max(1, min(self.threads, len(slot_N) * self._work // MIN_WORK))
        num_bytes = self._library.decode_bytes(self._address, max(len(slot_N), len(logit_row_R)), threads)
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if self._library.decode(self._pass, self._rows_address, self._memory.data_ptr(), threads) == OUT_OF_RANGE:
            raise IndexError("a slot, position, id, adapter or logit row is out of range")
        return logits_RV if outputs == self.vocab_size else logits_RV[:, : self.vocab_size]

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy keys and values of the first `tokens` positions from one slot to another."""
        tiles, positions = round_up(tokens, KEYS) // KEYS, round_up(tokens, PAIR)
        self.key_LBGTKS[:, target, :, :tiles] = self.key_LBGTKS[:, source, :, :tiles]
        self.value_LBGSK[:, target, :, :positions] = self.value_LBGSK[:, source, :, :positions]

    # --- packing

    def _hold(self, tensor: Tensor) -> int:
        self._buffers.append(tensor)
        return tensor.data_ptr()

    def _allocate(self, size: int) -> int:
        """Allocate memory for weights, in huge pages if available; returns the address."""
        if self._free_start + size > self._free_end:
            block = torch.empty(max(size, BLOCK) + LARGE_PAGE, dtype=torch.uint8)
            self._free_start = round_up(self._hold(block), LARGE_PAGE)
            self._free_end = block.data_ptr() + block.numel()
            self._library.use_large_pages(self._free_start, self._free_end - self._free_start)
        start, self._free_start = self._free_start, self._free_start + round_up(size, CACHE_LINE)
        return start

    def _pad(self, x: Tensor | None) -> int | None:
        """A float32 vector, padded with zeros to full panels."""
        if x is None:
            return None
        return self._hold(functional.pad(x.detach().float(), (0, round_up(len(x)) - len(x))).contiguous())

    def _multiplications(self, num_chosen: int) -> int:
        """The number of weights that a row is multiplied with."""

        def size(linear: Any) -> int:
            return int(linear.inputs * linear.outputs)

        experts = sum(size(layer.expert_gate_up) + size(layer.expert_down) for layer in self._layers)
        dense = sum(size(getattr(layer, name)) for layer in self._layers for name in ("qkv", "out", "gate_up", "down"))
        return dense + num_chosen * experts + size(self._decoder.head)

    def _adapters(self) -> list[_Adapter]:
        return [adapter for item in self._buffers if isinstance(item, ctypes.Array) for adapter in item]

    def _layer(self, weights: LayerWeights, index: int) -> _Layer:
        layer = _Layer(
            attention_gain=self._pad(weights.attention_gain_D),
            mlp_gain=self._pad(weights.mlp_gain_D),
            qkv_bias=self._pad(weights.qkv_bias_O),
            query_gain=self._pad(weights.query_gain_K),
            key_gain=self._pad(weights.key_gain_K),
            qkv=self._matrix(weights.qkv),
            out=self._matrix(weights.out),
            keys=self.key_LBGTKS[index].data_ptr(),
            values=self.value_LBGSK[index].data_ptr(),
            window=weights.window,
        )
        if weights.gate_up is not None and weights.down is not None:
            layer.gate_up, layer.down = self._matrix(weights.gate_up), self._matrix(weights.down)
        if (experts := weights.experts) is not None:
            layer.num_experts = len(experts.router_ED)
            layer.router = self._matrix(Matrix(weights_OI=[experts.router_ED]), TYPES[torch.float32])
            layer.expert_gate_up, layer.gate_up_step = self._stack(experts.gate_EFD, experts.up_EFD)
            layer.expert_down, layer.down_step = self._stack(experts.down_EDF)
            layer.correction = self._pad(experts.correction_E)
            layer.shared_gate = self._pad(experts.shared_gate_D)
        return layer

    def _matrix(self, matrix: Matrix, dtype_id: int | None = None) -> _Linear:
        dtype_id = self._type if dtype_id is None else dtype_id
        linear = self._panels([matrix.weights_OI], dtype_id, pairs=matrix.pairs)[0]
        if matrix.adapters:
            adapters = (_Adapter * len(matrix.adapters))(*(self._adapter(matrix, parts) for parts in matrix.adapters))
            self._buffers.append(adapters)
            linear.adapters = adapters
        return linear

    def _stack(self, *matrices_EOI: Tensor) -> tuple[_Linear, int]:
        """E packed matrices: the first one, and the bytes from each to the next."""
        stack = [[matrix_EOI[e] for matrix_EOI in matrices_EOI] for e in range(len(matrices_EOI[0]))]
        return self._panels(stack, self._type, pairs=len(matrices_EOI) == 2)

    def _panels(self, stack: Sequence[Sequence[Tensor]], dtype_id: int, *, pairs: bool) -> tuple[_Linear, int]:
        """Pack a stack of matrices, each of several parts, into consecutive panels."""
        inputs, sizes = stack[0][0].shape[1], [len(part) for part in stack[0]]
        outputs = 2 * round_up(sizes[0]) if pairs else round_up(sum(sizes))
        step = outputs // PANEL * _panel_bytes(inputs, dtype_id)
        panels = self._allocate(len(stack) * step)
        if outputs > sum(sizes):
            ctypes.memset(panels, 0, len(stack) * step)
        for number, parts in enumerate(stack):
            for index, part_OI in enumerate(parts):
                source_OI = part_OI.detach().contiguous()
                position = (0, 2, index) if pairs else (sum(sizes[:index]), 1, 0)
                self._library.pack(
                    source_OI.data_ptr(),
                    *source_OI.shape,
                    TYPES[source_OI.dtype],
                    panels + number * step,
                    outputs,
                    *position,
                    dtype_id,
                    torch.get_num_threads(),
                )
        return _Linear(panels=panels, inputs=inputs, outputs=outputs, type=dtype_id), step

    def _adapter(self, matrix: Matrix, parts: Sequence[LowRank | None]) -> _Adapter:
        """One low-rank matrix of all parts: their A are stacked, their B form a block-diagonal matrix."""
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
        float32 = TYPES[torch.float32]
        gain = None
        if any(part is not None and part.gain_O is not None for part in parts):
            rows = [
                functional.pad(gain_O, (0, round_up(len(gain_O)) - len(gain_O))).view(-1, PANEL) for gain_O in gains_O
            ]
            gain = self._pad(torch.stack(rows, dim=1).flatten() if matrix.pairs else torch.cat(gains_O))
        return _Adapter(
            a=self._panels([[a_RI]], float32, pairs=False)[0].panels,
            b=self._panels([b_parts_OR], float32, pairs=matrix.pairs)[0].panels,
            gain=gain,
            rank=sum(ranks),
        )


def _close(lib: Any, opened: int, *_buffers: Any) -> None:
    """End a decoder's threads; holds the memory that they read until then."""
    lib.decode_close(opened)


def _panel_bytes(inputs: int, dtype_id: int) -> int:
    if dtype_id == INT8:
        return round_up(inputs, GROUP) // GROUP * (2 * PANEL + GROUP * PANEL)
    return PANEL * (2 * round_up(inputs, PAIR) if dtype_id == TYPES[torch.bfloat16] else 4 * inputs)

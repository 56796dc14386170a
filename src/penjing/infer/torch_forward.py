"""The training model with a static KV cache: for accelerators, and for machines without a C compiler."""

from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penjing import devices
from penjing.infer import decode_graphs
from penjing.infer.decode_graphs import Decoded, DecodeGraphs, Key
from penjing.infer.forward import Ints, active_adapter, bytes_per_slot, on_device
from penjing.model.cache import Cache
from penjing.model.cast_cache import cache_casted_weights
from penjing.model.lora import adapter_scope, names
from penjing.model.transformer import Transformer

SPAN_MULTIPLE = 32  # the number of keys is rounded up to it, so that there are few shapes


class TorchForward:
    """`Forward` by `Transformer.hidden`.

    Sequences of one token each are batched as the first rows of the cache. So slots are permuted over the rows of the
    cache, with decoding slots first. graphs: decode with device graphs where possible.
    """

    batch_invariant = False

    def __init__(self, model: Transformer, *, num_slots: int, max_tokens: int, graphs: bool = True) -> None:
        self.model, self.num_slots, self.max_tokens = model, num_slots, max_tokens
        self.vocab_size, self.device = model.config.vocab_size, model.embed.weight.device
        self.adapters = names(model)
        self.active_adapter = active_adapter(model, self.adapters)
        dtype = model.compute_dtype or torch.float32
        self._multiple = devices.of(self.device).row_multiple
        graphs = graphs and not decode_graphs.unavailable_reason(model)
        # Padding rows use extra slots that hold no sequence.
        rows = num_slots + max(self._multiple - 1, decode_graphs.max_padding(num_slots) if graphs else 0)
        positions = _round_up(max_tokens, SPAN_MULTIPLE)
        self.bytes_per_slot = bytes_per_slot(model.config, positions, dtype)
        self._cache = Cache(model.config, rows, positions, device=self.device, dtype=dtype)
        self._row_S, self._slot_R = np.arange(rows), np.arange(rows)
        self._used_S = np.zeros(rows, dtype=np.int64)  # positions ever written
        self._exit_stack = ExitStack()
        was_training = model.training
        self._exit_stack.callback(lambda: model.train(was_training))
        model.eval()  # no dropout
        self._exit_stack.enter_context(cache_casted_weights(model))
        self._graphs = DecodeGraphs(model, self._decode_rows, rows) if graphs else None

    def close(self) -> None:
        self._graphs = None
        self._exit_stack.close()
        del self._cache

    @torch.no_grad()
    def __call__(
        self, slot_N: Ints, position_N: Ints, id_N: Ints, logits_index_R: Ints, adapter_N: Ints | None = None
    ) -> Tensor:
        first_B = np.flatnonzero(np.diff(slot_N, prepend=-1))
        count_B = np.diff(first_B, append=len(slot_N))
        adapter_N = np.full(len(slot_N), self.active_adapter) if adapter_N is None else adapter_N
        graphs = self._graphs if len(set(adapter_N[first_B[count_B == 1]].tolist())) == 1 else None
        if graphs is not None and len(first_B) == len(slot_N):
            logits_NV = self._decode(graphs, slot_N, position_N, id_N, adapter_N).logits_BV
            in_order = len(logits_index_R) == len(slot_N) and (logits_index_R == np.arange(len(slot_N))).all()
            return logits_NV if in_order else logits_NV[on_device(logits_index_R, self.device)]
        hidden_ND = torch.empty(len(slot_N), self.model.config.hidden_size, device=self.device)
        for group_G in self._group_sequences(first_B, count_B):
            row_BT = first_B[group_G][:, None] + np.arange(count_B[group_G[0]])
            group = (slot_N[row_BT[:, 0]], position_N[row_BT[:, 0]], id_N[row_BT], adapter_N[row_BT[:, 0]])
            if graphs is not None and row_BT.shape[1] == 1:
                hidden_BTD = self._decode(graphs, group[0], group[1], group[2][:, 0], group[3]).hidden_BD[:, None]
            else:
                hidden_BTD = self._forward_group(*group)
            hidden_ND[on_device(row_BT, self.device)] = hidden_BTD.float()
        return self._logits(hidden_ND[on_device(logits_index_R, self.device)])

    def _group_sequences(self, first_B: Ints, count_B: Ints) -> list[Ints]:
        """Batches of sequences: those of one token together, the others by length. Where rounding depends on the batch,
        as on a CPU, each longer sequence is a batch of its own."""
        groups = [np.flatnonzero(count_B == 1)]
        longer = np.flatnonzero(count_B > 1)
        if self._multiple > 1:
            groups += [np.array([sequence]) for sequence in longer]
        else:
            groups += [np.flatnonzero(count_B == count) for count in np.unique(count_B[longer])]
        return [group for group in groups if len(group)]

    def _forward_group(self, slot_B: Ints, position_B: Ints, id_BT: Ints, adapter_B: Ints) -> Tensor:
        """hidden_BTD of sequences that continue at their positions."""
        sequences, tokens = id_BT.shape
        padding = _round_up(sequences, self._multiple) - sequences if tokens == 1 else 0
        first = self._make_contiguous([*slot_B.tolist(), *range(self.num_slots, self.num_slots + padding)])
        position_B, id_BT = np.pad(position_B, (0, padding)), np.pad(id_BT, ((0, padding), (0, 0)))
        self._used_S[slot_B] = position_B[:sequences] + tokens
        span = min(self._cache.max_tokens, _round_up(int(position_B.max()) + tokens, SPAN_MULTIPLE))
        cache = _CacheView(self._cache, first, sequences + padding, span, on_device(position_B, self.device))
        with self._adapter_scope(np.pad(adapter_B, (0, padding), constant_values=-1), sequences):
            hidden_BTD = self.model.hidden(on_device(id_BT, self.device), cache=cache)
        return hidden_BTD[:sequences]

    def _decode(self, graphs: DecodeGraphs, slot_B: Ints, position_B: Ints, id_B: Ints, adapter_B: Ints) -> Decoded:
        """One token of each of these sequences, which have the same adapter."""
        sequences, rows = len(slot_B), decode_graphs.num_rows(len(slot_B))
        spare_slots = range(self.num_slots, self.num_slots + rows - sequences)
        self._move_to_first_rows([*slot_B.tolist(), *spare_slots])
        row_B = self._row_S[slot_B]
        input_3B = np.zeros((3, rows), dtype=np.int64)
        input_3B[0, row_B], input_3B[1, row_B], input_3B[2, :sequences] = id_B, position_B, row_B
        self._used_S[slot_B] = position_B + 1
        keys = decode_graphs.num_keys(int(position_B.max()) + 1, self._cache.max_tokens)
        decoded = graphs(input_3B, Key(rows, keys, int(adapter_B[0])))
        return Decoded(decoded.hidden_BD[:sequences], decoded.logits_BV[:sequences])

    def _decode_rows(self, input_3B: Tensor, key: Key) -> Decoded:
        """input_3B: token ids and positions of the first rows of the cache, and the order of the results."""
        id_B, position_B, row_B = input_3B
        cache = _CacheView(self._cache, 0, key.rows, key.keys, position_B.clone())  # the pass adds to its lengths
        with self._adapter_scope(np.full(key.rows, key.adapter), key.rows):
            hidden_BTD = self.model.hidden(id_B[:, None], cache=cache)
        hidden_BD = hidden_BTD[:, 0].index_select(0, row_B)
        return Decoded(hidden_BD, self.model.logits(hidden_BD))

    def _adapter_scope(self, adapter_B: Ints, num_sequences: int) -> AbstractContextManager[None]:
        used_adapters = set(adapter_B[:num_sequences].tolist())
        if used_adapters == {self.active_adapter} or not self.adapters:
            return nullcontext()
        adapter_names = [None if index < 0 else self.adapters[index] for index in adapter_B.tolist()]
        return adapter_scope(self.model, adapter_names[0] if len(used_adapters) == 1 else adapter_names)

    def _make_contiguous(self, slots: list[int]) -> int:
        """Make these slots contiguous rows of the cache, in this order; returns the first row."""
        if len(slots) == 1:
            return int(self._row_S[slots[0]])
        for row, slot in enumerate(slots):
            if self._slot_R[row] != slot:
                self._swap_rows(row, int(self._row_S[slot]))
        return 0

    def _move_to_first_rows(self, slots: list[int]) -> None:
        """Make these slots the first rows of the cache, in any order, with as few moves as possible."""
        row_B = self._row_S[slots]
        is_taken = np.zeros(len(slots), dtype=bool)
        is_taken[row_B[row_B < len(slots)]] = True
        for free_row, row in zip(np.flatnonzero(~is_taken).tolist(), row_B[row_B >= len(slots)].tolist(), strict=True):
            self._swap_rows(free_row, row)

    def _swap_rows(self, first_row: int, second_row: int) -> None:
        slots = self._slot_R[[first_row, second_row]]
        used = int(self._used_S[slots].max())
        for block_LBGSK in (self._cache.key_LBGSK, self._cache.value_LBGSK):
            source_block, target_block = block_LBGSK[:, first_row, :, :used], block_LBGSK[:, second_row, :, :used]
            saved = source_block.clone()
            source_block.copy_(target_block)
            target_block.copy_(saved)
        self._slot_R[[second_row, first_row]] = slots
        self._row_S[slots] = [second_row, first_row]

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        rows = len(hidden_RD)
        padding = _round_up(rows, self._multiple) - rows
        return self.model.logits(functional.pad(hidden_RD, (0, 0, 0, padding)) if padding else hidden_RD)[:rows]

    @torch.no_grad()
    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        source_row, target_row = self._row_S[source], self._row_S[target]
        for block_LBGSK in (self._cache.key_LBGSK, self._cache.value_LBGSK):
            block_LBGSK[:, target_row, :, :tokens] = block_LBGSK[:, source_row, :, :tokens]
        self._used_S[target] = tokens

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Masked positions are multiplied by 0, which does not remove NaN."""
        for block_LBGSK in (self._cache.key_LBGSK, self._cache.value_LBGSK):
            block_LBGSK[:, self._row_S[slot]] = 0


class _CacheView(Cache):
    """Rows of a cache, and their first `span` positions."""

    def __init__(self, cache: Cache, first: int, rows: int, span: int, length_B: Tensor) -> None:
        block = slice(first, first + rows)
        self.key_LBGSK, self.value_LBGSK = cache.key_LBGSK[:, block, :, :span], cache.value_LBGSK[:, block, :, :span]
        self.length_B = length_B


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

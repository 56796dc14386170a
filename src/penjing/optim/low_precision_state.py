"""Formats of optimizer state between steps: float32, bfloat16, or int8 with a scale for each block.

State is read into float32, changed and written back chunk by chunk, so that the float32 copy does not grow with the
model. bfloat16 uses stochastic rounding, which is unbiased.
"""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penjing import devices
from penjing.base.seeds import derive
from penjing.devices.shards import local_part
from penjing.optim.adamw_no_dynamo import NoDynamoOptimizer

StateDtype = Literal["float32", "bfloat16", "int8"]
BYTES: dict[StateDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1}  # per number; scales add 1/64 byte
BLOCK = 256  # numbers that share a scale; an outlier costs only these numbers precision
CHUNK = 1 << 22  # numbers processed at once: 16 MiB for each float32 temporary; a multiple of BLOCK
MIN_ELEMENTS = 4096  # smallest parameter whose state is compressed
UNSIGNED = ("exp_avg_sq",)  # moments that are never negative
_DECADES = 7  # of magnitude, below a block's largest number
_LOW_BITS = 1 << 16  # range of the float32 mantissa bits that bfloat16 lacks


def uses_low_precision(parameter: Tensor, state_dtype: StateDtype, *, embedding: bool) -> bool:
    """Whether this parameter's state is stored in fewer bits than float32.

    int8 excludes embeddings: their rows are updated rarely and at very different rates, and need 32 bits
    (arXiv:2110.02861, section 2.3).
    """
    return state_dtype != "float32" and parameter.numel() >= MIN_ELEMENTS and not (state_dtype == "int8" and embedding)


def chunks(count: int) -> Iterator[slice]:
    """Slices of at most CHUNK elements that cover `count` elements."""
    return (slice(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK))


def stochastic_round(value: Tensor, generator: torch.Generator) -> Tensor:
    """Stochastic rounding of float32 to bfloat16, unbiased (arXiv:1502.02551, section 3.1).

    With rounding to nearest, a running mean of weight 0.05 would stop once its changes are below 1/256 of it.
    """
    bits = value.float().contiguous().view(torch.int32)
    noise = torch.randint(_LOW_BITS, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # The sum carries into the high half with the required probability; the mask then drops the low half.
    return ((bits + noise) & -_LOW_BITS).view(torch.float32).to(torch.bfloat16)


class QuantCodebook:
    """256 levels from -1 (unsigned: 0) to 1, dense near zero: seven decades, each twice as fine as the one below.

    arXiv:2110.02861, section 1.3 (dynamic tree quantisation) and 2.2 (unsigned, for second moments). Unlike in the
    paper, the unsigned codebook has 1e-7 instead of zero: a second moment rounded to zero would make a step of size
    m / epsilon (arXiv:2309.01507).
    """

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        positive: list[float] = []
        for decade in range(_DECADES):
            count = 2**decade if signed else 2 ** (decade + 1)
            positive += [10.0 ** (decade - _DECADES + 1) * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        negative = [-value for value in reversed(positive)] + [0.0] if signed else [1e-7]
        levels = [*negative, *positive, 1.0]
        assert len(levels) == 256
        midpoints = [(lower + upper) / 2 for lower, upper in pairwise(levels)]
        self.levels_256 = torch.tensor(levels, dtype=torch.float32, device=device)
        self.midpoints_255 = torch.tensor(midpoints, dtype=torch.float32, device=device)

    def encode(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest codes (uint8, N) and each block's largest magnitude (float32, N / BLOCK rounded up)."""
        blocks = nn.functional.pad(value_N, (0, -len(value_N) % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(dim=1)
        normalized = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(normalized, self.midpoints_255, out_int32=True).to(torch.uint8)
        return codes.view(-1)[: len(value_N)], scale

    def decode(self, codes_N: Tensor, scale: Tensor) -> Tensor:
        """The values, float32, N."""
        value_N = self.levels_256.index_select(0, codes_N.int())
        return value_N.mul_(scale.repeat_interleave(BLOCK)[: len(codes_N)])


class LowPrecisionOptimizer(NoDynamoOptimizer):
    """Base of our parameter-wise optimizers: stores state in `state_dtype`, and frees each gradient after its use.

    It does not run inside the backward pass, which would free gradients sooner: clipping by the global norm and the
    guard against bad steps (train/nonfinite_guard.py) need all gradients before the first weight changes.

    Stochastic rounding is seeded by (seed, step, parameter), so that a resumed run is bit-identical and all ranks round
    alike. If `found_inf` is 1, which torch's grad scalers set, a step changes nothing.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: list[dict[str, Any]], defaults: dict[str, Any], dtype: StateDtype, seed: int) -> None:
        super().__init__(params, defaults)
        self.state_dtype, self.seed = dtype, seed
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        self._index = {parameter: index for index, parameter in enumerate(parameters)}
        self._codebooks: dict[bool, QuantCodebook] = {}

    @property
    def bad(self) -> Tensor | None:
        """A tensor on the device, 1 if this step must change nothing. None if that is already known not to be so."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        known = found_inf is not None and devices.of(found_inf.device).is_host  # nothing to wait for
        return None if known and not found_inf else found_inf

    def init_state(self, parameter: Tensor, *moments: str) -> torch.Generator | None:
        """Make a parameter's state if it is missing; return this step's generator for bfloat16 state, else None."""
        state = self.state[parameter]
        for name in moments:
            if name in state:
                continue
            if self.state_dtype == "int8":
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                num_blocks = -(-local_part(parameter).numel() // BLOCK)
                state[f"{name}_scale"] = torch.zeros(num_blocks, dtype=torch.float32, device=parameter.device)
            else:
                state[name] = torch.zeros_like(parameter, dtype=getattr(torch, self.state_dtype))
        if self.state_dtype != "bfloat16":
            return None
        state["draws"] = state.get("draws", 0) + 1  # counted on the host, bad steps included
        seed = derive(self.seed, state["draws"], self._index[parameter])
        return torch.Generator(device=parameter.device).manual_seed(seed)

    def read_state(self, parameter: Tensor, name: str, chunk: slice, *, signed: bool) -> Tensor:
        """A chunk of a state in float32: a view of float32 state, a copy of other state."""
        state = self.state[parameter]
        stored_N = local_part(state[name]).view(-1)[chunk]
        if self.state_dtype == "int8":
            return self._codebook(parameter.device, signed).decode(stored_N, state[f"{name}_scale"][_blocks(chunk)])
        return stored_N.float()

    def write_state(
        self,
        parameter: Tensor,
        name: str,
        chunk: slice,
        value_N: Tensor,
        generator: torch.Generator | None,
        *,
        signed: bool,
    ) -> None:
        """Write a chunk back. In a bad step the caller must not have changed it; the stored bits then stay the same."""
        state = self.state[parameter]
        stored_N = local_part(state[name]).view(-1)[chunk]
        if self.state_dtype == "float32":
            assert value_N.data_ptr() == stored_N.data_ptr(), "changed in place"
        elif self.state_dtype == "bfloat16":
            assert generator is not None
            stored_N.copy_(stochastic_round(value_N, generator))  # a bfloat16 value rounds to itself
        else:
            codes_N, scale = self._codebook(parameter.device, signed).encode(value_N)
            scale_before = state[f"{name}_scale"][_blocks(chunk)]
            if self.bad is not None:  # encoding decoded values need not give the same codes
                codes_N = torch.where(self.bad > 0, stored_N, codes_N)
                scale = torch.where(self.bad > 0, scale_before, scale)
            stored_N.copy_(codes_N)
            scale_before.copy_(scale)

    def _codebook(self, device: torch.device, signed: bool) -> QuantCodebook:
        if signed not in self._codebooks:
            self._codebooks[signed] = QuantCodebook(device, signed=signed)
        return self._codebooks[signed]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's. int8 state of a parameter that is spread over ranks is given in float32 (see `decoded`)."""
        state = super().state_dict()
        for number, parameter in enumerate(self._index):
            values = state["state"].get(number, {})
            if self.state_dtype == "int8" and values and local_part(parameter) is not parameter:
                local = {name: local_part(value) for name, value in values.items()}
                state["state"][number] = {
                    name: self._spread(parameter, value) if value.shape == local_part(parameter).shape else values[name]
                    for name, value in decoded(local).items()
                }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every tensor keeps its stored dtype; torch converts all to the weights' dtype."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = list(self._index)
        for number, values in state_dict["state"].items():
            parameter = parameters[number]
            state = self.state[parameter] = {
                name: value.to(parameter.device) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for name, value in list(state.items()) if self.state_dtype == "int8" else ():
                if value.shape == parameter.shape and value.is_floating_point():  # saved by ranks that share it
                    part = local_part(value)
                    codebook = self._codebook(part.device, name not in UNSIGNED)
                    codes_N, state[f"{name}_scale"] = codebook.encode(part.reshape(-1))
                    state[name] = self._spread(parameter, codes_N.view(part.shape))

    @staticmethod
    def _spread(parameter: Tensor, part: Tensor) -> Tensor:
        """A tensor like the parameter of which this rank has `part`."""
        whole = torch.zeros_like(parameter, dtype=part.dtype)
        local_part(whole).copy_(part)
        return whole


def decoded(values: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with int8 moments in float32: the blocks of a rank's part are not those of the whole."""
    result = dict(values)
    for name in values:
        scale = result.pop(f"{name}_scale", None)
        if scale is not None:
            codes = values[name]
            codebook = QuantCodebook(codes.device, signed=name not in UNSIGNED)
            result[name] = codebook.decode(codes.reshape(-1), scale).view(codes.shape)
    return result


def _blocks(chunk: slice) -> slice:
    return slice(chunk.start // BLOCK, -(-chunk.stop // BLOCK))

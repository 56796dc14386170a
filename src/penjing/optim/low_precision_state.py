"""How an optimizer's state is kept between steps: as it is, in bfloat16, or in 8 bits with a scale for each block.

A state is read into float32, changed and written back, piece by piece, so that what is there in float32 at one time
does not grow with the model. bfloat16 forgets nothing on average: it is rounded up or down by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penjing.base.seeds import derive
from penjing.optim.adamw_no_dynamo import NoDynamoOptimizer

StateDtype = Literal["float32", "bfloat16", "int8"]
BYTES: dict[StateDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1}  # of one kept number; scales add 1/64 byte
BLOCK = 256  # numbers that share a scale: one large one spoils no more than these
PIECE = 1 << 22  # numbers worked on at once: 16 MiB for each temporary in float32; a multiple of BLOCK
LEAST = 4096  # elements of a parameter whose state is worth making small
_DECADES = 7  # of magnitude, below the largest of a block
_LOW_BITS = 1 << 16  # of float32's mantissa that bfloat16 has not


def is_small(parameter: Tensor, how: StateDtype, *, embedding: bool) -> bool:
    """Whether this parameter's state is kept in less than float32.

    In 8 bits an embedding's is not: its rows are seen seldom and at very different rates (arXiv:2110.02861, section
    2.3, which found it to need 32 bits).
    """
    return how != "float32" and parameter.numel() >= LEAST and not (how == "int8" and embedding)


def pieces(count: int) -> Iterator[slice]:
    """Slices of at most PIECE that make up `count` elements."""
    return (slice(first, min(first + PIECE, count)) for first in range(0, count, PIECE))


def stochastic_round(value: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up with the probability of how far it is on the way (arXiv:1502.02551, section 3.1).

    Rounded to nearest, a running mean with weight 0.05 stands still once its changes are below 1/256 of it.
    """
    bits = value.float().contiguous().view(torch.int32)
    chance = torch.randint(_LOW_BITS, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # What is added overflows from the low half into the high one as often as it should; the low half is then dropped.
    return ((bits + chance) & -_LOW_BITS).view(torch.float32).to(torch.bfloat16)


class QuantCodebook:
    """256 numbers between -1 or 0 and 1, dense near zero: seven decades, each with twice as many as the one below.

    arXiv:2110.02861, section 1.3 (dynamic tree quantisation) and 2.2 (without a sign for second moments). Other than
    there the codes without a sign have no zero, but 1e-7: a second moment that is rounded to zero makes a step of the
    size of m / epsilon (arXiv:2309.01507).
    """

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        above: list[float] = []
        for decade in range(_DECADES):
            count = 2**decade if signed else 2 ** (decade + 1)
            above += [10.0 ** (decade - _DECADES + 1) * (0.1 + 0.9 * (at + 0.5) / count) for at in range(count)]
        below = [-value for value in reversed(above)] + [0.0] if signed else [1e-7]
        levels = [*below, *above, 1.0]
        assert len(levels) == 256
        middles = [(one + next_one) / 2 for one, next_one in pairwise(levels)]
        self.levels_256 = torch.tensor(levels, dtype=torch.float32, device=device)
        self.middles_255 = torch.tensor(middles, dtype=torch.float32, device=device)

    def encode(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest codes (uint8, N) and each block's largest magnitude (float32, N / BLOCK rounded up)."""
        blocks = nn.functional.pad(value_N, (0, -len(value_N) % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(dim=1)
        share = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(share, self.middles_255, out_int32=True).to(torch.uint8)
        return codes.view(-1)[: len(value_N)], scale

    def decode(self, codes_N: Tensor, scale: Tensor) -> Tensor:
        """float32, N."""
        share_N = self.levels_256.index_select(0, codes_N.int())
        return share_N.mul_(scale.repeat_interleave(BLOCK)[: len(codes_N)])


class LowPrecisionOptimizer(NoDynamoOptimizer):
    """A parameter-wise optimizer of ours: keeps its state as `how` says, and frees each gradient once it is consumed.

    It is not run inside the backward pass, where gradients could be freed even sooner: clipping by the global norm and
    the guard against bad steps (train/nonfinite_guard.py) both need all gradients before the first weight may change.

    Chance is drawn anew from (seed, step, parameter), so that a run that was taken up again goes on bit for bit, and
    all ranks round alike. Where `found_inf` is set to 1, as torch's scalers set it, a step changes nothing.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: list[dict[str, Any]], defaults: dict[str, Any], how: StateDtype, seed: int) -> None:
        super().__init__(params, defaults)
        self.how, self.seed = how, seed
        everyone = chain.from_iterable(part["params"] for part in self.param_groups)
        self._number = {parameter: number for number, parameter in enumerate(everyone)}
        self._codes: dict[bool, QuantCodebook] = {}

    @property
    def bad(self) -> Tensor | None:
        """1 on the device where this step must change nothing; None: nobody asks, or it is known that it need not."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is not None and found.device.type == "cpu" and not bool(found > 0):  # no device to wait for
            return None
        return found

    def begin(self, parameter: Tensor, *moments: str) -> torch.Generator | None:
        """Make what is kept of a parameter where it is not there; returns this step's chance, if any is needed."""
        state = self.state[parameter]
        for name in moments:
            if name in state:
                continue
            if self.how == "int8":
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                num_blocks = -(-parameter.numel() // BLOCK)
                state[f"{name}_scale"] = torch.zeros(num_blocks, dtype=torch.float32, device=parameter.device)
            else:
                state[name] = torch.zeros_like(parameter, dtype=getattr(torch, self.how))
        if self.how != "bfloat16":
            return None
        state["draws"] = state.get("draws", 0) + 1  # counted on the host, which knows of no bad steps
        seed = derive(self.seed, state["draws"], self._number[parameter])
        return torch.Generator(device=parameter.device).manual_seed(seed)

    def recall(self, parameter: Tensor, name: str, piece: slice, *, signed: bool) -> Tensor:
        """A piece of what is kept, in float32: of float32 state the very memory, else a copy."""
        state = self.state[parameter]
        stored_N: Tensor = state[name].view(-1)[piece]
        if self.how == "int8":
            return self._coded(parameter.device, signed).decode(stored_N, state[f"{name}_scale"][_blocks(piece)])
        return stored_N.float()

    def keep(
        self,
        parameter: Tensor,
        name: str,
        piece: slice,
        value_N: Tensor,
        chance: torch.Generator | None,
        *,
        signed: bool,
    ) -> None:
        """Put a piece back. In a bad step it must be as it was recalled, and what is kept then stays bit for bit."""
        state = self.state[parameter]
        stored_N: Tensor = state[name].view(-1)[piece]
        if self.how == "float32":
            assert value_N.data_ptr() == stored_N.data_ptr(), "changed in place"
        elif self.how == "bfloat16":
            assert chance is not None
            stored_N.copy_(stochastic_round(value_N, chance))  # of what bfloat16 holds there is only one rounding
        else:
            codes_N, scale = self._coded(parameter.device, signed).encode(value_N)
            scale_before = state[f"{name}_scale"][_blocks(piece)]
            if self.bad is not None:  # codes of what was decoded need not be the same ones
                codes_N = torch.where(self.bad > 0, stored_N, codes_N)
                scale = torch.where(self.bad > 0, scale_before, scale)
            stored_N.copy_(codes_N)
            scale_before.copy_(scale)

    def _coded(self, device: torch.device, signed: bool) -> QuantCodebook:
        if signed not in self._codes:
            self._codes[signed] = QuantCodebook(device, signed=signed)
        return self._codes[signed]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every tensor stays in the dtype it was kept in: torch's makes all of the weights' dtype."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = list(self._number)
        for number, values in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                name: value.to(parameter.device) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }


def _blocks(piece: slice) -> slice:
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))

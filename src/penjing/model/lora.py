"""LoRA and DoRA: small learned matrices beside frozen linear layers, switched, mixed and merged by name.

An adapted layer computes W x + s B A x with A [R, in], B [out, R] and s = alpha / R (arXiv:2106.09685) or
alpha / sqrt(R) (rank-stabilised, arXiv:2312.03732). DoRA (arXiv:2402.09353) gives each output a learned magnitude m:
m / |W + s B A| times that, where the norm is of each output's row and, as in the paper's section 4.3, a constant to
the gradient. Any `Linear` inside the blocks can be adapted. The head and the embedding cannot, as they are one table
in most models, and neither can the three-dimensional weights of routed experts, which no engine that reads adapters
serves; a model of experts is adapted in its attention, its dense layers and its shared experts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as functional
from annotated_types import Ge, Lt
from torch import Tensor, nn

from penjing.base.config import NonNegativeInt, PositiveFloat, Settings
from penjing.base.errors import UserError, suggest
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.dispatch import saves_memory
from penjing.kernels.fp8 import linear_float8
from penjing.model.adapter_matmul import AdaptedMatmul, PackedMatmul
from penjing.model.linear import Linear
from penjing.model.moe import MoELayer, mixtures

DEFAULT = "default"  # the name of the adapter that a run trains
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class Lora(Settings):
    """Which layers get an adapter, and of what size."""

    section: ClassVar = "lora"

    rank: NonNegativeInt = 0  # R, inner width of an adapter; 0 = no adapters, every weight learns
    alpha: PositiveFloat = 32.0  # the output is multiplied by alpha / rank (or alpha / sqrt(rank), see scaling)
    # Share of an adapter's inputs that is left out while learning. Not where two passes of the model are compared
    # (policies, preferences with a reference): only one of them would have its inputs left out.
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    # Patterns of layers: of their names inside a block (attention.q_proj) or whole (blocks.3.attention.q_proj).
    target_modules: tuple[str, ...] = ("*_proj",)
    use_rslora: bool = False  # alpha / sqrt(rank): same gradient size at any rank
    use_dora: bool = False  # also learns the length of every output's row of weights; slower, closer to full tuning

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rank:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    next_step = "Set lora.rank=16 too."
                    raise self.error(field.name, "has no effect without adapters", next_step=next_step)
        elif not self.target_modules:
            raise self.error("target_modules", "no layer to adapt", wanted="patterns such as attention.*_proj")

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSize:
    """What one layer's adapter is."""

    rank: int
    scale: float
    dropout: float = 0.0
    use_dora: bool = False


class Adapter(nn.Module):
    """A and B (and DoRA's magnitude) of one layer, in float32; begins as no change, as B is zero."""

    magnitude: nn.Parameter | None

    def __init__(self, base: Linear, size: AdapterSize, generator: torch.Generator | None) -> None:
        super().__init__()
        self.size = size
        device = base.weight.device
        self.A = nn.Parameter(torch.empty(size.rank, base.in_features))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5), generator=generator)  # uniform in +-1/sqrt(in)
        self.B = nn.Parameter(torch.zeros(base.out_features, size.rank))
        magnitude = base.weight.detach().float().norm(dim=1).cpu() if size.use_dora else None
        self.register_parameter("magnitude", None if magnitude is None else nn.Parameter(magnitude))
        self.to(device)
        # Masks are drawn from (seed, how many were drawn), which is saved with the weights: a resumed run draws the
        # masks that an uninterrupted one would have drawn, on any device, and looking at the model draws none.
        self.seed = int(torch.randint(2**62, (), generator=generator))
        self.draws = 0
        self._square: tuple[Any, Tensor] | None = None
        self._gain: tuple[Any, Tensor] | None = None

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.seed, self.draws])

    def set_extra_state(self, state: Tensor) -> None:
        self.seed, self.draws = state.tolist()

    def train(self, mode: bool = True) -> Self:
        """Also forgets what was kept for writing: fused optimizers and kernels of ours change weights unseen."""
        self._gain = None
        return super().train(mode)

    def mask(self, x: Tensor) -> Tensor | None:
        """Which inputs the adapter sees, as booleans; None: all. Inputs are left out only where gradients are made."""
        if not (self.size.dropout and self.training and torch.is_grad_enabled()):
            return None
        generator = torch.Generator(device=x.device).manual_seed((self.seed + self.draws) % 2**63)
        self.draws += 1
        return torch.rand(x.shape, device=x.device, generator=generator) >= self.size.dropout

    def gain(self, weight_OI: Tensor) -> Tensor | None:
        """DoRA's factor of each output, m / |W + s B A|; None for plain LoRA."""
        if self.magnitude is None:
            return None
        if torch.is_grad_enabled() or self.training:
            return self.magnitude / self._norm(weight_OI)
        key = (*_state_of(self.A), *_state_of(self.B), *_state_of(self.magnitude), *_state_of(weight_OI))
        if self._gain is None or self._gain[0] != key:
            # While writing, the norm of every layer would cost R times the matmul of one token.
            self._gain = (key, self.magnitude / self._norm(weight_OI))
        return self._gain[1]

    @torch.no_grad()
    def _norm(self, weight_OI: Tensor) -> Tensor:
        """|W + s B A| of each row, from |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B: the sum is never formed."""
        key = _state_of(weight_OI)
        if self._square is None or self._square[0] != key:
            self._square = (key, weight_OI.float().square().sum(dim=1))
        scale, a_RI, b_OR = self.size.scale, self.A, self.B
        cross_OR = (weight_OI @ a_RI.to(weight_OI.dtype).T).float()
        inner_OR = (2 * scale) * cross_OR + scale**2 * (b_OR @ (a_RI @ a_RI.T))
        return (self._square[1] + (inner_OR * b_OR).sum(dim=1)).sqrt()

    @property
    def has_own_way(self) -> bool:
        """Whether more than B A x is to be added now."""
        return self.magnitude is not None or bool(self.size.dropout and self.training and torch.is_grad_enabled())

    def change(self, x: Tensor, base: Tensor, weight_OI: Tensor) -> Tensor:
        """The layer's output with this adapter, written plainly. x: cast inputs; base: W x without bias."""
        mask = self.mask(x)
        seen = x if mask is None else x * mask / (1 - self.size.dropout)
        inner = functional.linear(seen, self.A.to(x.dtype))
        out = base + self.size.scale * functional.linear(inner, self.B.to(x.dtype))
        gain_O = self.gain(weight_OI)
        return out if gain_O is None else out * gain_O.to(out.dtype)


def _state_of(tensor: Tensor) -> tuple[Any, ...]:
    """Changes when the tensor's values are written or its memory is another."""
    return tensor._version, tensor.data_ptr(), tensor.dtype, tensor.device


class AdapterMap(NamedTuple):
    """Which rows of a batch each adapter speaks for; the others hear the base alone."""

    num_rows: int
    rows: dict[str, Tensor]


class AdaptedLinear(Linear):
    """A frozen `Linear` with adapters by name; `set_adapter` sets which of them are used."""

    def __init__(self, base: Linear) -> None:
        nn.Module.__init__(self)  # not Linear's: the weights are the given layer's own
        _share(base, self)
        self.adapters = nn.ModuleDict()
        self.active: str | None = None
        self.by_row: AdapterMap | None = None  # one for each row of the batch; None: `active` for all

    def adapter(self, name: str) -> Adapter:
        adapter = self.adapters[name]
        assert isinstance(adapter, Adapter)
        return adapter

    def plain(self) -> Linear:
        """The layer without adapters, sharing its weights."""
        layer = Linear.__new__(Linear)
        nn.Module.__init__(layer)
        _share(self, layer)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        if self.by_row is not None:
            return self._each_row(x, self.by_row)
        if self.active is None:
            return super().forward(x)
        adapter = self.adapter(self.active)
        weight_OI, bias_O = self._base()
        if self.float8 and torch.is_grad_enabled():
            x = x.to(weight_OI.dtype)
            changed = adapter.change(x, linear_float8(x, self.weight), weight_OI)
            return changed if bias_O is None else changed + bias_O
        gain_O = adapter.gain(weight_OI)
        x = x.to(weight_OI.dtype)
        out: Tensor = AdaptedMatmul.apply(  # type: ignore[no-untyped-call]
            x,
            weight_OI,
            bias_O if gain_O is None else None,
            adapter.A,
            adapter.B,
            adapter.size.scale,
            adapter.mask(x),
            1 / (1 - adapter.size.dropout),
        )
        if gain_O is not None:
            out = out * gain_O.to(out.dtype)
            out = out if bias_O is None else out + bias_O
        return out

    @staticmethod
    def packed(x: Tensor, *layers: nn.Module) -> Tensor | None:
        """The layers' outputs one after another in each row, from one matmul of all base weights; None where a layer
        has a way of its own: a bias, float8, DoRA, dropout, an adapter for each row."""
        mine = [layer for layer in layers if isinstance(layer, AdaptedLinear)]
        if len(mine) < len(layers) or any(each.by_row is not None for each in mine):
            return None
        if any(each.float8 or each.bias is not None for each in mine):
            return None
        adapters = [each.adapter(each.active) for each in mine if each.active is not None]
        if 0 < len(adapters) < len(mine) or any(each.has_own_way for each in adapters):
            return None
        weights_OI = [each._base()[0] for each in mine]
        x = x.to(weights_OI[0].dtype)
        if not adapters:
            return functional.linear(x, torch.cat(weights_OI))
        scales, factors = [each.size.scale for each in adapters], [each.A for each in adapters]
        factors += [each.B for each in adapters]
        return PackedMatmul.apply(x, scales, *weights_OI, *factors)  # type: ignore[no-any-return,no-untyped-call]

    def _base(self) -> tuple[Tensor, Tensor | None]:
        dtype = self.compute_dtype or self.weight.dtype
        weight_OI = arena.cast(self.weight, dtype) if saves_memory(self.weight) else self.weight.to(dtype)
        return weight_OI, None if self.bias is None else self.bias.to(dtype)

    def _each_row(self, x: Tensor, by_row: AdapterMap) -> Tensor:
        """Every row with its own adapter: the base's matmul is shared, the rows of one adapter go together."""
        if x.shape[0] != by_row.num_rows:
            raise UserError("one adapter per row is needed", where="use", got=by_row.num_rows, wanted=x.shape[0])
        weight_OI, bias_O = self._base()
        x = x.to(weight_OI.dtype)
        out = functional.linear(x, weight_OI)
        for name, rows_N in by_row.rows.items():
            changed = self.adapter(name).change(x[rows_N], out[rows_N], weight_OI)
            out = out.index_copy(0, rows_N, changed)
        return out if bias_O is None else out + bias_O


def _share(layer: Linear, other: Linear) -> None:
    """Make `other`, which is empty, the same layer with the same weights."""
    other.in_features, other.out_features = layer.in_features, layer.out_features
    other.weight = layer.weight
    other.register_parameter("bias", layer.bias)
    other.compute_dtype, other.float8, other.training = layer.compute_dtype, layer.float8, layer.training


# --- surgery ---------------------------------------------------------------------------------------------------------


def adaptable(model: nn.Module) -> dict[str, Linear]:
    """The layers that can carry an adapter, by dotted name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.startswith("blocks.")
    }


def adapted(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers that carry adapters, by dotted name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def names(model: nn.Module) -> tuple[str, ...]:
    """The adapters a model has, in the order they came."""
    return tuple(dict.fromkeys(name for layer in adapted(model).values() for name in layer.adapters))


def _inside(name: str) -> str:
    """`blocks.3.attention.q_proj` -> `attention.q_proj`."""
    return name.split(".", 2)[-1]


def attach(model: nn.Module, name: str, sizes: Mapping[str, AdapterSize], *, seed: int = 0) -> None:
    """Give the layers of `sizes` a new adapter called `name`, and freeze all that was there before.

    A is drawn from `seed` layer by layer, in the model's order; the global random state is left alone. The adapter
    is not used until `set_adapter` names it. Raises UserError for a name that cannot be one, or that is taken.
    """
    if not _ADAPTER_NAME.fullmatch(name) or hasattr(nn.ModuleDict(), name):
        raise UserError("not a name for an adapter", where=name, wanted="letters, digits, - and _")
    if name in names(model):
        raise UserError("there is already an adapter of this name", where=name)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    layers = adaptable(model)
    assert sizes.keys() <= layers.keys(), sizes.keys() - layers.keys()
    for where, base in layers.items():
        if where not in sizes:
            continue
        if not isinstance(base, AdaptedLinear):
            assert base.weight.dtype.itemsize >= 4, "magnitudes are taken from the whole weights"
            base = AdaptedLinear(base)
            above, _, last = where.rpartition(".")
            setattr(model.get_submodule(above), last, base)
        base.adapters[name] = Adapter(base, sizes[where], generator).train(base.training)


def add_adapter(model: nn.Module, settings: Lora, *, name: str = DEFAULT, seed: int = 0) -> None:
    """Attach a fresh adapter as the settings say, and use it. Raises UserError for a pattern that matches nothing."""
    layers = adaptable(model)
    size = AdapterSize(rank=settings.rank, scale=settings.scale, dropout=settings.dropout, use_dora=settings.use_dora)
    chosen: set[str] = set()
    for pattern in settings.target_modules:
        found = {layer for layer in layers if fnmatchcase(_inside(layer), pattern) or fnmatchcase(layer, pattern)}
        if not found:
            raise _no_match(model, pattern, layers)
        chosen |= found
    attach(model, name, {layer: size for layer in layers if layer in chosen}, seed=seed)
    set_adapter(model, name)


def _no_match(model: nn.Module, pattern: str, layers: Collection[str]) -> UserError:
    kinds = sorted({_inside(layer) for layer in layers})
    experts = bool(mixtures(model))
    why = "; routed experts are not adapted" if experts and pattern.startswith("mlp") else ""
    return UserError(
        f"matches no linear layer{why}",
        where="lora.target_modules",
        got=pattern,
        next_step=suggest(pattern.replace("*", ""), kinds),
    )


def set_adapter(model: nn.Module, chosen: str | Sequence[str | None] | None) -> None:
    """Which adapter speaks: one by name, None for the base alone, or one of these for each row of the next batches.

    Raises UserError if there is no adapter of that name.
    """
    known = names(model)
    rows = () if chosen is None or isinstance(chosen, str) else tuple(chosen)
    for name in {chosen} if chosen is None or isinstance(chosen, str) else set(rows):
        if name is not None and name not in known:
            raise UserError(f"no adapter is called {name!r}", next_step=suggest(name, known) if known else None)
    layers = list(adapted(model).values())
    device = layers[0].weight.device if layers else None
    places = {
        name: torch.tensor([row for row, given in enumerate(rows) if given == name], device=device)
        for name in known
        if name in rows
    }
    for layer in layers:
        layer.active = chosen if isinstance(chosen, str) and chosen in layer.adapters else None
        mine = {name: rows_N for name, rows_N in places.items() if name in layer.adapters}
        layer.by_row = AdapterMap(len(rows), mine) if rows else None


@contextmanager
def adapter_scope(model: nn.Module, chosen: str | Sequence[str | None] | None) -> Iterator[None]:
    """`set_adapter` for as long as the context lasts, then what was in use before."""
    before = [(layer, layer.active, layer.by_row) for layer in adapted(model).values()]
    set_adapter(model, chosen)
    try:
        yield
    finally:
        for layer, active, by_row in before:
            layer.active, layer.by_row = active, by_row


@torch.no_grad()
def merge(model: nn.Module, name: str) -> None:
    """Work an adapter into the weights, summed in float64 and rounded once to float32, and take all adapters off.

    The model then computes as with this one in use, at the base's speed. The weights must be float32: rounded ones
    (see `cast_frozen_base`) would lose what the adapter learned.
    """
    set_adapter(model, name)
    for layer in adapted(model).values():
        if name in layer.adapters:
            adapter, weight_OI = layer.adapter(name), layer.weight
            assert weight_OI.dtype == torch.float32, "merging needs the float32 weights"
            whole_OI = weight_OI.double() + adapter.size.scale * (adapter.B.double() @ adapter.A.double())
            if adapter.magnitude is not None:
                whole_OI *= (adapter.magnitude.double() / whole_OI.norm(dim=1))[:, None]
            weight_OI.copy_(whole_OI)
    remove_adapters(model)


def remove_adapters(model: nn.Module) -> None:
    """Take every adapter off; all weights may learn again."""
    for where, layer in adapted(model).items():
        above, _, last = where.rpartition(".")
        setattr(model.get_submodule(above), last, layer.plain())
    model.requires_grad_(True)


@torch.no_grad()
def cast_frozen_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the frozen weights of matmuls in the dtype that they are multiplied in.

    They are then not cast anew in every step, and take half the memory in bfloat16; the matmuls are the same. The
    embedding stays, as it is looked up in float32, and so do routers.
    """
    for module in model.modules():
        if not isinstance(module, Linear | MoELayer):
            continue
        for parameter in module.parameters(recurse=False):  # a mixture's are its experts; its router is a module below
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def trainable_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What an adapted model has beyond its base: the state without the frozen weights (adapters are never left out)."""
    frozen = {
        name for name, parameter in model.named_parameters() if not parameter.requires_grad and ".adapters." not in name
    }
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def fingerprint(model: nn.Module) -> str:
    """Hex SHA-256 of all weights by name, adapters left out: the same for the same model, in whatever files it lies."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if ".adapters." in name:
            continue
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

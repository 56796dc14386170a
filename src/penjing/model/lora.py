"""LoRA and DoRA: trainable low-rank matrices added to frozen linear layers; named adapters are switched and merged.

An adapted layer computes W x + s B A x with A [R, in], B [out, R] and s = alpha / R (arXiv:2106.09685) or
alpha / sqrt(R) (rank-stabilised, arXiv:2312.03732). DoRA (arXiv:2402.09353) scales each output by m / |W + s B A|:
m is a learned magnitude, and the norm is of the output's weight row, without gradient (the paper's section 4.3). Any
`Linear` inside the blocks can be adapted. Head and embedding cannot, as most models tie them. Nor can the
three-dimensional weights of routed experts, as no engine that loads adapters supports them: an MoE model has adapters
on its attention, dense layers and shared experts.
"""

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, Self

import torch
import torch.nn.functional as functional
from annotated_types import Ge, Lt
from torch import Tensor, nn

from penjing.base.config import NonNegativeInt, PositiveFloat, Settings
from penjing.base.errors import UserError, suggest
from penjing.kernels.autograd_functions import saves_memory
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.fp8 import linear_float8
from penjing.model.adapter_matmul import AdaptedMatmul, PackedMatmul
from penjing.model.linear import Linear
from penjing.model.moe import MoELayer, moe_layers

DEFAULT = "default"  # the name of the adapter that a run trains
# Layers of other models, as users name them, and what does the same here.
_PACKED = {
    **dict.fromkeys(("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"), "q_proj,k_proj,v_proj"),
    **dict.fromkeys(("gate_up_proj", "w13"), "gate_proj,up_proj"),
}
_ENDS_OF_MODEL = ("lm_head", "embed_tokens", "head", "embed", "wte", "output", "embed_out", "tok_embeddings")
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class Lora(Settings, section="lora"):
    """Which layers get an adapter, and of what size."""

    rank: NonNegativeInt = 0  # R, inner width of an adapter; 0 = no adapters, all weights are trained
    alpha: PositiveFloat = 32.0  # the output is multiplied by alpha / rank (or alpha / sqrt(rank), see use_rslora)
    # Dropout on an adapter's inputs in training. Not supported where two passes of the model are compared (policies,
    # preferences with a reference): only one of the two would have dropout.
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    # Patterns of layer names or of their ends: q_proj, attention.*_proj, blocks.3.mlp.up_proj; transformers' names too.
    # all-linear: every linear layer of the blocks.
    target_modules: tuple[str, ...] = ("*_proj",)
    use_rslora: bool = False  # alpha / sqrt(rank): same gradient size at any rank
    use_dora: bool = False  # also trains the norm of each weight row; slower, closer to full fine-tuning

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
    rank: int
    scale: float
    dropout: float = 0.0
    use_dora: bool = False


class Adapter(nn.Module):
    """A and B (and DoRA's magnitude) of one layer, in float32. B is zero at first, so the output starts unchanged."""

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
        # Dropout masks are drawn from (seed, number of draws), which is saved with the weights: a resumed run draws the
        # same masks as an uninterrupted one, on any device, and evaluation draws none.
        self.seed = int(torch.randint(2**62, (), generator=generator))
        self.draws = 0
        self._squared_norm: tuple[Any, Tensor] | None = None
        self._gain: tuple[Any, Tensor] | None = None

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.seed, self.draws])

    def set_extra_state(self, state: Tensor) -> None:
        self.seed, self.draws = state.tolist()

    def train(self, mode: bool = True) -> Self:
        """Also clear the gain cached for generation: fused optimizers and our kernels do not bump weight versions."""
        self._gain = None
        return super().train(mode)

    def mask(self, x: Tensor) -> Tensor | None:
        """The dropout mask of the adapter's inputs, True where kept; None: no dropout, as without gradients."""
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
        key = (*_version(self.A), *_version(self.B), *_version(self.magnitude), *_version(weight_OI))
        if self._gain is None or self._gain[0] != key:
            # In generation the norm of every layer would cost R times the matmul of one token.
            self._gain = (key, self.magnitude / self._norm(weight_OI))
        return self._gain[1]

    @torch.no_grad()
    def _norm(self, weight_OI: Tensor) -> Tensor:
        """|W + s B A| of each row, from |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B: the sum is never materialised."""
        key = _version(weight_OI)
        if self._squared_norm is None or self._squared_norm[0] != key:
            self._squared_norm = (key, weight_OI.float().square().sum(dim=1))
        scale, a_RI, b_OR = self.size.scale, self.A, self.B
        cross_OR = (weight_OI @ a_RI.to(weight_OI.dtype).T).float()
        inner_OR = (2 * scale) * cross_OR + scale**2 * (b_OR @ (a_RI @ a_RI.T))
        return (self._squared_norm[1] + (inner_OR * b_OR).sum(dim=1)).sqrt()

    @property
    def has_dora_or_dropout(self) -> bool:
        """Whether more than s B A x is computed now."""
        return self.magnitude is not None or bool(self.size.dropout and self.training and torch.is_grad_enabled())

    def adapted_output(self, x: Tensor, base: Tensor, weight_OI: Tensor) -> Tensor:
        """The layer's output with this adapter, in plain torch. x: cast inputs; base: W x without bias."""
        mask = self.mask(x)
        masked = x if mask is None else x * mask / (1 - self.size.dropout)
        inner = functional.linear(masked, self.A.to(x.dtype))
        out = base + self.size.scale * functional.linear(inner, self.B.to(x.dtype))
        gain_O = self.gain(weight_OI)
        return out if gain_O is None else out * gain_O.to(out.dtype)


def _version(tensor: Tensor) -> tuple[Any, ...]:
    """A key that changes when the tensor is written to or gets other memory."""
    return tensor._version, tensor.data_ptr(), tensor.dtype, tensor.device


class AdapterMap(NamedTuple):
    """The rows of a batch that use each adapter; other rows use the base alone."""

    num_rows: int
    rows: dict[str, Tensor]


class AdaptedLinear(Linear):
    """A frozen `Linear` with adapters by name; `set_adapter` selects which are active."""

    def __init__(self, base: Linear) -> None:
        nn.Module.__init__(self)  # not Linear's: the weights are shared with `base`
        _share_weights(base, self)
        self.adapters = nn.ModuleDict()
        self.active: str | None = None
        self.by_row: AdapterMap | None = None  # adapters by batch row; None: `active` for all rows

    def adapter(self, name: str) -> Adapter:
        adapter = self.adapters[name]
        assert isinstance(adapter, Adapter)
        return adapter

    def base_layer(self) -> Linear:
        """The layer without adapters, sharing its weights."""
        layer = Linear.__new__(Linear)
        nn.Module.__init__(layer)
        _share_weights(self, layer)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        if self.by_row is not None:
            return self._forward_by_row(x, self.by_row)
        if self.active is None:
            return super().forward(x)
        adapter = self.adapter(self.active)
        weight_OI, bias_O = self._cast_base()
        if self.float8 and torch.is_grad_enabled():
            x = x.to(weight_OI.dtype)
            adapted_out = adapter.adapted_output(x, linear_float8(x, self.weight), weight_OI)
            return adapted_out if bias_O is None else adapted_out + bias_O
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
    def packed(x: Tensor, *modules: nn.Module) -> Tensor | None:
        """The layers' outputs concatenated, from one matmul of all base weights; None if a layer has a bias, float8,
        DoRA, dropout or adapters by row."""
        layers = [module for module in modules if isinstance(module, AdaptedLinear)]
        if len(layers) < len(modules) or any(layer.by_row is not None for layer in layers):
            return None
        if any(layer.float8 or layer.bias is not None for layer in layers):
            return None
        adapters = [layer.adapter(layer.active) for layer in layers if layer.active is not None]
        if 0 < len(adapters) < len(layers) or any(adapter.has_dora_or_dropout for adapter in adapters):
            return None
        weights_OI = [layer._cast_base()[0] for layer in layers]
        x = x.to(weights_OI[0].dtype)
        if not adapters:
            return functional.linear(x, torch.cat(weights_OI))
        scales, factors = [adapter.size.scale for adapter in adapters], [adapter.A for adapter in adapters]
        factors += [adapter.B for adapter in adapters]
        return PackedMatmul.apply(x, scales, *weights_OI, *factors)  # type: ignore[no-any-return,no-untyped-call]

    def _cast_base(self) -> tuple[Tensor, Tensor | None]:
        dtype = self.compute_dtype or self.weight.dtype
        weight_OI = arena.cast(self.weight, dtype) if saves_memory(self.weight) else self.weight.to(dtype)
        return weight_OI, None if self.bias is None else self.bias.to(dtype)

    def _forward_by_row(self, x: Tensor, by_row: AdapterMap) -> Tensor:
        """Each row with its own adapter: the base matmul is shared, and the rows of one adapter are batched."""
        if x.shape[0] != by_row.num_rows:
            raise UserError("one adapter per row is needed", where="use", got=by_row.num_rows, wanted=x.shape[0])
        weight_OI, bias_O = self._cast_base()
        x = x.to(weight_OI.dtype)
        out = functional.linear(x, weight_OI)
        for name, rows_N in by_row.rows.items():
            adapted_out = self.adapter(name).adapted_output(x[rows_N], out[rows_N], weight_OI)
            out = out.index_copy(0, rows_N, adapted_out)
        return out if bias_O is None else out + bias_O


def _share_weights(layer: Linear, other: Linear) -> None:
    """Initialise the empty `other` as the same layer with the same weights."""
    other.in_features, other.out_features = layer.in_features, layer.out_features
    other.weight = layer.weight
    other.register_parameter("bias", layer.bias)
    other.compute_dtype, other.float8, other.training = layer.compute_dtype, layer.float8, layer.training


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
    """The names of a model's adapters, in the order they were added."""
    return tuple(dict.fromkeys(name for layer in adapted(model).values() for name in layer.adapters))


def attach(model: nn.Module, name: str, sizes: Mapping[str, AdapterSize], *, seed: int = 0) -> None:
    """Add a new adapter `name` to the layers of `sizes`, and freeze all existing weights.

    A is drawn from `seed` layer by layer, in the model's order; the global random state is not used. The adapter
    is inactive until `set_adapter`. Raises UserError for an invalid name or one that exists already.
    """
    if not _ADAPTER_NAME.fullmatch(name) or hasattr(nn.ModuleDict(), name):
        raise UserError("invalid adapter name", where=name, wanted="letters, digits, - and _")
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
            assert base.weight.dtype.itemsize >= 4, "magnitudes are computed from full-precision weights"
            base = AdaptedLinear(base)
            parent, _, child = where.rpartition(".")
            setattr(model.get_submodule(parent), child, base)
        base.adapters[name] = Adapter(base, sizes[where], generator).train(base.training)


def add_adapter(model: nn.Module, settings: Lora, *, name: str = DEFAULT, seed: int = 0) -> None:
    """Attach a new adapter and activate it. Raises UserError for a pattern that matches nothing."""
    layers = adaptable(model)
    size = AdapterSize(rank=settings.rank, scale=settings.scale, dropout=settings.dropout, use_dora=settings.use_dora)
    selected: set[str] = set()
    for target in settings.target_modules:
        pattern = _our_pattern(target)
        matches = {layer for layer in layers if fnmatchcase("." + layer, "*." + pattern)}
        if not matches:
            raise _no_match(model, target, layers)
        selected |= matches
    attach(model, name, {layer: size for layer in layers if layer in selected}, seed=seed)
    set_adapter(model, name)


def _our_pattern(target: str) -> str:
    """A pattern with transformers' and peft's names in ours."""
    pattern = "*" if target in ("all-linear", "all") else target.removeprefix("model.")
    for theirs, ours in (("layers.", "blocks."), ("self_attn.", "attention."), ("shared_experts.", "shared."),
                         ("shared_expert.", "shared.")):  # fmt: skip
        pattern = re.sub(rf"(^|\.){re.escape(theirs)}", rf"\1{ours}", pattern)
    return pattern


def _no_match(model: nn.Module, target: str, layers: Collection[str]) -> UserError:
    """The error for a target that no layer has: why, and the layers to name instead."""
    module, ends = target.rpartition(".")[2].replace("*", ""), sorted({layer.rpartition(".")[2] for layer in layers})
    why, next_step = "matches no linear layer", suggest(module, ends)
    if module in _PACKED:
        why, next_step = "this model has no packed layer of that name", f"Name its parts: {_PACKED[module]}."
    elif module in _ENDS_OF_MODEL:
        why = "embedding and head carry no adapter, as most models share one matrix for both"
        next_step = "Name all-linear or layers of the blocks; or train both in full: lora.rank=0 'freeze=blocks.*'"
    elif moe_layers(model) and re.search(r"(^|\.)mlp|experts|(gate|up|down)_proj", target):
        why += "; routed experts are not adapted"
    return UserError(why, where="lora.target_modules", got=target, next_step=next_step)


def set_adapter(model: nn.Module, selected: str | Sequence[str | None] | None) -> None:
    """Activate an adapter by name, None for the base alone, or a sequence of these: one for each batch row. Raises
    UserError if there is no adapter of that name."""
    known = names(model)
    rows = () if selected is None or isinstance(selected, str) else tuple(selected)
    for name in {selected} if selected is None or isinstance(selected, str) else set(rows):
        if name is not None and name not in known:
            raise UserError(f"no adapter is called {name!r}", next_step=suggest(name, known) if known else None)
    layers = list(adapted(model).values())
    device = layers[0].weight.device if layers else None
    rows_by_name = {
        name: torch.tensor([row for row, row_name in enumerate(rows) if row_name == name], device=device)
        for name in known
        if name in rows
    }
    for layer in layers:
        layer.active = selected if isinstance(selected, str) and selected in layer.adapters else None
        layer_rows = {name: rows_N for name, rows_N in rows_by_name.items() if name in layer.adapters}
        layer.by_row = AdapterMap(len(rows), layer_rows) if rows else None


@contextmanager
def adapter_scope(model: nn.Module, selected: str | Sequence[str | None] | None) -> Iterator[None]:
    """`set_adapter` for as long as the context lasts; then the previous adapters are restored."""
    saved = [(layer, layer.active, layer.by_row) for layer in adapted(model).values()]
    set_adapter(model, selected)
    try:
        yield
    finally:
        for layer, active, by_row in saved:
            layer.active, layer.by_row = active, by_row


@torch.no_grad()
def merge(model: nn.Module, name: str) -> None:
    """Merge an adapter into the weights, summed in float64 and rounded once to float32, and remove all adapters.

    The model then computes the same at the base's speed. The weights must be float32: rounding (see `cast_frozen_base`)
    would lose what was trained.
    """
    set_adapter(model, name)
    for layer in adapted(model).values():
        if name in layer.adapters:
            adapter, weight_OI = layer.adapter(name), layer.weight
            assert weight_OI.dtype == torch.float32, "merging needs the float32 weights"
            merged_OI = weight_OI.double() + adapter.size.scale * (adapter.B.double() @ adapter.A.double())
            if adapter.magnitude is not None:
                merged_OI *= (adapter.magnitude.double() / merged_OI.norm(dim=1))[:, None]
            weight_OI.copy_(merged_OI)
    remove_adapters(model)


def remove_adapters(model: nn.Module) -> None:
    """Remove all adapters; all weights become trainable again."""
    for where, layer in adapted(model).items():
        parent, _, child = where.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.base_layer())
    model.requires_grad_(True)


@torch.no_grad()
def cast_frozen_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen weights of matmuls in the dtype of the matmuls. They are then not cast in every step, and take
    half the memory in bfloat16; results are the same. Embedding and routers keep float32, in which they are used."""
    for module in model.modules():
        if not isinstance(module, Linear | MoELayer):
            continue
        for parameter in module.parameters(recurse=False):  # an MoELayer's experts; its router is a submodule
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def trainable_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without the frozen base weights (adapters are always included)."""
    frozen = {
        name for name, parameter in model.named_parameters() if not parameter.requires_grad and ".adapters." not in name
    }
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def fingerprint(model: nn.Module) -> str:
    """Hex SHA-256 of all weights by name, without adapters: equal for equal models, whatever their files."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if ".adapters." in name:
            continue
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

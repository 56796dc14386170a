"""Device speed: from the data sheet (L0) or from a measured profile (L1). All in SI units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penjing import devices
from penjing.plan.gpu_specs import DEVICE_TYPE, GpuSpec

if TYPE_CHECKING:
    from penjing.devices.device import Device

Level = Literal["L0", "L1", "L2", "L3"]
LEVELS = {"L0": "spec sheet", "L1": "machine profile", "L2": "probe of the real step", "L3": "re-fit in the run"}
# Half-width of the printed interval, by level. L2 and L3 widen it by the noise they measured.
MARGINS: dict[str, float] = {"L0": 0.30, "L1": 0.15, "L2": 0.03, "L3": 0.02}

# Fractions of the data sheet's peak reached inside a training step, by large matmuls and by fused attention.
# Attention FLOPs are those executed: the causal half, with scores recomputed in the backward pass. Ampere, Volta and
# consumer cards: tuned on published training runs (docs/cost.md); the others: estimates from published matmul tests.
PEAK_SHARES = {
    "pascal": (0.80, 0.30),
    "volta": (0.40, 0.15),
    "turing": (0.35, 0.20),
    "ampere": (0.80, 0.30),
    "ada": (0.55, 0.35),
    "hopper": (0.60, 0.25),
    "blackwell": (0.55, 0.20),
    "consumer": (0.95, 0.50),  # boost clocks above the sheet's
}
MAX_SHAPE_RATIO = 1.5  # of a dimension to that of a measured matmul of similar shape
UNALIGNED_SHARE = 0.5  # of the rate if a dimension is no multiple of 8 (vocabulary 50,257), as tensor cores need
BANDWIDTH_SHARE = 0.80  # of the sheet's memory bandwidth that elementwise kernels reach
LAUNCH_SECONDS = 25e-6  # host time of one eager operation in Python, forward and backward
NVLINK_BYTES_PER_SECOND = 230e9  # bus rate of an all-reduce within a node of data-centre cards
PCIE_BYTES_PER_SECOND = 12e9  # the same for cards without NVLink
WITHOUT_NVLINK = ("A10", "A30", "A40")  # data-centre cards without it, or whose bridge is sold separately


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A measured matmul [rows, inner] @ [inner, outputs]."""

    rows: int
    inner: int
    outputs: int
    dtype: str
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """A measured rate of fused attention, forward and backward. keys: mean number of keys per query."""

    dtype: str
    keys: float
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, and the bandwidth between devices of its kind."""

    name: str
    kind: str  # type of the device, as torch calls it
    level: Level
    source: str  # where the rates come from, as text
    matmul_flops: dict[str, float]  # sustained on large matmuls, by dtype
    attention_share: float  # fraction of the matmul rate that attention reaches
    bytes_per_second: float  # sustained by elementwise kernels, reads plus writes
    launch_seconds: float  # of one operation
    bus_bytes_per_second: float = PCIE_BYTES_PER_SECOND
    memory_bytes: int = 0  # available to programs; 0 = unknown
    triton_kernels: bool = True  # whether kernels/triton can run, on cards that support it
    watts: float = 0.0  # at full load; 0 = unknown
    peak_flops: dict[str, float] = field(default_factory=dict)  # data sheet, for MFU; on a CPU measured
    context_bytes: int = 0  # used besides tensors: the context of a GPU, or the interpreter
    matmuls: tuple[Gemm, ...] = ()  # measured shapes
    attentions: tuple[AttentionRate, ...] = ()  # the same; a dtype without one falls back to attention_share

    @property
    def on_host(self) -> bool:
        """Whether it computes on the CPU."""
        return self.kind == devices.HOST_TYPE

    @property
    def device(self) -> Device:
        """What a device of this kind can do."""
        return devices.of(self.kind)

    def runs_triton_kernels(self, dtype: str) -> bool:
        """Whether steps in `dtype` use kernels/triton: cards with bfloat16 units do."""
        return not self.on_host and self.triton_kernels and dtype == "bfloat16"

    def rate(self, dtype: str) -> float:
        """FLOPs per second of large matmuls."""
        return self.matmul_flops.get(dtype) or max(self.matmul_flops.values())

    @property
    def fastest_dtype(self) -> str:
        """The dtype of the fastest matmuls."""
        return max(self.matmul_flops, key=lambda name: self.matmul_flops[name])

    def attention_rate(self, dtype: str, keys: float) -> float:
        """FLOPs per second of attention with so many keys per query: a cost per query plus a cost per key."""
        measured = sorted((rate.keys, 1 / rate.flops_per_second) for rate in self.attentions if rate.dtype == dtype)
        if not measured:
            return self.rate(dtype) * self.attention_share
        (min_keys, slow), (max_keys, quick) = measured[0], measured[-1]
        if min_keys == max_keys or slow <= quick:
            return 1 / quick
        per_query = (slow - quick) / (1 / min_keys - 1 / max_keys)
        return 1 / max(quick + per_query * (1 / keys - 1 / max_keys), quick / 2)

    def matmul_seconds(self, rows: int, inner: int, outputs: int, dtype: str) -> float:
        """Of [rows, inner] @ [inner, outputs]: at the rate of the nearest measured shape, else the general rate."""
        flops = 2.0 * rows * inner * outputs
        nearest = nearest_matmul(self.matmuls, rows, inner, outputs, dtype)
        if nearest is not None:
            return flops / nearest.flops_per_second
        unaligned = not self.on_host and dtype != "float32" and any(side % 8 for side in (rows, inner, outputs))
        return flops / (self.rate(dtype) * (UNALIGNED_SHARE if unaligned else 1.0))


def nearest_matmul(matmuls: Sequence[Gemm], rows: int, inner: int, outputs: int, dtype: str) -> Gemm | None:
    """The measured matmul of similar shape, dimensions in any order."""

    def ratio(matmul: Gemm) -> float:
        measured = sorted((matmul.rows, matmul.inner, matmul.outputs))
        pairs = zip(sorted((rows, inner, outputs)), measured, strict=True)
        return max(max(pair) / max(1, min(pair)) for pair in pairs)

    same = (matmul for matmul in reversed(matmuls) if matmul.dtype == dtype)
    best = min(same, key=ratio, default=None)
    return best if best and ratio(best) <= MAX_SHAPE_RATIO else None


def machine_from_spec(card: GpuSpec) -> Machine:
    """L0: the data sheet's rates, times the fractions that training reaches."""
    share, attention_share = PEAK_SHARES[card.generation]
    dtypes = ("bfloat16", "float16", "tf32", "float32")
    has_nvlink = card.generation in ("volta", "ampere", "hopper", "blackwell") and "PCIe" not in card.name
    has_nvlink = has_nvlink and card.name not in WITHOUT_NVLINK
    # float32 without tensor cores runs close to the data sheet on every generation.
    rates = {dtype: card.peak_flops(dtype) * (0.9 if dtype == "float32" else share) for dtype in dtypes}
    return Machine(
        name=card.name,
        kind=DEVICE_TYPE,
        level="L0",
        source=f"{card.name} data sheet",
        matmul_flops=rates,
        attention_share=attention_share / share,
        bytes_per_second=card.gigabytes_per_second * 1e9 * BANDWIDTH_SHARE,
        launch_seconds=LAUNCH_SECONDS,
        bus_bytes_per_second=NVLINK_BYTES_PER_SECOND if has_nvlink else PCIE_BYTES_PER_SECOND,
        memory_bytes=card.memory_bytes,
        watts=card.watts,
        peak_flops={dtype: card.peak_flops(dtype) for dtype in dtypes},
        context_bytes=int(0.47 * 2**30),  # lazily loaded kernels, A100 and torch 2.1: measured by others
    )

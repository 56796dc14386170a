"""How fast a device works: from a maker's sheet (L0) or from a profile measured on it (L1). All in SI units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from penjing.plan.gpu_specs import Card

Level = Literal["L0", "L1", "L2", "L3"]
LEVELS: dict[str, str] = {
    "L0": "spec sheet",
    "L1": "machine profile",
    "L2": "probe of the real step",
    "L3": "re-fit in the run",
}
# Half-width of the interval that a prediction of each level is printed with. L2 and L3 widen it by what they saw.
MARGINS: dict[str, float] = {"L0": 0.30, "L1": 0.15, "L2": 0.03, "L3": 0.02}

# Shares of the sheet's peak that are reached inside a training step: by large matmuls, and by fused attention, its
# FLOPs counted as done (causal half only, scores computed again going backward). Ampere, Volta and consumer cards:
# tuned on published training runs (docs/cost.md); the others are estimates from published matmul tests.
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
ODD_SHARE = 0.5  # of the rate, where a side is no multiple of 8: tensor cores want aligned rows (vocabulary 50,257)
BANDWIDTH_SHARE = 0.80  # of the sheet's memory bandwidth that elementwise kernels reach
LAUNCH_SECONDS = 25e-6  # host time of one eager operation under Python, forward and backward
NVLINK_BYTES_PER_SECOND = 230e9  # bus rate of an all-reduce within a node of data-centre cards
PCIE_BYTES_PER_SECOND = 12e9  # the same of cards without a link of their own
UNLINKED = ("A10", "A30", "A40")  # data-centre cards without one, or with a bridge between two that is bought apart


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
    """Fused attention as measured, forward and backward, of queries that see so many keys on average."""

    dtype: str
    keys: float
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, and how it talks to others like it."""

    name: str
    kind: Literal["cuda", "cpu"]
    level: Level
    source: str  # where the rates come from, in words
    matmul_flops: dict[str, float]  # sustained on large matmuls, by dtype
    attention_share: float  # of the matmul rate that attention reaches
    bytes_per_second: float  # sustained by elementwise kernels, reading and writing counted
    launch_seconds: float  # of one operation
    bus_bytes_per_second: float = PCIE_BYTES_PER_SECOND
    memory_bytes: int = 0  # that programs can have; 0 = unknown
    own_kernels: bool = True  # whether kernels/triton runs there, if the card is of the kind
    watts: float = 0.0  # at full load; 0 = unknown
    peak_flops: dict[str, float] = field(default_factory=dict)  # the sheet's, for MFU; of a CPU what was measured
    context_bytes: int = 0  # held beside tensors: a CUDA context, or the interpreter
    matmuls: tuple[Gemm, ...] = ()  # measured one by one
    attentions: tuple[AttentionRate, ...] = ()  # the same; of a dtype that has none, attention_share tells

    def runs_own_kernels(self, dtype: str) -> bool:
        """Whether steps in `dtype` run kernels/triton: cards that have bfloat16 units do."""
        return self.kind == "cuda" and self.own_kernels and dtype == "bfloat16"

    def rate(self, dtype: str) -> float:
        """FLOPs per second of large matmuls."""
        return self.matmul_flops.get(dtype) or max(self.matmul_flops.values())

    @property
    def fastest_dtype(self) -> str:
        """The dtype of the fastest matmuls."""
        return max(self.matmul_flops, key=lambda name: self.matmul_flops[name])

    def attention_rate(self, dtype: str, keys: float) -> float:
        """FLOPs per second of attention whose queries see so many keys: a query costs something, and each key."""
        mine = sorted((one.keys, 1 / one.flops_per_second) for one in self.attentions if one.dtype == dtype)
        if not mine:
            return self.rate(dtype) * self.attention_share
        (few, slow), (many, quick) = mine[0], mine[-1]
        if few == many or slow <= quick:
            return 1 / quick
        own = (slow - quick) / (1 / few - 1 / many)
        return 1 / max(quick + own * (1 / keys - 1 / many), quick / 2)

    def matmul_seconds(self, rows: int, inner: int, outputs: int, dtype: str) -> float:
        """Of [rows, inner] @ [inner, outputs]: at the rate of the nearest measured shape, or the general one."""
        flops = 2.0 * rows * inner * outputs
        near = nearest_matmul(self.matmuls, rows, inner, outputs, dtype)
        if near is not None:
            return flops / near.flops_per_second
        odd = self.kind == "cuda" and dtype != "float32" and any(side % 8 for side in (rows, inner, outputs))
        return flops / (self.rate(dtype) * (ODD_SHARE if odd else 1.0))


def nearest_matmul(matmuls: Sequence[Gemm], rows: int, inner: int, outputs: int, dtype: str) -> Gemm | None:
    """The measured matmul that is like this one: no side more than 1.5 times off; the order of sides is free."""
    best, distance = None, 1.5
    for matmul in matmuls:
        if matmul.dtype != dtype:
            continue
        worst = max(
            max(mine, theirs) / max(1, min(mine, theirs))
            for mine, theirs in zip(
                sorted((rows, inner, outputs)), sorted((matmul.rows, matmul.inner, matmul.outputs)), strict=True
            )
        )
        if worst <= distance:
            best, distance = matmul, worst
    return best


def machine_of_card(card: Card) -> Machine:
    """L0: what a card's sheet promises, times the shares that training reaches."""
    share, attention_share = PEAK_SHARES[card.generation]
    dtypes = ("bfloat16", "float16", "tf32", "float32")
    linked = card.generation in ("volta", "ampere", "hopper", "blackwell") and "PCIe" not in card.name
    linked = linked and card.name not in UNLINKED
    # float32 units without tensor cores run close to their sheet on every generation.
    rates = {dtype: card.peak_flops(dtype) * (0.9 if dtype == "float32" else share) for dtype in dtypes}
    return Machine(
        name=card.name,
        kind="cuda",
        level="L0",
        source=f"{card.name} data sheet",
        matmul_flops=rates,
        attention_share=attention_share / share,
        bytes_per_second=card.gigabytes_per_second * 1e9 * BANDWIDTH_SHARE,
        launch_seconds=LAUNCH_SECONDS,
        bus_bytes_per_second=NVLINK_BYTES_PER_SECOND if linked else PCIE_BYTES_PER_SECOND,
        memory_bytes=card.memory_bytes,
        watts=card.watts,
        peak_flops={dtype: card.peak_flops(dtype) for dtype in dtypes},
        context_bytes=int(0.47 * 2**30),  # lazily loaded kernels, A100 and torch 2.1: measured by others
    )

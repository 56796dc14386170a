"""GPU data sheets by name: level 0 of a plan. Any measurement is better.

Rates are dense TFLOPS with float32 accumulation, as torch's matmuls accumulate. GeForce cards run that at half the
advertised tensor rate. The formula is SMs x boost GHz x 2 x FMA per SM and cycle (256 on GeForce Ampere and later).
A card with two memory sizes has two names.
"""

import re
from dataclasses import dataclass
from typing import Literal

from penjing.base.errors import UserError, suggest

DEVICE_TYPE = "cuda"  # torch's name for the type of all cards here
Generation = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "consumer"]


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU. `half` is float16 on cards without bfloat16; None: no such units."""

    name: str
    generation: Generation
    half: float  # TFLOPS, bfloat16 or float16
    tf32: float | None
    single: float  # TFLOPS, float32 without tensor cores
    memory_gib: float  # as torch reports it, below the advertised size; an estimate for cards without a report
    gigabytes_per_second: float
    watts: float  # board power limit
    has_bfloat16: bool = True

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    def peak_flops(self, dtype: str) -> float:
        """FLOPs per second by dtype: bfloat16, float16, tf32 or float32."""
        if dtype == "float32":
            return self.single * 1e12
        if dtype == "tf32":
            return (self.tf32 or self.single) * 1e12
        if dtype == "bfloat16" and not self.has_bfloat16:
            return self.single * 1e12  # emulated in float32
        return self.half * 1e12


GPU_SPECS = {
    card.name: card
    for card in (
        GpuSpec("B200", "blackwell", 2250, 1125, 80, 178, 8000, 1000),
        GpuSpec("GB200", "blackwell", 2500, 1250, 80, 184, 8000, 1200),
        GpuSpec("GH200", "hopper", 989, 494.5, 67, 94.5, 4000, 700),
        GpuSpec("H200", "hopper", 989, 494.5, 67, 139.8, 4800, 700),
        GpuSpec("H100 PCIe", "hopper", 756, 378, 51, 79.1, 2000, 350),
        GpuSpec("H100 NVL", "hopper", 835, 417.5, 60, 93.1, 3900, 400),
        GpuSpec("H100", "hopper", 989, 494.5, 67, 79.1, 3350, 700),
        GpuSpec("A100 40GB", "ampere", 312, 156, 19.5, 39.4, 1555, 400),
        GpuSpec("A100 PCIe", "ampere", 312, 156, 19.5, 79.2, 1935, 300),
        GpuSpec("A100", "ampere", 312, 156, 19.5, 79.2, 2039, 400),
        GpuSpec("L40S", "ada", 362, 183, 91.6, 44.4, 864, 350),
        GpuSpec("L4", "ada", 121, 60, 30.3, 22, 300, 72),
        GpuSpec("A40", "ampere", 149.7, 74.8, 37.4, 44.3, 696, 300),
        GpuSpec("A30", "ampere", 165, 82, 10.3, 23.6, 933, 165),
        GpuSpec("A10", "ampere", 125, 62.5, 31.2, 22.1, 600, 150),
        GpuSpec("V100 PCIe", "volta", 112, None, 14, 31.7, 900, 250, False),
        GpuSpec("V100 16GB", "volta", 125, None, 15.7, 15.8, 900, 300, False),
        GpuSpec("V100", "volta", 125, None, 15.7, 31.7, 900, 300, False),
        GpuSpec("T4", "turing", 65, None, 8.1, 14.6, 320, 70, False),
        # No tensor cores: float16 matmuls with float32 accumulation run at the float32 rate.
        GpuSpec("P100", "pascal", 9.5, None, 9.5, 15.9, 732, 250, False),
        GpuSpec("TITAN X", "pascal", 11, None, 11, 11.9, 480, 250, False),
        GpuSpec("RTX 2080 Ti", "consumer", 56.9, None, 14.2, 10.8, 616, 260, False),
        GpuSpec("RTX 3060", "consumer", 25.6, 12.8, 12.7, 11.8, 360, 170),
        GpuSpec("RTX 3070", "consumer", 40.6, 20.3, 20.3, 7.8, 448, 220),
        GpuSpec("RTX 3080", "consumer", 59.5, 29.8, 29.8, 9.8, 760, 320),
        GpuSpec("RTX 3090", "consumer", 71, 35.6, 35.6, 23.6, 936, 350),
        GpuSpec("RTX 4060", "consumer", 30, 15, 15.1, 7.8, 272, 115),
        GpuSpec("RTX 4070", "consumer", 58.3, 29.1, 29.1, 11.7, 504, 200),
        GpuSpec("RTX 4080", "consumer", 97.5, 48.7, 48.7, 15.7, 717, 320),
        GpuSpec("RTX 4090", "consumer", 165.2, 82.6, 82.6, 23.5, 1008, 450),
        GpuSpec("RTX 5090", "consumer", 209.5, 104.8, 104.8, 31.4, 1792, 575),
    )
}
_NOT_A_VARIANT = r"(?! (?:Ti|SUPER|D|Laptop)\b)"  # these suffixes name another card
_LONGEST_FIRST = sorted(GPU_SPECS, key=len, reverse=True)
_SMALL_VARIANTS = {"A100": ("40GB", 50), "V100": ("16GB", 20)}  # by memory in GB, for names without a size


def match_gpu_spec(name: str, memory_bytes: int = 0) -> GpuSpec | None:
    """The card of a driver's device name; None if unknown. memory_bytes: selects between memory sizes."""
    for known in _LONGEST_FIRST:
        words = known.split()
        pattern = r"\b" + r"[ -](?:.*[ -])?".join(map(re.escape, words)) + r"\b" + _NOT_A_VARIANT
        if re.search(pattern, name):
            small, border = _SMALL_VARIANTS.get(known, ("", 0))
            return GPU_SPECS[f"{known} {small}"] if small and 0 < memory_bytes < border * 1e9 else GPU_SPECS[known]
    return None


def find_gpu_spec(name: str) -> GpuSpec:
    """A card as a user types it: `RTX 3090`, `rtx3090`, `3090`, `A100-40GB`. Raises UserError naming the nearest."""
    query = _normal(name)
    exact = (gpu for gpu in GPU_SPECS.values() if _normal(gpu.name).removeprefix("rtx") == query.removeprefix("rtx"))
    found = next(exact, None) or match_gpu_spec(re.sub(r"^(nvidia|tesla) ", "", name.strip(), flags=re.IGNORECASE))
    if found is not None:
        return found
    suggestion = suggest(query, [_normal(card) for card in GPU_SPECS])
    for card in sorted(GPU_SPECS, key=len):
        suggestion = suggestion.replace(f"{_normal(card)}?", f"{card}?")
    step = suggestion if suggestion.startswith("Did") else "Known: " + ", ".join(GPU_SPECS)
    raise UserError("no card of this name is known", where="--gpu", got=repr(name), next_step=step)


def _normal(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())

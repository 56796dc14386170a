"""Other people's measured training steps, as workloads. The table lies beside the repository, where it is at all."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from penjing.plan.device_model import machine_from_spec
from penjing.plan.gpu_specs import GpuSpec, match_gpu_spec
from penjing.plan.layout import NODE_RANKS, STATE_BYTES, Layout
from penjing.plan.shape import Shape
from penjing.plan.step_time import step_time
from penjing.plan.step_workload import VALUE_BYTES, Workload

TABLE = Path(__file__).parents[2] / "../shared/reference/published_runs.csv"
WHERE = "the table ../shared/reference/published_runs.csv is not here"
# Reads and writes of each value of a materialised attention map: scores, scale, mask, softmax, mixing and their
# gradients. Dropout adds some. Half-precision matmuls with float32 master weights compute the softmax in float32.
MAP_VALUES, MAP_DROPOUT_VALUES, MAP_MASTER_FACTOR = 18, 5, 1.25
MAP_RATE = 0.6  # matmuls of small heads run at about six tenths of large ones


@dataclass(frozen=True, kw_only=True)
class PublishedWork(Workload):
    """A step of other people's programs, whose weights may be of half precision themselves."""

    half_weights: bool = False

    @property
    def _has_masters(self) -> bool:
        return super()._has_masters and not self.half_weights

    def optimizer_bytes(self) -> float:
        return super().optimizer_bytes() * (16 / 28 if self.half_weights else 1)


@dataclass(frozen=True, kw_only=True)
class MaterialisedWork(PublishedWork):
    """A step whose attention stores its maps, as other people's programs do; their bytes count as elementwise."""

    attention_dropout: bool = False

    def attention_flops(self) -> float:
        """FLOPs of one pass: forward 2 matmuls, backward 4, on all pairs."""
        layers, forwards = self.shape.layers, 1 + float(self.recompute == "block") + self.extra_forwards
        flops = 2.0 * self.tokens * self.shape.query_size * self.seq_len
        return flops * (2 * forwards * layers + 4 * (layers - self.first_backward))

    def map_bytes(self) -> float:
        """Bytes moved in one pass for the maps."""
        values = MAP_VALUES + (MAP_DROPOUT_VALUES if self.attention_dropout else 0)
        value_bytes = VALUE_BYTES[self.dtype] * (MAP_MASTER_FACTOR if self._has_masters else 1.0)
        return self.tokens * self.seq_len * self.shape.heads * self.shape.layers * values * value_bytes

    def elementwise_bytes(self) -> float:
        return super().elementwise_bytes() + self.map_bytes()


def read_rows() -> list[dict[str, str]]:
    with open(TABLE, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def group_of(row: dict[str, str]) -> str:
    """Rows of one source on one kind of card."""
    return f"{row['source'].split('/')[0]}, {row['hardware']}"


def card_of(row: dict[str, str]) -> GpuSpec:
    name = row["hardware"].replace("_", " ").replace("a100 80gb", "A100").replace("h100 80gb", "H100")
    found = match_gpu_spec(name, int(float(row["gpu_mem_gb"] or 40) * 1e9))  # unsaid: the more common A100
    assert found is not None, row["hardware"]
    return found


def rows_with_time() -> list[dict[str, str]]:
    """All that tell the time of a step and the shape of the model."""
    wanted = ("step_time_ms", "seq_len", "micro_batch", "layers", "hidden", "heads", "head_dim", "ffn", "vocab")
    return [row for row in read_rows() if all(row[name] for name in wanted)]


def workload_of(row: dict[str, str]) -> Workload:
    def whole(name: str) -> int:
        return int(row[name])

    precision = row["precision"]
    automatic = "amp" in precision or "autocast" in precision
    dtype = "float32" if precision == "fp32" else "tf32" if precision == "tf32" else "bfloat16"
    dtype = "float16" if "fp16" in precision else dtype
    ranks = int(row["n_gpus"] or 1)
    shards = frozenset(STATE_BYTES if "FSDP" in row["parallelism"] else ())
    shape = Shape(
        layers=whole("layers"),
        width=whole("hidden"),
        heads=whole("heads"),
        query_size=whole("heads") * whole("head_dim"),
        key_size=int(row["kv_heads"] or row["heads"]) * whole("head_dim"),
        intermediate_size=whole("ffn"),
        mlp_matrices=2,
        vocabulary=whole("vocab"),
        parameters=whole("params"),
    )
    fused = PublishedWork(
        shape=shape,
        tokens=whole("micro_batch") * whole("seq_len"),
        seq_len=whole("seq_len"),
        keys=(whole("seq_len") + 1) / 2,
        passes=int(row["grad_accum"] or 1),
        dtype=dtype,
        half_weights=not automatic and dtype not in ("float32", "tf32"),
        recompute="block" if row["act_ckpt"] == "full" else "none",
        fused_optimizer="fused" in row["optimizer"],
        compiled=row["compile"] == "yes",
        layout=Layout(ranks=ranks, nodes=-(-ranks // NODE_RANKS), shards=shards),
    )
    if "materialised" not in row["attention"]:
        return fused
    return MaterialisedWork(**vars(fused), attention_dropout="dropout" in row["attention"])


def predicted_seconds(row: dict[str, str]) -> float:
    """What we say of one step, without a probe."""
    work, machine = workload_of(row), machine_from_spec(card_of(row))
    if isinstance(work, MaterialisedWork):
        machine = replace(machine, attention_share=MAP_RATE)
    return step_time(work, machine).seconds


def textbook_seconds(row: dict[str, str]) -> float:
    """6 N D / peak of one step on one device, still to be divided by somebody's constant."""
    peak = card_of(row).peak_flops(workload_of(row).dtype)
    tokens = int(row["micro_batch"]) * int(row["seq_len"]) * int(row["grad_accum"] or 1)
    return 6 * float(row["params"]) * tokens / peak

"""The configuration of a DeepSpeed engine, from a run's settings and from the user's ds_config.json, if there is one.

penjing's settings decide. A field of the file that says the same, or `auto`, is accepted; one that says something else
is an error that names both; what only DeepSpeed knows (buckets, prefetching, logging) is passed on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penjing import devices
from penjing.base.config import flat
from penjing.base.errors import UserError
from penjing.base.files import read_json

PASSED_ON = (
    "aio",
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "steps_per_print",
    "tensorboard",
    "timers",
    "wall_clock_breakdown",
    "wandb",
    "zero_optimization",
)
# How DeepSpeed searches a loss scale, and its own kernels: parallel/grad_scaler.py and optim/adamw.py are used instead.
WITHOUT_EFFECT = (
    "bf16.",
    "fp16.hysteresis",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
    "optimizer.params.torch_adam",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
AUTO = "auto"  # in the files of Hugging Face: as the run's settings say
UNKNOWN = object()  # a value that is decided later
BUCKET = 1 << 24  # numbers that are exchanged at once; DeepSpeed allocates room for them, by default 2 GB


def engine_config(run: Any, geometry: Any, stage: int) -> dict[str, Any]:
    """The configuration of an engine. run: its resolved settings. geometry: of its batches. stage: of ZeRO."""
    settings = _settings(run, geometry, stage)
    file = run.parallel.ds_config
    theirs = _read(Path(file), settings) if file else {}
    theirs_zero = theirs.pop("zero_optimization", {})
    zero = {
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "use_multi_rank_bucket_allreduce": False,  # gradients are reduced to the rank that keeps them: half the bytes
        "stage3_param_persistence_threshold": 0,  # small weights are sharded too
        **theirs_zero,
        "stage": stage,
    }
    if run.parallel.offload:
        zero["offload_optimizer"] = {**theirs_zero.get("offload_optimizer", {}), "device": devices.HOST.type}
    # The loop counts passes and rows, so the engine's own counts are 1. `step` passes on max_grad_norm.
    return {
        **theirs,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,  # our AdamW, a subclass of torch's
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def check_file(run: Any, stage: int) -> None:
    """Refuse what contradicts the settings that are known before data are read: not yet the sizes of batches, nor the
    dtype of `auto`."""
    if run.parallel.ds_config:
        _read(Path(run.parallel.ds_config), _settings(run, None, stage))


def _settings(run: Any, geometry: Any, stage: int) -> dict[str, tuple[Any, str]]:
    """By field of a ds_config.json: the value that it must have, and the setting that says so. geometry: None: unknown,
    nor is the dtype of `auto`."""
    optimizer, dtype = run.optimizer, f"compute.dtype={run.compute.dtype}"
    any_dtype = geometry is None and run.compute.dtype == "auto"
    sizes = (UNKNOWN, UNKNOWN, UNKNOWN)
    if geometry is not None:
        sizes = geometry.global_size, geometry.micro_size, geometry.accumulation
    micro = f"batch.micro_size={sizes[1]} in {getattr(geometry, 'world', 0)} processes"
    scheduler = {"constant": "WarmupLR", "cosine": "WarmupCosineLR"}.get(run.schedule.name, "none")
    return {
        "train_batch_size": (sizes[0], f"batch.size={sizes[0]}"),
        "train_micro_batch_size_per_gpu": (sizes[1], micro),
        "gradient_accumulation_steps": (sizes[2], micro),
        "gradient_clipping": (run.max_grad_norm, f"max_grad_norm={run.max_grad_norm}"),
        "bf16.enabled": (UNKNOWN if any_dtype else run.compute.dtype == "bfloat16", dtype),
        "fp16.enabled": (UNKNOWN if any_dtype else run.compute.dtype == "float16", dtype),
        "fp16.loss_scale": (0, "a scale that is searched"),
        "optimizer.type": ("adamw", f"optimizer.name={optimizer.name}"),
        "optimizer.params.lr": (optimizer.learning_rate, f"optimizer.learning_rate={optimizer.learning_rate}"),
        "optimizer.params.betas": ([optimizer.beta1, optimizer.beta2], "optimizer.beta1 and beta2"),
        "optimizer.params.eps": (optimizer.eps, f"optimizer.eps={optimizer.eps}"),
        "optimizer.params.weight_decay": (optimizer.weight_decay, f"optimizer.weight_decay={optimizer.weight_decay}"),
        "optimizer.params.adam_w_mode": (True, "decoupled decay"),
        "scheduler.type": (scheduler, f"schedule.name={run.schedule.name}"),
        "zero_optimization.stage": (stage, f"parallel.strategy=zero{stage}"),
        "zero_optimization.offload_optimizer.device": (
            devices.HOST.type if run.parallel.offload else "none",
            f"parallel.offload={str(run.parallel.offload).lower()}",
        ),
    }


def _read(file: Path, settings: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """What is passed on of a file, without `auto`. Raises UserError for a field that contradicts the settings."""
    theirs = read_json(file)
    if not isinstance(theirs, dict):
        raise UserError("not a JSON object", where=file)
    for field, value in flat(theirs):
        wanted, why = settings.get(field, (AUTO, "penjing decides it"))
        name = "adamw" if field == "optimizer.type" and value in ("Adam", "AdamW") else value
        free = field.split(".")[0] in PASSED_ON or field.startswith(WITHOUT_EFFECT)
        if wanted is not UNKNOWN and name not in (AUTO, wanted) and not (free and field not in settings):
            wanted = f"{wanted} ({why}), or leave it out"
            raise UserError("contradicts the run's settings", where=f"{file}: {field}", got=value, wanted=wanted)
    return _without_auto({name: value for name, value in theirs.items() if name in PASSED_ON})


def _without_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: _without_auto(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in kept.items() if value != AUTO}

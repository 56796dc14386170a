"""Shared by the baselines: a stock model of the spec's shape, its loss on held-out text, and the trial's output."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as functional

from compare.held_out import IGNORED
from compare.held_out import bits_per_byte as held_out_bits
from compare.trial_spec import PretrainSpec, TrainingSpec, TrialSpec
from compare.trial_timer import TrialTimer

GPU_WORKERS = 8  # DataLoader workers for a GPU; on a CPU they would take its cores


def stock_model(spec: PretrainSpec) -> Any:
    """Qwen3 in float32, newly initialised, on the device of the trial."""
    import transformers

    torch.manual_seed(spec.seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**spec.shape)).to(spec.device)


def stock_tokenizer(spec: PretrainSpec) -> Any:
    """The tokenizer. `bos` begins and ends a text; `eos`, which occurs in no text, pads rows."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(spec.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def loading(spec: TrialSpec) -> dict[str, Any]:
    """DataLoader arguments for the device."""
    on_gpu = spec.device != "cpu"
    return {"num_workers": GPU_WORKERS if on_gpu else 0, "persistent_workers": on_gpu, "pin_memory": on_gpu}


def training_arguments(spec: TrainingSpec) -> dict[str, Any]:
    """Arguments of transformers.TrainingArguments: the spec's step, and nothing else."""
    return {
        "output_dir": spec.out,
        "use_cpu": spec.device == "cpu",
        "bf16": spec.dtype == "bfloat16",
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "weight_decay": spec.weight_decay,
        "max_grad_norm": spec.max_grad_norm,
        "logging_nan_inf_filter": False,  # it synchronizes with the device at every step
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": spec.seed,
        **{f"dataloader_{name}": value for name, value in loading(spec).items()},
    }


def bits_per_byte(spec: PretrainSpec, model: Any) -> float:
    """Bits per byte of the held-out text, in the dtype of the weights."""

    @torch.no_grad()
    def nats(ids_BT: Any, target_BT: Any) -> float:
        logits_BTV = model(input_ids=torch.from_numpy(ids_BT).to(spec.device)).logits
        target_N = torch.from_numpy(target_BT).flatten().to(spec.device)
        logits_NV = logits_BTV.flatten(0, 1).float()
        return float(functional.cross_entropy(logits_NV, target_N, ignore_index=IGNORED, reduction="sum"))

    was_training = model.training
    model.eval()
    bits = held_out_bits(spec.held_out, nats)
    model.train(was_training)
    return bits


def has_tf32(spec: TrialSpec) -> bool:
    """Whether float32 matmuls can run in TF32: on GPUs of compute capability 8.0 or higher."""
    return spec.device != "cpu" and torch.cuda.get_device_capability() >= (8, 0)


def matmul_dtype(model: Any, context: AbstractContextManager[Any] | None = None) -> str:
    """The compute dtype of the linear layers of `model`, observed in a forward pass of two tokens."""
    seen: list[torch.dtype] = []
    layer = next(part for part in model.modules() if isinstance(part, torch.nn.Linear))
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.no_grad(), context or nullcontext():
        model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=layer.weight.device))
    hook.remove()
    return str(seen[0]).removeprefix("torch.")


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Settings read from the optimizer itself."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's
    groups = optimizer.param_groups
    return {
        "optimizer": type(optimizer).__name__,
        "learning_rate": max(float(group["lr"]) for group in groups),
        "betas": list(groups[0]["betas"]),
        "weight_decay": max(float(group["weight_decay"]) for group in groups),
    }


def finish(timer: TrialTimer, options: list[str], **settings: Any) -> None:
    """Print the trial. options: for display; settings: the values actually used in training."""
    print(json.dumps(timer.result(options=options, settings=settings)))

"""What trials of TRL's trainers share: the settings of the step, the data, and how one is run to its end."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

from penjing.bench.meter import Laps, Spec
from penjing.bench.peers.hf_model import product_dtype, settings_of


def settings(spec: Spec) -> dict[str, Any]:
    """Arguments of TRL's configurations that say the same step as ours, with nothing beside it."""
    return {
        "output_dir": spec.out,
        "use_cpu": True,
        "bf16": spec.dtype == "bfloat16",
        "gradient_accumulation_steps": spec.batch // spec.micro,
        "max_steps": spec.steps,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": spec.clip_norm,
        "optim": "adamw_torch_fused",
        "beta": spec.beta,
        "gradient_checkpointing": spec.checkpointing,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": spec.seed,
        "model_init_kwargs": {"dtype": "float32"},
    }


def read_rows(spec: Spec) -> Any:
    """The trial's data as a `datasets.Dataset`."""
    datasets: Any = importlib.import_module("datasets")  # does not say its types
    datasets.disable_progress_bars()
    with open(spec.data, encoding="utf-8") as stream:
        return datasets.Dataset.from_list([json.loads(line) for line in stream])


def run(
    make: Callable[[list[Any]], Any], laps: Laps, lap: Callable[[dict[str, float]], None], options: list[str]
) -> None:
    """Train to the end and print the result. make: a trainer with these callbacks; lap: called with what it logs."""
    import transformers
    import trl

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            laps.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            lap(logs)

    trainer = make([Clock()])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    said = [
        f"trl {trl.__version__}",
        f"per_device_train_batch_size={trainer.args.per_device_train_batch_size}",
        f"gradient_checkpointing={trainer.args.gradient_checkpointing}",
        f"attention {trainer.model.config._attn_implementation}",
        f"optim={trainer.args.optim.value}",
        *options,
    ]
    result = laps.result(options=said)
    told = settings_of(trainer.optimizer, max_grad_norm=trainer.args.max_grad_norm, dtype=product_dtype(trainer.model))
    print(json.dumps({**result, "settings": told}))

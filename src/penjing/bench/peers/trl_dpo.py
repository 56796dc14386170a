"""A trial of TRL's DPOTrainer: `python -m penjing.bench.peers.trl_dpo SPEC.json`.

It gets ready token ids in the order in which ours learns them, so that both take the same steps and tokenizing is
nobody's time. Its `padding_free` is switched off in this version by TRL itself.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from penjing.bench.meter import Laps, Spec, read_spec


def main() -> None:
    spec, laps = read_spec(Spec), Laps()
    import torch
    import transformers

    # Neither says its types.
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")

    _ = trl.DPOTrainer, trl.DPOConfig  # loaded when first asked for
    laps.imported()
    torch.set_num_threads(spec.threads)
    datasets.disable_progress_bars()

    class Ready(trl.DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            laps.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                names = {"loss": "loss", "accuracy": "rewards/accuracies", "margin": "rewards/margins"}
                laps.lap({name: logs[theirs] for name, theirs in names.items()})

    settings = trl.DPOConfig(
        output_dir=spec.out,
        use_cpu=True,
        bf16=spec.dtype == "bfloat16",
        per_device_train_batch_size=spec.micro,
        gradient_accumulation_steps=spec.batch // spec.micro,
        max_steps=spec.steps,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=spec.clip_norm,
        optim="adamw_torch_fused",
        beta=spec.beta,
        loss_type=["sigmoid"],
        max_length=None,
        precompute_ref_log_probs=spec.reference == "precomputed",
        gradient_checkpointing=spec.checkpointing,
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=spec.seed,
        model_init_kwargs={"dtype": "float32"},
    )
    with open(spec.data, encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    trainer = Ready(
        model=spec.model,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(spec.model),
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    options = [
        f"trl {trl.__version__}",
        f"per_device_train_batch_size={spec.micro}",
        f"gradient_checkpointing={spec.checkpointing}",
        f"precompute_ref_log_probs={settings.precompute_ref_log_probs}",
        f"attention {trainer.model.config._attn_implementation}",
        f"optim={settings.optim.value}",
        "its tokenizing left out",
    ]
    print(json.dumps(laps.result(options=options)))


if __name__ == "__main__":
    main()

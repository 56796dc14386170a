"""A trial of TRL's GRPOTrainer: `python -m penjing.bench.peers.trl_grpo SPEC.json`.

It samples with transformers' `generate`, as TRL does without a server of vLLM, once for all answers of a step.
Prompts come in the order in which ours answers them; its reward is the function that ours calls.
"""

from __future__ import annotations

import importlib
import json
import time
from typing import Any

from penjing.base.table import look_up
from penjing.bench.meter import Laps, Spec, read_spec


def main() -> None:
    spec, laps = read_spec(Spec), Laps()
    import torch
    import transformers

    # Neither says its types.
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")

    _ = trl.GRPOTrainer, trl.GRPOConfig  # loaded when first asked for
    is_match = look_up({"match": spec.match}, "match", what="reward")
    laps.imported()
    torch.set_num_threads(spec.threads)
    datasets.disable_progress_bars()
    sampling: list[float] = []

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            said = super()._generate_single_turn(*args, **kwargs)
            sampling.append(time.perf_counter() - began)
            return said

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            laps.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "reward" in logs:
                names = {"reward": "reward", "answer_tokens": "completions/mean_length"}
                figures = {name: logs[theirs] for name, theirs in names.items()}
                laps.lap({**figures, "sampling_seconds": sampling[-1]})

    def exact(completions: Any, completion_ids: Any, gt: Any, **kwargs: Any) -> list[float]:
        stop = set(trainer.eos_token_ids)
        return [
            float(ids[-1] in stop and is_match(said[0]["content"].strip(), truths))
            for said, ids, truths in zip(completions, completion_ids, gt, strict=True)
        ]

    passes = spec.batch // spec.micro
    settings = trl.GRPOConfig(
        output_dir=spec.out,
        use_cpu=True,
        bf16=spec.dtype == "bfloat16",
        per_device_train_batch_size=spec.micro * spec.answers,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,  # one generation for all answers of a step
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
        loss_type="grpo",
        epsilon=0.2,
        num_iterations=1,
        num_generations=spec.answers,
        max_completion_length=spec.max_tokens,
        temperature=spec.temperature,
        shuffle_dataset=False,
        gradient_checkpointing=spec.checkpointing,
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
    trainer = Timed(
        model=spec.model,
        reward_funcs=exact,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(spec.model, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    options = [
        f"trl {trl.__version__}",
        f"per_device_train_batch_size={spec.micro * spec.answers}",
        f"steps_per_generation={passes}",
        f"gradient_checkpointing={spec.checkpointing}",
        f"attention {trainer.model.config._attn_implementation}",
        f"optim={settings.optim.value}",
        "generation by transformers' generate",
    ]
    print(json.dumps(laps.result(options=options)))


if __name__ == "__main__":
    main()

"""A trial of TRL's DPOTrainer or GRPOTrainer: `python -m compare.baselines.trl_trainers SPEC.json`.

DPO gets token ids in penjing's order, so that both take the same steps and tokenizing is not timed. TRL itself turns
off `padding_free` in this version. GRPO samples with transformers' `generate`, as TRL does without a vLLM server, once
for all answers of a step. Prompts come in penjing's order; the reward is the same function.
"""

from __future__ import annotations

import importlib
import json
import time
from typing import Any

import torch

from compare.baselines import stock
from compare.trial_spec import AlignmentSpec, read_spec
from compare.trial_timer import TrialTimer
from penjing.base.registry import look_up

# Figures of each step: common name -> name in TRL's logs.
FIGURES = {
    "dpo": {"loss": "loss", "accuracy": "rewards/accuracies", "margin": "rewards/margins"},
    "grpo": {"reward": "reward", "answer_tokens": "completions/mean_length"},
}


def settings(spec: AlignmentSpec) -> dict[str, Any]:
    """Arguments of TRL's configurations: the same step as penjing's, and nothing else."""
    return {
        **stock.training_arguments(spec),
        "gradient_accumulation_steps": spec.batch // spec.micro,
        "max_steps": spec.steps,
        "warmup_steps": 0,
        "adam_epsilon": 1e-8,
        "optim": "adamw_torch_fused",
        "beta": spec.beta,
        "gradient_checkpointing": spec.checkpointing,
        "logging_steps": 1,
        "model_init_kwargs": {"dtype": "float32"},
    }


def read_rows(spec: AlignmentSpec) -> Any:
    """The trial's data as a `datasets.Dataset`."""
    datasets: Any = importlib.import_module("datasets")  # does not say its types
    datasets.disable_progress_bars()
    with open(spec.data, encoding="utf-8") as stream:
        return datasets.Dataset.from_list([json.loads(line) for line in stream])


def make_dpo(trl: Any, spec: AlignmentSpec, tokenizer: Any, callback: Any) -> tuple[Any, list[str]]:
    """The trainer, and its options for display."""

    class PreTokenizedTrainer(trl.DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    arguments = trl.DPOConfig(
        **settings(spec),
        per_device_train_batch_size=spec.micro,
        loss_type=["sigmoid"],
        max_length=None,
        precompute_ref_log_probs=spec.reference == "precomputed",
        train_sampling_strategy="sequential",
    )
    trainer = PreTokenizedTrainer(
        model=spec.model,
        args=arguments,
        train_dataset=read_rows(spec),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    return trainer, [f"precompute_ref_log_probs={arguments.precompute_ref_log_probs}", "its tokenizing left out"]


def make_grpo(
    trl: Any, spec: AlignmentSpec, tokenizer: Any, callback: Any, sampling: dict[str, float]
) -> tuple[Any, list[str]]:
    """The same. sampling: receives the seconds of the last generation."""

    class TimedTrainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            answers = super()._generate_single_turn(*args, **kwargs)
            sampling["sampling_seconds"] = time.perf_counter() - began
            return answers

    is_match = look_up({"match": spec.match}, "match", what="reward")
    stop: set[int] = set()  # filled in once the trainer exists

    def exact(completions: Any, completion_ids: Any, gt: Any, **kwargs: Any) -> list[float]:
        return [
            float(ids[-1] in stop and is_match(answer[0]["content"].strip(), truths))
            for answer, ids, truths in zip(completions, completion_ids, gt, strict=True)
        ]

    shared = settings(spec)
    passes = shared["gradient_accumulation_steps"]
    arguments = trl.GRPOConfig(
        **shared,
        per_device_train_batch_size=spec.micro * spec.num_generations,
        steps_per_generation=passes,  # one generation for all answers of a step
        loss_type="grpo",
        epsilon=0.2,
        num_iterations=1,
        num_generations=spec.num_generations,
        max_completion_length=spec.max_tokens,
        temperature=spec.temperature,
        shuffle_dataset=False,
    )
    trainer = TimedTrainer(
        model=spec.model,
        reward_funcs=exact,
        args=arguments,
        train_dataset=read_rows(spec),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    stop.update(trainer.eos_token_ids)
    return trainer, [f"steps_per_generation={passes}", "generation by transformers' generate"]


def main() -> None:
    spec = read_spec(AlignmentSpec)
    import transformers

    trl: Any = importlib.import_module("trl")  # does not say its types
    # TRL imports these lazily.
    _ = (trl.DPOTrainer, trl.DPOConfig) if spec.method == "dpo" else (trl.GRPOTrainer, trl.GRPOConfig)
    timer = TrialTimer(spec)
    timer.imported()
    torch.set_num_threads(spec.threads)
    names, sampling = FIGURES[spec.method], dict[str, float]()

    class TimerCallback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            timer.ready()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if set(names.values()) <= logs.keys():
                timer.step(spec.batch, **{name: logs[logged_name] for name, logged_name in names.items()}, **sampling)

    if spec.method == "dpo":
        trainer, more = make_dpo(trl, spec, transformers.AutoTokenizer.from_pretrained(spec.model), TimerCallback())
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model, padding_side="left")
        trainer, more = make_grpo(trl, spec, tokenizer, TimerCallback(), sampling)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    options = [
        f"trl {trl.__version__}",
        f"per_device_train_batch_size={trainer.args.per_device_train_batch_size}",
        f"gradient_checkpointing={trainer.args.gradient_checkpointing}",
        f"attention {trainer.model.config._attn_implementation}",
        f"optim={trainer.args.optim.value}",
        *more,
    ]
    stock.finish(
        timer,
        options,
        **stock.optimizer_settings(trainer.optimizer),
        max_grad_norm=trainer.args.max_grad_norm,
        dtype=stock.matmul_dtype(trainer.model),
    )


if __name__ == "__main__":
    main()

"""A trial of TRL's GRPOTrainer: `python -m penjing.bench.peers.trl_grpo SPEC.json`.

It samples with transformers' `generate`, as TRL does without a server of vLLM, once for all answers of a step.
Prompts come in the order in which ours answers them; its reward is the function that ours calls.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from penjing.base.registry import look_up
from penjing.bench.meter import Laps, Spec, read_spec
from penjing.bench.peers import trl_shared


def main() -> None:
    spec, laps = read_spec(Spec), Laps()
    import torch
    import transformers

    trl: Any = importlib.import_module("trl")  # does not say its types
    _ = trl.GRPOTrainer, trl.GRPOConfig  # loaded when first asked for
    is_match = look_up({"match": spec.match}, "match", what="reward")
    laps.imported()
    torch.set_num_threads(spec.threads)
    sampling: list[float] = []

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            said = super()._generate_single_turn(*args, **kwargs)
            sampling.append(time.perf_counter() - began)
            return said

    def lap(logs: dict[str, float]) -> None:
        if "reward" in logs:
            names = {"reward": "reward", "answer_tokens": "completions/mean_length"}
            figures = {name: logs[theirs] for name, theirs in names.items()}
            laps.lap({**figures, "sampling_seconds": sampling[-1]})

    shared = trl_shared.settings(spec)
    passes = shared["gradient_accumulation_steps"]
    settings = trl.GRPOConfig(
        **shared,
        per_device_train_batch_size=spec.micro * spec.answers,
        steps_per_generation=passes,  # one generation for all answers of a step
        loss_type="grpo",
        epsilon=0.2,
        num_iterations=1,
        num_generations=spec.answers,
        max_completion_length=spec.max_tokens,
        temperature=spec.temperature,
        shuffle_dataset=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model, padding_side="left")
    stop: set[int] = set()  # known when the trainer is
    rows = trl_shared.read_rows(spec)

    def exact(completions: Any, completion_ids: Any, gt: Any, **kwargs: Any) -> list[float]:
        return [
            float(ids[-1] in stop and is_match(said[0]["content"].strip(), truths))
            for said, ids, truths in zip(completions, completion_ids, gt, strict=True)
        ]

    def make(callbacks: list[Any]) -> Any:
        trainer = Timed(
            model=spec.model,
            reward_funcs=exact,
            args=settings,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        stop.update(trainer.eos_token_ids)
        return trainer

    options = [f"steps_per_generation={passes}", "generation by transformers' generate"]
    trl_shared.run(make, laps, lap, options)


if __name__ == "__main__":
    main()

"""A trial of TRL's DPOTrainer: `python -m penjing.bench.peers.trl_dpo SPEC.json`.

It gets ready token ids in the order in which ours learns them, so that both take the same steps and tokenizing is
nobody's time. Its `padding_free` is switched off in this version by TRL itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from penjing.bench.meter import Laps, Spec, read_spec
from penjing.bench.peers import trl_shared


def main() -> None:
    spec, laps = read_spec(Spec), Laps()
    import torch
    import transformers

    trl: Any = importlib.import_module("trl")  # does not say its types
    _ = trl.DPOTrainer, trl.DPOConfig  # loaded when first asked for
    laps.imported()
    torch.set_num_threads(spec.threads)

    class Ready(trl.DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    def lap(logs: dict[str, float]) -> None:
        if "loss" in logs:
            names = {"loss": "loss", "accuracy": "rewards/accuracies", "margin": "rewards/margins"}
            laps.lap({name: logs[theirs] for name, theirs in names.items()})

    settings = trl.DPOConfig(
        **trl_shared.settings(spec),
        per_device_train_batch_size=spec.micro,
        loss_type=["sigmoid"],
        max_length=None,
        precompute_ref_log_probs=spec.reference == "precomputed",
        train_sampling_strategy="sequential",
    )
    rows = trl_shared.read_rows(spec)

    def make(callbacks: list[Any]) -> Any:
        return Ready(
            model=spec.model,
            args=settings,
            train_dataset=rows,
            processing_class=transformers.AutoTokenizer.from_pretrained(spec.model),
            callbacks=callbacks,
        )

    options = [f"precompute_ref_log_probs={settings.precompute_ref_log_probs}", "its tokenizing left out"]
    trl_shared.run(make, laps, lap, options)


if __name__ == "__main__":
    main()

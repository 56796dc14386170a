"""A trial of transformers' Trainer: `python -m compare.baselines.hf_trainer SPEC.json [packed]`.

Default: one document per row, truncated to the row length and padded to the longest of its batch by transformers'
collator. `packed`: concatenated documents, cut into full rows as in transformers' language-modelling example. bf16 and
torch.compile follow the spec (bench/tuning.py finds the fastest configuration). On a GPU float32 matmuls use TF32, and
worker processes load batches. An incomplete last batch is dropped, because torch.compile would recompile for it. Texts
are tokenized before the first step.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import torch

from compare.baselines import stock
from compare.held_out import IGNORED, packed_rows, read_texts
from compare.trial_spec import PretrainSpec, read_spec
from compare.trial_timer import TrialTimer


class PackedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Prepared rows of token ids."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index]}


def make_rows(spec: PretrainSpec, tokenizer: Any, *, packed: bool) -> list[list[int]]:
    if spec.setting == "step":
        batches = packed_rows(spec)
        return [row[:-1].tolist() for _ in range(spec.steps) for row in next(batches)[0]]
    bos = tokenizer.bos_token_id
    documents = [[bos, *ids] for ids in tokenizer(read_texts(spec), add_special_tokens=False)["input_ids"]]
    if not packed:
        return [[*ids, bos][: spec.seq_len] for ids in documents]
    stream, size = list(chain.from_iterable(documents)), spec.seq_len
    return [stream[first : first + size] for first in range(0, len(stream) - size + 1, size)]


def arguments(spec: PretrainSpec) -> dict[str, Any]:
    """Arguments of transformers.TrainingArguments."""
    return {
        **stock.training_arguments(spec),
        "per_device_train_batch_size": spec.batch,
        "max_steps": spec.steps if spec.setting == "step" else 10**6,
        "tf32": True if stock.has_tf32(spec) else None,
        "torch_compile": spec.compiled,
        "dataloader_drop_last": True,
    }


def make_trainer(timer: TrialTimer, model: Any, settings: Any, **more: Any) -> Any:
    """A Trainer that counts tokens with a target and calls the timer."""
    import transformers

    class CountingTrainer(transformers.Trainer):  # type: ignore[misc]
        counted = 0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.counted += int((inputs["labels"][:, 1:] != IGNORED).sum())
            return super().training_step(model, inputs, *args, **kwargs)

    class TimerCallback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            timer.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not timer.step(trainer.counted)
            trainer.counted = 0

    trainer = CountingTrainer(model=model, args=settings, callbacks=[TimerCallback()], **more)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer


def main() -> None:
    import transformers

    spec, packed = read_spec(PretrainSpec), "packed" in sys.argv[2:]
    torch.set_num_threads(spec.threads)
    _ = transformers.Trainer, transformers.Qwen3ForCausalLM  # transformers imports these lazily
    timer = TrialTimer(spec, lambda: stock.bits_per_byte(spec, model))
    timer.imported()
    tokenizer, model = stock.stock_tokenizer(spec), stock.stock_model(spec)
    settings = transformers.TrainingArguments(**arguments(spec))
    trainer = make_trainer(
        timer,
        model,
        settings,
        train_dataset=PackedDataset(make_rows(spec, tokenizer, packed=packed)),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    options = [
        f"transformers {transformers.__version__}",
        f"bf16={settings.bf16}",
        f"torch_compile={settings.torch_compile}",
        "rows packed" if packed or spec.setting == "step" else "rows padded to the longest of a batch",
        f"attention {model.config._attn_implementation}",
        f"optim={settings.optim.value}",
    ]
    stock.finish(
        timer,
        options,
        **stock.optimizer_settings(trainer.optimizer),
        max_grad_norm=settings.max_grad_norm,
        dtype=stock.matmul_dtype(model),
        compiled=hasattr(trainer.model_wrapped, "_orig_mod"),
        tf32=bool(settings.tf32),
        loading_processes=settings.dataloader_num_workers,
        drop_last=settings.dataloader_drop_last,
    )


if __name__ == "__main__":
    main()

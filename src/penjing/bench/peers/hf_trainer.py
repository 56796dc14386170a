"""A trial of transformers' Trainer: `python -m penjing.bench.peers.hf_trainer SPEC.json [packed]`.

Plain: a document a row, cut at the row's length and padded to the longest of its batch by transformers' own collator.
`packed`: documents end to end, cut into full rows as transformers' own example of language modelling does it. bf16 and
torch.compile are the spec's (bench/tune.py finds the fastest way). On a GPU float32 products are TF32 and batches are
made by processes of their own. A last batch that is not full is left out, as torch.compile would compile again for it.
Texts are tokenized before the first step.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from typing import Any

import torch

from penjing.bench.meter import read_spec
from penjing.bench.peers.hf_model import (
    GPU_WORKERS,
    bits_per_byte,
    has_tf32,
    product_dtype,
    read_texts,
    settings_of,
    stock_model,
    stock_tokenizer,
)
from penjing.bench.race import IGNORED, Race, RaceSpec, packed_rows


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Ready rows of ids."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index]}


def make_rows(spec: RaceSpec, tokenizer: Any, *, packed: bool) -> list[list[int]]:
    if spec.kind == "step":
        batches = packed_rows(spec)
        return [row[:-1].tolist() for _ in range(spec.steps) for row in next(batches)[0]]
    opens = tokenizer.bos_token_id
    documents = [[opens, *ids] for ids in tokenizer(read_texts(spec), add_special_tokens=False)["input_ids"]]
    if not packed:
        return [[*ids, opens][: spec.row_tokens] for ids in documents]
    stream, size = list(chain.from_iterable(documents)), spec.row_tokens
    return [stream[first : first + size] for first in range(0, len(stream) - size + 1, size)]


def arguments(spec: RaceSpec) -> dict[str, Any]:
    """Of transformers.TrainingArguments."""
    on_gpu = spec.device != "cpu"
    return {
        "output_dir": spec.out,
        "use_cpu": not on_gpu,
        "per_device_train_batch_size": spec.batch,
        "max_steps": spec.steps if spec.kind == "step" else 10**6,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "weight_decay": spec.weight_decay,
        "max_grad_norm": spec.clip_norm,
        "bf16": spec.dtype == "bfloat16",
        "tf32": True if has_tf32(spec) else None,
        "torch_compile": spec.compiled,
        "dataloader_drop_last": True,
        "dataloader_num_workers": GPU_WORKERS if on_gpu else 0,
        "dataloader_persistent_workers": on_gpu,
        "dataloader_pin_memory": on_gpu,
        "logging_nan_inf_filter": False,  # which waits for the device at every step
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": spec.seed,
    }


def main() -> None:
    import transformers

    spec, packed = read_spec(RaceSpec), "packed" in sys.argv[2:]
    torch.set_num_threads(spec.threads)
    _ = transformers.Trainer, transformers.Qwen3ForCausalLM  # loaded when first asked for
    race = Race(spec, lambda: bits_per_byte(spec, model))
    race.imported()
    tokenizer, model = stock_tokenizer(spec), stock_model(spec)
    rows = Rows(make_rows(spec, tokenizer, packed=packed))
    settings = transformers.TrainingArguments(**arguments(spec))

    class Counting(transformers.Trainer):  # type: ignore[misc]
        counted = 0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.counted += int((inputs["labels"][:, 1:] != IGNORED).sum())
            return super().training_step(model, inputs, *args, **kwargs)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            race.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not race.step(trainer.counted)
            trainer.counted = 0

    trainer = Counting(
        model=model,
        args=settings,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    result = race.result(
        options=[
            f"transformers {transformers.__version__}",
            f"bf16={settings.bf16}",
            f"torch_compile={settings.torch_compile}",
            "rows packed" if packed or spec.kind == "step" else "rows padded to the longest of a batch",
            f"attention {model.config._attn_implementation}",
            f"optim={settings.optim.value}",
        ]
    )
    told = settings_of(
        trainer.optimizer,
        max_grad_norm=settings.max_grad_norm,
        dtype=product_dtype(model),
        compiled=hasattr(trainer.model_wrapped, "_orig_mod"),
        tf32=bool(settings.tf32),
        loading_processes=settings.dataloader_num_workers,
        drop_last=settings.dataloader_drop_last,
    )
    print(json.dumps({**result, "settings": told}))


if __name__ == "__main__":
    main()

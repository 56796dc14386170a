"""A trial of transformers' Trainer: `python -m penjing.bench.peers.hf_trainer SPEC.json [packed]`.

Plain: its defaults (float32, eager, pinned copies to a GPU), a document a row, cut at the row's length and padded
to the longest of its batch by transformers' own collator. `packed`: documents end to end, cut into full rows as
transformers' own example of language modelling does it, with torch.compile, and bf16 where that is faster. Texts are
tokenized before the first step by either.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from typing import Any

import torch

from penjing.bench.meter import read_spec
from penjing.bench.peers.hf_model import bits_per_byte, read_texts, stock_model, stock_tokenizer
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


def main() -> None:
    import transformers

    spec, packed = read_spec(RaceSpec), "packed" in sys.argv[2:]
    torch.set_num_threads(spec.threads)
    _ = transformers.Trainer, transformers.Qwen3ForCausalLM  # loaded when first asked for
    race = Race(spec, lambda: bits_per_byte(spec, model))
    race.imported()
    tokenizer, model = stock_tokenizer(spec), stock_model(spec)
    rows = Rows(make_rows(spec, tokenizer, packed=packed))
    settings = transformers.TrainingArguments(
        output_dir=spec.out,
        use_cpu=spec.device == "cpu",
        per_device_train_batch_size=spec.batch,
        max_steps=spec.steps if spec.kind == "step" else 10**6,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.clip_norm,
        bf16=packed and spec.half,
        torch_compile=packed,
        dataloader_pin_memory=spec.device != "cpu",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=spec.seed,
    )

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
    options = [
        f"transformers {transformers.__version__}",
        f"bf16={settings.bf16}",
        f"torch_compile={packed}",
        "rows packed" if packed or spec.kind == "step" else "rows padded to the longest of a batch",
        f"attention {model.config._attn_implementation}",
        f"optim={settings.optim.value}",
    ]
    print(json.dumps(race.result(options=options)))


if __name__ == "__main__":
    main()

"""A trial of LitGPT's pretraining: `python -m compare.baselines.litgpt SPEC.json`.

It uses LitGPT's model, initialisation, data and loop as LitGPT's command line does, with its default of four loading
processes. Its loop always calls torch.compile, which is disabled if the spec says eager. Each text is a file; litdata
tokenizes the files, concatenates them with a `bos` before each, and cuts full rows. Batch size, AdamW and the constant
learning rate are the same for all contestants.

Its requirements exclude the huggingface_hub that transformers 5 needs, so it is installed without them; see
docs/speed.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from compare.baselines import stock
from compare.held_out import packed_rows, read_texts
from compare.trial_spec import PretrainSpec, read_spec
from compare.trial_timer import TrialTimer

# Tokens, or steps. It prints the remaining time, which must not exceed a C int of days.
NO_END = 10**11


class TrialOverError(Exception):
    """The trial is over; LitGPT's loop has no other way to stop."""


class LogitsModel(torch.nn.Module):
    """LitGPT's model with the call signature of transformers, without the padding of its vocabulary."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.model(input_ids)[..., : self.model.config.vocab_size])


def model_config(spec: PretrainSpec) -> Any:
    """LitGPT's Qwen3 preset, with this shape."""
    from litgpt import Config

    shape = spec.shape
    return Config(
        name="trial",
        block_size=spec.seq_len,
        n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_key_value_heads"],
        n_embd=shape["hidden_size"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        norm_eps=shape["rms_norm_eps"],
        rope_base=shape["rope_theta"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_qk=True,
        mlp_class_name="LLaMAMLP",
    )


def make_fabric(spec: PretrainSpec, timer: TrialTimer, precision: str) -> Any:
    """A Fabric that calls the timer: LitGPT's loop calls `no_backward_sync` at the start of a step, `log_dict` at the
    end."""
    import lightning
    import litgpt
    from litgpt.utils import choose_logger

    class TimedFabric(lightning.Fabric):  # type: ignore[misc]
        stock_model: LogitsModel | None = None
        going = False
        settings: dict[str, Any]

        def setup_optimizers(self, *optimizers: Any) -> Any:
            self.settings = stock.optimizer_settings(optimizers[0])
            return super().setup_optimizers(*optimizers)

        def setup(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.stock_model = LogitsModel(next(part for part in module.modules() if isinstance(part, litgpt.GPT)))
            return super().setup(module, *args, **kwargs)

        def no_backward_sync(self, module: Any, enabled: bool = True) -> Any:
            if not self.going:
                self.going = True
                timer.ready()
            return super().no_backward_sync(module, enabled)

        def log_dict(self, metrics: Any, step: int | None = None) -> None:
            super().log_dict(metrics, step)
            if not timer.step(spec.batch * spec.seq_len):
                raise TrialOverError

    logger = choose_logger("csv", Path(spec.out), name="trial", log_interval=1)
    return TimedFabric(devices=1, accelerator=spec.device, precision=precision, loggers=[logger])


def make_data(spec: PretrainSpec) -> Any:
    """LitGPT's reader of text files, or the shared packed rows."""
    from litgpt.data import DataModule, TextFiles

    class DummyValidation:
        """LitGPT validates on two batches before the first step; the result is not used."""

        def val_dataloader(self) -> Any:
            row_T = torch.zeros(spec.seq_len + 1, dtype=torch.long)
            return torch.utils.data.DataLoader([row_T] * spec.batch, batch_size=spec.batch)  # type: ignore[arg-type]

    class Texts(DummyValidation, TextFiles):  # type: ignore[misc]
        pass

    class PackedRows(DummyValidation, DataModule):  # type: ignore[misc]
        def connect(self, **kwargs: Any) -> None:
            pass

        def train_dataloader(self) -> Any:
            rows = [torch.from_numpy(row_T) for ids_BT, _ in islice(packed_rows(spec), spec.steps) for row_T in ids_BT]
            return torch.utils.data.DataLoader(rows, batch_size=spec.batch)  # type: ignore[arg-type]

    if spec.setting == "step":
        return PackedRows()
    # One file per text; LitGPT holds out the first file.
    folder = Path(spec.out) / "text"
    folder.mkdir(parents=True)
    for number, text in enumerate(read_texts(spec)):
        (folder / f"{number:07}.txt").write_text(text, encoding="utf-8")
    return Texts(folder, seed=spec.seed)


def pretrain(spec: PretrainSpec, fabric: Any, data: Any) -> None:
    """Run LitGPT's loop until the timer ends the trial."""
    import litgpt.pretrain
    from litgpt.args import EvalArgs, TrainArgs

    adamw = {"lr": spec.learning_rate, "betas": spec.betas, "weight_decay": spec.weight_decay}
    with suppress(TrialOverError):
        litgpt.pretrain.main(
            fabric=fabric,
            devices=1,
            seed=spec.seed,
            initial_checkpoint_dir=None,
            resume=False,
            config=model_config(spec),
            data=data,
            out_dir=Path(spec.out),
            tokenizer_dir=None,
            tokenizer=litgpt.Tokenizer(spec.tokenizer),
            train=TrainArgs(
                save_interval=None,
                global_batch_size=spec.batch,
                micro_batch_size=spec.batch,
                max_tokens=NO_END,
                max_norm=spec.max_grad_norm,
                min_lr=spec.learning_rate,  # without warm-up this is a constant rate
                lr_warmup_steps=0,
                tie_embeddings=spec.shape["tie_word_embeddings"],
            ),
            eval=EvalArgs(interval=NO_END, final_validation=False),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": adamw},
        )


def main() -> None:
    spec = read_spec(PretrainSpec)
    # By default litdata checks PyPI for a newer version, and writes its chunks to folders that all runs share.
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{spec.out}/chunks"
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = f"{spec.out}/data"
    import litgpt.pretrain  # noqa: F401  # before memory is measured

    torch.set_num_threads(spec.threads)
    timer = TrialTimer(spec, lambda: stock.bits_per_byte(spec, fabric.stock_model))
    timer.imported()
    torch._dynamo.config.disable = not spec.compiled
    precision = "bf16-mixed" if spec.dtype == "bfloat16" else "32-true"
    fabric = make_fabric(spec, timer, precision)
    fabric.launch()
    data = make_data(spec)
    pretrain(spec, fabric, data)
    options = [
        f"litgpt {version('litgpt')}, lightning {version('lightning')}, litdata {version('litdata')}",
        precision,
        "torch.compile" if spec.compiled else "eager",
        "rows packed",
        "its own initialisation",
        "csv log",
        "one process" if spec.setting == "step" else f"{data.num_workers} loading processes, not in its memory",
    ]
    with fabric.autocast():
        dtype = stock.matmul_dtype(fabric.stock_model)
    settings = {"max_grad_norm": spec.max_grad_norm, "compiled": spec.compiled, "dtype": dtype}
    stock.finish(timer, options, **fabric.settings, **settings)


if __name__ == "__main__":
    main()

"""A trial of LitGPT's pretraining: `python -m penjing.bench.peers.litgpt SPEC.json`.

Its own model, initialisation, data and loop, called as its command line calls them, with four loading processes as that
command has by default. Its loop always calls torch.compile; where the spec says eager, that does nothing. A text is a
file; litdata tokenizes the files, puts them end to end with a `bos` in front of each, and cuts full rows. Batch, AdamW
and constant rate are everyone's.

Its requirements exclude the huggingface_hub that transformers 5 needs, so it is installed without them; see
docs/speed.md.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from penjing.bench.meter import read_spec
from penjing.bench.peers.hf_model import bits_per_byte, product_dtype, read_texts, settings_of
from penjing.bench.race import Race, RaceSpec, packed_rows

# Tokens, or steps. It prints the time that is left, and more than a C int of days fails.
NO_END = 10**11


class OverError(Exception):
    """The trial is over: its loop asks nobody whether to go on."""


class Stock(torch.nn.Module):
    """LitGPT's model, called as one of transformers is, without what its head is padded by."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.model(input_ids)[..., : self.model.config.vocab_size])


def model_config(spec: RaceSpec) -> Any:
    """What its own presets of Qwen3 say, with this shape."""
    from litgpt import Config

    shape = spec.shape
    return Config(
        name="race",
        block_size=spec.row_tokens,
        n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_key_value_heads"],
        n_embd=shape["hidden_size"],
        head_size=shape["head_dim"],
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


def main() -> None:
    spec = read_spec(RaceSpec)
    out = Path(spec.out)
    # litdata would ask the index for a newer one of itself, and put its pieces in folders that all runs share.
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(out / "chunks")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(out / "data")
    import lightning
    import litdata
    import litgpt.pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule, TextFiles
    from litgpt.utils import choose_logger

    torch.set_num_threads(spec.threads)
    row_tokens = spec.batch * spec.row_tokens

    class Watched(lightning.Fabric):  # type: ignore[misc]
        """Its loop calls `no_backward_sync` at the start of a step and `log_dict` at the end."""

        stock: Stock | None = None
        going = False
        told: dict[str, Any]

        def setup_optimizers(self, *optimizers: Any) -> Any:
            self.told = settings_of(optimizers[0], max_grad_norm=spec.clip_norm, compiled=spec.compiled)
            return super().setup_optimizers(*optimizers)

        def setup(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.stock = Stock(next(part for part in module.modules() if isinstance(part, litgpt.GPT)))
            return super().setup(module, *args, **kwargs)

        def no_backward_sync(self, module: Any, enabled: bool = True) -> Any:
            if not self.going:
                self.going = True
                race.ready()
            return super().no_backward_sync(module, enabled)

        def log_dict(self, metrics: Any, step: int | None = None) -> None:
            super().log_dict(metrics, step)
            if not race.step(row_tokens):
                raise OverError

    class OneCheck:
        """It tries two batches of validation before the first step; what it says of the held-out text is not asked."""

        def val_dataloader(self) -> Any:
            row_T = torch.zeros(spec.row_tokens + 1, dtype=torch.long)
            return torch.utils.data.DataLoader([row_T] * spec.batch, batch_size=spec.batch)  # type: ignore[arg-type]

    class Texts(OneCheck, TextFiles):  # type: ignore[misc]
        pass

    class GivenRows(OneCheck, DataModule):  # type: ignore[misc]
        def connect(self, **kwargs: Any) -> None:
            pass

        def train_dataloader(self) -> Any:
            rows = [torch.from_numpy(row_T) for ids_BT, _ in islice(packed_rows(spec), spec.steps) for row_T in ids_BT]
            return torch.utils.data.DataLoader(rows, batch_size=spec.batch)  # type: ignore[arg-type]

    race = Race(spec, lambda: bits_per_byte(spec, fabric.stock))
    race.imported()
    precision = "bf16-mixed" if spec.dtype == "bfloat16" else "32-true"
    torch._dynamo.config.disable = not spec.compiled
    logger = choose_logger("csv", out, name="race", log_interval=1)
    fabric = Watched(devices=1, accelerator=spec.device, precision=precision, loggers=[logger])
    fabric.launch()
    data = GivenRows() if spec.kind == "step" else Texts(_as_files(spec, out / "text"), seed=spec.seed)
    adamw = {"lr": spec.learning_rate, "betas": spec.betas, "weight_decay": spec.weight_decay}
    with suppress(OverError):
        litgpt.pretrain.main(
            fabric=fabric,
            devices=1,
            seed=spec.seed,
            initial_checkpoint_dir=None,
            resume=False,
            config=model_config(spec),
            data=data,
            out_dir=out,
            tokenizer_dir=None,
            tokenizer=litgpt.Tokenizer(spec.tokenizer),
            train=TrainArgs(
                save_interval=None,
                global_batch_size=spec.batch,
                micro_batch_size=spec.batch,
                max_tokens=NO_END,
                max_norm=spec.clip_norm,
                min_lr=spec.learning_rate,  # with no warm-up that is a constant rate
                lr_warmup_steps=0,
                tie_embeddings=spec.shape["tie_word_embeddings"],
            ),
            eval=EvalArgs(interval=NO_END, final_validation=False),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": adamw},
        )
    result = race.result(
        options=[
            f"litgpt {version('litgpt')}, lightning {lightning.__version__}, litdata {litdata.__version__}",
            precision,
            "torch.compile" if spec.compiled else "eager",
            "rows packed",
            "its own initialisation",
            "csv log",
            "one process" if spec.kind == "step" else f"{data.num_workers} loading processes, not in its memory",
        ]
    )
    with fabric.autocast():
        dtype = product_dtype(fabric.stock)
    print(json.dumps({**result, "settings": {**fabric.told, "dtype": dtype}}))


def _as_files(spec: RaceSpec, folder: Path) -> Path:
    """A text a file, as its `TextFiles` reads them; it keeps the first file from training."""
    folder.mkdir(parents=True)
    for number, text in enumerate(read_texts(spec)):
        (folder / f"{number:07}.txt").write_text(text, encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()

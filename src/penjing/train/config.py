"""Every setting of a training run, in one tree. `penjing show pretrain` prints it resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from penjing.base.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Settings
from penjing.base.errors import UserError
from penjing.kernels.fp8 import Float8
from penjing.model.config import ModelConfig
from penjing.model.lora import Lora
from penjing.model.transformer import Recompute
from penjing.objective.base import ObjectiveSettings
from penjing.objective.next_token import NextTokenSettings
from penjing.objective.router import RouterSettings
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon
from penjing.optim.schedule import Constant, Cosine, WarmupStableDecay
from penjing.train.renamed_settings import RENAMED
from penjing.train.stages import settings_classes


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """What is read."""

    section: ClassVar = "data"

    train: tuple[str, ...] = ()  # files or folders of text or chats, or one folder of ready token shards
    # Whole texts are learned; or of conversations what an assistant says; or pairs of answers; or prompts are answered.
    format: Literal["documents", "chats", "preferences", "prompts"] = "documents"
    seq_len: Annotated[int, Ge(8)] = 512  # T, positions of one packed row (the classic script's max_seq_len)
    # Where conversations are few: `seq_len` is the most, and rows become shorter, down to this and to the longest
    # conversation, until an epoch has 25 of them and a run batch.min_steps. 0 = `seq_len` as it is.
    min_seq_len: NonNegativeInt = 0
    # Of documents (chats always stay whole): `best_fit` keeps each in one row where it can, `concat` cuts every T
    # tokens and costs nothing to lay out, for corpora of many millions of documents.
    packing: Literal["best_fit", "concat"] = "best_fit"
    # Of documents: `as_given` keeps to the order of the files, for a curriculum; `shuffled` draws one each epoch.
    order: Literal["shuffled", "as_given"] = "shuffled"
    # Of chats: `switch` writes answers without a thought with an empty one, so that thinking can be switched off later.
    thinking: Literal["as_given", "switch"] = "as_given"
    val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.01  # of the texts, held out by hash
    prefetch: NonNegativeInt = 2  # batches made ready in a background thread; 0 makes them in line
    # share of records that may be broken: they are left out and listed in bad_records.jsonl
    max_bad_fraction: Fraction = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thinking == "switch" and self.format != "chats":
            raise UserError("has no effect", where="data.thinking", got=f"data.format={self.format}", wanted="chats")
        if self.order == "as_given" and self.format != "documents":
            raise UserError("has no effect", where="data.order", got=f"data.format={self.format}", wanted="documents")


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Which tokenizer, or how to train one."""

    path: str = ""  # a tokenizer to use; empty: that of `init_from`, or one trained on data.train
    vocab_size: int = 0  # ids of a newly trained one; 0 = model.vocab_size
    max_han_per_token: int = 4  # most Chinese characters in one token of a newly trained one


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings):
    """How much is learned from at once."""

    section: ClassVar = "batch"

    size: PositiveInt = 32  # rows (pairs, prompts) of one optimizer step, over all devices and accumulation
    # Rows of one forward pass on one device; 0 = a device's whole share, on one CPU half of it. Fewer take less memory.
    # Gradients are the same but for rounding, and to the last bit where a step's passes are the same ones. Only where a
    # softmax router has router.balance=batch (its default) they are not: that loss is taken over each pass.
    micro_size: NonNegativeInt = 0
    # Where the data are few: `size` is the most, and becomes smaller until the run takes so many optimizer steps and an
    # epoch 25, where that is possible. 0 = `size` as it is, as where batch.size or max_steps is set.
    min_steps: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    """Where and in which precision."""

    section: ClassVar = "compute"

    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    # Of matmuls; weights and optimizer stay float32. float16 has loss scaling, for cards without bfloat16.
    dtype: Literal["auto", "bfloat16", "float16", "tf32", "float32"] = "auto"
    # Matmuls of the blocks' linear layers in float8, a scale for each tensor (kernels/fp8.py). For models from about
    # 700M parameters on, on cards of compute capability 8.9 or later; below that it is slower.
    fp8: Float8 = "off"
    # torch.compile. auto: each block, in runs long enough to pay for it (train/compile_policy.py); `whole`: one graph
    # with the loss; `graphs`: that as CUDA graphs, for very short passes.
    compile: Literal["auto", "off", "blocks", "whole", "graphs"] = "auto"
    # Activations that are made again in the backward pass instead of kept: those of MLPs, or of whole blocks. Takes
    # less memory and more time; what is learned is the same.
    activation_checkpointing: Recompute = "none"
    threads: NonNegativeInt = 0  # CPU threads of one process; 0 = physical cores / processes


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """Loss on the held-out texts."""

    section: ClassVar = "eval"

    every: NonNegativeInt = 200  # steps; 0 = never. Always once at the end
    sequences: PositiveInt = 128  # of the held-out rows (pairs, prompts), at most
    at_start: bool = False  # also before the first step, to see what training changed
    # A file of questions by which the model is known (`penjing eval --questions`). With at_start=true they are asked
    # before the first step and after the last, and what was lost is named. Empty: those of `init_from`; none: no file.
    questions: str = ""


@dataclass(frozen=True, kw_only=True)
class SampleSettings(Settings):
    """What the model writes while it learns."""

    section: ClassVar = "sample"

    every: NonNegativeInt = 0  # steps; 0 = never
    prompts: tuple[str, ...] = ()  # continued by a base model, answered by a chat model; empty: nothing is written
    max_new_tokens: PositiveInt = 64  # longest continuation


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """Checkpoints. The last step is always saved."""

    section: ClassVar = "checkpoint"

    every: PositiveInt = 500  # steps
    keep_last: PositiveInt = 2  # newest checkpoints that stay
    keep_every: NonNegativeInt = 0  # every so many steps one stays for good, beside the newest; 0 = none
    # true: copy what is to be saved (weights and optimizer state) and write it while training goes on.
    async_: bool = True


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    """Where the figures go besides the terminal and metrics.jsonl."""

    section: ClassVar = "log"

    every: PositiveInt = 10  # steps between logged figures
    trackers: tuple[str, ...] = ()  # besides the terminal and metrics.jsonl, such as wandb
    project: str = "penjing"  # of wandb
    run_name: str = ""  # of wandb; empty: the folder's name


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """One training run: a stage is a recipe that fills this in."""

    renamed: ClassVar = RENAMED

    stage: str = "pretrain"  # name of the recipe
    out: str = "runs/pretrain"  # folder of the run; the same command again continues what is there
    init_from: str = ""  # run or checkpoint whose weights to begin with; empty: from nothing
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] = 1  # of initial weights, order of data and samples
    epochs: NonNegativeFloat = 1.0  # times through the training rows
    max_steps: NonNegativeInt = 0  # optimizer steps; 0 = as many as `epochs` takes
    max_grad_norm: NonNegativeFloat = 1.0  # largest gradient norm; 0 = no clipping
    freeze: tuple[str, ...] = ()  # patterns of parameters that do not learn, such as embed.* or blocks.[0-3].*
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveSettings = field(default_factory=NextTokenSettings, metadata={"choices": settings_classes})
    lora: Lora = field(default_factory=Lora)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: AdamW | Muon = field(default_factory=AdamW)
    schedule: Cosine | WarmupStableDecay | Constant = field(default_factory=Cosine)
    router: RouterSettings = field(default_factory=RouterSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs == 0 and self.max_steps == 0:
            raise self.error("epochs", "nothing to do", wanted="more than 0, or max_steps=N")
        if not self.model.is_mixture and self.router != RouterSettings():
            raise UserError(
                "has no effect on a dense model",
                where="router",
                next_step="Take a mixture of experts, such as model=tiny-moe, or leave router.* out.",
            )
        if self.compute.activation_checkpointing != "none" and (self.model.is_mixture or self.lora.dropout):
            raise UserError(
                "what a forward pass counts or draws would be counted or drawn twice",
                where="compute.activation_checkpointing",
                got="a mixture of experts" if self.model.is_mixture else "lora.dropout",
                wanted="none",
            )
        if self.compute.compile in ("whole", "graphs") and self.data.format == "chats":
            raise UserError(
                "answers differ in length, and each pass would be compiled anew",
                where="compute.compile",
                got=f"{self.compute.compile} with data.format=chats",
                wanted="blocks, auto or off",
            )
        objective = self.objective
        if self.lora.dropout and objective.compares_passes:
            raise UserError(
                "what is learned compares two passes, of which only one would have its inputs left out",
                where="lora.dropout",
                got=f"{self.lora.dropout} with objective.name={objective.name}",
                wanted="0",
            )
        if self.compute.fp8 != "off":
            if self.compute.dtype not in ("auto", "bfloat16"):
                raise UserError(
                    "goes with bfloat16 only", where="compute.fp8", got=f"compute.dtype={self.compute.dtype}"
                )
            if objective.compares_passes:
                raise UserError(
                    "what is learned compares two passes, of which only one would be rounded",
                    where="compute.fp8",
                    got=f"objective.name={objective.name}",
                    wanted="off",
                )
        if self.data.seq_len > self.model.max_position_embeddings:
            wanted = f"at most model.max_position_embeddings = {self.model.max_position_embeddings}"
            raise self.error("data.seq_len", "rows longer than the model's longest sequence", wanted=wanted)

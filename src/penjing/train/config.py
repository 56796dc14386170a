"""Every setting of a training run, in one tree. `penjing show pretrain` prints it resolved."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, Lt

from penjing.base.config import BelowOne, Decision, NonNegativeFloat, NonNegativeInt, PositiveInt, Settings
from penjing.base.errors import UserError
from penjing.data.corpus import DataSettings
from penjing.kernels.fp8 import Float8
from penjing.model.config import ModelConfig
from penjing.model.lora import Lora
from penjing.model.regularization import Regularization
from penjing.model.transformer import Recompute
from penjing.objective.base import ObjectiveSettings
from penjing.objective.next_token import NextTokenSettings
from penjing.objective.router import RouterSettings
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon
from penjing.optim.schedule import Constant, Cosine, WarmupStableDecay
from penjing.parallel import STRATEGIES
from penjing.train.foreign_settings import ABSENT, FOREIGN
from penjing.train.stages import settings_classes


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings(Settings, section="tokenizer"):
    """Which tokenizer, or how to train one."""

    path: str = ""  # a tokenizer to use; empty: that of `init_from`, or one trained on data.train
    vocab_size: NonNegativeInt = 0  # ids of a newly trained one; 0 = model.vocab_size
    max_han_per_token: PositiveInt = 4  # most Chinese characters in one token of a newly trained one


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings, section="batch"):
    """Batch size."""

    # Rows (pairs, prompts) of one optimizer step, over all devices and accumulation.
    size: Annotated[int, Ge(1), Le(1 << 32)] = 32
    # Rows of one forward pass on one device; 0 = a device's full share, on one CPU half of it. Fewer take less memory.
    # Gradients are equal except for rounding; equal passes give equal bits. Exception: with a softmax router and
    # router.balance=batch (its default), that loss is computed over each pass.
    micro_size: NonNegativeInt = 0
    # For little data: `size` is reduced until the run takes this many optimizer steps and an epoch 25, if possible. 0 =
    # always `size`, also if batch.size or max_steps is set.
    min_steps: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings, section="compute"):
    """Device and precision."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    # Of matmuls; weights and optimizer state stay float32. float16 uses loss scaling, for GPUs without bfloat16.
    dtype: Literal["auto", "bfloat16", "float16", "tf32", "float32"] = "auto"
    # Matmuls of the blocks' linear layers in float8, with a scale per tensor (kernels/fp8.py). Needs compute capability
    # 8.9 or later; faster for models from about 700M parameters on, slower for smaller ones.
    fp8: Float8 = "off"
    # torch.compile. auto: each block, in runs long enough to pay for it (train/compile_policy.py); `graphs`: model and
    # loss as one device graph, for very short passes.
    compile: Literal["auto", "off", "blocks", "graphs"] = "auto"
    # Activations to recompute in the backward pass instead of storing them: of MLPs, or of blocks. Takes less memory
    # and more time; the result is the same.
    activation_checkpointing: Recompute = "none"
    threads: NonNegativeInt = 0  # CPU threads of one process; 0 = physical cores / processes


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings, section="parallel"):
    """Several devices."""

    # single, ddp, fsdp2, hsdp, or zero1, zero2 and zero3 (DeepSpeed); auto: single for one process, else ddp, or fsdp2
    # where only that fits
    strategy: str = "auto"
    # fsdp2, hsdp and zero2: free gathered weights and exchange gradients after each pass, or once a step: faster with
    # several passes, with room for all weights and gradients. auto: step if they take a tenth of a device's memory.
    reshard: Literal["auto", "pass", "step"] = "auto"
    offload: bool = False  # keep weights (but of zero1 to zero3), gradients and optimizer state on the host; step there
    ds_config: str = ""  # a ds_config.json, for what penjing does not decide of DeepSpeed


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings, section="eval"):
    """Loss on the held-out texts."""

    every: NonNegativeInt = 200  # steps; 0 = never. Always once at the end
    sequences: PositiveInt = 128  # of the held-out rows (pairs, prompts), at most
    at_start: bool = False  # also before the first step, to see what training changed
    # The run stops after so many validations in a row without a new lowest held-out loss; 0 = never.
    patience: NonNegativeInt = 0
    # A file of questions that the model can answer (`penjing eval --questions`). With at_start=true they are asked
    # before the first step and after the last, and lost answers are listed. Empty: those of `init_from`; none: no file.
    questions: str = ""
    # Tasks that are asked at each validation (`penjing eval --list`), of files in the folder `data`.
    tasks: tuple[str, ...] = ()
    data: str = ""  # the folder of these files
    limit: NonNegativeInt = 200  # requests of each task (and of each task of core), spread over all; 0 = all

    def validations(self, steps: int) -> int:
        """How many a run of so many steps has."""
        return self.at_start + math.ceil(steps / (self.every or steps))


@dataclass(frozen=True, kw_only=True)
class SampleSettings(Settings, section="sample"):
    """Samples from the model during training."""

    every: NonNegativeInt = 0  # steps; 0 = never
    prompts: tuple[str, ...] = ()  # a base model continues them, a chat model answers them; empty: no samples
    max_new_tokens: PositiveInt = 64  # longest continuation


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings, section="checkpoint"):
    """Checkpoints. The last step is always saved."""

    every: PositiveInt = 500  # steps
    keep_last: PositiveInt = 2  # newest checkpoints to keep
    keep_every: NonNegativeInt = 0  # also keep every checkpoint whose step is a multiple of this; 0 = none
    # Also keep the checkpoint with the lowest held-out loss; it is the one that is used, unless the newest one's loss
    # is at most 0.2 % higher. A new best that is not due for a save is saved after the first epoch, or with
    # eval.patience, so that one pass writes nothing more. No effect where the loss is no measure of quality (RL, DPO).
    best: bool = True
    # true: copy weights and optimizer state, and write the copy while training goes on.
    async_: bool = True
    # From so many GiB of weights on, the ranks of fsdp2 and hsdp write files of their own, and nothing is gathered.
    parts_from_gib: NonNegativeFloat = 4.0


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings, section="log"):
    """Where metrics are logged, besides the terminal and metrics.jsonl."""

    every: PositiveInt = 10  # steps between logged metrics
    trackers: tuple[str, ...] = ()  # also to wandb, swanlab, tensorboard, trackio or mlflow, or to several
    project: str = "penjing"  # in the trackers
    run_name: str = ""  # in the trackers; empty: the folder's name


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """One training run; a recipe fills in the settings."""

    foreign: ClassVar = FOREIGN
    absent: ClassVar = ABSENT

    stage: str = "pretrain"  # name of the recipe
    out: str = "runs/pretrain"  # folder of the run; the same command again resumes it
    init_from: str = ""  # run or checkpoint (RUN@STEP) with the start weights; empty: train from scratch
    # Embedding of a model trained from scratch. cooccurrence: tokens with the same neighbours in the text begin alike
    # (model/cooccurrence.py), which saves steps of a short pretraining.
    embedding_init: Literal["normal", "cooccurrence"] = "normal"
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] = 1  # of initial weights, order of data and samples
    epochs: NonNegativeFloat = 1.0  # times through the training rows
    max_steps: NonNegativeInt = 0  # optimizer steps; 0 = as many as `epochs` takes
    max_grad_norm: NonNegativeFloat = 1.0  # largest gradient norm; 0 = no clipping
    # Decay per step of an average of the weights (such as 0.99 or 0.999), which is validated, sampled from, saved and
    # exported instead of the last weights; 0 = none. Takes 4 bytes per trained parameter (optim/ema.py).
    ema_decay: BelowOne = 0.0
    freeze: tuple[str, ...] = ()  # patterns of frozen parameters, such as embed.* or blocks.[0-3].*
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveSettings = field(default_factory=NextTokenSettings, metadata={"choices": settings_classes})
    lora: Lora = field(default_factory=Lora)
    regularization: Regularization = field(default_factory=Regularization)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: AdamW | Muon = field(default_factory=AdamW)
    schedule: Cosine | WarmupStableDecay | Constant = field(default_factory=Cosine)
    router: RouterSettings = field(default_factory=RouterSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    # Not a setting: what train/resolve.py decided, and why.
    decisions: tuple[Decision, ...] = field(default=(), compare=False, repr=False, metadata={"setting": False})

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per trained parameter, approximately, with the average of the weights."""
        return self.optimizer.state_bytes + 4 * bool(self.ema_decay)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs == 0 and self.max_steps == 0:
            raise self.error("epochs", "nothing to do", wanted="more than 0, or max_steps=N")
        if not self.model.is_mixture and self.router != RouterSettings():
            hint = "Use a mixture of experts, such as model=tiny-moe, or leave router.* out."
            raise UserError("has no effect on a dense model", where="router", next_step=hint)
        if self.compute.activation_checkpointing != "none" and (self.model.is_mixture or self.lora.dropout):
            what, got = "recomputing a forward pass would repeat its counts and random draws", "lora.dropout"
            got = "a mixture of experts" if self.model.is_mixture else got
            raise self.error("compute.activation_checkpointing", what, got=got, wanted="none")
        if self.compute.compile == "graphs" and self.data.format == "chats":
            what, wanted = "answers differ in length, so every pass would be recompiled", "blocks, auto or off"
            raise self.error("compute.compile", what, got="graphs with data.format=chats", wanted=wanted)
        if self.compute.fp8 != "off" and self.compute.dtype not in ("auto", "bfloat16"):
            raise self.error("compute.fp8", "works with bfloat16 only", got=f"compute.dtype={self.compute.dtype}")
        for setting, off, difference in (("lora.dropout", 0, "have dropout"), ("compute.fp8", "off", "be rounded")):
            if attrgetter(setting)(self) != off and self.objective.compares_passes:
                what = f"the loss compares two forward passes, of which only one would {difference}"
                raise self.error(setting, what, got=f"objective.name={self.objective.name}", wanted=off)
        if self.regularization.dropout and not self.objective.takes_noise:
            what, got = "noise is for rows of text or conversations", f"objective.name={self.objective.name}"
            raise UserError(what, where="regularization", got=got, wanted="next_token or distill with rows")
        if self.embedding_init != "normal" and (self.init_from or self.objective.name != "next_token"):
            what, got = "is for a model trained from scratch on text", f"objective.name={self.objective.name}"
            got = f"init_from={self.init_from}" if self.init_from else got
            raise self.error("embedding_init", what, got=got, wanted="normal")
        plain = {"objective.name": "next_token", "data.format": "documents", "data.packing": "best_fit"}
        for setting, only in (plain | {"data.order": "shuffled", "data.weights": ()}).items():
            if self.regularization.bpe_dropout and attrgetter(setting)(self) != only:
                what, got = "works with one text in shuffled rows only", f"{setting}={attrgetter(setting)(self)}"
                raise self.error("regularization.bpe_dropout", what, got=got, wanted=f"{setting}={only or 'none'}")
        parallel = self.parallel
        zero = parallel.strategy.startswith("zero") and parallel.strategy in STRATEGIES
        if zero and (self.optimizer.name, self.optimizer.state_dtype) != ("adamw", "float32"):
            got = f"{self.optimizer.name} with optimizer.state_dtype={self.optimizer.state_dtype}"
            what = f"parallel.strategy={parallel.strategy} gives the optimizer a flat vector of float32, no matrices"
            wanted = "adamw with float32, or parallel.strategy=fsdp2, which takes both in the same memory"
            raise self.error("optimizer.name", what, got=got, wanted=wanted)
        if self.eval.patience and not self.objective.best_metric:
            what = "the held-out loss of this objective is no measure of its quality"
            raise self.error("eval.patience", what, got=f"objective.name={self.objective.name}", wanted="0")
        if self.ema_decay and zero:
            what, wanted = "needs the weights as the optimizer has them, which DeepSpeed keeps", "fsdp2 or ddp"
            raise self.error("ema_decay", what, got=f"parallel.strategy={parallel.strategy}", wanted=wanted)
        if parallel.ds_config and not zero:
            got, wanted = f"parallel.strategy={parallel.strategy}", "parallel.strategy=zero1, zero2 or zero3"
            raise parallel.error("ds_config", "has an effect on DeepSpeed only", got=got, wanted=wanted)
        if self.data.seq_len > self.model.max_position_embeddings:
            wanted = f"at most model.max_position_embeddings = {self.model.max_position_embeddings}"
            raise self.error("data.seq_len", "rows longer than the model's longest sequence", wanted=wanted)

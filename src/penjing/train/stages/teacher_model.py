"""What distillation has beside the student: a frozen teacher, checked, and a way to judge the one by the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import read_json, write_json
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import fingerprint, keep_base_in
from penjing.model.transformer import Transformer
from penjing.objective.distill import Distill, Distillation
from penjing.parallel.base import Strategy
from penjing.plan import hardware
from penjing.plan.flops import training_flops_per_token
from penjing.train.config import Run
from penjing.train.run_dir import RunFolder, load_trained


@dataclass(frozen=True, slots=True)
class TeacherModel:
    """A frozen teacher, and the hash of its weights as they lie on disk."""

    model: Transformer
    tokenizer: Tokenizer
    sha256: str


def load_teacher(run: Run, settings: Distill) -> TeacherModel:
    """The run's teacher on the CPU, adapters merged. Raises UserError if there is none, or it reads shorter rows."""
    if not settings.teacher:
        raise UserError("no teacher", where="objective.teacher", wanted="a run, a Hugging Face directory or a hub name")
    trained = load_trained(Path(settings.teacher), adapters="merged")
    longest = trained.model.config.max_tokens
    if run.data.row_tokens > longest:
        raise UserError(
            "rows longer than the teacher's longest sequence",
            where="data.row_tokens",
            got=run.data.row_tokens,
            wanted=f"at most {longest}",
        )
    return TeacherModel(trained.model.requires_grad_(False), trained.tokenizer, fingerprint(trained.model))


def place(teacher: TeacherModel, run: Run, strategy: Strategy) -> Transformer:
    """The teacher on the run's device, in the precision of its products."""
    dtype = hardware.compute_dtype(run.compute.dtype, strategy.device)
    keep_base_in(teacher.model, dtype)
    set_compute_dtype(teacher.model, None if dtype == torch.float32 else dtype)
    return teacher.model.to(strategy.device)


def take_tokenizer(run: Run, teacher: TeacherModel) -> None:
    """A student that begins from nothing, without a tokenizer of its own, takes the teacher's."""
    folder = RunFolder(Path(run.out)).tokenizer
    if run.start or run.tokenizer.folder or (folder / "tokenizer.json").is_file():
        return
    if teacher.tokenizer.size > run.model.vocabulary_size:
        raise UserError(
            "the teacher's tokenizer has more ids than the student",
            where="model.vocabulary_size",
            got=run.model.vocabulary_size,
            wanted=f"at least {teacher.tokenizer.size}",
        )
    teacher.tokenizer.save(folder)


def check_vocabulary(tokenizer: Tokenizer, teacher: TeacherModel, settings: Distill) -> None:
    """Raise UserError where the same id would mean different texts to student and teacher."""
    if tokenizer.vocabulary_hash == teacher.tokenizer.vocabulary_hash:
        return
    raise UserError(
        "the teacher cuts text into other tokens than the student, so their predictions cannot be compared",
        where="objective.teacher",
        got=f"{settings.teacher} with {teacher.tokenizer.size} ids",
        wanted=f"the student's vocabulary of {tokenizer.size} ids",
        next_step=f"Learn from its answers instead: penjing generate {settings.teacher} --prompts FILE --out ANSWERS, "
        "then penjing train sft data.train=ANSWERS.",
    )


def note_teacher(run: Run, teacher: TeacherModel, settings: Distill) -> None:
    """Write which teacher a run has; a run that goes on must have the same one. Raises UserError if it has not."""
    path = Path(run.out) / "teacher.json"
    begun = RunFolder(Path(run.out)).checkpoints.is_dir()
    if begun and path.is_file() and (known := read_json(path)["sha256"]) != teacher.sha256:
        raise UserError(
            "the teacher has changed since this run was begun",
            where=settings.teacher,
            got=teacher.sha256[:12],
            wanted=known[:12],
            next_step="Put the old weights back, or train anew with another out=.",
        )
    write_json(path, {"teacher": settings.teacher, "sha256": teacher.sha256})


def relative_cost(run: Run, teacher: Transformer, num_keys: float) -> float:
    """The teacher's forward pass, in forward passes of the student."""
    return training_flops_per_token(teacher.config, num_keys) / training_flops_per_token(run.model, num_keys)


def about_teacher(run: Run, settings: Distill, teacher: Transformer) -> tuple[str, str]:
    size = units.count(sum(value.numel() for value in teacher.parameters()))
    return "teacher", f"{settings.teacher}, {size} parameters, {settings.mode}, divergence {settings.divergence}"


def judge(
    objective: Distillation, model: nn.Module, batches: Iterator[Any], strategy: Strategy, names: Sequence[str]
) -> dict[str, float]:
    """Means of the objective's parts over batches that are spread over the ranks, under `validation_` names."""
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            parts = objective(cast(Callable[..., Tensor], model), batch).parts
            values = torch.stack([*(parts[name] for name in names), objective.weight(batch)])
            sums += values.cpu().double()  # in this order: Apple's GPUs know no float64
    *totals, weight = strategy.add(sums.to(strategy.device) if strategy.device.type == "cuda" else sums).tolist()
    return {f"validation_{name}": total / max(1.0, weight) for name, total in zip(names, totals, strict=True)}

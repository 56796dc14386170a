"""Base of the distillation stages: reads and checks the frozen teacher."""

from pathlib import Path

import torch
from torch import nn

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import read_json, write_json
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.lora import fingerprint
from penjing.model.transformer import Transformer
from penjing.objective.distill import Distill, Distillation
from penjing.plan.flops import training_flops_per_token
from penjing.train.config import Run
from penjing.train.load_model import LoadedModel, load_trained, start_shape
from penjing.train.stages.base import Stage

META = torch.device("meta")


class TeacherStage(Stage[Distill]):
    """A stage whose objective uses a teacher. Subclasses provide the data."""

    teacher: Transformer | None = None  # None: batches contain its predictions
    num_ids = 0  # ids that teacher and student share
    teacher_sha256 = ""  # of its weights on disk; set by read_teacher

    def read_teacher(self) -> LoadedModel:
        """The teacher on the CPU with merged adapters; a student without a tokenizer gets the teacher's.

        Raises UserError if there is no teacher, or the student's rows are too long for it.
        """
        if not self.settings.teacher:
            wanted = "a run, a Hugging Face directory or a hub name"
            raise UserError("no teacher", where="objective.teacher", wanted=wanted)
        teacher = load_trained(Path(self.settings.teacher), adapters="merged")
        longest, seq_len = teacher.model.config.max_position_embeddings, self.run.data.seq_len
        if seq_len > longest:
            what = "rows longer than the teacher's longest sequence"
            raise self.run.error("data.seq_len", what, wanted=f"at most {longest}")
        teacher.model.requires_grad_(False)
        self.teacher_sha256 = fingerprint(teacher.model)
        if self.strategy.rank == 0:
            self._adopt_tokenizer(teacher.tokenizer)
        return teacher

    def _adopt_tokenizer(self, tokenizer: Tokenizer) -> None:
        """A student that is trained from scratch and has no tokenizer gets the teacher's."""
        run, folder = self.run, self.folder.tokenizer
        if run.init_from or run.tokenizer.path or (folder / "tokenizer.json").is_file():
            return
        if tokenizer.size > run.model.vocab_size:
            wanted = f"at least {tokenizer.size}"
            raise run.error("model.vocab_size", "the teacher's tokenizer has more ids than the student", wanted=wanted)
        tokenizer.save(folder)

    def set_teacher(self, teacher: LoadedModel) -> None:
        """Record the teacher's identity, and move it to the run's device.

        Raises UserError if student and teacher have different vocabularies.
        """
        if self.tokenizer.vocabulary_hash != teacher.tokenizer.vocabulary_hash:
            name = self.settings.teacher
            raise UserError(
                "teacher and student have different vocabularies, so their predictions cannot be compared",
                where="objective.teacher",
                got=f"{name} with {teacher.tokenizer.size} ids",
                wanted=f"the student's vocabulary of {self.tokenizer.size} ids",
                next_step=f"Learn from its answers instead: penjing generate {name} --prompts FILE --out ANSWERS, "
                "then penjing train sft data.train=ANSWERS.",
            )
        if self.strategy.rank == 0:
            self._pin_teacher()
        self.num_ids = min(teacher.model.config.vocab_size, self.run.model.vocab_size)
        self.teacher = self._in_compute_dtype(teacher.model).to(self.strategy.device)
        self._teacher_size = sum(value.numel() for value in teacher.model.parameters())

    def _pin_teacher(self) -> None:
        """Write the teacher's identity. Raises UserError if a resumed run had another teacher."""
        path, name = self.folder.path / "teacher.json", self.settings.teacher
        resuming = self.folder.checkpoints.is_dir()
        if resuming and path.is_file() and (saved := read_json(path)["sha256"]) != self.teacher_sha256:
            what = "the teacher has changed since this run was started"
            hint = "Restore the old weights, or train anew with another out=."
            raise UserError(what, where=name, got=self.teacher_sha256[:12], wanted=saved[:12], next_step=hint)
        write_json(path, {"teacher": name, "sha256": self.teacher_sha256})

    def _in_compute_dtype(self, teacher: Transformer) -> Transformer:
        self.precision.cast_frozen(teacher)
        self.precision.apply(teacher)
        return teacher

    def assume_data(self) -> list[str]:
        self.num_ids = self.run.model.vocab_size
        if self.settings.mode == "top_k":
            return []
        shape = start_shape(self.settings.teacher) if self.settings.teacher else self.run.model
        with META:
            self.teacher = self._in_compute_dtype(Transformer(shape).requires_grad_(False).eval())
        return [] if self.settings.teacher else ["no teacher is named: it is assumed to have the student's shape"]

    def frozen_models(self) -> list[nn.Module]:
        return [] if self.teacher is None else [self.teacher]

    def objective(self) -> Distillation:
        return Distillation(self.settings, self.teacher, self.router, num_ids=self.num_ids)

    def describe(self) -> list[tuple[str, str]]:
        distill, size = self.settings, units.count(self._teacher_size)
        return [("teacher", f"{distill.teacher}, {size} parameters, {distill.mode}, divergence {distill.divergence}")]


def relative_cost(run: Run, teacher: Transformer, num_keys: float) -> float:
    """The cost of the teacher's forward pass, in forward passes of the student."""
    return training_flops_per_token(teacher.config, num_keys) / training_flops_per_token(run.model, num_keys)

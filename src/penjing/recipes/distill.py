"""Teach a model to predict as a larger one does.
Run: penjing train distill objective.teacher=runs/large data.train=TEXT.jsonl model=tiny

Changes from pretrain: each position's target is the teacher's whole prediction beside the token that came; a tenth of
the loss is still the data's own. The student begins from nothing with the teacher's tokenizer; start=RUN distils into
one that is there, and so it is AdamW and a cosine. On conversations: data.kind=chats, which may also be answered by the
student itself (objective.mode=on_policy objective.data_weight=0). Held-out rows are judged before the first step too.
For the quickstart's model: penjing train tiny_distill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penjing.base.config import Layer
from penjing.infer.sample import Sampling
from penjing.infer.sampler_factory import writer
from penjing.objective.distill import Distill
from penjing.parallel.base import Strategy
from penjing.recipes.pretrain import pretrain
from penjing.train.config import Run
from penjing.train.run_dir import start_shape
from penjing.train.stages.base import Report
from penjing.train.stages.distill import DistillStage
from penjing.train.stages.on_policy_distill import OnPolicyStage


def distill() -> Layer:
    return {
        **pretrain(),
        "stage": "distill",
        "out": "runs/distill",
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_fraction": 0.02, "floor_fraction": 0.1},
        "objective": {"kind": "distill", "data_weight": 0.1},
        "validate": {"before": "yes"},
    }


def make_stage(run: Run, strategy: Strategy, report: Report) -> DistillStage | OnPolicyStage:
    """What distillation brings to a run, by `objective.mode`."""
    settings = run.objective
    assert isinstance(settings, Distill)
    if settings.mode != "on_policy":
        return DistillStage(run, strategy, report)
    drawn = writer(settings.answer_tokens, Sampling(temperature=settings.sample_temperature))
    return OnPolicyStage(run, strategy, report, drawn, writer(settings.answer_tokens, Sampling()))


def fit_to_teacher(run: Run, layers: Sequence[Layer]) -> Run:
    """A student that begins from nothing has as many ids as its teacher, unless a layer says how many."""
    settings = run.objective
    if not isinstance(settings, Distill) or not settings.teacher or run.start:
        return run
    tables = [layer.get("model") for layer in layers]
    if any(isinstance(table, Mapping) and "vocabulary_size" in table for table in tables):
        return run
    size = start_shape(settings.teacher).vocabulary_size
    return replace(run, model=replace(run.model, vocabulary_size=size))

"""The stage of preference tuning: pairs from files, a reference model, and metrics on held-out pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor, nn

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.checkpoint.tensors import write_tensors
from penjing.data.preference_shards import PreferenceShards
from penjing.infer.generate import sample_answers
from penjing.infer.sample import Sampling
from penjing.loader.group_sampler import pack_tight
from penjing.loader.shared_prompt_batch import Answer, AnswerBatch, Group
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import adapter_scope, fingerprint
from penjing.model.transformer import Transformer
from penjing.objective.base import Objective
from penjing.objective.distill import Distill, Distillation
from penjing.objective.preference import DESIRABLE, MISMATCHED, REFERENCE, Preference, PreferenceObjective
from penjing.parallel.base import Strategy
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.load_model import load_start
from penjing.train.oom_recovery import with_smaller_passes
from penjing.train.stages.base import DatasetSize
from penjing.train.stages.example_batches import example_answers
from penjing.train.stages.held_out import held_out_means, summed_over_ranks
from penjing.train.stages.preference_data import PreferenceDataStage, PreferenceGroups, need_pairs
from penjing.train.stages.reference import LogProbs, answer_log_probs, base_log_probs, frozen_copy

Reference = Literal["none", "copy", "adapter_off", "precomputed"]
REFERENCE_LINES = {
    "copy": "a frozen copy of the start model",
    "adapter_off": "the model without its adapter",
    "precomputed": "the start model, computed once",
}


class PreferenceStage(PreferenceDataStage[Preference]):
    """Pairs (or labelled answers), the reference, and metrics on the questions held out by hash."""

    train: _PreferenceSplit
    held_out: _PreferenceSplit

    def groups(self, tokens: PreferenceShards) -> _PreferenceSplit:
        if self.settings.loss != "kto":
            need_pairs(tokens, f"objective.loss={self.settings.loss}")
        return _PreferenceSplit(tokens, self.run, mismatched=self.settings.loss == "kto")

    def prepare_data(self) -> None:
        if self.settings.needs_reference and not self.run.init_from:
            hint = "Give init_from=RUN, the folder of a run that was trained on conversations."
            raise UserError("preference tuning needs a model that already answers", where="init_from", next_step=hint)
        batch_geometry(self.run, self.strategy.world, self.strategy.device)  # raises if kl_groups does not fit
        super().prepare_data()
        run, number = self.run, len(self.train)
        uses = run.max_steps * run.batch.size if run.max_steps else run.epochs * number
        self.reference = self._choose_reference(every_pair_is_used=uses >= number)

    def assume_data(self) -> list[str]:
        # With `epochs`, every pair is used at least once.
        self.reference = self._choose_reference(every_pair_is_used=not self.run.max_steps)
        if not self.settings.needs_reference or self.settings.reference != "auto":
            return []
        return [f"the reference is assumed to be {self.reference.replace('_', ' ')} (objective.reference)"]

    def _choose_reference(self, *, every_pair_is_used: bool) -> Reference:
        settings, has_adapter = self.settings, bool(self.run.lora.rank)
        if not settings.needs_reference:
            return "none"
        if settings.reference == "adapter_off" and not has_adapter:
            next_step = "Set lora.rank=8, or leave it out."
            raise settings.error("reference", "there is no adapter to switch off", next_step=next_step)
        if settings.reference != "auto":
            return settings.reference
        if every_pair_is_used:
            return "precomputed"
        return "adapter_off" if has_adapter else "copy"

    def size(self) -> DatasetSize:
        return replace(super().size(), extra_forwards=float(self.reference in ("copy", "adapter_off")))

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        decoder = cast(Transformer, model)
        self._log_probs: LogProbs | None = None
        self._copied: Transformer | None = None
        if self.reference == "copy":
            self._copied = frozen_copy(decoder, self.precision)
            self._log_probs = partial(answer_log_probs, self._copied)
        elif self.reference == "adapter_off":
            self._log_probs = partial(base_log_probs, decoder)
        elif self.reference == "precomputed" and self.fingerprint:
            self._precompute(decoder, str(self.precision.dtype))

    def frozen_models(self) -> list[nn.Module]:
        return [] if self._copied is None else [self._copied]

    def _precompute(self, model: Transformer, dtype: str) -> None:
        """Read the reference's log-probabilities from disk, or compute and write them; each rank computes its share."""
        file = self.folder.path / "reference.safetensors"
        about = {
            "model": fingerprint(model),
            "data": self.fingerprint,
            "held_out": self.tokens["validation"].fingerprint,
            "dtype": dtype,
            "form": f"{self.settings.loss == 'kto'} {self.run.data.seq_len} {self.run.seed}",
        }
        exists = self.strategy.broadcast(self.strategy.rank == 0 and _written_for(file, about))
        halves = {"train": self.train, "validation": self.held_out}
        if exists:
            stored = safetensors.torch.load_file(file)
            for name, half in halves.items():
                half.reference_N = stored[name].numpy()
            return
        self.report(f"computing the reference's log-probabilities of {len(self.train):,} {self.size().unit}")
        for half in halves.values():
            half.reference_N = with_smaller_passes(self, partial(self._reference_log_probs, model, half))
        if self.strategy.rank == 0:
            tensors = {name: torch.from_numpy(half.reference_N) for name, half in halves.items()}
            write_tensors(file, tensors, about)
        self.strategy.any(False)  # a barrier: the others wait until the file is complete

    def _reference_log_probs(self, model: Transformer, half: _PreferenceSplit) -> npt.NDArray[np.float32]:
        all_logp_N = torch.zeros(half.first[-1])
        for indices, batch in self.chunks(half, len(half), self.no_grad_size):
            logp_N = base_log_probs(model, batch.to(self.strategy.device)).cpu()
            all_logp_N[half.first[indices.start] : half.first[indices.stop]] = logp_N
        # Each value is from one rank and zero on the others, so the sum is exact.
        return self.strategy.all_reduce(all_logp_N.to(self.strategy.device)).cpu().numpy()

    def objective(self) -> Objective:
        return PreferenceObjective(self.settings, self._log_probs, self.router)

    def example_batch(self, micro_size: int, device: torch.device) -> AnswerBatch:
        return example_answers(
            (micro_size, 2, self.run.data.seq_len),
            device,
            values=(REFERENCE,) if self.reference == "precomputed" else (),
            figures=(DESIRABLE, MISMATCHED),
        )

    def validate(self) -> dict[str, float]:
        objective = PreferenceObjective(self.settings, self._log_probs)
        block = self.settings.indivisible_units  # shares an estimate
        batches = self.held_out_batches(max(1, self.no_grad_size // block) * block)
        metrics = held_out_means(objective, self.model, batches, self.strategy)
        return {
            **metrics,
            **self._kl_metrics(min(self.run.eval.sequences, len(self.held_out), self.settings.own_answers)),
        }

    def _kl_metrics(self, number: int) -> dict[str, float]:
        """The KL divergence from the start weights, on the model's own answers to held-out questions."""
        if not (number and self.run.init_from):
            return {}
        prompts = [self.tokens["validation"][index].prompt for index in range(number)]
        seeds = [derive(self.run.seed, "own", index) for index in range(number)]
        length, stop, sampling = self.settings.own_answer_tokens, self.tokenizer.stop, Sampling(temperature=1.0)
        write = partial(sample_answers, max_new_tokens=length, stop=stop, sampling=sampling)
        return kl_to_reference(self.model, self._start_model(), prompts, seeds, write, self.strategy, self.no_grad_size)

    def _start_model(self) -> Transformer | BaseModelView:
        """The model before step 1. Without a copy it is read again for each validation, so that it takes no memory
        during steps."""
        if self._copied is not None:
            return self._copied
        if self.run.lora.rank:
            return BaseModelView(self.model)
        start = load_start(self.run).requires_grad_(False).eval()
        set_compute_dtype(start, self.model.compute_dtype)
        return start.to(self.strategy.device)

    def describe(self) -> list[tuple[str, str]]:
        loss = f"objective.loss={self.settings.loss}, beta={self.settings.resolved_beta:g}"
        lines = [("preferences", f"{loss}; {len(self.held_out):,} held out by question")]
        return lines if self.reference == "none" else [*lines, ("reference", REFERENCE_LINES[self.reference])]


class _PreferenceSplit(PreferenceGroups):
    """With `mismatched`, each group also gets the answers of one fixed other group, for KTO's estimate of the
    divergence. Those answers are truncated to fit into a row."""

    def __init__(self, tokens: PreferenceShards, run: Run, *, mismatched: bool) -> None:
        super().__init__(tokens)
        self.seq_len = run.data.seq_len
        self._partner_G: npt.NDArray[np.int64] | None = None
        if mismatched:
            # One cycle through all groups in a random order, so that no group is its own partner.
            generator = np.random.Generator(np.random.PCG64(derive(run.seed, "mismatched")))
            order_G = generator.permutation(len(tokens))
            self._partner_G = np.empty_like(order_G)
            self._partner_G[order_G] = np.roll(order_G, 1)
        self.reference_N = np.zeros(0, dtype=np.float32)
        lengths = (sum(len(ids) for ids, _, _ in self._answers(index)) for index in range(len(tokens)))
        self.first = list(accumulate(lengths, initial=0))  # start of each group's values in reference_N; and the end

    def _answers(self, index: int) -> Iterator[tuple[list[int], list[int], bool]]:
        """(ids, weights, whether it answers another question) of each answer."""
        record = self.tokens[index]
        for answer in record.answers:
            yield answer.ids, answer.weights, False
        if self._partner_G is None or len(self.tokens) < 2:
            return
        free = self.seq_len - record.num_tokens
        for answer in self.tokens[int(self._partner_G[index])].answers:
            if free > 0:
                yield answer.ids[:free], answer.weights[:free], True
                free -= len(answer.ids)

    def group(self, index: int) -> Group:
        record = self.tokens[index]
        first = self.first[index]
        answers, mismatched = [], []
        for ids, weights, other in self._answers(index):
            values = {REFERENCE: self.reference_N[first : first + len(ids)]} if len(self.reference_N) else {}
            first += len(ids)
            # an array is as good as a sequence here
            answers.append(Answer(ids=ids, weights=weights, values=values))  # type: ignore[arg-type]
            mismatched.append(float(other))
        desirable = [float(value) for value in record.is_chosen]
        figures: dict[str, Sequence[float]] = {
            DESIRABLE: desirable + [0.0] * (len(answers) - len(desirable)),
            MISMATCHED: mismatched,
        }
        return Group(prompt=record.prompt, answers=answers, figures=figures)


def _written_for(file: Path, about: dict[str, str]) -> bool:
    if not file.is_file():
        return False
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {}) == about
    except safetensors.SafetensorError:
        return False


class BaseModelView:
    """A model with its adapters switched off, with the interface of a teacher."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        with adapter_scope(self._model, None):
            return self._model.hidden(*args, **kwargs)

    @property
    def head_weight_VD(self) -> Tensor:
        return self._model.head_weight_VD  # the head has no adapter

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._model.compute_dtype


@torch.no_grad()
def kl_to_reference(
    model: Transformer,
    reference: Transformer | BaseModelView,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    write: Callable[[Transformer, Sequence[Sequence[int]], Sequence[int]], list[list[int]]],
    strategy: Strategy,
    size: int,
) -> dict[str, float]:
    """KL(model || reference) on one sampled answer to each prompt, in nats per token and per answer.

    The expectation over the next token is exact, that over answers is sampled: sum_t KL(model(.|y<t) ||
    reference(.|y<t)) with y sampled from the model. Its mean is the divergence of answers, it is never negative, and it
    varies less than estimates from the sampled tokens alone (k1, k3). Each rank answers its share, `size` at a time.
    """
    objective = Distillation(Distill(divergence="reverse"), reference)  # type: ignore[arg-type]  # the same interface
    nats = tokens = number = 0.0
    with strategy.gathered(model):
        for first in range(strategy.rank * size, len(prompts), strategy.world * size):
            chunk = slice(first, min(first + size, len(prompts)))
            answers = write(model, prompts[chunk], seeds[chunk])
            groups = [
                Group(prompt=prompt, answers=[Answer(ids=answer, values={"from_data": [0.0] * len(answer)})])
                for prompt, answer in zip(prompts[chunk], answers, strict=True)
            ]
            batch = pack_tight(groups).to(strategy.device)
            nats += float(objective(model, batch).parts["divergence"])
            tokens += float(objective.weight(batch))
            number += batch.num_answers
    nats, tokens, number = summed_over_ranks([nats, tokens, number], strategy)
    return {
        "val_kl": nats / max(1.0, tokens),
        "val_kl_per_answer": nats / max(1.0, number),
        "val_own_answer_tokens": tokens / max(1.0, number),
    }

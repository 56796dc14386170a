"""Preference tuning as a stage: pairs from files, a reference to stay near, and how held-out pairs are judged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor, nn

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.checkpoint.save import write_tensors
from penjing.data.preference_shards import TokenGroups
from penjing.infer.sampler_factory import Write
from penjing.loader.batch_source import Source
from penjing.loader.group_sampler import GroupSource, pack_tight
from penjing.loader.shared_prompt_batch import Answer, AnswerBatch, Group, run_model
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import fingerprint, keep_base_in, strip, using
from penjing.model.transformer import Transformer
from penjing.objective.base import Objective
from penjing.objective.preference import MISMATCHED, REFERENCE, WANTED, Preference, PreferenceObjective
from penjing.parallel.base import Strategy
from penjing.plan import hardware
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.kl_to_reference import WithoutAdapter, drift
from penjing.train.oom_recovery import release, with_room
from penjing.train.run_dir import RunFolder, load_start
from penjing.train.stages.base import Report, Size
from penjing.train.stages.preference_data import measure, need_pairs, prepare_judgements

CHUNK = 32  # groups of a forward pass without gradients, at most; the same for any number of ranks


# --- references ------------------------------------------------------------------------------------------------------


def frozen_copy(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy that does not learn, its matrices held in the dtype that they are multiplied in."""
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    keep_base_in(copied, dtype)
    return copied


def score(model: Callable[..., Any], batch: AnswerBatch) -> Tensor:
    """logp_N of a batch under a model that does not learn from it."""
    with torch.no_grad():
        scored = run_model(model, batch)
    logp_2N: Tensor = scored[0] if isinstance(scored, tuple) else scored
    return logp_2N[0]


# --- the stage -------------------------------------------------------------------------------------------------------


class PreferenceStage:
    """Pairs (or judged answers), the reference, and the figures on the questions that were held out by hash."""

    runs_ahead = True

    def __init__(self, run: Run, strategy: Strategy, report: Report, write: Write) -> None:
        """write: draws the model's own answers to held-out questions."""
        settings = run.objective
        assert isinstance(settings, Preference)
        self._write = write
        if settings.needs_reference and not run.start:
            raise UserError(
                "preferences are learned by a model that already answers",
                where="start",
                next_step="Give start=RUN, the folder of a run that was taught conversations.",
            )
        self.run, self.strategy, self.settings, self._report = run, strategy, settings, report
        self._data = prepare_judgements(run, strategy, report)
        self.tokenizer, self.notes = self._data.tokenizer, self._data.notes
        self.fingerprint = self._data.train.fingerprint
        self._needs_mismatched = settings.loss == "kto"
        if self._needs_mismatched:
            batch_geometry(run, strategy.world, strategy.device)  # raises where kl_groups does not fit
        else:
            for half in (self._data.train, self._data.validation):
                need_pairs(half, f"objective.loss={settings.loss}")
        self._train = _Half(self._data.train, run, mismatched=self._needs_mismatched)
        self._validation = _Half(self._data.validation, run, mismatched=self._needs_mismatched)
        self.reference = self._choose_reference()

    def _choose_reference(self) -> Literal["none", "copy", "adapter_off", "precomputed"]:
        settings, run = self.settings, self.run
        if not settings.needs_reference:
            return "none"
        if settings.reference == "adapter_off" and not run.lora.rank:
            raise UserError(
                "there is no adapter to switch off",
                where="objective.reference",
                got="adapter_off",
                next_step="Set lora.rank=8, or leave it out.",
            )
        if settings.reference != "auto":
            return settings.reference
        uses = run.steps * run.batch.rows if run.steps else run.epochs * len(self._data.train)
        if uses >= len(self._data.train):
            return "precomputed"
        return "adapter_off" if run.lora.rank else "copy"

    def size(self) -> Size:
        train = self._train
        tokens, num_keys, padding = measure(
            train.group, len(train), batch_geometry(self.run, self.strategy.world, self.strategy.device).micro_size
        )
        return Size(
            unit="pairs" if self._data.train.has_pairs else "judged answers",
            units_per_epoch=len(train),
            tokens_per_unit=tokens,
            row_tokens=self.run.data.row_tokens,
            num_keys=num_keys,
            padding_fraction=padding,
            extra_forwards=1.0 if self.reference in ("copy", "adapter_off") else 0.0,
        )

    def trained(self, model: Transformer) -> nn.Module:
        return model

    def begin(self, model: nn.Module, strategy: Strategy) -> None:
        assert isinstance(model, Transformer)
        self._model = model
        dtype = hardware.compute_dtype(self.run.compute.dtype, strategy.device)
        self._scorer: Callable[[AnswerBatch], Tensor] | None = None
        self._copied: Transformer | None = None
        if self.reference == "copy":
            copied = self._copied = _base_of(model, dtype) if self.run.lora.rank else frozen_copy(model, dtype)
            self._scorer = lambda batch: score(copied, batch)
        elif self.reference == "adapter_off":
            self._scorer = lambda batch: _score_base(model, batch)
        elif self.reference == "precomputed":
            self._precompute(model, str(dtype))

    def _precompute(self, model: Transformer, dtype: str) -> None:
        """Read the reference's log-probabilities back, or compute them: each rank its share, then all of them."""
        file = RunFolder(Path(self.run.out)).path / "reference.safetensors"
        about = {
            "model": fingerprint(model),
            "data": self.fingerprint,
            "held_out": self._data.validation.fingerprint,
            "dtype": dtype,
            "form": f"{self.settings.loss == 'kto'} {self.run.data.row_tokens} {self.run.seed}",
        }
        known = self.strategy.broadcast(self.strategy.rank == 0 and _written_for(file, about))
        halves = {"train": self._train, "validation": self._validation}
        if known:
            found = safetensors.torch.load_file(file)
            for name, half in halves.items():
                half.take_reference(found[name].numpy())
            return
        self._report(f"asking the reference about {len(self._train):,} {self.size().unit}")
        for half in halves.values():
            half.take_reference(self._ask_in_room(model, half))
        if self.strategy.rank == 0:
            tensors = {name: torch.from_numpy(half.reference_N) for name, half in halves.items()}
            write_tensors(file, tensors, about)
        self.strategy.any(False)  # the others wait until the file is whole

    def _ask_in_room(self, model: Transformer, half: _Half) -> npt.NDArray[np.float32]:
        """In smaller passes where memory does not suffice."""
        size = groups_of_pass(self.run)

        def make_room(said: str) -> None:
            nonlocal size
            release()
            if size == 1 or self.strategy.world > 1:
                raise UserError(f"out of memory: {said}", where="batch.micro_rows", next_step="Halve it.")
            size //= 2

        return with_room(lambda: self._ask(model, half, size), make_room)

    def _ask(self, model: Transformer, half: _Half, size: int) -> npt.NDArray[np.float32]:
        found_N = torch.zeros(half.num_values)
        for indices, batch in _chunks(half, len(half), self.strategy, size):
            logp_N = _score_base(model, batch.to(self.strategy.device)).cpu()
            places = [place for index in indices for place in half.places(index)]
            first = 0
            for place in places:
                length = place.stop - place.start
                found_N[place] = logp_N[first : first + length]
                first += length
            assert first == len(logp_N)
        # Each value comes from one rank and is zero on the others: the sum is exact.
        return self.strategy.add(found_N.to(self.strategy.device)).cpu().numpy()

    def source(self, micro_units: int, rank: int, world: int) -> Source:
        return GroupSource(
            self._train.group,
            len(self._train),
            micro_units=micro_units,
            seed=derive(self.run.seed, self.run.stage, "order"),
            rank=rank,
            world=world,
        )

    def objective(self) -> Objective:
        biased = self.run.model.architecture == "glm4_moe"
        return PreferenceObjective(self.settings, self._scorer, self.run.router, biased=biased)

    def validate(self) -> dict[str, float]:
        objective = PreferenceObjective(self.settings, self._scorer)
        number = min(self.run.validate.rows, len(self._validation))
        size = groups_of_pass(self.run)
        if self._needs_mismatched:  # whole blocks that share an estimate
            size = max(size, self.settings.kl_groups)
        chunks = _chunks(self._validation, number, self.strategy, size)
        figures = held_out_figures(objective, self._model, chunks, self.strategy)
        return {**figures, **self._drift(min(number, self.settings.own_answers))}

    def _drift(self, number: int) -> dict[str, float]:
        """How far the model has gone from its start, on its own answers to held-out questions."""
        if not (number and self.run.start):
            return {}
        prompts = [self._data.validation[index].prompt for index in range(number)]
        seeds = [derive(self.run.seed, self.run.stage, "own", index) for index in range(number)]
        reference, model = self._as_begun(), self._model
        size = groups_of_pass(self.run)
        return drift(model, reference, prompts, seeds, self._write, self.tokenizer.stop, self.strategy, size)

    def _as_begun(self) -> Transformer | WithoutAdapter:
        """The model as it was before step 1. Read again where no copy is kept: a look needs it, and the steps' memory
        should not hold it."""
        if self._copied is not None:
            return self._copied
        if self.run.lora.rank:
            return WithoutAdapter(self._model)
        begun = load_start(self.run).requires_grad_(False).eval()
        set_compute_dtype(begun, self._model.compute_dtype)
        return begun.to(self.strategy.device)

    def describe(self) -> list[tuple[str, str]]:
        judged = f"objective.loss={self.settings.loss}, beta={self.settings.strength:g}"
        lines = [("preferences", f"{judged}; {len(self._validation):,} held out by question")]
        if self.reference != "none":
            lines.append(("reference", {**_SAID, "precomputed": "the start model, asked once"}[self.reference]))
        return lines


_SAID = {"copy": "a frozen copy of the start model", "adapter_off": "the model without its adapter"}


class _Half:
    """One half of the data as groups for batches.

    With `mismatched`, each group also gets the answers of another one, always the same: the estimate of KTO. What does
    not fit a row of those is cut off.
    """

    def __init__(self, groups: TokenGroups, run: Run, *, mismatched: bool) -> None:
        self.groups, self.row_tokens = groups, run.data.row_tokens
        self._partner_G: npt.NDArray[np.int64] | None = None
        if mismatched:
            # One cycle through all groups in a drawn order: nobody is their own partner.
            generator = np.random.Generator(np.random.PCG64(derive(run.seed, "mismatched")))
            order_G = generator.permutation(len(groups))
            self._partner_G = np.empty_like(order_G)
            self._partner_G[order_G] = np.roll(order_G, 1)
        self.reference_N = np.zeros(0, dtype=np.float32)
        self._places: list[list[slice]] = []
        self.num_values = 0
        for index in range(len(groups)):
            lengths = [len(ids) for ids, _, _ in self._answers(index)]
            ends = np.cumsum([self.num_values, *lengths]).tolist()
            self._places.append([slice(*pair) for pair in pairwise(ends)])
            self.num_values = ends[-1]

    def __len__(self) -> int:
        return len(self.groups)

    def places(self, index: int) -> list[slice]:
        """Where the values of each of a group's answers stand among those of all."""
        return self._places[index]

    def take_reference(self, reference_N: npt.NDArray[np.float32]) -> None:
        self.reference_N = reference_N

    def _answers(self, index: int) -> Iterator[tuple[list[int], list[int], bool]]:
        """ids, weights and whether they answer another question."""
        own = self.groups[index]
        for answer in own.answers:
            yield answer.ids, answer.weights, False
        if self._partner_G is None or len(self.groups) < 2:
            return
        room = self.row_tokens - own.num_tokens
        for answer in self.groups[int(self._partner_G[index])].answers:
            if room > 0:
                yield answer.ids[:room], answer.weights[:room], True
                room -= len(answer.ids)

    def group(self, index: int) -> Group:
        own = self.groups[index]
        places = self._places[index] if len(self.reference_N) else []
        answers, mismatched = [], []
        for number, (ids, weights, other) in enumerate(self._answers(index)):
            values = {REFERENCE: self.reference_N[places[number]]} if places else {}
            answers.append(
                Answer(
                    ids=ids,
                    weights=None if all(weights) else [float(weight) for weight in weights],
                    values=values,  # type: ignore[arg-type]  # an array is as good as a sequence here
                )
            )
            mismatched.append(float(other))
        wanted = [float(value) for value in own.wanted]
        figures: dict[str, Sequence[float]] = {
            WANTED: wanted + [0.0] * (len(answers) - len(wanted)),
            MISMATCHED: mismatched,
        }
        return Group(prompt=own.prompt, answers=answers, figures=figures)


def groups_of_pass(run: Run) -> int:
    """Groups of a forward pass without gradients: no more than of one with them, where its size is set."""
    return min(CHUNK, run.batch.micro_rows or CHUNK)


def _chunks(half: _Half, number: int, strategy: Strategy, size: int) -> Iterator[tuple[range, AnswerBatch]]:
    """The first `number` groups, this rank's only, `size` at a time whatever the number of ranks."""
    for first in range(strategy.rank * size, number, strategy.world * size):
        indices = range(first, min(first + size, number))
        yield indices, pack_tight([half.group(index) for index in indices])


def held_out_figures(
    objective: Objective, model: Callable[..., Any], chunks: Iterator[tuple[range, AnswerBatch]], strategy: Strategy
) -> dict[str, float]:
    """Means of an objective's parts over batches, each on one rank; named `validation_...`."""
    sums: dict[str, float] = {}
    units = 0.0
    with torch.no_grad():
        for _, batch in chunks:
            on_device = batch.to(strategy.device)
            for name, value in objective(model, on_device).parts.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            units += float(objective.weight(on_device))
    names = strategy.broadcast(sorted(sums))  # rank 0 has a chunk, whoever else may have none
    totals = torch.tensor([units, *(sums.get(name, 0.0) for name in names)], dtype=torch.float64)
    if strategy.device.type != "mps":  # which knows no float64, and has no neighbours
        totals = strategy.add(totals.to(strategy.device))
    units, *values = totals.tolist()
    return {f"validation_{name}": value / max(1.0, units) for name, value in zip(names, values, strict=True)}


def _score_base(model: Transformer, batch: AnswerBatch) -> Tensor:
    with using(model, None):
        return score(model, batch)


def _base_of(model: Transformer, dtype: torch.dtype) -> Transformer:
    copied = copy.deepcopy(model)
    strip(copied)
    return frozen_copy(copied, dtype)


def _written_for(file: Path, about: dict[str, str]) -> bool:
    if not file.is_file():
        return False
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {}) == about
    except safetensors.SafetensorError:
        return False

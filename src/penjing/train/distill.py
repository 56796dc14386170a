"""Distillation: the data of pretraining or SFT beside a frozen teacher, its predictions on disk, or its verdict on what
the student writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from penjing.base import units
from penjing.base.errors import UserError
from penjing.base.files import read_json, sha256_text, write_json
from penjing.base.seeds import derive, fraction
from penjing.feed.answers import Answer, AnswerBatch, Group, pack
from penjing.feed.batch import Batch, collate
from penjing.feed.source import PackedSource, Source
from penjing.model.head_distill import likeliest
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import fingerprint, keep_base_in
from penjing.model.transformer import Transformer
from penjing.objective.distill import Distill, Distillation, TaughtBatch
from penjing.objective.next_token import FIGURE
from penjing.parallel.base import Engine
from penjing.plan import hardware
from penjing.plan.flops import training_flops_per_token
from penjing.text import prepare, records
from penjing.text.chat import render
from penjing.text.pack import BestFitRows, Rows
from penjing.text.shards import Shards
from penjing.text.teacher import FixedRows, Key, Slots, Store, Writer, find, in_order, numbered
from penjing.text.tokenizer import Tokenizer
from penjing.text.whole import WholeRows
from penjing.train.folder import RunFolder, load_trained
from penjing.train.run import Run
from penjing.train.stage import Report, Size, micro_units
from penjing.train.tokens import NextTokenStage, data_paths, run_tokenizer

# prompts, a seed for each, ids that end an answer -> what the model says after each, with the id that ended it
Write = Callable[[Transformer, Sequence[Sequence[int]], Sequence[int], Collection[int]], list[list[int]]]

SYNC_BATCHES = 64  # of a teacher's reading, after which ranks wait for each other and note how far they are


# --- the teacher -----------------------------------------------------------------------------------------------------


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


def place(teacher: TeacherModel, run: Run, engine: Engine) -> Transformer:
    """The teacher on the run's device, in the precision of its products."""
    dtype = hardware.compute_dtype(run.compute.dtype, engine.device)
    keep_base_in(teacher.model, dtype)
    set_compute_dtype(teacher.model, None if dtype == torch.float32 else dtype)
    return teacher.model.to(engine.device)


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


def _relative_cost(run: Run, teacher: Transformer, num_keys: float) -> float:
    """The teacher's forward pass, in forward passes of the student."""
    return training_flops_per_token(teacher.config, num_keys) / training_flops_per_token(run.model, num_keys)


def _about(run: Run, settings: Distill, teacher: Transformer) -> tuple[str, str]:
    size = units.count(sum(value.numel() for value in teacher.parameters()))
    return "teacher", f"{settings.teacher}, {size} parameters, {settings.mode}, divergence {settings.divergence}"


def judge(
    objective: Distillation, model: nn.Module, batches: Iterator[Any], engine: Engine, names: Sequence[str]
) -> dict[str, float]:
    """Means of the objective's parts over batches that are spread over the ranks, under `validation_` names."""
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            parts = objective(cast(Callable[..., Tensor], model), batch).parts
            values = torch.stack([*(parts[name] for name in names), objective.weight(batch)])
            sums += values.double().cpu()
    *totals, weight = engine.add(sums.to(engine.device) if engine.device.type == "cuda" else sums).tolist()
    return {f"validation_{name}": total / max(1.0, weight) for name, total in zip(names, totals, strict=True)}


# --- on the data -----------------------------------------------------------------------------------------------------


class DistillStage:
    """Rows of packed text or conversations, each with what the teacher makes of it: asked anew, or read from disk."""

    runs_ahead = True

    def __init__(self, run: Run, engine: Engine, report: Report) -> None:
        """Makes tokenizer and shards where they are not there yet, and with mode=top_k the store."""
        assert isinstance(run.objective, Distill)
        self.run, self.engine, self.settings = run, engine, run.objective
        if run.data.kind not in ("documents", "chats"):
            raise UserError(
                "nothing to read for the teacher",
                where="data.kind",
                got=run.data.kind,
                wanted="documents or chats, or objective.mode=on_policy",
            )
        teacher = load_teacher(run, self.settings)
        if engine.rank == 0:
            take_tokenizer(run, teacher)
        self._data = NextTokenStage(run, engine, report)
        self.tokenizer, self.fingerprint, self.notes = self._data.tokenizer, self._data.fingerprint, self._data.notes
        check_vocabulary(self.tokenizer, teacher, self.settings)
        if engine.rank == 0:
            note_teacher(run, teacher, self.settings)
        self.num_ids = min(teacher.model.config.vocabulary_size, run.model.vocabulary_size)
        self._cost = _relative_cost(run, teacher.model, self._data.size().num_keys)
        self._describe = _about(run, self.settings, teacher.model)
        self._teacher: Transformer | None = place(teacher, run, engine)
        self._stores: list[Store] = []
        if self.settings.mode == "top_k":
            self._stores = [self._store(half, teacher, report) for half in (self._data.rows, self._data.held_out)]
            self._teacher = None

    def _store(self, rows: Rows, teacher: TeacherModel, report: Report) -> Store:
        fixed = _fixed(rows)
        count = min(self.settings.top_k, self.num_ids - 1)
        layout = f"{fixed.shards.kind} in rows of {fixed.row_tokens}"
        key = Key(
            teacher=teacher.sha256,
            data=_all_files(fixed.shards),
            layout=layout,
            count=count,
            num_ids=self.num_ids,
            temperature=self.settings.temperature,
        )
        folder = Path(self.settings.store) if self.settings.store else Path(self.run.out) / "teacher"
        known = self.engine.broadcast(find(folder, key) is not None if self.engine.rank == 0 else None)
        if known:
            return Store(folder / key.name, key)
        assert self._teacher is not None
        return make_store(
            self._teacher, in_order(fixed), folder, key, self.engine, report, micro_units(self.run, self.engine)
        )

    def size(self) -> Size:
        return replace(self._data.size(), extra_forwards=0.0 if self._stores else self._cost)

    def trained(self, model: Transformer) -> nn.Module:
        return model

    def begin(self, model: nn.Module, engine: Engine) -> None:
        self._model = model

    def source(self, micro_units: int, rank: int, world: int) -> Source:
        if not self._stores:
            return self._data.source(micro_units, rank, world)
        return StoredSource(_fixed(self._data.rows), self._stores[0], micro_rows=micro_units, rank=rank, world=world)

    def objective(self) -> Distillation:
        return Distillation(
            self.settings,
            self._teacher,
            self.run.router,
            num_ids=self.num_ids,
            biased=self.run.model.architecture == "glm4_moe",
        )

    def validate(self) -> dict[str, float]:
        """Cross-entropy, KL and agreement on the held-out rows, every row on one rank only."""
        names = (FIGURE, "kl_nats_per_token", "agreement")
        figures = judge(self.objective(), self._model, self._held_out(), self.engine, names)
        if self.run.data.kind == "documents":
            nats = figures[f"validation_{FIGURE}"]
            figures["validation_bits_per_byte"] = nats / math.log(2) * self._data.targets_per_byte
        return figures

    def _held_out(self) -> Iterator[Batch]:
        rows = self._data.held_out
        mine = range(self.engine.rank, min(self.run.validate.rows, rows.rows_per_epoch), self.engine.world)
        size = micro_units(self.run, self.engine)
        taught = Taught(_fixed(rows), self._stores[1]) if self._stores else None
        for first in range(0, len(mine), size):
            chosen = mine[first : first + size]
            batch = taught.batch(chosen) if taught else collate([rows.row(index) for index in chosen])
            yield batch.to(self.engine.device)

    def describe(self) -> list[tuple[str, str]]:
        lines = [self._describe]
        if self._stores:
            size = sum(path.stat().st_size for store in self._stores for path in store.folder.glob("*.bin"))
            lines.append(("teacher on disk", f"{units.megabytes(size)}, {self._stores[0].key.count} ids a position"))
        return lines


def _fixed(rows: Rows) -> FixedRows:
    """The rows, if they are the same ones in every epoch. Raises UserError if not."""
    if isinstance(rows, BestFitRows | WholeRows):
        return rows
    raise UserError(
        "a stream cuts the text anew in each epoch, so the teacher's predictions cannot be kept",
        where="data.packing",
        got="stream",
        wanted="whole, or objective.mode=logits",
    )


def _all_files(shards: Shards) -> str:
    return sha256_text(" ".join(f"{name} {facts['sha256']}" for name, facts in sorted(shards.meta["files"].items())))


def make_store(
    teacher: Transformer, rows: FixedRows, folder: Path, key: Key, engine: Engine, report: Report, micro_rows: int
) -> Store:
    """Have the teacher read every row once and keep its predictions; each rank reads its share. A stop loses little.

    rows: in an order that is always the same one.
    """
    slots = Slots(rows.shards)
    writer = Writer(folder, key, slots.count)
    done = engine.broadcast(writer.begin() if engine.rank == 0 else None)
    writer.open()
    report(f"the teacher reads {max(0, rows.rows_per_epoch - done):,} rows, once")
    places = numbered(rows)
    stride = engine.world * micro_rows
    for number, first in enumerate(range(done, rows.rows_per_epoch, stride), start=1):
        mine = range(first + engine.rank * micro_rows, min(first + (engine.rank + 1) * micro_rows, rows.rows_per_epoch))
        if mine:
            batch = collate([rows.row(index) for index in mine]).to(engine.device)
            id_NK, logp_NJ = read_teacher(teacher, batch, key)
            slot_N = np.concatenate([slots.of(places.row(index)) for index in mine])
            writer.write(slot_N, id_NK.cpu().numpy(), logp_NJ.cpu().numpy())
        if number % SYNC_BATCHES == 0:
            writer.flush()
            engine.any(False)
            if engine.rank == 0:
                writer.note(first + stride)
    writer.flush()
    engine.any(False)
    if engine.rank == 0:
        writer.finish({"rows": rows.rows_per_epoch})
    engine.any(False)
    return Store(folder / key.name, key)


@torch.no_grad()
def read_teacher(teacher: Transformer, batch: Batch, key: Key) -> tuple[Tensor, Tensor]:
    """What a store holds of a batch's positions of weight above 0."""
    hidden_ND = teacher.hidden(batch.ids_BT, batch.document_BT).flatten(0, 1)
    if batch.scored_N is not None:
        hidden_ND = hidden_ND[batch.scored_N]
    weight_VD = teacher.head_weight_VD
    return likeliest(
        hidden_ND,
        weight_VD,
        teacher.compute_dtype or weight_VD.dtype,
        count=key.count,
        num_ids=key.num_ids,
        temperature=key.temperature,
    )


class Taught:
    """Rows joined with what a store holds of them."""

    def __init__(self, rows: FixedRows, store: Store) -> None:
        self.rows, self.store, self.places, self.slots = rows, store, numbered(rows), Slots(rows.shards)

    def batch(self, indices: Sequence[int]) -> TaughtBatch:
        batch = collate([self.rows.row(index) for index in indices])
        slot_N = np.concatenate([self.slots.of(self.places.row(index)) for index in indices])
        id_NK, logp_NJ = self.store.read(slot_N)
        return TaughtBatch(**vars(batch), top_id_NK=torch.from_numpy(id_NK), top_logp_NJ=torch.from_numpy(logp_NJ))


class StoredSource(PackedSource):
    """`PackedSource` with the teacher's predictions."""

    def __init__(self, rows: FixedRows, store: Store, *, micro_rows: int, rank: int = 0, world: int = 1) -> None:
        super().__init__(rows, micro_rows=micro_rows, rank=rank, world=world)
        self._taught = Taught(rows, store)

    def __next__(self) -> Batch:
        first = self._next_row + self.rank * self.micro_rows
        self._next_row += self.world * self.micro_rows
        return self._taught.batch(range(first, first + self.micro_rows))


# --- on what the student writes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and what the data answer (empty where they do not)."""

    ids: list[int]
    answer: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + max(0, len(self.answer) - 1)


def encode_prompts(run: Run, settings: Distill, tokenizer: Tokenizer) -> tuple[list[Prompt], list[Prompt], int]:
    """(to learn from, held out, left out as too long). Of a conversation the last answer is asked for again."""
    paths, answered = data_paths(run), run.data.kind == "chats"
    chats = records.read_chats(paths) if answered else (chat for chat, _ in records.read_prompts(paths))
    fitting: list[tuple[Prompt, str]] = []
    left_out = 0
    for chat in chats:
        for prompt in _prompts(chat, tokenizer, answered=answered):
            if max(len(prompt.ids) + settings.answer_tokens - 1, prompt.num_tokens) <= run.data.row_tokens:
                fitting.append((prompt, prepare.split_key(chat)))
                break
        else:
            left_out += 1
    below = prepare.held_out_below((key for _, key in fitting), run.data.validation_fraction)
    halves: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt, key in fitting:
        halves[prepare.is_held_out(key, below)].append(prompt)
    for half, what in zip(halves, ("to learn from", "held out"), strict=True):
        if not half:
            raise UserError(
                f"no prompt {what} leaves room for an answer",
                where="data.row_tokens",
                got=f"{run.data.row_tokens}, of which objective.answer_tokens={settings.answer_tokens} for the answer",
                next_step="Give more prompts, longer rows or shorter answers.",
            )
    return *halves, left_out


def _prompts(chat: records.Chat, tokenizer: Tokenizer, *, answered: bool) -> Iterator[Prompt]:
    """What a conversation asks: with answers, its last question, and then those before, each shorter to read."""
    if not answered:
        yield Prompt(render(tokenizer, chat.messages, chat.tools, ask=True).ids, [])
        return
    for number in range(len(chat.messages), 0, -1):
        if chat.messages[number - 1].role != "assistant":
            continue
        rendered = render(tokenizer, chat.messages[:number], chat.tools)
        # The last stretch of taught tokens is what the assistant said last.
        end = len(rendered.weights) - rendered.weights[::-1].index(1)
        start = end
        while start > 0 and rendered.weights[start - 1]:
            start -= 1
        if start:
            yield Prompt(rendered.ids[:start], rendered.ids[start:end])


class OnPolicyStage:
    """Prompts that the student answers with the weights of the step, for the teacher to judge token by token.

    What is drawn depends on the run's seed and the prompt's place in the order alone, for any number of ranks.
    """

    runs_ahead = False

    def __init__(self, run: Run, engine: Engine, report: Report, write: Write, write_likeliest: Write) -> None:
        """write: answers as they are drawn in training; write_likeliest: greedy ones, for held-out prompts."""
        assert isinstance(run.objective, Distill)
        self.run, self.engine, self.settings = run, engine, run.objective
        self._write, self._write_likeliest = write, write_likeliest
        if run.data.kind not in ("chats", "prompts"):
            raise UserError("nothing to answer", where="data.kind", got=run.data.kind, wanted="chats or prompts")
        if run.data.kind == "prompts" and self.settings.own_fraction < 1:
            raise UserError(
                "prompts have no answers of the data's own",
                where="objective.own_fraction",
                got=self.settings.own_fraction,
                wanted="1, or data.kind=chats",
            )
        teacher = load_teacher(run, self.settings)
        folder = RunFolder(Path(run.out))
        if engine.rank == 0:
            take_tokenizer(run, teacher)
            run_tokenizer(run, folder, report)
        engine.any(False)
        self.tokenizer = Tokenizer.load(folder.tokenizer)
        check_vocabulary(self.tokenizer, teacher, self.settings)
        if engine.rank == 0:
            note_teacher(run, teacher, self.settings)
        self._prompts, self._held_out, left_out = encode_prompts(run, self.settings, self.tokenizer)
        self.fingerprint = sha256_text(repr([(prompt.ids, prompt.answer) for prompt in self._prompts]))
        self.notes = [f"{left_out} prompts that leave no room for an answer were left out"] if left_out else []
        self._teacher = place(teacher, run, engine)
        self._describe = _about(run, self.settings, teacher.model)

    def size(self) -> Size:
        lengths = [prompt.num_tokens if prompt.answer else len(prompt.ids) for prompt in self._prompts]
        tokens = sum(lengths) / len(lengths)
        if self.run.data.kind == "prompts":
            tokens += self.settings.answer_tokens / 2
        return Size(
            unit="prompts",
            units_per_epoch=len(self._prompts),
            tokens_per_unit=tokens,
            row_tokens=self.run.data.row_tokens,
            num_keys=tokens / 2,
            padding_fraction=0.0,
            # The student's writing is about one forward pass more, a token at a time.
            extra_forwards=_relative_cost(self.run, self._teacher, tokens / 2) + self.settings.own_fraction,
            probe_steps=2,
        )

    def trained(self, model: Transformer) -> nn.Module:
        return model

    def begin(self, model: nn.Module, engine: Engine) -> None:
        assert isinstance(model, Transformer)
        self._model = model

    def source(self, micro_units: int, rank: int, world: int) -> Source:
        return cast(Source, OwnAnswers(self, micro_units, rank, world))

    def objective(self) -> Distillation:
        return Distillation(
            self.settings, self._teacher, self.run.router, biased=self.run.model.architecture == "glm4_moe"
        )

    def batch(self, indices: Sequence[int]) -> AnswerBatch:
        """The prompts at these places of the endless order, with the student's answers or the data's."""
        chosen = [self._prompt(index) for index in indices]
        seed = derive(self.run.seed, self.run.stage, "own")
        own = [fraction(seed, index) < self.settings.own_fraction for index in indices]
        asked = [number for number, mine in enumerate(own) if mine]
        seeds = [derive(self.run.seed, self.run.stage, "answer", indices[number]) for number in asked]
        asked_ids = [chosen[number].ids for number in asked]
        written = self._write(self._model, asked_ids, seeds, self.tokenizer.stop) if asked else []
        answers = [prompt.answer for prompt in chosen]
        for number, said in zip(asked, written, strict=True):
            answers[number] = said
        return self._pack(chosen, answers, [not mine for mine in own])

    def _pack(self, prompts: Sequence[Prompt], answers: Sequence[list[int]], given: Sequence[bool]) -> AnswerBatch:
        groups = [
            Group(prompt=prompt.ids, answers=[Answer(ids=said, values={"given": [float(by_data)] * len(said)})])
            for prompt, said, by_data in zip(prompts, answers, given, strict=True)
        ]
        return pack(groups, self.run.data.row_tokens)

    def _prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._prompts))
        if getattr(self, "_epoch", None) != epoch:
            generator = np.random.Generator(np.random.PCG64(derive(self.run.seed, self.run.stage, "order", epoch)))
            self._order, self._epoch = generator.permutation(len(self._prompts)), epoch
        return self._prompts[int(self._order[place])]

    def validate(self) -> dict[str, float]:
        """KL and agreement on held-out prompts: with the data's answers, and their cross-entropy; where there are none,
        with the student's likeliest ones."""
        if self.run.data.kind == "prompts":
            return judge(self.objective(), self._model, self._judged(), self.engine, ("kl_nats_per_token", "agreement"))
        settings = replace(self.settings, own_fraction=0.0)
        objective = Distillation(settings, self._teacher)
        names = (FIGURE, "kl_nats_per_token", "agreement")
        return judge(objective, self._model, self._judged(), self.engine, names)

    def _judged(self) -> Iterator[AnswerBatch]:
        held_out = self._held_out[: self.run.validate.rows][self.engine.rank :: self.engine.world]
        size = micro_units(self.run, self.engine)
        for first in range(0, len(held_out), size):
            prompts = held_out[first : first + size]
            by_data = self.run.data.kind == "chats"
            if by_data:
                answers = [prompt.answer for prompt in prompts]
            else:
                asked, seeds = [prompt.ids for prompt in prompts], [0] * len(prompts)
                answers = self._write_likeliest(self._model, asked, seeds, self.tokenizer.stop)
            yield self._pack(prompts, answers, [by_data] * len(prompts)).to(self.engine.device)

    def describe(self) -> list[tuple[str, str]]:
        return [self._describe]


class OwnAnswers:
    """`micro_units` prompts at a time; of each group of `world` batches this rank takes its own."""

    def __init__(self, stage: OnPolicyStage, micro_units: int, rank: int, world: int) -> None:
        self._stage, self._size, self._rank, self._world = stage, micro_units, rank, world
        self._next = 0

    def __next__(self) -> AnswerBatch:
        first = self._next + self._rank * self._size
        self._next += self._world * self._size
        return self._stage.batch(range(first, first + self._size))

    def state(self) -> dict[str, Any]:
        return {"next_prompt": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = int(state["next_prompt"])

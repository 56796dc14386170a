"""On-policy distillation: the student answers, and the teacher scores its tokens (arXiv:2306.13649)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.base.seeds import derive, fraction
from penjing.data.chat.render import render
from penjing.data.corpus import Corpus, threshold
from penjing.data.formats import BadRecords, Chat
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.generate import sample_answers
from penjing.infer.sample import Sampling
from penjing.loader.batch_source import OrderedSource, Source
from penjing.loader.group_sampler import EpochOrder
from penjing.loader.shared_prompt_batch import Answer, AnswerBatch, Group, pack
from penjing.objective.distill import Distill, Distillation
from penjing.objective.next_token import LOSS_METRIC
from penjing.train.config import Run
from penjing.train.stages.base import DatasetSize
from penjing.train.stages.example_batches import example_answers
from penjing.train.stages.held_out import held_out_means
from penjing.train.stages.run_data import run_tokenizer
from penjing.train.stages.teacher_model import TeacherStage, relative_cost


@dataclass(frozen=True, slots=True)
class StudentPrompt:
    """A prompt, and the data's answer (empty if there is none)."""

    ids: list[int]
    answer: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + max(0, len(self.answer) - 1)


def encode_prompts(
    run: Run, settings: Distill, tokenizer: Tokenizer, bad_records: BadRecords
) -> tuple[list[StudentPrompt], list[StudentPrompt], int]:
    """(training prompts, held-out prompts, number too long). A conversation is cut before its last answer that fits.

    bad_records: receives conversations that are broken, or that the template refuses.
    """
    answered = run.data.format == "chats"
    corpus = Corpus(run.data)
    fitting: list[tuple[StudentPrompt, float]] = []
    skipped = 0
    for chat, place in corpus.placed(bad_records):
        try:
            candidates = _prompts(chat, tokenizer, answered=answered)
            # with the longest answer
            lengths = ((one, max(len(one.ids) + settings.max_new_tokens - 1, one.num_tokens)) for one in candidates)
            fits = next((one for one, length in lengths if length <= run.data.seq_len), None)
        except UserError as error:
            bad_records.reject(error, chat.source, chat.line)
            continue
        if fits is None:
            skipped += 1
        else:
            fitting.append((fits, place))
    below = threshold((place for _, place in fitting), corpus.split.share)
    halves: tuple[list[StudentPrompt], list[StudentPrompt]] = ([], [])
    for prompt, place in fitting:
        halves[place < below].append(prompt)
    for half, what in zip(halves, ("to learn from", "held out"), strict=True):
        if not half and not (half is halves[1] and corpus.split.may_be_empty):
            raise UserError(
                f"no prompt {what} leaves enough positions for an answer",
                where="data.seq_len",
                got=f"{run.data.seq_len}, of which objective.max_new_tokens={settings.max_new_tokens} for the answer",
                next_step="Give more prompts, longer rows or shorter answers.",
            )
    return *halves, skipped


def _prompts(chat: Chat, tokenizer: Tokenizer, *, answered: bool) -> Iterator[StudentPrompt]:
    """A conversation's prompts: with answers, that of its last answer first, then the earlier and shorter ones."""
    if not answered:
        yield StudentPrompt(render(tokenizer, chat.messages, chat.tools, ask=True).ids, [])
        return
    for number in range(len(chat.messages), 0, -1):
        if chat.messages[number - 1].role != "assistant":
            continue
        rendered = render(tokenizer, chat.messages[:number], chat.tools)
        if not any(rendered.weights):  # some templates do not render tool calls
            continue
        # The last run of target tokens is the assistant's last turn.
        end = len(rendered.weights) - rendered.weights[::-1].index(1)
        start = end
        while start > 0 and rendered.weights[start - 1]:
            start -= 1
        if start:
            yield StudentPrompt(rendered.ids[:start], rendered.ids[start:end])


class OnPolicyStage(TeacherStage):
    """Prompts that the student answers with its current weights, and that the teacher scores token by token.

    Samples depend only on the run's seed and the prompt's index in the order, for any number of ranks.
    """

    runs_ahead = False

    def prepare_data(self) -> None:
        run = self.run
        self._check()
        teacher = self.read_teacher()
        if self.strategy.rank == 0:
            run_tokenizer(run, self.report)
        self.strategy.any(False)
        self.tokenizer = Tokenizer.load(self.folder.tokenizer)
        bad = Corpus(run.data).counts(None if self.strategy.rank else self.folder.bad_records)
        self.set_teacher(teacher)
        self._prompts, self._held_out, skipped = encode_prompts(run, self.settings, self.tokenizer, bad)
        self._order = EpochOrder(len(self._prompts), run.seed, "order")
        self.fingerprint = sha256_text(repr([(prompt.ids, prompt.answer) for prompt in self._prompts]))
        self.notes += [note] if (note := bad.note()) else []
        if skipped:
            self.notes.append(f"{skipped} prompts that are too long for an answer were skipped")

    def _check(self) -> None:
        """Raise UserError for data without prompts, or without answers where the settings need them."""
        data = self.run.data
        self.need_format("nothing to answer", "chats", "prompts")
        if data.format == "prompts" and self.settings.on_policy_fraction < 1:
            raise self.settings.error(
                "on_policy_fraction", "data.format=prompts has no answers", wanted="1, or data.format=chats"
            )
        if data.weights:
            raise data.error("weights", "have no effect on prompts", wanted="it left out")
        if data.thinking != "as_given":
            wanted = "it left out, or objective.mode=logits or top_k"
            raise data.error("thinking", "has no effect on the student's answers", wanted=wanted)

    def size(self) -> DatasetSize:
        assert self.teacher is not None
        lengths = [prompt.num_tokens if prompt.answer else len(prompt.ids) for prompt in self._prompts]
        tokens = sum(lengths) / len(lengths)
        if self.run.data.format == "prompts":
            tokens += self.settings.max_new_tokens / 2
        return DatasetSize(
            unit="prompts",
            units_per_epoch=len(self._prompts),
            tokens_per_unit=tokens,
            seq_len=self.run.data.seq_len,
            num_keys=tokens / 2,
            padding_fraction=0.0,
            # The student's sampling costs about one forward pass, one token at a time.
            extra_forwards=relative_cost(self.run, self.teacher, tokens / 2) + self.settings.on_policy_fraction,
        )

    def source(self, micro_size: int, rank: int, world: int) -> Source:
        return OrderedSource(self.batch, "next_prompt", micro_size, rank, world)

    def example_batch(self, micro_size: int, device: torch.device) -> AnswerBatch:
        return example_answers((micro_size, 1, self.run.data.seq_len), device, values=("from_data",))

    def batch(self, indices: Sequence[int]) -> AnswerBatch:
        """The prompts at these indices of the endless order, with the student's answers or the data's."""
        prompts = [self._prompts[self._order[index]] for index in indices]
        seed = derive(self.run.seed, "own")
        on_policy = [fraction(seed, index) < self.settings.on_policy_fraction for index in indices]
        numbers = [number for number, sampled in enumerate(on_policy) if sampled]
        seeds = [derive(self.run.seed, "answer", indices[number]) for number in numbers]
        prompt_ids = [prompts[number].ids for number in numbers]
        samples = self._sample(self.settings.sample_temperature, prompt_ids, seeds)
        answers = [prompt.answer for prompt in prompts]
        for number, answer in zip(numbers, samples, strict=True):
            answers[number] = answer
        return self._pack(prompts, answers, [not sampled for sampled in on_policy])

    def _pack(
        self, prompts: Sequence[StudentPrompt], answers: Sequence[list[int]], from_data: Sequence[bool]
    ) -> AnswerBatch:
        groups = [
            Group(prompt=prompt.ids, answers=[Answer(ids=answer, values={"from_data": [float(data)] * len(answer)})])
            for prompt, answer, data in zip(prompts, answers, from_data, strict=True)
        ]
        return pack(groups, self.run.data.seq_len)

    def _sample(self, temperature: float, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        length, stop = self.settings.max_new_tokens, self.tokenizer.stop
        sampling = Sampling(temperature=temperature)
        with self.strategy.gathered(self.model):
            return sample_answers(self.model, prompts, seeds, max_new_tokens=length, stop=stop, sampling=sampling)

    def validate(self) -> dict[str, float]:
        """KL and agreement on held-out prompts: with the data's answers, and their cross-entropy; without such answers,
        with the student's greedy ones."""
        names: tuple[str, ...] = ("kl", "agreement")
        settings = self.settings
        if self.run.data.format == "chats":
            names, settings = (LOSS_METRIC, *names), replace(settings, on_policy_fraction=0.0)
        objective = Distillation(settings, self.teacher)
        return held_out_means(objective, self.model, self._held_out_batches(), self.strategy, names)

    def _held_out_batches(self) -> Iterator[AnswerBatch]:
        held_out = self._held_out[: self.run.eval.sequences][self.strategy.rank :: self.strategy.world]
        size, from_data = self.micro_size, self.run.data.format == "chats"
        answers = [prompt.answer for prompt in held_out]
        if not from_data:
            answers = self._sample(0.0, [prompt.ids for prompt in held_out], [0] * len(held_out))
        for first in range(0, len(held_out), size):
            part = slice(first, first + size)
            yield self._pack(held_out[part], answers[part], [from_data] * len(held_out[part]))

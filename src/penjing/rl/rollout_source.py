"""Reinforcement learning's source of batches: it asks the model, with the weights as they are now.

A round answers the prompts of `updates` optimizer steps; every rank samples its share, and then all know the whole
round. Which prompt comes when, and what random numbers each answer draws, follows from the run's seed and the global
position alone: a run may stop in the middle of a round and go on with another number of ranks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.forward import default_slots
from penjing.infer.generate import sample_batch
from penjing.infer.requests import Completion, Request
from penjing.infer.sample import Sampling
from penjing.infer.tool_loop import ToolLoop, last_turn
from penjing.loader.batch_source import Source
from penjing.loader.group_sampler import EpochOrder
from penjing.loader.shared_prompt_batch import AnswerBatch, Group, pack
from penjing.model.transformer import Transformer
from penjing.model.value_head import ScalarHead
from penjing.objective.policy import ADVANTAGE, Policy
from penjing.objective.value import advantages as token_advantages
from penjing.objective.value import whiten
from penjing.parallel.base import Strategy
from penjing.rl.advantages import advantages, degenerate
from penjing.rl.prompts import Prompt
from penjing.rl.reward_mix import RewardMix
from penjing.rl.rewards.base import RewardInput
from penjing.rl.rollout_buffer import RolloutBuffer, collate, concat, select, split
from penjing.train.oom_recovery import retry_on_oom
from penjing.train.stages.reference import LogProbs, answer_log_probs

SCORED_ROWS = 8  # rows of one pass of a reference
# What each rank fills in for its own prompts; the rest follows from it.
SHARED = (
    "id_PAM", "length_PA", "sampled_PAM", "turns_PA", "calls_PA", "failed_PA", "behaviour_PAM", "reference_PAM",
    "value_PAM", "cut_off_PA", "score_RPA",
)  # fmt: skip


@dataclass(kw_only=True)
class RolloutSampler:
    """Answers prompts and judges the answers.

    reference: gives log-probabilities to compare with, where asked for. values: the model with its value head, for ppo.
    turns: reads what was said and runs the tools that it calls; None where answers are taken as they come.
    slots: answers written at once; halved where memory does not suffice, and so for the rest of the run.
    scored_rows: rows of one pass of a reference; the same. record: takes down that this happened.
    """

    settings: Policy
    model: Transformer
    tokenizer: Tokenizer
    scorer: RewardMix
    strategy: Strategy
    seq_len: int
    reference: LogProbs | None = None
    values: ScalarHead | None = None
    turns: ToolLoop | None = None
    record: Callable[[dict[str, Any]], None] = lambda incident: None
    slots: int = field(init=False)
    scored_rows: int = SCORED_ROWS

    def __post_init__(self) -> None:
        self.slots = self._slots_requested

    @property
    def _slots_requested(self) -> int:
        return self.settings.rollout.max_concurrent or default_slots(self.model, self.seq_len)

    @property
    def style(self) -> Sampling:
        """How answers are drawn in training."""
        how = self.settings.rollout
        return Sampling(temperature=how.temperature, top_p=how.top_p, top_k=how.top_k)

    def answer(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """Answers to each prompt, one for each of its seeds."""
        how, slots = self.settings.rollout, self.slots
        requests = [Request(prompt=prompt.ids, seeds=own) for prompt, own in zip(prompts, seeds, strict=True)]
        num_answers = sum(map(len, seeds))

        def write() -> list[list[Completion]]:
            return sample_batch(
                self.model,
                requests,
                max_new_tokens=how.max_new_tokens,
                stop=self.tokenizer.stop,
                sampling=sampling,
                slots=self.slots,
                score_temperature=how.temperature,
                on_turn_end=self.turns if how.max_turns > 1 else None,
            )

        answers = retry_on_oom(write, lambda message: self._halve_slots(num_answers, message))
        if self.slots < slots:
            warnings.warn(f"out of memory while sampling: max_concurrent is now {self.slots}", stacklevel=2)
            self.record({"kind": "out of memory", "slots": self.slots})
        return answers

    def _halve_slots(self, num_answers: int, message: str) -> None:
        """Each answer draws from its own seed, so fewer at once are the same answers."""
        self.slots = min(self.slots, num_answers) // 2
        if not self.slots:
            raise UserError(
                f"out of memory while sampling a single answer: {message}",
                where="objective.rollout.max_new_tokens",
                got=self.settings.rollout.max_new_tokens,
                next_step="Take shorter answers or prompts (data.seq_len), or a smaller model.",
            )

    def _halve_scored_rows(self, message: str) -> None:
        if self.scored_rows == 1:
            raise UserError(
                f"out of memory while scoring one row of answers: {message}",
                where="data.seq_len",
                got=self.seq_len,
                next_step="Take shorter rows or a smaller model.",
            )
        self.scored_rows //= 2

    @property
    def has_fewer_slots(self) -> bool:
        """Than the run asked for, as memory did not suffice."""
        return self.slots < self._slots_requested

    def reward_input(self, prompt: Prompt, written: Completion) -> RewardInput:
        """What rewards see of an answer."""
        stopped = written.finish_reason == "stop"
        last = last_turn(written)
        return RewardInput(
            messages=prompt.messages,
            text=self.tokenizer.decode(last[:-1] if stopped else last).strip(),
            num_tokens=(len(written.ids) if written.is_sampled is None else sum(written.is_sampled)) - stopped,
            cut_off=written.finish_reason == "length",
            truths=prompt.truths,
            record=prompt.record,
            where=prompt.where,
            turns=self.turns.exchanges(written) if self.turns is not None else (),
        )

    def sample(
        self, prompts: Sequence[Prompt], indices: Sequence[int], seeds: Sequence[Sequence[int]]
    ) -> RolloutBuffer:
        """Answer and judge prompts, all ranks together: of prompt number i rank i mod world takes care.

        prompts: all that there are; indices: which of them are asked. Every rank gets the whole round.
        """
        strategy, how = self.strategy, self.settings.rollout
        mine = range(strategy.rank, len(indices), strategy.world)
        own_prompts = [prompts[indices[place]] for place in mine]
        began = time.perf_counter()
        written = self.answer(own_prompts, [seeds[place] for place in mine], self.style)
        seconds = time.perf_counter() - began
        one = self._empty(indices)
        inputs: list[RewardInput] = []
        for place, prompt, answers in zip(mine, own_prompts, written, strict=True):
            for number, each in enumerate(answers):
                at, length = (place, number), len(each.ids)
                one.id_PAM[at][:length] = each.ids
                one.length_PA[at] = length
                one.behaviour_PAM[at][:length] = each.logp
                one.sampled_PAM[at][:length] = 1 if each.is_sampled is None else each.is_sampled
                one.cut_off_PA[at] = each.finish_reason == "length"
                answer = self.reward_input(prompt, each)
                inputs.append(answer)
                results = [result for turn in answer.turns for result in turn.results]
                one.turns_PA[at] = max(1, len(answer.turns))
                one.calls_PA[at] = sum(len(turn.turn.calls) for turn in answer.turns)
                one.failed_PA[at] = one.calls_PA[at] - sum(result.worked for result in results)
        scores = self.scorer(inputs).reshape(len(self.scorer.names), len(own_prompts), how.num_generations)
        one.score_RPA[:, list(mine)] = scores
        values: dict[str, LogProbs] = {}
        if self.reference is not None:
            values["reference"] = self.reference
        if how.old_logprobs == "recomputed":
            values["behaviour"] = partial(answer_log_probs, self.model, temperature=how.temperature)
        if self.values is not None:
            values["value"] = partial(state_values, self.values)
        for name, scored_by in values.items():
            retry_on_oom(partial(self._score, one, mine, prompts, name, scored_by), self._halve_scored_rows)
        one.seconds, one.scoring_seconds = seconds, time.perf_counter() - began - seconds
        self._exchange(one)
        one.tokens = int(one.sampled_PAM.sum())
        one.reward_PA = self.scorer.total(one.score_RPA.reshape(len(self.scorer.names), -1)).reshape(
            len(indices), how.num_generations
        )
        one.advantage_PA = advantages(one.reward_PA, self.settings.advantage_kind)
        if self.values is not None:
            self._foresee(one)
        same_P = degenerate(one.reward_PA)
        one.sampled, one.degenerate = len(indices), int(same_P.sum())
        if self.settings.degenerate_kind != "keep":
            one.counts_P = (~same_P).astype(np.float64)
        return one

    def _empty(self, indices: Sequence[int]) -> RolloutBuffer:
        how = self.settings.rollout
        answers = (len(indices), how.num_generations)
        tokens = (*answers, how.max_new_tokens)
        valued = (*answers, 0 if self.values is None else how.max_new_tokens)
        return RolloutBuffer(
            prompt_P=np.asarray(indices, dtype=np.int64),
            id_PAM=np.zeros(tokens, np.int64),
            length_PA=np.zeros(answers, np.int64),
            behaviour_PAM=np.zeros(tokens, np.float32),
            reference_PAM=np.zeros(tokens, np.float32),
            value_PAM=np.zeros(valued, np.float32),
            gain_PAM=np.zeros(valued, np.float32),
            return_PAM=np.zeros(valued, np.float32),
            sampled_PAM=np.zeros(tokens, np.int64),
            turns_PA=np.zeros(answers, np.int64),
            calls_PA=np.zeros(answers, np.int64),
            failed_PA=np.zeros(answers, np.int64),
            cut_off_PA=np.zeros(answers, np.int64),
            score_RPA=np.zeros((len(self.scorer.names), *answers)),
            reward_PA=np.zeros(answers),
            advantage_PA=np.zeros(answers),
            counts_P=np.ones(len(indices)),
        )

    def _exchange(self, one: RolloutBuffer) -> None:
        """Every rank filled in its own prompts and left zeros elsewhere: the sum is the whole round."""
        if self.strategy.world == 1:
            return
        for name in SHARED:
            array = getattr(one, name)
            setattr(one, name, self.strategy.all_reduce(torch.from_numpy(array).to(self.strategy.device)).cpu().numpy())

    def _foresee(self, one: RolloutBuffer) -> None:
        """Advantages of tokens from values; an answer's reward comes with its last token. Whitened over the round.

        Tokens that the model was given do not count: the one before them is followed by the first of the next turn.
        """
        how = self.settings.value
        sampled_PAM = one.sampled_PAM.astype(bool)
        last_PAM = np.arange(one.value_PAM.shape[2]) == one.length_PA[..., None] - 1
        reward_N = torch.from_numpy((last_PAM * one.reward_PA[..., None])[sampled_PAM]).float()
        answer_N = torch.from_numpy(np.repeat(np.arange(one.length_PA.size), sampled_PAM.sum(-1).reshape(-1)))
        value_N = torch.from_numpy(one.value_PAM[sampled_PAM])
        gain_N, return_N = token_advantages(reward_N, value_N, answer_N, gamma=how.gamma, gae_lambda=how.gae_lambda)
        one.gain_PAM[sampled_PAM] = whiten(gain_N, torch.ones_like(gain_N)).numpy()
        one.return_PAM[sampled_PAM] = return_N.numpy()

    @torch.no_grad()
    def _score(
        self, one: RolloutBuffer, mine: Sequence[int], prompts: Sequence[Prompt], name: str, scored_by: LogProbs
    ) -> None:
        """Fill in log-probabilities of this rank's answers, a few rows at a time; on a CPU each prompt's alone.

        There the rounding of a pass depends on its size, and which prompts a rank has is not to be seen in a value.
        """
        array = {"reference": one.reference_PAM, "behaviour": one.behaviour_PAM, "value": one.value_PAM}[name]
        for waiting in self._passes(one, mine, prompts):
            batch = pack([group for _, _, group in waiting], self.seq_len)
            logp = scored_by(batch.to(self.strategy.device)).float().cpu().numpy()
            first = 0
            for place, number, group in waiting:
                for offset, answer in enumerate(group.answers):
                    array[place, number + offset, : len(answer.ids)] = logp[first : first + len(answer.ids)]
                    first += len(answer.ids)

    def _passes(
        self, one: RolloutBuffer, mine: Sequence[int], prompts: Sequence[Prompt]
    ) -> Iterator[list[tuple[int, int, Group]]]:
        """The groups that are scored together, each with its place and the number of its first answer."""
        alone, most_tokens = self.strategy.device.type == "cpu", self.scored_rows * self.seq_len
        waiting: list[tuple[int, int, Group]] = []
        tokens = 0
        for place in mine:
            number = 0
            for group in split(one.group(place, prompts, ()), self.seq_len):
                if waiting and (tokens + group.num_tokens > most_tokens or (alone and not number)):
                    yield waiting
                    waiting, tokens = [], 0
                waiting.append((place, number, group))
                number += len(group.answers)
                tokens += group.num_tokens
        if waiting:
            yield waiting


@torch.no_grad()
def state_values(head: ScalarHead, batch: AnswerBatch) -> Tensor:
    """value_N of the state before each of the answers' tokens. Without gradients no dropout is drawn."""
    value_N: Tensor = head(
        batch.ids_BT,
        batch.document_BT,
        branch_BT=batch.branch_BT,
        position_BT=batch.position_BT,
        scalar_N=batch.scored_N,
    )
    return value_N


class RolloutSource(Source):
    """Batches of sampled answers, `micro_units` prompts on each rank; see the file's docstring."""

    def __init__(
        self,
        sampler: RolloutSampler,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        prompts_per_step: int,
        micro_units: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.sampler, self.prompts, self.seed = sampler, prompts, seed
        self.order = EpochOrder(len(prompts), seed, "prompts")
        self.prompts_per_step, self.micro_units, self.rank, self.world = prompts_per_step, micro_units, rank, world
        how = sampler.settings.rollout
        self.round_prompts = prompts_per_step * how.steps_per_rollout
        self.round_units = self.round_prompts * how.num_epochs
        self._next_place = 0  # in the stream of prompts
        self._unit = 0  # of the round that is under way, over all ranks
        self._round: RolloutBuffer | None = None

    def __next__(self) -> AnswerBatch:
        if self._round is None:
            self._round = self._sample_round()
        one, how = self._round, self.sampler.settings.rollout
        first = (self._unit + self.rank * self.micro_units) % self.round_prompts
        step = first // self.prompts_per_step
        places = range(step * self.prompts_per_step, (step + 1) * self.prompts_per_step)
        values = ["behaviour", *(["reference"] if self.sampler.reference is not None else [])]
        if self.sampler.values is not None:
            values += ["value", ADVANTAGE, "return"]
        groups = [one.group(place, self.prompts, values) for place in range(first, first + self.micro_units)]
        figures = one.figures(
            places, self.sampler.scorer.names, how.steps_per_rollout * how.num_epochs, turns=how.max_turns > 1
        )
        batch = collate(groups, self.sampler.seq_len, figures)
        self._unit += self.world * self.micro_units
        if self._unit >= self.round_units:
            self._unit, self._round = 0, None
        return batch

    def _sample_round(self) -> RolloutBuffer:
        """The next prompts' answers; with `resample`, further prompts take the places of those that teach nothing."""
        settings = self.sampler.settings
        one = self._sample(self.round_prompts)
        if settings.degenerate_kind == "resample":
            for _ in range(settings.resample_rounds):
                missing = self.round_prompts - int(one.counts_P.sum())
                if not missing:
                    break
                one = concat(one, self._sample(missing))
            teaching = np.flatnonzero(one.counts_P).tolist()[: self.round_prompts]
            silent = np.flatnonzero(one.counts_P == 0).tolist()
            one = select(one, [*teaching, *silent[: self.round_prompts - len(teaching)]])
        if not one.counts_P.any() and self.rank == 0:
            warnings.warn(
                "no prompt of a round had answers of unlike reward: its steps teach nothing and show no rewards; "
                "the prompts are too hard or too easy, or the reward knows no difference",
                stacklevel=2,
            )
        return one

    def _sample(self, num_prompts: int) -> RolloutBuffer:
        places = range(self._next_place, self._next_place + num_prompts)
        self._next_place += num_prompts
        answers = range(self.sampler.settings.rollout.num_generations)
        seeds = [[derive(self.seed, "answer", place, answer) for answer in answers] for place in places]
        return self.sampler.sample(self.prompts, [self.order[place] for place in places], seeds)

    def state(self) -> dict[str, Any]:
        """A position, and in the middle of a round what was sampled: the weights that did it are gone."""
        place = self.position()
        return {**place, "round": "" if self._round is None else self._round.to_text()}

    def position(self) -> dict[str, Any]:
        """The same with the round itself, which is not compressed: for use in this process."""
        slots = {"slots": self.sampler.slots} if self.sampler.has_fewer_slots else {}
        return {"next_place": self._next_place, "unit": self._unit, "round": self._round, **slots}

    def restore(self, state: dict[str, Any]) -> None:
        """Of a state or a place. Slots that were found to be too many stay away."""
        self._next_place, self._unit = int(state["next_place"]), int(state["unit"])
        one = state["round"]
        self._round = RolloutBuffer.from_text(one) if isinstance(one, str) and one else one or None
        self.sampler.slots = min(self.sampler.slots, int(state.get("slots", self.sampler.slots)))
        if self._unit % (self.world * self.micro_units):
            raise UserError("the checkpoint was not written at the end of a step", where="batch.micro_size")

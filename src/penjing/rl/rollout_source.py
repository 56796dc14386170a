"""Reinforcement learning's source of batches: it samples answers from the current weights.

A round is one rollout: the answers to the prompts of `steps_per_rollout` optimizer steps. Every rank samples its share,
and then the ranks exchange them. The order of prompts and each answer's random numbers depend only on the run's seed
and the global position, so a run may stop in the middle of a round and resume with another number of ranks.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.forward import default_slots
from penjing.infer.generate import sample_batch
from penjing.infer.requests import Completion, InjectedTokens, Request, Turn
from penjing.infer.sample import Sampling
from penjing.infer.tool_loop import ToolLoop, last_turn
from penjing.loader.batch_source import Source
from penjing.loader.group_sampler import EpochOrder
from penjing.loader.shared_prompt_batch import AnswerBatch, Group, pack
from penjing.model.transformer import Transformer
from penjing.model.value_head import ScalarHead
from penjing.objective.policy import ADVANTAGE, KEPT, Policy, token_advantages, whiten
from penjing.objective.run_model import run_rows
from penjing.parallel.base import Strategy
from penjing.rl.prompts import Prompt
from penjing.rl.rewards.base import RewardInput, RewardMix
from penjing.rl.rollout_buffer import RolloutBuffer, advantages, collate, concat, degenerate, select, split
from penjing.train.oom_recovery import retry_on_oom
from penjing.train.stages.reference import LogProbs, answer_log_probs

SCORED_ROWS = 8  # rows of one scoring pass (reference, value)
FLAT_ROUNDS = 5  # in a row without any advantage, after which the user is told


@dataclass(kw_only=True)
class RolloutSampler:
    """Samples answers to prompts and scores them.

    reference: log-probabilities of the reference policy, if the loss needs them. values: the model with its value head,
    for ppo. tool_loop: parses turns and runs their tool calls; None: answers are not parsed.
    slots: answers generated at once; halved for the rest of the run when memory runs out. scored_rows: rows of one
    scoring pass; halved likewise. record: called with an incident when this happens.
    """

    settings: Policy
    model: Transformer
    tokenizer: Tokenizer
    scorer: RewardMix
    strategy: Strategy
    seq_len: int
    reference: LogProbs | None = None
    values: ScalarHead | None = None
    tool_loop: ToolLoop | None = None
    record: Callable[[dict[str, Any]], None] = lambda incident: None
    slots: int = field(init=False)
    scored_rows: int = SCORED_ROWS

    def __post_init__(self) -> None:
        self.slots = self.slots_requested

    @property
    def slots_requested(self) -> int:
        return self.settings.rollout.max_concurrent or default_slots(self.model, self.seq_len)

    @property
    def sampling(self) -> Sampling:
        rollout = self.settings.rollout
        return Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """Completions of each prompt, one for each of its seeds."""
        rollout, slots = self.settings.rollout, self.slots
        requests = [Request(prompt=prompt.ids, seeds=own) for prompt, own in zip(prompts, seeds, strict=True)]
        num_answers = sum(map(len, seeds))

        def attempt() -> list[list[Completion]]:
            return sample_batch(
                self.model,
                requests,
                max_new_tokens=rollout.max_new_tokens,
                stop=self.tokenizer.stop,
                sampling=sampling,
                slots=self.slots,
                score_temperature=rollout.temperature,
                on_turn_end=self._run_tools if rollout.max_turns > 1 else None,
            )

        with self.strategy.gathered(self.model):
            answers = retry_on_oom(attempt, lambda message: self._halve_slots(num_answers, message))
        if self.slots < slots:
            warnings.warn(f"out of memory while sampling: max_concurrent is now {self.slots}", stacklevel=2)
            self.record({"kind": "out of memory", "slots": self.slots})
        return answers

    def _run_tools(self, turns: Sequence[Turn]) -> list[InjectedTokens | None]:
        """Tools may take any time, as the user's own do."""
        assert self.tool_loop is not None, "there are several turns only with tools"
        with self.strategy.untimed():
            return self.tool_loop(turns)

    def _halve_slots(self, num_answers: int, message: str) -> None:
        """Fewer at once gives the same answers, since each answer has its own seed."""
        self.slots = min(self.slots, num_answers) // 2
        if not self.slots:
            what = f"out of memory while sampling a single answer: {message}"
            hint = "Take shorter answers or prompts (data.seq_len), or a smaller model."
            raise self.settings.error("rollout.max_new_tokens", what, next_step=hint)

    def _halve_scored_rows(self, message: str) -> None:
        if self.scored_rows == 1:
            what = f"out of memory while scoring one row of answers: {message}"
            hint = "Take shorter rows or a smaller model."
            raise UserError(what, where="data.seq_len", got=self.seq_len, next_step=hint)
        self.scored_rows //= 2

    def reward_input(self, prompt: Prompt, completion: Completion) -> RewardInput:
        """An answer as rewards see it."""
        stopped = completion.finish_reason == "stop"
        last = last_turn(completion)
        return RewardInput(
            messages=prompt.messages,
            tools=prompt.tools,
            text=self.tokenizer.decode(last[:-1] if stopped else last).strip(),
            num_tokens=(len(completion.ids) if completion.is_sampled is None else sum(completion.is_sampled)) - stopped,
            truncated=completion.finish_reason == "length",
            truths=prompt.truths,
            record=prompt.record,
            where=prompt.where,
            turns=self.tool_loop.exchanges(completion) if self.tool_loop is not None else (),
        )

    def sample(
        self, prompts: Sequence[Prompt], indices: Sequence[int], seeds: Sequence[Sequence[int]]
    ) -> RolloutBuffer:
        """Sample and score answers, on all ranks together: rank i mod world takes prompt number i. prompts: all
        training prompts; indices: those to answer. Every rank returns the whole round."""
        strategy, rollout = self.strategy, self.settings.rollout
        local_indices = range(strategy.rank, len(indices), strategy.world)
        local_prompts = [prompts[indices[index]] for index in local_indices]
        began = time.perf_counter()
        completions = self.generate(local_prompts, [seeds[index] for index in local_indices], self.sampling)
        seconds = time.perf_counter() - began
        sizes = {"P": len(indices), "A": rollout.num_generations, "M": rollout.max_new_tokens}
        without = set() if rollout.is_truncated else {"kept_PAM"}
        without |= {"value_PAM", "gain_PAM", "return_PAM"} if self.values is None else set()
        buffer = RolloutBuffer.empty(indices, {**sizes, "R": len(self.scorer.names)}, without)
        inputs: list[RewardInput] = []
        for index, prompt, answers in zip(local_indices, local_prompts, completions, strict=True):
            for number, completion in enumerate(answers):
                cell, length = (index, number), len(completion.ids)
                buffer.id_PAM[cell][:length] = completion.ids
                buffer.length_PA[cell] = length
                buffer.behaviour_PAM[cell][:length] = completion.logp
                if rollout.is_truncated:
                    buffer.kept_PAM[cell][:length] = np.subtract(completion.logp, completion.sampling_logp)
                buffer.sampled_PAM[cell][:length] = 1 if completion.is_sampled is None else completion.is_sampled
                buffer.cut_off_PA[cell] = completion.finish_reason == "length"
                answer = self.reward_input(prompt, completion)
                inputs.append(answer)
                results = [result for turn in answer.turns for result in turn.results]
                buffer.turns_PA[cell] = max(1, len(answer.turns))
                buffer.calls_PA[cell] = sum(len(turn.turn.calls) for turn in answer.turns)
                buffer.failed_PA[cell] = buffer.calls_PA[cell] - sum(result.worked for result in results)
        with strategy.untimed():
            scores = self.scorer(inputs).reshape(len(self.scorer.names), len(local_prompts), rollout.num_generations)
        buffer.score_RPA[:, list(local_indices)] = scores
        values: dict[str, LogProbs] = {}
        if self.reference is not None:
            values["reference"] = self.reference
        if rollout.old_logprobs == "recomputed":
            values["behaviour"] = partial(answer_log_probs, self.model, temperature=rollout.temperature)
        if self.values is not None:
            values["value"] = lambda batch: run_rows(self.values, batch, scalar_N=batch.scored_N)
        with strategy.gathered(self.model) if values else nullcontext():
            for name, score_fn in values.items():
                score = partial(self._score, buffer, local_indices, prompts, name, score_fn)
                retry_on_oom(score, self._halve_scored_rows)
        if rollout.is_truncated:
            buffer.behaviour_PAM -= buffer.kept_PAM
        buffer.seconds, buffer.scoring_seconds = seconds, time.perf_counter() - began - seconds
        self._exchange(buffer)
        buffer.tokens = int(buffer.sampled_PAM.sum())
        buffer.reward_PA = self.scorer.total(buffer.score_RPA.reshape(len(self.scorer.names), -1)).reshape(
            len(indices), rollout.num_generations
        )
        buffer.advantage_PA = advantages(buffer.reward_PA, self.settings.advantage_kind)
        if self.values is not None:
            self._compute_gae(buffer)
        same_P = degenerate(buffer.reward_PA)
        buffer.sampled, buffer.degenerate = len(indices), int(same_P.sum())
        if self.settings.degenerate_kind != "keep":
            buffer.counts_P = (~same_P).astype(np.float64)
        return buffer

    def _exchange(self, buffer: RolloutBuffer) -> None:
        """All-reduce by sum: every rank filled in its own prompts and left zeros elsewhere."""
        if self.strategy.world == 1:
            return
        for name, array in vars(buffer).items():
            if isinstance(array, np.ndarray) and name not in ("prompt_P", "counts_P"):  # every rank has all of these
                local = torch.from_numpy(array).to(self.strategy.device)
                setattr(buffer, name, self.strategy.all_reduce(local).cpu().numpy())

    def _compute_gae(self, buffer: RolloutBuffer) -> None:
        """GAE: advantages of tokens from values, whitened over the round. An answer's reward is at its last token.
        Tokens that the model did not generate are skipped: a turn's last token is followed by the next turn's first."""
        value = self.settings.value
        sampled_PAM = buffer.sampled_PAM.astype(bool)
        last_PAM = np.arange(buffer.value_PAM.shape[2]) == buffer.length_PA[..., None] - 1
        reward_N = torch.from_numpy((last_PAM * buffer.reward_PA[..., None])[sampled_PAM]).float()
        answer_N = torch.from_numpy(np.repeat(np.arange(buffer.length_PA.size), sampled_PAM.sum(-1).reshape(-1)))
        value_N = torch.from_numpy(buffer.value_PAM[sampled_PAM])
        gain_N, return_N = token_advantages(reward_N, value_N, answer_N, gamma=value.gamma, gae_lambda=value.gae_lambda)
        buffer.gain_PAM[sampled_PAM] = whiten(gain_N).numpy()
        buffer.return_PAM[sampled_PAM] = return_N.numpy()

    @torch.no_grad()
    def _score(
        self, buffer: RolloutBuffer, indices: Sequence[int], prompts: Sequence[Prompt], name: str, score_fn: LogProbs
    ) -> None:
        """Fill in the scores (log-probabilities or values) of this rank's answers, a few rows at a time.

        On a CPU each prompt has a pass of its own: there rounding depends on the size of a pass, and a score must not
        depend on which other prompts the rank has.
        """
        array = {"reference": buffer.reference_PAM, "behaviour": buffer.behaviour_PAM, "value": buffer.value_PAM}[name]
        for pending in self._scoring_passes(buffer, indices, prompts):
            batch = pack([group for _, _, group in pending], self.seq_len)
            logp = score_fn(batch.to(self.strategy.device)).float().cpu().numpy()
            first = 0
            for index, number, group in pending:
                for offset, answer in enumerate(group.answers):
                    array[index, number + offset, : len(answer.ids)] = logp[first : first + len(answer.ids)]
                    first += len(answer.ids)

    def _scoring_passes(
        self, buffer: RolloutBuffer, indices: Sequence[int], prompts: Sequence[Prompt]
    ) -> Iterator[list[tuple[int, int, Group]]]:
        """Groups that are scored together, each with its prompt's index and the number of its first answer."""
        separate, max_tokens = devices.of(self.strategy.device).is_host, self.scored_rows * self.seq_len
        pending: list[tuple[int, int, Group]] = []
        tokens = 0
        for index in indices:
            number = 0
            for group in split(buffer.group(index, prompts, ()), self.seq_len):
                if pending and (tokens + group.num_tokens > max_tokens or (separate and not number)):
                    yield pending
                    pending, tokens = [], 0
                pending.append((index, number, group))
                number += len(group.answers)
                tokens += group.num_tokens
        if pending:
            yield pending


class RolloutSource(Source):
    """Batches of sampled answers to `micro_units` prompts on each rank; see the file's docstring."""

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
        rollout = sampler.settings.rollout
        self.round_prompts = prompts_per_step * rollout.steps_per_rollout
        self.round_units = self.round_prompts * rollout.num_epochs
        self._next_index = 0  # in the stream of prompts
        self._unit = 0  # of the current round, over all ranks
        self._round: RolloutBuffer | None = None
        self._flat_rounds = 0  # rounds in a row without any advantage

    def __next__(self) -> AnswerBatch:
        if self._round is None:
            self._round = self._sample_round()
        buffer, rollout = self._round, self.sampler.settings.rollout
        first = (self._unit + self.rank * self.micro_units) % self.round_prompts
        step = first // self.prompts_per_step
        indices = range(step * self.prompts_per_step, (step + 1) * self.prompts_per_step)
        values = ["behaviour", *([KEPT] if buffer.kept_PAM.size else [])]
        values += ["reference"] if self.sampler.reference is not None else []
        if self.sampler.values is not None:
            values += ["value", ADVANTAGE, "return"]
        groups = [buffer.group(index, self.prompts, values) for index in range(first, first + self.micro_units)]
        names, steps = self.sampler.scorer.names, rollout.steps_per_round
        figures = buffer.metrics(indices, names, steps, turns=rollout.max_turns > 1)
        batch = collate(groups, self.sampler.seq_len, figures)
        self._unit += self.world * self.micro_units
        if self._unit >= self.round_units:
            self._unit, self._round = 0, None
        return batch

    def _sample_round(self) -> RolloutBuffer:
        """Answers to the next prompts; with `resample`, further prompts replace those whose advantages are all 0."""
        settings = self.sampler.settings
        buffer = self._sample(self.round_prompts)
        if settings.degenerate_kind == "resample":
            for _ in range(settings.resample_rounds):
                num_missing = self.round_prompts - int(buffer.counts_P.sum())
                if not num_missing:
                    break
                buffer = concat(buffer, self._sample(num_missing))
            informative = np.flatnonzero(buffer.counts_P).tolist()[: self.round_prompts]
            uninformative = np.flatnonzero(buffer.counts_P == 0).tolist()
            buffer = select(buffer, [*informative, *uninformative[: self.round_prompts - len(informative)]])
        # A value head (PPO) gives advantages where rewards are equal.
        is_flat = self.sampler.values is None and bool(degenerate(buffer.reward_PA).all())
        self._flat_rounds = self._flat_rounds + 1 if is_flat else 0
        if self.rank == 0 and (self._flat_rounds == FLAT_ROUNDS or not buffer.counts_P.any()):
            warnings.warn(
                "each prompt of a round had answers of equal reward: its steps teach nothing and show no rewards; "
                "the prompts are too hard or too easy, or the reward does not tell answers apart",
                stacklevel=2,
            )
        return buffer

    def _sample(self, num_prompts: int) -> RolloutBuffer:
        indices = range(self._next_index, self._next_index + num_prompts)
        self._next_index += num_prompts
        answers = range(self.sampler.settings.rollout.num_generations)
        seeds = [[derive(self.seed, "answer", index, answer) for answer in answers] for index in indices]
        return self.sampler.sample(self.prompts, [self.order[index] for index in indices], seeds)

    def state(self) -> dict[str, Any]:
        """The position, and in the middle of a round its samples: the weights that drew them are gone."""
        position = self.position()
        return {**position, "round": "" if self._round is None else self._round.to_text()}

    def position(self) -> dict[str, Any]:
        """The same with the uncompressed round, for use in this process."""
        slots = {"slots": self.sampler.slots} if self.sampler.slots < self.sampler.slots_requested else {}
        return {"next_place": self._next_index, "unit": self._unit, "round": self._round, **slots}

    def restore(self, state: dict[str, Any]) -> None:
        """From `state` or `position`. The number of slots is not raised again."""
        self._next_index, self._unit = int(state["next_place"]), int(state["unit"])
        saved = state["round"]
        self._round = RolloutBuffer.from_text(saved) if isinstance(saved, str) and saved else saved or None
        self.sampler.slots = min(self.sampler.slots, int(state.get("slots", self.sampler.slots)))
        if self._unit % (self.world * self.micro_units):
            raise UserError("the checkpoint was not written at the end of a step", where="batch.micro_size")

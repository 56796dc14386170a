"""The stage of reinforcement learning: prompts, rollouts, rewards, reference, and exact match on held-out prompts."""

from functools import partial
from typing import cast

import torch
from torch import nn

from penjing.agent_tools.box import Toolbox
from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.chat.render import parse_switch
from penjing.data.corpus import Corpus
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.sample import Sampling
from penjing.infer.tool_loop import ToolLoop
from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.model.lora import adapted
from penjing.model.transformer import Transformer
from penjing.model.value_head import ScalarHead
from penjing.objective.policy import ADVANTAGE, COUNTS, KEPT, Policy, PolicyObjective
from penjing.rl import prompts as prompt_files
from penjing.rl.rewards.base import RewardInput, RewardMix, RewardRuntime
from penjing.rl.rewards.reference_answer import is_correct
from penjing.rl.rollout_source import RolloutSampler, RolloutSource
from penjing.train.stages.base import DatasetSize, Stage
from penjing.train.stages.example_batches import example_answers
from penjing.train.stages.held_out import summed_over_ranks
from penjing.train.stages.reference import LogProbs, answer_log_probs, base_log_probs, frozen_copy
from penjing.train.stages.run_data import on_rank_0, run_tokenizer

EXACT_MATCH = "val_exact_match"


class PolicyStage(Stage[Policy]):
    """Samples answers to prompts, scores them, and trains the policy towards those that score above their group."""

    runs_ahead = False  # answers are sampled from the weights of their own step

    def prepare_data(self) -> None:
        run, rollout = self.run, self.settings.rollout
        self.need_format("reinforcement learning needs prompts", "prompts")
        corpus = Corpus(run.data)
        corpus.files  # noqa: B018 (raises an error before a model is read)
        on_rank_0(self.strategy, self._save_tokenizer)
        self.tokenizer = Tokenizer.load(self.folder.tokenizer)
        max_prompt_tokens = run.data.seq_len - rollout.max_new_tokens
        if max_prompt_tokens < 1:
            wanted = f"more than objective.rollout.max_new_tokens = {rollout.max_new_tokens}"
            raise run.error("data.seq_len", "the longest answer leaves no tokens for a prompt", wanted=wanted)
        self.toolbox = Toolbox(rollout.tools, self.settings.tool)
        thinking = parse_switch(rollout.thinking)
        bad_records = corpus.counts(None if self.strategy.rank else self.folder.bad_records)
        prompts = prompt_files.read(
            corpus,
            self.tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            thinking=thinking,
            default_tools=self.toolbox.schemas,
            bad_records=bad_records,
        )
        # Thoughts must be separated from the answer even without tools.
        self.tool_loop = (
            ToolLoop(self.tokenizer, self.toolbox, max_turns=rollout.max_turns, thinking=thinking)
            if self.toolbox or thinking is not None
            else None
        )
        self.prompts, self.held_out = prompts.train, prompts.held_out[: run.eval.sequences]
        self.fingerprint = prompts.fingerprint
        runtime = RewardRuntime(device=self.strategy.device, max_tokens=rollout.max_new_tokens)
        self.scorer = RewardMix(self.settings, runtime)
        self.scorer.check([*self.prompts, *self.held_out])
        self.notes += [note] if (note := bad_records.note()) else []
        if prompts.skipped:
            self.notes.append(f"{prompts.skipped} prompts of more than {max_prompt_tokens} tokens were skipped")
        unknown = sorted(prompts.tools - self.toolbox.tools.keys())
        if unknown and self.toolbox:
            self.notes.append(
                f"calls of these tools fail, as rollout.tools does not list them: {', '.join(unknown[:8])}"
            )

    def _save_tokenizer(self) -> None:
        if not run_tokenizer(self.run, self.report).template:
            wanted = "a run of `penjing train sft`, or another chat model"
            raise UserError("must be a chat model", where="init_from", got=repr(self.run.init_from), wanted=wanted)

    def assume_data(self) -> list[str]:
        return ["the training step is traced, the sampling of answers is not"]

    def size(self) -> DatasetSize:
        """A unit is a prompt with its answers, whose length is a guess: half of the maximum."""
        seq_len, number = self.run.data.seq_len, len(self.prompts)
        lengths = self.settings.unit_lengths(seq_len, tokens=sum(len(prompt.ids) for prompt in self.prompts) / number)
        return DatasetSize(
            unit="prompts",
            units_per_epoch=number,
            tokens_per_unit=lengths.tokens,
            seq_len=seq_len,
            num_keys=lengths.keys,
            padding_fraction=0.1,
            extra_forwards=lengths.extra_forwards,
            round_steps=self.settings.rollout.steps_per_round,
        )

    def trainable(self, model: Transformer) -> nn.Module:
        return ScalarHead(model) if self.settings.loss == "ppo" else model

    def setup(self, model: nn.Module) -> None:
        values = model if isinstance(model, ScalarHead) else None
        policy = cast(Transformer, values.model if values is not None else model)
        self._reference_model: Transformer | None = None
        reference = self._reference(policy) if self.settings.kl_coef else None
        if not self.fingerprint:
            return  # plans and traces sample nothing
        self.sampler = RolloutSampler(
            settings=self.settings,
            model=policy,
            tokenizer=self.tokenizer,
            scorer=self.scorer,
            strategy=self.strategy,
            seq_len=self.run.data.seq_len,
            reference=reference,
            values=values,
            tool_loop=self.tool_loop,
            record=lambda incident: self.record(incident),
        )

    def _reference(self, model: Transformer) -> LogProbs:
        temperature, kind = self.settings.rollout.temperature, self.settings.reference
        has_adapters = bool(adapted(model))
        if kind == "adapter_off" and not has_adapters:
            raise UserError(
                "the model has no adapters to disable", where="objective.reference", wanted="copy, or lora.rank=8"
            )
        if has_adapters and kind != "copy":
            return partial(base_log_probs, model, temperature=temperature)
        self._reference_model = frozen_copy(model, self.precision)
        return partial(answer_log_probs, self._reference_model, temperature=temperature)

    def frozen_models(self) -> list[nn.Module]:
        return [] if self._reference_model is None else [self._reference_model]

    def source(self, micro_size: int, rank: int, world: int) -> RolloutSource:
        return RolloutSource(
            self.sampler,
            self.prompts,
            seed=derive(self.run.seed, "order"),
            prompts_per_step=self.run.batch.size,
            micro_units=micro_size,
            rank=rank,
            world=world,
        )

    def objective(self) -> PolicyObjective:
        return PolicyObjective(self.settings, self.router)

    def example_batch(self, micro_size: int, device: torch.device) -> AnswerBatch:
        """A prompt's answers branch off it in one row."""
        values = ["behaviour", *(["reference"] if self.settings.kl_coef else []), ADVANTAGE]
        values += [KEPT] if self.settings.rollout.is_truncated else []
        values += ["value", "return"] if self.settings.loss == "ppo" else []
        shape = (micro_size, self.settings.rollout.num_generations, self.run.data.seq_len)
        return example_answers(shape, device, values=values, figures=(COUNTS,))

    def validation_size(self, micro_size: int) -> int:
        return 0  # held-out prompts are answered

    def validate(self) -> dict[str, float]:
        """On held-out prompts: exact match of greedy answers, in all and by kind, and their mean reward. Also the exact
        match of one answer each, sampled as in training, with the same seeds every time."""
        strategy, after = self.strategy, self.settings.reward.answer_after
        kinds = ["", *sorted({prompt.kind for prompt in self.held_out if prompt.truths and prompt.kind})]  # "": all
        indices = range(strategy.rank, len(self.held_out), strategy.world)
        prompts = [self.held_out[index] for index in indices]

        def ask(seeds: list[list[int]], sampling: Sampling) -> list[RewardInput]:
            answers = self.sampler.generate(prompts, seeds, sampling)
            return [self.sampler.reward_input(prompt, group[0]) for prompt, group in zip(prompts, answers, strict=True)]

        greedy = ask([[0]] * len(prompts), Sampling())
        reward = float(self.scorer.total(self.scorer(greedy)).sum())
        sampled = ask([[derive(self.run.seed, "validation", index)] for index in indices], self.sampler.sampling)
        sums = [reward, len(greedy), sum(answer.num_tokens for answer in greedy)]
        sums += [sum(is_correct(answer, after) for answer in sampled)]
        for kind in kinds:
            asked = (answer for answer in zip(prompts, greedy, strict=True) if kind in ("", answer[0].kind))
            graded = [is_correct(answer, after) for prompt, answer in asked if prompt.truths]
            sums += [len(graded), sum(graded)]
        reward, number, tokens, drawn, *counts = summed_over_ranks(sums, strategy)
        if not number:
            return {}
        figures = {"val_reward": reward / number, "val_answer_tokens": tokens / number}
        if counts[0]:
            figures[f"{EXACT_MATCH}_drawn"] = drawn / counts[0]
            for kind, total, correct in zip(kinds, counts[::2], counts[1::2], strict=True):
                figures[f"{EXACT_MATCH}_{kind}" if kind else EXACT_MATCH] = correct / total
        return figures

    def describe(self) -> list[tuple[str, str]]:
        rollout, scorer = self.settings.rollout, self.scorer
        rewards = ", ".join(f"{weight:g} x {name}" for name, weight in zip(scorer.names, scorer.weights, strict=True))
        return [
            ("answers", f"{rollout.num_generations} to each prompt, at most {rollout.max_new_tokens} tokens each"),
            ("rewards", rewards),
            *([("tools", f"{', '.join(self.toolbox.tools)}; {rollout.max_turns} turns")] if self.toolbox else []),
            ("held out", f"{len(self.held_out)} prompts"),
        ]

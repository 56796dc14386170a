"""Policy gradients on sampled answers: GRPO and its family, and PPO's policy loss, as options of one objective.

An answer of tokens y_t was sampled by an earlier policy (`behaviour`) and got an advantage A. With the ratio
r_t = pi(y_t) / behaviour(y_t) of the current policy to the earlier one, every loss is a sum over tokens of
-g(r_t, A) + kl_coef * KL_t. The losses differ in g and in the weight of a token:

grpo     (arXiv:2402.03300, eq. 3): g = min(r A, clip(r, 1 - low, 1 + high) A); mean over the tokens of an answer, then
         over answers.
dr_grpo  (arXiv:2503.20783, sec. 3): the same g; the sum over an answer's tokens divided by a constant, the longest
         answer allowed; advantages are centred, not divided by their standard deviation.
dapo     (arXiv:2503.14476, eq. 8): the same g with high > low; mean over all tokens of all answers.
gspo     (arXiv:2507.18071, eq. 5-7): g of one ratio per answer, exp(mean_t log r_t); mean over answers.
cispo    (arXiv:2506.13585, eq. 4-5): g = stop_gradient(min(r, 1 + high)) A log pi(y_t), a clipped weight, so that no
         token loses its gradient; mean over all tokens.
ppo      (arXiv:1707.06347, eq. 7): the g of grpo with an advantage per token (`token_advantages`); mean over all
         tokens.

The divergence from a reference model is estimated from the sampled token alone. With d = log reference(y_t) -
log pi(y_t) (J. Schulman, "Approximating KL Divergence", 2020): k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. k2 and k3
serve as KL_t in the sum above. k1 cannot: its gradient does not depend on the reference and is 0 on average. Instead,
kl_coef * k1 is subtracted from each token's A as a constant, which gives the divergence's gradient (arXiv:2510.01555).

top_p and top_k sample from pi / Z on the tokens that they keep, where Z is the probability of all of these under pi.
The ratio r stays one of full softmaxes, so that it is 1 where nothing was learned and its clip range holds. The loss of
each token is weighted by the Z of its sampling, which is the importance weight of pi to the sampled distribution and at
most 1 (gspo: by the geometric mean over the answer).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from penjing.agent_tools.base import ToolSettings
from penjing.base.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings
from penjing.base.errors import UserError
from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.objective.base import Loss, ObjectiveSettings, UnitLengths, reject_unused
from penjing.objective.rollout import Rollout
from penjing.objective.router import RouterSettings
from penjing.objective.run_model import run_model

PolicyLoss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo"]
KLEstimator = Literal["k1", "k2", "k3"]
# Each paper's clip range of the ratio, below and above 1.
PAPER_CLIP: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (math.inf, 4.0),
    "ppo": (0.2, 0.2),
}
PER_TOKEN = ("dapo", "cispo", "ppo")  # losses whose unit is a token; of the others it is an answer
MAX_LOG_RATIO = 20.0  # a larger ratio is noise, and an infinite one times 0 would be NaN
COUNTS = "counts"  # key in a batch's figures: 0 for answers in the batch that have no loss
ADVANTAGE = "advantage"
KEPT = "kept"


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Settings, section="objective.reward"):
    """Settings of the rewards. Each reward reads only its own (rl/rewards/)."""

    answer_after: str = ""  # text that the final answer follows, such as `####`; empty: the whole answer counts
    pattern: str = ""  # regex: the whole answer without its thoughts must match it
    format_pattern: str = ""  # format: the same, thoughts included; empty: an answer in <think>...</think> form
    # length: longest answer in tokens without a penalty; 0 = three quarters of the longest
    soft_length: NonNegativeInt = 0
    repeated_words: PositiveInt = 3  # repetition: length in words of the n-grams that should not repeat
    most_calls: PositiveInt = 4  # tools: calls in one answer without a penalty; each further call costs 1/4
    code_seconds: PositiveFloat = 5.0  # code: CPU time limit of one answer
    code_mebibytes: PositiveInt = 512  # code: memory limit of one answer
    code_workers: PositiveInt = 2  # code: answers executed at once
    model: str = ""  # model: a run of `penjing train reward`, or a Hugging Face sequence classifier
    judge_url: str = ""  # judge: an OpenAI-compatible server, such as http://localhost:8000/v1
    judge_model: str = ""  # judge: the model's name there
    judge_key_variable: str = "OPENAI_API_KEY"  # judge: environment variable of its API key, if it needs one
    judge_prompt: str = ""  # judge: its prompt, with {question}, {answer} and {truth}; empty: the built-in prompt
    judge_workers: PositiveInt = 4  # judge: concurrent requests
    judge_seconds: PositiveFloat = 60.0  # judge: timeout of one request
    judge_tries: PositiveInt = 3  # judge: attempts of a request before the run stops

    def unused(self, rewards: Sequence[str]) -> Iterator[tuple[str, str]]:
        """(setting, the reward that reads it) of the changed settings whose reward is not in use. Nothing if a reward
        is user-defined (MODULE:CLASS), because it may read any setting."""
        if any(":" in name for name in rewards):
            return
        for setting in fields(self):
            prefix = setting.name.partition("_")[0]
            reader = READ_BY.get(setting.name, prefix if prefix in ("code", "judge") else None)
            if reader and reader not in rewards and getattr(self, setting.name) != setting.default:
                yield setting.name, reader


# The reward that reads a setting. answer_after is missing: validation's exact match always reads it.
READ_BY = {
    "pattern": "regex",
    "format_pattern": "format",
    "soft_length": "length",
    "repeated_words": "repetition",
    "most_calls": "tools",
    "model": "model",
}


@dataclass(frozen=True, kw_only=True)
class Value(Settings, section="objective.value"):
    """PPO's learned value of each state, a head on the policy's hidden states (`token_advantages`, `value_loss`)."""

    gamma: Fraction = 1.0  # discount per token
    gae_lambda: Fraction = 0.95  # lambda: 1 uses the rewards alone, 0 the value alone
    weight: NonNegativeFloat = 0.1  # of the value loss, relative to the policy loss
    clip: NonNegativeFloat = 0.2  # change of a value since sampling above which the loss is clipped


@dataclass(frozen=True, kw_only=True)
class Policy(ObjectiveSettings):
    """Reinforcement learning on sampled answers."""

    best_metric: ClassVar = ""  # rewards are no losses
    varying_shapes: ClassVar = True
    compares_passes: ClassVar = True
    name: Literal["policy"] = "policy"
    loss: PolicyLoss = "grpo"  # GRPO, one of its variants, or PPO with a value head
    clip_low: NonNegativeFloat = 0.0  # clip range of the ratio below 1; 0 = the paper's
    clip_high: NonNegativeFloat = 0.0  # clip range above 1; 0 = the paper's
    kl_coef: NonNegativeFloat = 0.0  # of the divergence from the reference, nats; 0 = no reference model
    kl_estimator: KLEstimator = "k3"  # k2, k3: added to the loss; k1: subtracted from each token's advantage
    # The model at the start of the run: a copy, or the base without its adapters; auto: adapter_off if there are any.
    reference: Literal["auto", "copy", "adapter_off"] = "auto"
    # Over the answers to one prompt. normalised: (reward - mean) / std. centred: reward - mean. leave_one_out: reward -
    # mean of the others. auto: centred for dr_grpo, else normalised.
    advantage: Literal["auto", "normalised", "centred", "leave_one_out"] = "auto"
    # Groups whose answers all got the same reward have no gradient: keep them, drop them, or resample from further
    # prompts (arXiv:2503.14476, eq. 11). auto: resample for dapo, else keep.
    degenerate: Literal["auto", "keep", "drop", "resample"] = "auto"
    resample_rounds: PositiveInt = 3  # with `resample`: most further rounds of sampling
    rewards: tuple[str, ...] = ("exact",)  # see `penjing.rl.rewards`
    reward_weights: tuple[float, ...] = ()  # one per reward; empty: 1 for all
    rollout: Rollout = field(default_factory=Rollout)
    reward: RewardSettings = field(default_factory=RewardSettings)
    value: Value = field(default_factory=Value)
    tool: ToolSettings = field(default_factory=ToolSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "ppo" and self.rollout.temperature != 1:
            raise self.error("rollout.temperature", "ppo samples at temperature 1")
        if not self.rewards:
            raise UserError("no reward", where="objective.rewards", wanted="at least one, such as exact")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            got, wanted = len(self.reward_weights), len(self.rewards)
            raise self.error("reward_weights", "one weight for each reward is needed", got=got, wanted=wanted)
        if self.rollout.num_generations < 2 and self.loss != "ppo":
            raise self.rollout.error(
                "num_generations", "this loss compares the answers to one prompt", wanted="at least 2"
            )
        self._check_effect()

    def _check_effect(self) -> None:
        """Raise UserError for a setting that would have no effect."""
        if self.tool != ToolSettings() and not self.rollout.tools:
            raise UserError("has no effect without objective.rollout.tools", where="objective.tool")
        if self.loss != "ppo" and self.value != Value():
            raise UserError("only ppo trains a value head", where="objective.value", got=f"objective.loss={self.loss}")
        reject_unused(self, ("advantage",), self.loss != "ppo", "an objective.loss other than ppo")
        if self.loss == "ppo" and self.degenerate_kind != "keep":
            raise self.error("degenerate", "has no effect on ppo, which does not compare answers", wanted="it left out")
        reject_unused(self, ("clip_low",), self.loss != "cispo", "an objective.loss other than cispo")
        for name, reader in self.reward.unused(self.rewards):
            raise UserError(f"has no effect without {reader} in objective.rewards", where=f"objective.reward.{name}")
        steps = "objective.rollout.steps_per_rollout or num_epochs above 1"
        reject_unused(self.rollout, ("old_logprobs",), not self.strictly_on_policy, steps)
        reject_unused(self, ("clip_low", "clip_high"), not self.strictly_on_policy, steps)
        reject_unused(self, ("kl_estimator", "reference"), self.kl_coef > 0, "objective.kl_coef above 0")
        reject_unused(self, ("resample_rounds",), self.degenerate_kind == "resample", "objective.degenerate=resample")

    @property
    def needs_start_weights(self) -> bool:
        return self.kl_coef > 0

    @property
    def sampling(self) -> Rollout:
        return self.rollout

    def unit_lengths(self, seq_len: int, *, tokens: float = 0.0, every_unit: bool = True) -> UnitLengths:
        """A prompt with its answers, which are half as long as the longest; tokens: of the prompt, else also half."""
        answer, longest = self.rollout.max_new_tokens / 2, seq_len - self.rollout.max_new_tokens
        prompts = "" if tokens else f", and prompts {longest / 2:.0f}"
        note = f"answers are assumed to have {answer:.0f} tokens{prompts}: half of the longest"
        prompt, answers = tokens or longest / 2, self.rollout.num_generations * answer
        keys = (prompt * prompt / 2 + answers * (prompt + answer / 2)) / (prompt + answers)
        extra = float(self.kl_coef > 0) + float(self.rollout.old_logprobs == "recomputed")
        return UnitLengths(tokens=prompt + answers, keys=keys, extra_forwards=extra, note=note)

    @property
    def strictly_on_policy(self) -> bool:
        """Whether each answer is used in one step only, so that the policy that sampled it also learns from it.

        The ratio is then 1 by definition, whatever the rounding difference between sampling and scoring. In bfloat16
        that difference is larger than gspo's clip of 3e-4 and would clip answers at random.
        """
        return self.rollout.steps_per_round == 1

    @property
    def clip(self) -> tuple[float, float]:
        """The clip range of the ratio below and above 1."""
        low, high = PAPER_CLIP[self.loss]
        return self.clip_low or low, self.clip_high or high

    @property
    def advantage_kind(self) -> Literal["normalised", "centred", "leave_one_out"]:
        if self.advantage != "auto":
            return self.advantage
        return "centred" if self.loss == "dr_grpo" else "normalised"

    @property
    def degenerate_kind(self) -> Literal["keep", "drop", "resample"]:
        if self.degenerate != "auto":
            return self.degenerate
        return "resample" if self.loss == "dapo" else "keep"


def divergence(logp_N: Tensor, reference_N: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) in nats, estimated from each sampled token; see the module docstring."""
    difference_N = (reference_N - logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -difference_N
    return 0.5 * difference_N**2 if estimator == "k2" else difference_N.exp() - difference_N - 1


class PolicyObjective:
    """The loss of `Policy.loss` over a batch of sampled answers, as a sum over answers or over tokens.

    batch.figures: `advantage` of each answer, unless batch.values has one of each token; `counts`, 0 for answers
    without a loss; means over units of all other figures are reported. batch.values: `behaviour`, log-probabilities at
    sampling (if missing, or if each answer is used in one step only, the current policy's, so that every ratio is 1);
    `kept`, log Z, if top_p or top_k sampled; `reference`; for ppo `advantage`, `value` and `return`, which need a model
    with a value head (model/value_head.py).
    """

    def __init__(self, settings: Policy, router: RouterSettings = RouterSettings()) -> None:
        self.settings, self.router = settings, router

    def weight(self, batch: AnswerBatch) -> Tensor:
        return self._units_A(batch).sum()

    def _units_A(self, batch: AnswerBatch) -> Tensor:
        """Units of each answer: 1, or its number of generated tokens."""
        length_A = batch.length_A()
        counts_A = batch.figures[COUNTS] if COUNTS in batch.figures else torch.ones_like(length_A)
        return counts_A * (length_A if self.settings.loss in PER_TOKEN else (length_A > 0).to(length_A.dtype))

    def _units_N(self, batch: AnswerBatch) -> Tensor:
        """Units of each token; their sum is that of the answer."""
        length_A = batch.length_A().clamp(min=1)
        return (self._units_A(batch) / length_A)[batch.answer_N] * batch.weight_N

    def __call__(self, model: Callable[..., Any], batch: AnswerBatch) -> Loss:
        has_values = "value" in batch.values
        temperature = self.settings.rollout.temperature
        scored = run_model(model, batch, temperature=temperature, scalar_N=batch.scored_N if has_values else None)
        logp_2N, *others = scored if isinstance(scored, tuple) else (scored,)
        total, parts = self.loss_from_log_probs(logp_2N[0], logp_2N[1], batch)
        if has_values:
            loss, value_parts = self._value_loss(others.pop(0), batch)
            total, parts = total + loss, {**parts, **value_parts}
        means = others[0] if others else None
        return self.router.add_to(Loss(total, parts), means, lambda: batch.units_B(self._units_A(batch)))

    def _value_loss(self, value_N: Tensor, batch: AnswerBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted value loss as a sum over units, and its metrics."""
        settings, units_N, return_N = self.settings.value, self._units_N(batch), batch.values["return"]
        loss_N, clipped_N = value_loss(value_N, batch.values["value"], return_N, clip=settings.clip)
        parts = {
            "value_loss": loss_N,
            "value": value_N,
            "return": return_N,
            "value_clipped_fraction": clipped_N.float(),
        }
        sums = {name: (units_N * token_value_N.detach()).sum() for name, token_value_N in parts.items()}
        return settings.weight * (units_N * loss_N).sum(), sums

    def _ratio_N(self, log_ratio_N: Tensor, batch: AnswerBatch) -> Tensor:
        """Each token's ratio; for gspo the geometric mean over its answer."""
        if self.settings.loss != "gspo":
            return log_ratio_N.exp()
        mean_A = batch.sum_A(log_ratio_N) / batch.length_A().clamp(min=1)
        return mean_A.exp()[batch.answer_N]

    def loss_from_log_probs(
        self, logp_N: Tensor, entropy_N: Tensor, batch: AnswerBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss as a sum over units, and its metrics, from each token's log-probability and entropy."""
        settings, units_N = self.settings, self._units_N(batch)
        low, high = settings.clip
        behaviour_N, kept_N = batch.values.get("behaviour", logp_N.detach()), batch.values.get(KEPT)
        if kept_N is not None:
            behaviour_N = behaviour_N + kept_N  # under the full softmax
        advantage_N = batch.values.get(ADVANTAGE)
        if advantage_N is None:
            advantage_N = batch.figures[ADVANTAGE][batch.answer_N]
        reward_advantage_N, reference_N = advantage_N, batch.values.get("reference")
        if reference_N is not None and settings.kl_estimator == "k1":
            advantage_N = reward_advantage_N - settings.kl_coef * divergence(logp_N.detach(), reference_N, "k1")
        old_N = logp_N.detach() if settings.strictly_on_policy else behaviour_N
        log_ratio_N = (logp_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_N = self._ratio_N(log_ratio_N, batch)
        if settings.loss == "cispo":
            gain_N = ratio_N.clamp(max=1 + high).detach() * advantage_N * logp_N
        else:
            gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - low, 1 + high) * advantage_N)
        loss_N = -gain_N
        parts = {"policy_loss": loss_N}
        if reference_N is not None:
            if settings.kl_estimator != "k1":
                kl_N = divergence(logp_N, reference_N, settings.kl_estimator)
                loss_N = loss_N + settings.kl_coef * kl_N
            parts["kl"] = divergence(logp_N, reference_N, "k3")
        if kept_N is not None:
            loss_N = self._ratio_N(kept_N, batch) * loss_N
        if settings.loss == "dr_grpo":
            counted_N = (units_N > 0).to(loss_N.dtype) * batch.weight_N
            total = (counted_N * loss_N).sum() / settings.rollout.max_new_tokens
        else:
            total = (units_N * loss_N).sum()
        clipped_low_N = (ratio_N < 1 - low) & (advantage_N < 0)
        clipped_high_N = (ratio_N > 1 + high) & ((advantage_N > 0) | (settings.loss == "cispo"))
        parts |= {
            "ratio": ratio_N,
            "clipped_low_fraction": clipped_low_N.float(),
            "clipped_high_fraction": clipped_high_N.float(),
            "entropy": entropy_N,
            "kl_old_new": divergence(behaviour_N, logp_N, "k3"),
            "advantage_square": reward_advantage_N**2,
        }
        sums = {name: (units_N * value_N.detach()).sum() for name, value_N in parts.items()}
        units_A = self._units_A(batch)
        for name, value_A in batch.figures.items():
            if name not in (ADVANTAGE, COUNTS):
                sums[name] = (units_A * value_A).sum()
        return total, sums


def token_advantages(
    reward_N: Tensor, value_N: Tensor, answer_N: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """(advantage_N, return_N) of the tokens of answers laid one after another (arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, both 0 after an answer's last token. The
    return, which the value should predict, is A_t + V_t. answer_N: the answer of each token.
    """
    advantage_N = torch.zeros_like(value_N)
    advantage, value_after = 0.0, 0.0
    rewards, values, answers = reward_N.tolist(), value_N.tolist(), answer_N.tolist()
    for token in range(len(values) - 1, -1, -1):
        if token + 1 == len(values) or answers[token + 1] != answers[token]:
            advantage, value_after = 0.0, 0.0
        advantage = rewards[token] + gamma * value_after - values[token] + gamma * gae_lambda * advantage
        value_after = values[token]
        advantage_N[token] = advantage
    return advantage_N, advantage_N + value_N


def whiten(advantage_N: Tensor) -> Tensor:
    """Advantages with mean 0 and variance 1 over tokens."""
    centred_N = advantage_N - advantage_N.mean()
    return centred_N * (centred_N.square().mean() + 1e-8).rsqrt()


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    """(loss_N, whether each was clipped): 1/2 max((V - R)^2, (V_clipped - R)^2), where V_clipped is V clipped to within
    `clip` of the value at sampling (the clipped value loss of common PPO implementations)."""
    clipped_N = torch.clamp(value_N, old_value_N - clip, old_value_N + clip)
    unclipped_loss_N, clipped_loss_N = (value_N - return_N) ** 2, (clipped_N - return_N) ** 2
    return 0.5 * torch.maximum(unclipped_loss_N, clipped_loss_N), clipped_loss_N > unclipped_loss_N

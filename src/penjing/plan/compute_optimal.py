"""How many tokens: for a size of model, from data that repeats, in which batches and at which rate.

Losses of these laws belong to their authors' tokenizers and texts. What carries over are ratios and differences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penjing.base.formatting import count


@dataclass(frozen=True, slots=True)
class LossLaw:
    """L(N, D) = limit + a / N^alpha + b / D^beta, in nats per token. N: all parameters; D: tokens."""

    a: float
    b: float
    limit: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return float(self.limit + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """N and D of least loss for C = 6 N D: N = G (C/6)^(beta/(alpha+beta)), G = (alpha a / beta b)^(1/(...))."""
        parameters = self._ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / (6 * parameters)

    def tokens_for(self, parameters: float) -> float:
        """D of the budget for which N is best."""
        flops = 6 * (parameters / self._ratio) ** ((self.alpha + self.beta) / self.beta)
        return float(flops / (6 * parameters))

    def parameters_for(self, tokens: float) -> float:
        """N for which D is best: `tokens_for` the other way round."""
        both = self.alpha + self.beta
        return float((tokens * self._ratio ** (both / self.beta)) ** (self.beta / self.alpha))

    @property
    def _ratio(self) -> float:
        return float((self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta)))


LAWS = {
    # Hoffmann et al. 2022 as fitted again (arXiv:2404.10102): the figures printed in 2022 contradict the paper's other
    # two methods, because of a fit that had stopped early and coefficients rounded too hard.
    "corrected": LossLaw(482.01, 2085.43, 1.8169, 0.3478, 0.3659),
    "as printed": LossLaw(406.4, 410.7, 1.69, 0.34, 0.28),  # arXiv:2203.15556, equation 10
}
SHARE_ERROR = 0.020  # standard error of the exponent of N in the corrected fit (0.513)
CENTRE_FLOPS = 1e20  # in the middle of the runs it was fitted on, where its ratio is surest
# Tokens for each parameter of transformer matrices and head, over budgets of 1e18 to 1e19 FLOPs, as measured by the
# authors of nanochat: this count keeps one ratio at all sizes, which the count of all parameters does not.
MATRICES_RATIO = 10.5
RATIOS = (20, 100, 500)  # tokens for each parameter: for least training compute, for use, for use a great deal


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Tokens to train N parameters on, with the range that four of five refits would give."""

    tokens: float
    low: float
    high: float
    by_matrices: float  # the same from the count of matrices and head alone


def advise(parameters: int, matrices: int) -> Advice:
    """Compute-optimal tokens. parameters: all of them; matrices: those in matmuls, the head among them."""
    tokens = LAWS["corrected"].tokens_for(parameters)
    flops = 6 * parameters * tokens
    # The exponent's error turns the line of optima around its centre.
    spread = math.exp(abs(math.log(flops / CENTRE_FLOPS)) * 2 * 1.28 * SHARE_ERROR)
    return Advice(tokens=tokens, low=tokens / spread, high=tokens * spread, by_matrices=MATRICES_RATIO * matrices)


REPEAT_CONSTANT = 15.388  # R*_D of arXiv:2305.16264, table 1: repetitions after which new ones are worth a third


def repeated_tokens(unique: float, epochs: float) -> float:
    """What `epochs` times through `unique` tokens is worth in fresh ones (arXiv:2305.16264, equation 5)."""
    if epochs <= 1:
        return unique * epochs
    return unique + unique * REPEAT_CONSTANT * (1 - math.exp(-(epochs - 1) / REPEAT_CONSTANT))


def repeat_worth(epochs: float) -> float:
    """Worth of each token, on average, against a fresh one."""
    return repeated_tokens(1.0, epochs) / epochs if epochs else 1.0


def repeat_warning(epochs: float) -> str:
    """What to say of so many epochs; empty if they cost little."""
    worth = f"each token is then worth {repeat_worth(epochs):.0%} of a fresh one"
    if epochs > 16:
        return f"{epochs:.1f} epochs: {worth}; more text, a smaller model or a higher weight decay would do more"
    if epochs > 4:
        return f"{epochs:.1f} epochs: {worth}; up to 4 cost little"
    return ""


def batch_tokens(tokens: float) -> float:
    """The batch of tokens for a run of `tokens`: 2^19 at 1.2e9, growing with D^0.383 (arXiv:2505.13738)."""
    return float(2**19 * (tokens / 1.2e9) ** 0.383)


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """Batch and rate that one published rule would take, for AdamW."""

    rule: str
    batch_tokens: float
    learning_rate: float | None


def cross_checks(parameters_without_embedding: int, tokens: float, flops: float) -> list[CrossCheck]:
    """What others would take. They differ by factors of three; a choice outside all of them wants a reason."""
    size = float(parameters_without_embedding)
    return [
        CrossCheck("Step Law (arXiv:2503.04715)", 0.58 * tokens**0.571, 1.79 * size**-0.713 * tokens**0.307),
        CrossCheck("DeepSeek (arXiv:2401.02954)", 0.2920 * flops**0.3271, 0.3118 * flops**-0.1250),
        CrossCheck("Power Lines (arXiv:2505.13738)", batch_tokens(tokens), None),
    ]


def small_data_advice(parameters: int, unique: float) -> list[str]:
    """What to do where there is less text than the model would like; empty where there is enough."""
    worth, law = repeated_tokens(unique, 4), LAWS["corrected"]
    if worth >= law.tokens_for(parameters):
        return []
    return [
        f"{_short(unique)} unique tokens are few for {_short(parameters)} parameters: 4 epochs of them, worth "
        f"{_short(worth)} fresh ones, are compute-optimal for {_short(law.parameters_for(worth))}",
        "a larger model still learns a little more from them; weight decay of 0.1 and more, a smaller vocabulary "
        "and above all more text help",
    ]


def _short(number: float) -> str:
    return count(float(f"{number:.2g}"))


def token_bytes(vocabulary: int) -> int:
    """Bytes of one token id on disk, in the smallest whole type that holds them all."""
    return 2 if vocabulary <= 1 << 16 else 4

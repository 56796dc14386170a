"""Compute-optimal tokens for a model size, the value of repeated data, batch size and learning rate.

The losses of these laws hold for their authors' tokenizers and texts only. Ratios and differences carry over.
"""

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

    def optimal_tokens(self, parameters: float) -> float:
        """D of minimal loss for N at C = 6 N D: N = G (C/6)^(beta/(alpha+beta)), G = (alpha a / beta b)^(1/(...))."""
        return float((parameters / self._ratio) ** ((self.alpha + self.beta) / self.beta) / parameters)

    def optimal_parameters(self, tokens: float) -> float:
        """Compute-optimal N for D: the inverse of `optimal_tokens`."""
        exponent_sum = self.alpha + self.beta
        return float((tokens * self._ratio ** (exponent_sum / self.beta)) ** (self.beta / self.alpha))

    @property
    def _ratio(self) -> float:
        return float((self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta)))


LAWS = {
    # Hoffmann et al. 2022, refitted (arXiv:2404.10102). The 2022 coefficients contradict the paper's other two methods:
    # the fit stopped early, and the coefficients were rounded too coarsely.
    "corrected": LossLaw(482.01, 2085.43, 1.8169, 0.3478, 0.3659),
    "as printed": LossLaw(406.4, 410.7, 1.69, 0.34, 0.28),  # arXiv:2203.15556, equation 10
}
# Least tokens. Of fewer it says far too much: 12 nats for 9.4M parameters and 3.3M tokens; 2.7 were measured.
LAW_FROM_TOKENS = 1e8
EXPONENT_STD_ERROR = 0.020  # standard error of the exponent of N in the corrected fit (0.513)
CENTRE_FLOPS = 1e20  # middle of the fitted runs, where the ratio is most certain
# Tokens per parameter of the transformer matrices and the head, for budgets of 1e18 to 1e19 FLOPs, measured by the
# authors of nanochat. This ratio is the same at all sizes; the ratio to all parameters is not.
MATRIX_RATIO = 10.5
TOKEN_RATIOS = (20, 100, 500)  # tokens per parameter: minimal training compute; for use; for heavy use


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Tokens to train N parameters on, with the 80 % range of refits."""

    tokens: float
    low: float
    high: float
    by_matrices: float  # the same, counting only the matrices and the head


def advise(parameters: int, matrices: int) -> Advice:
    """Compute-optimal tokens. parameters: all; matrices: those in matmuls, including the head."""
    tokens = LAWS["corrected"].optimal_tokens(parameters)
    flops = 6 * parameters * tokens
    # An error of the exponent rotates the line of optima around its centre.
    spread = math.exp(abs(math.log(flops / CENTRE_FLOPS)) * 2 * 1.28 * EXPONENT_STD_ERROR)
    return Advice(tokens=tokens, low=tokens / spread, high=tokens * spread, by_matrices=MATRIX_RATIO * matrices)


REPEAT_CONSTANT = 15.388  # R*_D of arXiv:2305.16264, table 1: after so many repetitions another is worth a third


def repeated_tokens(unique: float, epochs: float) -> float:
    """Fresh tokens that `epochs` passes over `unique` tokens are worth (arXiv:2305.16264, equation 5)."""
    if epochs <= 1:
        return unique * epochs
    return unique + unique * REPEAT_CONSTANT * (1 - math.exp(-(epochs - 1) / REPEAT_CONSTANT))


def repeat_worth(epochs: float) -> float:
    """Mean value of a token relative to a fresh one."""
    return repeated_tokens(1.0, epochs) / epochs if epochs else 1.0


def repeat_warning(epochs: float) -> str:
    """A warning about so many epochs; empty if they cost little."""
    worth = f"each token is then worth {repeat_worth(epochs):.0%} of a fresh one"
    if epochs > 16:
        return f"{epochs:.1f} epochs: {worth}; more text, a smaller model or a higher weight decay would do more"
    return f"{epochs:.1f} epochs: {worth}; up to 4 cost little" if epochs > 4 else ""


def batch_tokens(tokens: float) -> float:
    """Batch size in tokens for a run of `tokens`: 2^19 at 1.2e9, growing with D^0.383 (arXiv:2505.13738)."""
    return float(2**19 * (tokens / 1.2e9) ** 0.383)


def cross_checks(
    parameters_without_embedding: int, tokens: float, flops: float
) -> list[tuple[str, float, float | None]]:
    """Batch size in tokens and learning rate of published rules, for AdamW. They differ by factors of three; a value
    outside all of them needs a reason."""
    size = float(parameters_without_embedding)
    return [
        ("Step Law", 0.58 * tokens**0.571, 1.79 * size**-0.713 * tokens**0.307),  # arXiv:2503.04715
        ("DeepSeek", 0.2920 * flops**0.3271, 0.3118 * flops**-0.1250),  # arXiv:2401.02954
        ("Power Lines", batch_tokens(tokens), None),
    ]


def small_data_advice(parameters: int, unique: float) -> list[str]:
    """Advice for less text than the model needs; empty where there is enough."""
    worth, law = repeated_tokens(unique, 4), LAWS["corrected"]
    if worth >= law.optimal_tokens(parameters):
        return []
    shown = [count(float(f"{number:.2g}")) for number in (unique, parameters, worth, law.optimal_parameters(worth))]
    few = "{} unique tokens are few for {} parameters: 4 epochs, worth {} fresh ones, are compute-optimal for {}"
    return [
        few.format(*shown),
        "a larger model still learns a little more from them; weight decay of 0.1 and more, a smaller vocabulary "
        "and above all more text help",
    ]

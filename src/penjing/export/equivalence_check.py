"""The check of every export: its texts, and the difference of two sets of logits."""

import copy
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.lock import unfinished
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.linear import set_compute_dtype
from penjing.model.transformer import Transformer

# Both languages, code, emoji, digits, runs of spaces, accents, and text that looks like a control token.
CHECK_TEXTS = (
    "Once upon a time, Mia had 3 apples. She gave 12 to the frog, and it wasn't glad.",
    "从前，小明有一只风筝。他看见池塘边的青蛙，于是说：“你好！”",
    "def f(x: int) -> int:\n    return x + 1  # 加一\n\n\tprint(f(41), 'it''s', \"we'LL\")\r\n",
    "Emoji 👩‍👩‍👧‍👦 🇨🇳 👍🏽, naïve café, Ωmega, ½, ﬁ, 한국어, العربية, ①②③, 1234567890.",
    "   leading, trailing   \n\n\n  and  \t mixed \u3000 space\u00a0here  ",
    "<|im_start|>assistant\nnot a turn<|im_end|> <|endoftext|> < think >",
)
GREEDY_TOKENS, MAX_CHECK_TOKENS = 24, 512  # generated after the prompt; tokens of one checked row
MARKER = "penjing_export.json"  # marks a folder that an export may replace; holds the result of its check


@contextmanager
def export_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, renamed to `path` on success and removed on failure. Raises UserError if `path`
    exists and is not an export, or if the disk refuses."""
    if path.exists() and not (path / MARKER).is_file():
        raise UserError("exists and was not written by this command", where=path, next_step="Choose another folder.")
    with unfinished(path) as folder:
        folder.mkdir()
        yield folder
        shutil.rmtree(path, ignore_errors=True)
        folder.rename(path)


@dataclass(frozen=True, slots=True)
class VerifiedFolder:
    """The export's path and the result of its check. largest_difference: of any logit; None if nothing was installed to
    compare with."""

    path: Path
    largest_difference: float | None
    note: str


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """The difference of another program's logits from ours on the same ids."""

    largest: float  # of any logit
    typical: float  # median over positions of the largest difference; checked for mixtures of experts, see `within`
    spread: float  # standard deviation of our logits, the scale for `largest`
    divergence: float  # KL(ours, other) in nats per position
    perplexity_change: float  # (other - ours) / ours, on the same ids

    def within(self, bound: float, divergence: float, *, is_mixture: bool) -> bool:
        """Whether the logits differ by rounding only. bound: for logits of spread 1. divergence: in nats.

        In a mixture of experts rounding may route a token to another expert if two of them tie. Its logits then differ
        by far more than rounding. This is rare, so there the median position is compared with the bound.
        """
        worst = self.typical if is_mixture else self.largest
        return worst <= bound * max(1.0, self.spread) and self.divergence <= divergence

    def line(self) -> str:
        return (
            f"largest difference {self.largest:.1e} (logits spread {self.spread:.2g}), "
            f"KL {self.divergence:.1e} nats, perplexity {self.perplexity_change:+.2%}"
        )


def float_copy(model: Transformer) -> Transformer:
    """A copy on the CPU that computes in float32; `model` itself is not changed or moved."""
    copied = copy.deepcopy(model).cpu().eval()
    set_compute_dtype(copied, None)
    return copied


def check_rows(tokenizer: Tokenizer, max_tokens: int, texts: Sequence[str] = CHECK_TEXTS) -> list[list[int]]:
    """One row of ids per text, after the begin token, cut to `max_tokens` and MAX_CHECK_TOKENS."""
    max_length = min(MAX_CHECK_TOKENS, max_tokens)
    return [[tokenizer.begin, *tokenizer.encode(text)][:max_length] for text in texts]


def greedy_prompt(rows: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[int], int]:
    """The start of the first row, and the number of ids to generate after it in a context of `max_tokens`."""
    prompt = list(rows[0][: min(12, max_tokens // 2)])
    return prompt, min(GREEDY_TOKENS, max_tokens - len(prompt))


@torch.no_grad()
def row_logits(model: Transformer, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """logits_TV of each row, computed one row at a time without padding."""
    return [model(torch.tensor([list(row)]))[0] for row in rows]


def difference(rows: Sequence[Sequence[int]], ours: Sequence[Tensor], other: Sequence[Tensor]) -> LogitDifference:
    ours_NV, other_NV = torch.cat(list(ours)).double(), torch.cat(list(other)).double()
    if not bool(other_NV.isfinite().all()):
        infinite = float("inf")
        return LogitDifference(infinite, infinite, float(ours_NV.std()), infinite, infinite)
    logp_NV, other_logp_NV = ours_NV.log_softmax(-1), other_NV.log_softmax(-1)
    divergence = (logp_NV.exp() * (logp_NV - other_logp_NV)).sum(-1).mean()
    nats = []
    for logits in (ours, other):
        nats_per_row = [
            part_TV[:-1].double().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None]).neg()
            for row, part_TV in zip(rows, logits, strict=True)
            if len(row) > 1
        ]
        nats.append(float(torch.cat(nats_per_row).mean()) if nats_per_row else 0.0)
    perplexity_change = float(torch.tensor(nats[1] - nats[0], dtype=torch.float64).expm1())
    max_diff_N = (ours_NV - other_NV).abs().amax(-1)
    return LogitDifference(
        largest=float(max_diff_N.max()),
        typical=float(max_diff_N.median()),
        spread=float(ours_NV.std()),
        divergence=max(0.0, float(divergence)),
        perplexity_change=perplexity_change,
    )


@torch.no_grad()
def is_greedy(
    model: Transformer,
    prompt: Sequence[int],
    generated: Sequence[int],
    stop: Collection[int],
    *,
    max_new_tokens: int,
    tolerance: float,
) -> bool:
    """Whether `generated` (without stop ids) is the greedy continuation of `prompt` by `model`.

    If two logits differ by less than `tolerance`, rounding decides, and either token is right. Each token is checked by
    our logits after the tokens before it.
    """
    ids = [*prompt, *generated]
    logits_TV = model(torch.tensor([ids]))[0, len(prompt) - 1 :]
    for step, index in enumerate(generated):
        if float(logits_TV[step].max() - logits_TV[step, index]) > tolerance:
            return False
    if len(generated) == max_new_tokens or len(ids) >= model.config.max_position_embeddings:
        return True
    best_stop_logit = max(float(logits_TV[-1, index]) for index in stop)
    return float(logits_TV[-1].max()) - best_stop_logit <= tolerance

"""What every export is checked by: the texts it is tried on, and how far two sets of logits lie apart."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import disk_error
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.linear import set_compute_dtype
from penjing.model.transformer import Transformer

# Both languages, code, emoji, digits, runs of spaces, accents, and text that only looks like a control token.
CHECK_TEXTS = (
    "Once upon a time, Mia had 3 apples. She gave 12 to the frog, and it wasn't glad.",
    "从前，小明有一只风筝。他看见池塘边的青蛙，于是说：“你好！”",
    "def f(x: int) -> int:\n    return x + 1  # 加一\n\n\tprint(f(41), 'it''s', \"we'LL\")\r\n",
    "Emoji 👩‍👩‍👧‍👦 🇨🇳 👍🏽, naïve café, Ωmega, ½, ﬁ, 한국어, العربية, ①②③, 1234567890.",
    "   leading, trailing   \n\n\n  and  \t mixed \u3000 space\u00a0here  ",
    "<|im_start|>assistant\nnot a turn<|im_end|> <|endoftext|> < think >",
)
GREEDY_TOKENS, LONGEST_CHECK = 24, 512  # written after the prompt; positions of one checked row
MARK = "penjing_export.json"  # what tells a folder that an export may replace; holds what its check found


@contextmanager
def export_folder(path: Path) -> Iterator[Path]:
    """A folder to write beside `path`; it gets that name if all goes well, and is removed if not.

    Raises UserError if `path` is there and no export, or the disk refuses.
    """
    if path.exists() and not (path / MARK).is_file():
        raise UserError("is there and was not made by this command", where=path, next_step="Choose another folder.")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


@dataclass(frozen=True, slots=True)
class VerifiedFolder:
    """What was written, and what the check found; `largest_difference` of any logit is None where nothing was there to
    compare with."""

    path: Path
    largest_difference: float | None
    note: str


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """How far another program's logits are from ours on the same ids."""

    largest: float  # of any logit
    typical: float  # median over the positions of the largest there: what a mixture is checked by, see `within`
    spread: float  # standard deviation of our logits: what `largest` is to be seen against
    divergence: float  # KL(ours, theirs) in nats per position
    perplexity_change: float  # (theirs - ours) / ours, on the ids themselves

    def within(self, bound: float, divergence: float, *, is_mixture: bool) -> bool:
        """Whether logits differ by rounding only: `bound` is for logits of spread 1, `divergence` in nats.

        In a mixture of experts rounding may send a token to another expert where two of them tie, and then its logits
        differ by far more than rounding. That is rare: there the typical position is held to the bound.
        """
        worst = self.typical if is_mixture else self.largest
        return worst <= bound * max(1.0, self.spread) and self.divergence <= divergence

    def line(self) -> str:
        return (
            f"largest difference {self.largest:.1e} (logits spread {self.spread:.2g}), "
            f"KL {self.divergence:.1e} nats, perplexity {self.perplexity_change:+.2%}"
        )


def float_twin(model: Transformer) -> Transformer:
    """A copy on the CPU that computes in float32; `model` is left as it is, wherever it is."""
    twin = copy.deepcopy(model).cpu().eval()
    set_compute_dtype(twin, None)
    return twin


def check_rows(tokenizer: Tokenizer, max_tokens: int, texts: Sequence[str] = CHECK_TEXTS) -> list[list[int]]:
    """One row of ids per text, each begun as documents are, cut to `max_tokens` and to LONGEST_CHECK."""
    longest = min(LONGEST_CHECK, max_tokens)
    return [[tokenizer.begin, *tokenizer.encode(text)][:longest] for text in texts]


def greedy_prompt(rows: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[int], int]:
    """The beginning of the first row, and how many ids are to be written after it by a model of so many positions."""
    prompt = list(rows[0][: min(12, max_tokens // 2)])
    return prompt, min(GREEDY_TOKENS, max_tokens - len(prompt))


@torch.no_grad()
def row_logits(model: Transformer, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """logits_TV of each row, one row at a time: padding is nobody's business here."""
    return [model(torch.tensor([list(row)]))[0] for row in rows]


def difference(rows: Sequence[Sequence[int]], ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> LogitDifference:
    """Compare logits_TV of the same rows."""
    ours_NV, theirs_NV = torch.cat(list(ours)).double(), torch.cat(list(theirs)).double()
    if not bool(theirs_NV.isfinite().all()):
        beyond = float("inf")
        return LogitDifference(beyond, beyond, float(ours_NV.std()), beyond, beyond)
    logp_NV, their_logp_NV = ours_NV.log_softmax(-1), theirs_NV.log_softmax(-1)
    divergence = (logp_NV.exp() * (logp_NV - their_logp_NV)).sum(-1).mean()
    nats = []
    for logits in (ours, theirs):
        scored = [
            part_TV[:-1].double().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None]).neg()
            for row, part_TV in zip(rows, logits, strict=True)
            if len(row) > 1
        ]
        nats.append(float(torch.cat(scored).mean()) if scored else 0.0)
    change = float(torch.tensor(nats[1] - nats[0], dtype=torch.float64).expm1())
    apart_N = (ours_NV - theirs_NV).abs().amax(-1)
    return LogitDifference(
        largest=float(apart_N.max()),
        typical=float(apart_N.median()),
        spread=float(ours_NV.std()),
        divergence=max(0.0, float(divergence)),
        perplexity_change=change,
    )


@torch.no_grad()
def same_greedy(
    model: Transformer,
    prompt: Sequence[int],
    written: Sequence[int],
    stop: Collection[int],
    *,
    longest: int,
    tolerance: float,
) -> bool:
    """Whether `written` (stop ids left out) is what `model` writes greedily after `prompt`.

    Where two logits lie within `tolerance` of each other rounding decides, and either token is right: each token is
    checked by our logits after the tokens before it.
    """
    ids = [*prompt, *written]
    logits_TV = model(torch.tensor([ids]))[0, len(prompt) - 1 :]
    for step, index in enumerate(written):
        if float(logits_TV[step].max() - logits_TV[step, index]) > tolerance:
            return False
    if len(written) == longest or len(ids) >= model.config.max_position_embeddings:
        return True
    ending = max(float(logits_TV[-1, index]) for index in stop)
    return float(logits_TV[-1].max()) - ending <= tolerance

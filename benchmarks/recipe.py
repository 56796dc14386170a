"""The default recipe beside plain AdamW with cosine at its best learning rate: tokens to the same bits per byte.

Run: python benchmarks/recipe.py --out results/recipe.json
Real text: python benchmarks/recipe.py --english english.txt --chinese data/sanguo --threads 1 --jobs 2

Plain: AdamW (0.9, 0.95, decay 0.1 of matrices), cosine to a tenth, every matrix drawn at a spread of 0.02; the rate is
doubled or halved from 4e-3 until the best lies between two worse ones, for each size and corpus. Ours: the recipe
`pretrain`'s optimizer, schedule and starting weights, with its rates, the same for all four. Both have the same shape,
tokenizer, rows, batch and order of data. Plain trains on N tokens; ours on 0.5 N and 0.7 N, each with its schedule's
end at its last token; between the two a straight line in the logarithm of tokens says where ours meets plain's bits per
byte (0.5 stands for 0.5 or less). The goal is 0.7 or less. Without files, the texts are the toy world's English and
Chinese documents.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from compare.table import ResultTable, spread, with_range
from compare.tuning import best_rate
from training_step import arguments

from penjing.base.files import write_json
from penjing.plan.hardware import environment

SIZES = {
    "0.5M": {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 256, "head_dim": 96},
    "2M": {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "head_dim": 96,
        "num_attention_heads": 2,
    },
}
SHARES = (0.5, 0.7)
FIRST_RATE = 4e-3
ROWS, ROW_TOKENS, VOCABULARY = 8, 256, 2048


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--english", type=Path, default=None, help="file or folder of documents; none: the toy world")
    parser.add_argument("--chinese", type=Path, default=None, help="file or folder of documents; none: the toy world")
    parser.add_argument("--sizes", default=",".join(SIZES), help="(default: %(default)s)")
    parser.add_argument("--tokens", type=float, default=1e6, help="N, plain's training tokens (default: %(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes; a language is one job (default: %(default)s)")
    return parser.parse_args(words)


def toy_texts(folder: Path) -> dict[str, Path]:
    """The toy world's documents by language."""
    from penjing.data import synthetic as toyworld

    toyworld.write(folder, seed=11, documents=9_000, conversations=10, preferences=10, prompts=10, questions_per_kind=1)
    halves: dict[str, list[str]] = {"english": [], "chinese": []}
    for line in (folder / "pretrain.jsonl").read_text(encoding="utf-8").splitlines():
        chinese = any("\u4e00" <= character <= "\u9fff" for character in json.loads(line)["text"])
        halves["chinese" if chinese else "english"].append(line)
    paths = {}
    for language, lines in halves.items():
        paths[language] = folder / f"{language}.jsonl"
        paths[language].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def plain_weights(model: Any, seed: int) -> None:
    """Every matrix from a normal distribution of spread 0.02, gains at one, as stock models begin."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def train_once(settings: dict[str, Any], folder: Path, *, plain: bool) -> float:
    """Bits per byte of the held-out text after one training."""
    from penjing.parallel.base import make_strategy
    from penjing.train.build import prepare_run
    from penjing.train.loop import train
    from penjing.workflows.train import resolve_run

    run = resolve_run("pretrain", {**settings, "out": str(folder)})
    made = prepare_run(run, make_strategy("cpu"))
    if plain:
        plain_weights(made.model, run.seed)
    figures = train(made.context, made.state)
    made.context.trackers.end()
    made.context.source.close()
    return figures["val_bits_per_byte"]


class Pair:
    """One size on one corpus."""

    def __init__(self, asked: argparse.Namespace, size: str, text: Path, work: Path, tokenizer: Path | None) -> None:
        shape = {"vocab_size": VOCABULARY, "num_attention_heads": 1, "num_key_value_heads": 1, **SIZES[size]}
        self.asked, self.work, self.count = asked, work, 0
        self.base: dict[str, Any] = {
            "model": shape,
            "data": {"train": [str(text)], "seq_len": ROW_TOKENS, "val_fraction": 0.03},
            "batch": {"size": ROWS},
            "compute": {"device": "cpu", "threads": asked.threads, "compile": "off"},
            "sample": {"every": 0},
            "checkpoint": {"every": 10**9},
            "log": {"every": 10**9},
            "tokenizer": {"path": str(tokenizer) if tokenizer else ""},
        }

    def run(self, share: float, seed: int, rate: float = 0.0) -> float:
        """rate: plain's; 0 = ours."""
        self.count += 1
        steps = max(1, round(share * self.asked.tokens / (ROWS * ROW_TOKENS)))
        settings = {**self.base, "max_steps": steps, "seed": seed, "eval": {"every": steps, "sequences": 256}}
        if rate:
            settings["optimizer"] = {"name": "adamw", "learning_rate": rate, "weight_decay": 0.1}
            settings["schedule"] = {"name": "cosine", "warmup_ratio": 0.02, "min_lr_ratio": 0.1}
        return train_once(settings, self.work / str(self.count), plain=bool(rate))


def needed_share(plain: float, ours: dict[float, float]) -> float:
    """Share of plain's tokens at which ours is where plain ends, on the line through the two in log tokens.

    The smaller of the two shares stands for itself and anything below: nothing was measured there.
    """
    (low, high), (at_low, at_high) = SHARES, (ours[share] for share in SHARES)
    slope = (at_high - at_low) / (math.log(high) - math.log(low))
    if at_low <= plain:
        return low
    return math.exp(math.log(low) + (plain - at_low) / slope) if slope < 0 else math.inf


def study(asked: argparse.Namespace, language: str, text: Path, work: Path) -> dict[str, Any]:
    """All sizes on one corpus, by name."""
    from penjing.train.load_model import set_threads

    set_threads(asked.threads, 1)
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    tokenizer: Path | None = None
    found: dict[str, Any] = {}
    for size in asked.sizes.split(","):
        name = f"{size} {language}"
        pair = Pair(asked, size, text, work / name, tokenizer)
        rate, tried = best_rate(lambda rate, pair=pair: pair.run(1.0, seeds[0], rate), FIRST_RATE)
        tokenizer = tokenizer or work / name / "1" / "tokenizer"
        plain = {seed: tried[rate] if seed == seeds[0] else pair.run(1.0, seed, rate) for seed in seeds}
        ours = {seed: {share: pair.run(share, seed) for share in SHARES} for seed in seeds}
        shares = [needed_share(plain[seed], ours[seed]) for seed in seeds]
        found[name] = {
            "plain_rate": rate,
            "plain_by_rate": tried,
            "plain_bits_per_byte": plain,
            "ours_bits_per_byte": ours,
            "share_of_tokens": spread(shares),
        }
        print(
            f"{name}: plain {statistics.median(plain.values()):.4f} bits per byte at {rate:g}; ours there "
            f"after {statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f}) of the tokens",
            flush=True,
        )
    return found


def markdown(whole: dict[str, Any]) -> str:
    """The table of docs/speed.md: medians over the seeds, ranges behind them."""
    settings = whole["settings"]
    tokens = f"{settings['tokens'] / 1e6:g}M"
    ours_at = [f"ours, {share:g} of them" for share in SHARES]
    headings = ["model and text", "plain's best rate", f"plain, {tokens} tokens", *ours_at, "share that ours needs"]
    rows = []
    for name, pair in whole["pairs"].items():
        ours = pair["ours_bits_per_byte"].values()
        by_share = [[each[share] for each in ours] for share in map(str, SHARES)]
        bits = [list(pair["plain_bits_per_byte"].values()), *by_share]
        needed = pair["share_of_tokens"]
        words = f"{needed['median']:.2f} (at most {needed['high']:.2f})"
        if needed["high"] <= SHARES[0]:
            words = f"{SHARES[0]:g} or less"
        shown = [with_range(spread(each), "{:.3f}".format) for each in bits]
        rows.append([name, f"{pair['plain_rate']:g}", *shown, words])
    return ResultTable(headings, rows).markdown()


def main() -> None:
    asked = parse()
    import torch

    from penjing import devices

    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        texts = {} if asked.english and asked.chinese else toy_texts(work / "toy")
        texts |= {name: path for name, path in (("english", asked.english), ("chinese", asked.chinese)) if path}
        with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(study, asked, language, text, work) for language, text in texts.items()]
            found = {name: pair for job in jobs for name, pair in job.result().items()}
    if asked.out:
        settings = {
            key: value.name if isinstance(value, Path) else value for key, value in vars(asked).items() if key != "out"
        }
        cpu = torch.device("cpu")
        about = environment(cpu, devices.of(cpu).compute_dtype("auto", cpu))
        write_json(asked.out, {**about, "settings": settings, "goal": 0.7, "pairs": found})


if __name__ == "__main__":
    main()

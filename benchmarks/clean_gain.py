"""What cleaning a dirty corpus gains: held-out bits per byte of a 3.5M model trained on the raw and the cleaned form.

Run: python benchmarks/clean_gain.py --english FILE... --chinese FILE... --out results/clean_gain_DATE.json

Texts of the files, cut to pages of about 2 kB, become a crawl: dirt is planted as DIRT says (tests/planted_dirt.py
makes it). Pages held out before stay clean. `penjing data clean` cleans the crawl by its default rules; `penjing data
ablate` predicts the gain from tiny runs on the crawl; then both forms train the same model for as many steps, with each
seed, by the same tokenizer, which the raw form trained. The tiny runs come first, so their verdict knows nothing of the
others.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compare.run import write
from rich.console import Console

from penjing.base.markup import silent_console
from penjing.data.formats import read_documents
from penjing.plan.flops import parameters
from penjing.plan.hardware import environment
from penjing.workflows.ablate import Effect
from penjing.workflows.train import execute, resolve_run

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import planted_dirt as planted

# Of the pages of a crawl
DIRT = {
    "lines of web pages around the text": 0.5,
    "UTF-8 read in another encoding": 0.03,
    "invisible characters or odd line ends": 0.05,
    "the page again, to the letter": 0.08,
    "the page again, with other lines around it": 0.12,
    "another page of nothing but dirt": 0.2,  # of all kinds of planted.dropped
}
PAGE_CHARACTERS = {"en": 2000, "zh": 700}
HELD_OUT = 0.06
MAX_BAD = 0.05  # some pages hold zero bytes
MODEL = {"hidden_size": 192, "num_hidden_layers": 7, "intermediate_size": 512, "vocab_size": 4096}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", type=Path, nargs="+", required=True, help="clean texts")
    parser.add_argument("--chinese", type=Path, nargs="+", required=True)
    parser.add_argument("--megabytes", type=float, default=3, help="clean, of each language (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=260, help="of a run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--budget", default="8min", help="of the tiny runs (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=None, help="folder for all files; else a temporary one")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args(words)


def pages(files: list[Path], language: str, num_bytes: float) -> list[str]:
    """Texts of about a page, in random order."""
    size = PAGE_CHARACTERS[language]
    texts = (document.text for document in read_documents(files))
    found = [text[start : start + size].strip() for text in texts for start in range(0, len(text), size)]
    random.Random(1).shuffle(found)
    chosen = []
    for text in found:
        chosen.append(text)
        num_bytes -= len(text.encode())
        if num_bytes < 0:
            break
    return chosen


def crawl(texts: Sequence[str], language: str, rng: random.Random, counts: Counter[str]) -> list[str]:
    """The pages with dirt, in random order. counts: gets the number of pages of each kind."""

    def happens(kind: str) -> bool:
        hit = rng.random() < DIRT[kind]
        counts[kind] += hit
        return hit

    found = []
    for text in texts:
        lines, encoding, invisible, again, nearly, junk = DIRT
        page = planted.boilerplate(text, rng, language) if happens(lines) else text
        if happens(encoding):
            page = planted.mojibake(page, rng)
        if happens(invisible):
            page = planted.REPAIRED[rng.choice(["invisible", "line ends"])](page, rng)
        found += [page] * (1 + happens(again))
        if happens(nearly):
            found.append(planted.boilerplate(text, rng, language))
        if happens(junk):
            found.append(rng.choice(list(planted.dropped(text, rng, language).values())))
    rng.shuffle(found)
    return found


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_corpus(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Write `raw.jsonl` and the held-out files; return what was planted."""
    rng, counts, raw = random.Random(2), Counter[str](), list[str]()
    for language, files in (("en", asked.english), ("zh", asked.chinese)):
        texts = pages(files, language, asked.megabytes * 1e6)
        held_out = int(len(texts) * HELD_OUT)
        write_texts(work / f"{language}.jsonl", texts[:held_out])
        counts["clean pages"] += len(texts) - held_out
        raw += crawl(texts[held_out:], language, rng, counts)
    rng.shuffle(raw)
    write_texts(work / "raw.jsonl", raw)
    return {"clean_pages": counts.pop("clean pages"), "pages": len(raw), "planted": dict(counts)}


def penjing(*words: str) -> str:
    """What the command prints. Ends this program if it fails."""
    done = subprocess.run([sys.executable, "-m", "penjing", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"penjing {' '.join(words)}: exit code {done.returncode}")
    return done.stdout


def clean(work: Path) -> dict[str, Any]:
    """The cleaned form, in `clean`."""
    penjing("data", "clean", str(work / "raw.jsonl"), "--out", str(work / "clean"), "--workers", "1")
    counts = json.loads((work / "clean" / "_cleaning" / "counts.json").read_text())
    by_rule = Counter[str]()
    for action, rule, _, number in counts["rules"]:
        by_rule[f"{rule}: {action}"] += number
    return {name: counts[name] for name in ("records", "kept", "dropped", "changed")} | {"rules": dict(by_rule)}


def ablate(work: Path, held_out: str, budget: str) -> dict[str, Any]:
    words = ["data", "ablate", str(work / "raw.jsonl"), "--rules", "default", "--held-out", held_out]
    words += ["--budget", budget, "--out", str(work / "ablate"), "--json", f"data.max_bad_fraction={MAX_BAD}"]
    made = json.loads(penjing(*words))
    return {name: made[name] for name in ("figures", "effects", "parameters", "steps", "tokens")}


def train(work: Path, form: str, held_out: str, steps: int, seed: int) -> dict[str, float]:
    """Bits per byte of the held-out pages after a run."""
    settings = {
        "data": {
            "train": [str(work / form)],
            "validation": held_out.split(","),
            "format": "documents",
            "max_bad_fraction": MAX_BAD,
        },
        "tokenizer": {"path": str(work / "tokenizer")},
        "model": {"preset": "tiny", **MODEL},
        "max_steps": steps,
        "seed": seed,
        "out": str(work / f"{form.partition('.')[0]}-{seed}"),
        "eval": {"every": 0, "sequences": 512},
        "sample": {"every": 0},
        "checkpoint": {"every": steps},
    }
    run = resolve_run("tiny", settings)
    outcome = execute(run, silent_console(Console()))
    figures = {name: outcome[name] for name in outcome if name.startswith("val_bits_per_byte")}
    return {"parameters": parameters(run.model).total, "training_seconds": outcome["training_seconds"], **figures}


def main(words: list[str] | None = None) -> None:
    asked = parse(words)
    record: dict[str, Any] = {**environment(torch.device("cpu"), torch.bfloat16), "dirt": DIRT, "steps": asked.steps}
    with tempfile.TemporaryDirectory() as folder:
        work = asked.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        held_out = f"{work / 'en.jsonl'},{work / 'zh.jsonl'}"
        record |= {"corpus": make_corpus(asked, work), "cleaning": clean(work)}
        print(json.dumps(record["corpus"]), json.dumps(record["cleaning"]), sep="\n", flush=True)
        record["ablate"] = ablate(work, held_out, asked.budget)
        print(json.dumps(record["ablate"]["effects"]), flush=True)
        size = ["--vocabulary", str(MODEL["vocab_size"]), "--max-han-per-token", "2"]
        penjing("tokenizer", "train", str(work / "raw.jsonl"), *size, "--out", str(work / "tokenizer"))
        runs: dict[str, list[dict[str, float]]] = {"raw.jsonl": [], "clean": []}
        for seed in range(1, asked.seeds + 1):
            for form, made in runs.items():
                made.append(train(work, form, held_out, asked.steps, seed))
                print(form, seed, json.dumps(made[-1]), flush=True)
        raw, cleaned = ([run["val_bits_per_byte"] for run in made] for made in runs.values())
        effect = Effect.of("cleaned instead of raw", raw, cleaned)
        record |= {"runs": {"raw": runs["raw.jsonl"], "cleaned": runs["clean"]}, "gain": vars(effect)}
    print(f"{effect.helps:+.4f} bits per byte saved, 95 % interval {effect.low:+.4f} to {effect.high:+.4f}")
    if asked.out:
        write(record, asked.out, ["python", "benchmarks/clean_gain.py", *(words or sys.argv[1:])])


if __name__ == "__main__":
    main()

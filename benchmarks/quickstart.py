"""The quickstart as its users run it, timed from outside, with what its model came to. The README quotes the record.

Run: python benchmarks/quickstart.py --out results/quickstart.json    (on an otherwise idle machine)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penjing.base.files import read_json, write_json


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="folder of the runs; a temporary one by default")
    parser.add_argument("--real", default="sanguo", help="real text to run too (default: %(default)s); empty: none")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="of the record")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args()


def timed(*words: str) -> tuple[float, int]:
    """Seconds and peak resident KiB of one command. Its output is left out."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "penjing", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"penjing {' '.join(words)} failed")
    return time.perf_counter() - began, used.ru_maxrss


def shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    def right(stage: str, language: str = "") -> float:
        mine = [row for row in rows if row["stage"] == stage and language in ("", row["language"])]
        return sum(row["right"] for row in mine) / sum(row["asked"] for row in mine)

    after = [row for row in rows if row["stage"] == "sft"]
    asked = sum(row["asked"] for row in after)
    return {
        "before_sft": right("pretrain"),
        "all": right("sft"),
        "en": right("sft", "en"),
        "zh": right("sft", "zh"),
        "chance": sum(row["chance"] * row["asked"] for row in after) / asked,
        "questions": asked,
    }


def main() -> None:
    asked = parse()
    folder = asked.work or Path(tempfile.mkdtemp())
    seconds, peak = timed("quickstart", "--out", str(folder / "toyworld"))
    run, evaluation = read_json(folder / "toyworld/quickstart.json"), read_json(folder / "toyworld/evaluation.json")
    stages = ("pretrain", "sft")
    result = {
        "what": "penjing quickstart, one run from beginning to end",
        "date": asked.date,
        **{name: run[name] for name in ("machine", "penjing", "torch", "python")},
        "wall_seconds": seconds,
        "peak_resident_kibibytes": peak,
        "stages": run["stages"],
        "plan": {stage: read_json(folder / "toyworld" / stage / "plan.json") for stage in stages},
        "outcome": {stage: read_json(folder / "toyworld" / stage / "outcome.json") for stage in stages},
        "accuracy": shares(evaluation["rows"]),
        "rows": [row for row in evaluation["rows"] if row["stage"] == "sft"],
        "stories": {name: evaluation["stories"][name] for name in ("asked", "with_required_words")},
    }
    if asked.real:
        real_seconds, _ = timed("quickstart", "--data", asked.real, "--out", str(folder / "real"))
        text = read_json(folder / "real/compression.json")
        result["real_text"] = {
            "what": f"penjing quickstart --data {asked.real}",
            "bits_per_byte": text["model_bits_per_byte"],
            "zstd_19_bits_per_byte": text["zstd_19_bits_per_byte"],
            "wall_seconds": real_seconds,
        }
    print(json.dumps({name: result[name] for name in ("wall_seconds", "accuracy", "real_text") if name in result}))
    for stage in stages:
        print(stage, f"{result['outcome'][stage]['tokens_per_second']:,.0f} tokens/s")
    if asked.out:
        write_json(asked.out, result)


if __name__ == "__main__":
    main()

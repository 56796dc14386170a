"""The log of a pipeline of stages in one folder: what is done is not repeated, a killed pipeline continues."""

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from penjing import __version__, devices
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import make_folder, read_json, write_json
from penjing.base.lock import LOCK, is_locked, owner
from penjing.devices.choose import local_device
from penjing.plan import hardware
from penjing.report.load_runs import QUICKSTART

START_ANEW = "Start anew with --fresh (make: FRESH=1), or give another --out (make: OUT=...)."


@dataclass
class StageLog:
    """quickstart.json: the options, and the result of each stage. Written after every stage."""

    path: Path
    facts: dict[str, Any]
    console: Console

    def stage(self, name: str, function: Callable[[], str]) -> None:
        """Run a stage that is not done yet; `function` returns its result in one sentence."""
        entry = next((entry for entry in self.facts["stages"] if entry["name"] == name), None)
        if entry is not None and entry["state"] in ("done", "skipped"):
            self.console.print(Text(f"{name}: {entry['note']} (from before)", style="dim"))
            return
        self.console.print(Text(name, style="bold"))
        began = time.perf_counter()
        earlier_seconds = entry["seconds"] if entry else 0.0
        note = function()
        state = "skipped" if note.startswith("skipped") else "done"
        seconds = earlier_seconds + time.perf_counter() - began
        result = {"name": name, "state": state, "seconds": seconds, "note": note}
        self.facts["stages"] = [other for other in self.facts["stages"] if other["name"] != name] + [result]
        write_json(self.path, self.facts)
        self.console.print(Text(f"  {note} ({units.duration(seconds)})"))

    def record(self, **facts: Any) -> None:
        self.facts.update(facts)
        write_json(self.path, self.facts)


def open_log(out: Path, command: str, request: Mapping[str, Any], console: Console, *, fresh: bool) -> StageLog:
    """The log of the folder. fresh: delete what it holds. Raises UserError for a pipeline with other options.

    request: the options that decide what the stages make.
    """
    path = out / QUICKSTART
    make_folder(out)
    if fresh:
        if not path.is_file() and any(file.name != LOCK for file in out.iterdir()):
            raise UserError("not a quickstart's folder; it is not removed", where=out, next_step="Choose another OUT.")
        if is_locked(out):
            raise UserError("another process is using this folder", where=out, got=owner(out))
        try:
            shutil.rmtree(out)
        except OSError as error:
            raise UserError(f"cannot be removed: {error.strerror or error}", where=error.filename or out) from None
        make_folder(out)
    facts = read_json(path) if path.is_file() else {}
    has_begun = is_locked(out) or any(file.name not in (QUICKSTART, LOCK) for file in out.iterdir())
    if facts and (has_begun or facts["asked"] == request):  # after an error in the data, options may be corrected
        if facts["asked"] != request:
            what = "this folder holds a quickstart with other options"
            got, wanted = (json.dumps(one, ensure_ascii=False) for one in (request, facts["asked"]))
            raise UserError(what, where=out, got=got, wanted=wanted, next_step=START_ANEW)
        return StageLog(path, facts, console)
    device = local_device("auto")
    facts = {
        "title": "A small language model, made here",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "asked": request,
        "penjing": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": hardware.describe(device, devices.of(device).compute_dtype("auto", device)),
        "stages": [],
    }
    write_json(path, facts)
    return StageLog(path, facts, console)

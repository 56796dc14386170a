"""Weights & Biases. Needs `pip install "penjing[wandb]"`; without a network or a login it records offline."""

import os
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penjing.base.errors import missing_extra
from penjing.base.files import read_json, write_json
from penjing.track.base import Tracker


class Wandb(Tracker):
    """One wandb run per training run; a resumed run continues it (the run's folder stores its id)."""

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise missing_extra("wandb", "wandb", "log.trackers") from None
        id_file = folder / "wandb.json"
        run_id = read_json(id_file)["id"] if id_file.exists() else secrets.token_hex(4)
        write_json(id_file, {"id": run_id})
        mode: Any = os.environ.get("WANDB_MODE")
        if not mode:  # `login` then neither prompts for a key nor contacts the server
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        self._begin = partial(
            wandb.init, project=project, name=name or folder.name, id=run_id, dir=folder, config=config, mode=mode
        )
        self._run = self._begin(resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        """Continue from `step` and remove what follows it: wandb ignores a step before the last one."""
        self._run.finish()
        self._run = self._begin(resume_from=f"{self._run.id}?_step={step}")

    def end(self) -> None:
        self._run.finish()

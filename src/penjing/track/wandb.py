"""Weights & Biases. Needs `pip install "penjing[wandb]"`; without a login it records offline, in the run's folder."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from penjing.track.markdown import LibraryRun, incident_text


class Wandb(LibraryRun):
    """One wandb run per training run, which a resumed run continues.

    Offline, each process writes a part below `wandb/`, with the same id. The newest part has the whole run: a killed
    process loses what wandb has not written yet, and `wandb sync` of a part replaces what the server has.
    """

    package: ClassVar = "wandb"

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE")
        if not mode:  # `login` then neither prompts for a key nor contacts the server
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        self._wandb = wandb
        self._offline = mode == "offline"
        self._options: dict[str, Any] = dict(
            project=project, name=name or folder.name, id=run_id, dir=folder, config=config, mode=mode
        )
        self._run = self._begin(resume="allow")

    def held(self, step: int) -> int:
        return -1 if self._offline else step

    def _begin(self, **how: Any) -> Any:
        # The run's own metrics have the system's. A new object each time: `init` changes it.
        settings = self._wandb.Settings(x_disable_stats=True, console="off")
        return self._wandb.init(**self._options, **how, settings=settings)

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = [[one["prompt"], one["text"]] for one in samples]
        self._run.log({"samples": self._wandb.Table(columns=["prompt", "text"], data=rows)}, step=step)

    def incident(self, incident: Mapping[str, Any]) -> None:
        self._run.log({"incident": incident_text(incident)}, commit=False)  # with the next metrics

    def summary(self, name: str, figures: Mapping[str, Any]) -> None:
        self._run.summary.update({name: dict(figures)})

    def rewind(self, step: int) -> None:
        """Online, continue from `step` and remove what follows it: wandb ignores a step before the last one. A server
        that refuses keeps the later steps of before."""
        self._run.finish()
        if not self._offline:
            try:
                self._run = self._begin(resume_from=f"{self._run.id}?_step={max(0, step)}")
                return
            except self._wandb.errors.Error as error:
                warnings.warn(f"wandb keeps the steps after {step}: {error}", stacklevel=2)
        self._run = self._begin(resume="allow")

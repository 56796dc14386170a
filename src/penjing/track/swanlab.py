"""SwanLab. Needs `pip install "penjing[swanlab]"`; without a login it records offline, for `swanlab sync`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from penjing.track.markdown import LibraryRun


class SwanLab(LibraryRun):
    """Each process of a run writes a folder below `swanlab/`, with the same id; offline, the newest has the whole run.
    Of a step that is there twice, SwanLab keeps the first value: after a rollback its curve goes on where it was."""

    package: ClassVar = "swanlab"

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str) -> None:
        import swanlab

        logs = folder / "swanlab"
        logs.mkdir(exist_ok=True)
        settings = swanlab.Settings(  # the run's own metrics have the system's
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(monitor=False, requirements=False),
        )
        mode: Any = os.environ.get("SWANLAB_MODE") or ("online" if settings.api_key else "offline")
        self._markdown, self._is_new = swanlab.Text, True
        self._run = swanlab.init(
            reinit=True,
            mode=mode,
            project=project,
            name=name or folder.name,
            id=run_id,
            resume="allow",
            log_dir=str(logs),
            config=config,
            settings=settings,
        )

    def held(self, step: int) -> int:
        """Nothing of earlier processes: a killed one loses what its file's buffer holds."""
        return -1 if self._is_new else step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        self._is_new = False

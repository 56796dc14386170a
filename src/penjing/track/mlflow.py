"""MLflow. Needs `pip install "penjing[mlflow]"`; without MLFLOW_TRACKING_URI it records in the run's folder."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from penjing.base.files import write_text
from penjing.track.base import Tracker
from penjing.track.markdown import incident_text, samples_markdown
from penjing.track.run_record import flatten

TAG = "penjing.id"


class MLflow(Tracker):
    """A run of MLflow in `mlflow/` of the run's folder, or on the server of MLFLOW_TRACKING_URI. MLflow cannot remove
    metrics: on a server, steps that a resumed run repeats are there twice."""

    package: ClassVar = "mlflow"

    def load(self, folder: Path) -> None:
        # Files need no database and no server; MLflow asks for a word that one means them. And it reports its use.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        super().load(folder)

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str) -> None:
        from mlflow import MlflowClient, entities

        address = os.environ.get("MLFLOW_TRACKING_URI")
        self._store = None if address else folder.resolve() / "mlflow"
        self._client, self._entities = MlflowClient(tracking_uri=address or f"file:{self._store}"), entities
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run_id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment, tags={TAG: run_id}, run_name=name or folder.name)
        self._id = made.info.run_id
        params = [entities.Param(key, value) for key, value in flatten(config).items() if value]
        self._client.log_batch(self._id, params=params)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._client.log_text(self._id, samples_markdown(samples), f"samples/step-{step:08d}.md")

    def incident(self, incident: Mapping[str, Any]) -> None:
        name = f"incidents/step-{incident['step']:08d}-{time.time_ns()}.txt"
        self._client.log_text(self._id, incident_text(incident), name)

    def summary(self, name: str, figures: Mapping[str, Any]) -> None:
        self._client.log_dict(self._id, dict(figures), f"{name}.json")

    def attach(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def rewind(self, step: int) -> None:
        """Remove the later lines of its files: `time value step`."""
        files = self._store.glob(f"*/{self._id}/metrics/**/*") if self._store else ()
        for file in files:
            if file.is_file():
                lines = file.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if len(line.split()) == 3 and int(line.split()[2]) <= step]
                if kept:
                    write_text(file, "".join(f"{line}\n" for line in kept))
                else:
                    file.unlink()  # an empty one is an error

    def end(self) -> None:
        self._client.set_terminated(self._id)

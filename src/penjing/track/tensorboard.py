"""TensorBoard. Needs `pip install "penjing[tensorboard]"`; `tensorboard --logdir runs` shows all runs below `runs`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from penjing.track.markdown import MarkdownTracker, table_markdown


class TensorBoard(MarkdownTracker):
    """Event files in `tensorboard/` of the run's folder."""

    package: ClassVar = "tensorboard"

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str) -> None:
        # Not torch.utils.tensorboard: the process of the trackers then needs no torch, and a row is one event.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder, self._writer_type = folder / "tensorboard", EventFileWriter
        self._event, self._summary, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        is_new = not self._folder.is_dir()
        self._writer: Any = EventFileWriter(str(self._folder))
        if is_new:
            self._text("config", table_markdown({"project": project, **config}), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()])
        self._step = step

    def _text(self, name: str, markdown: str, step: int) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[markdown.encode()])
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        self._write(step, [self._summary.Summary.Value(tag=name, metadata=metadata, tensor=tensor)])

    def _write(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """A new file, at whose start TensorBoard drops later steps of the earlier ones."""
        self._writer.close()
        self._writer = self._writer_type(str(self._folder))
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def end(self) -> None:
        self._writer.close()

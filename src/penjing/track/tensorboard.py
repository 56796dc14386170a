"""TensorBoard. Needs `pip install "penjing[tensorboard]"`; `tensorboard --logdir runs` shows all runs below `runs`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from penjing.track.markdown import MarkdownTracker, table_markdown


class TensorBoard(MarkdownTracker):
    """Event files in `tensorboard/` of the run's folder."""

    package: ClassVar = "tensorboard"

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._writer_type = folder / "tensorboard", SummaryWriter
        is_new = not self._folder.is_dir()
        self._writer: Any = SummaryWriter(str(self._folder))
        if is_new:
            self._text("config", table_markdown({"project": project, **config}), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._step = step

    def _text(self, name: str, markdown: str, step: int) -> None:
        self._writer.add_text(name, markdown, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """A new file, at whose start TensorBoard drops later steps of the earlier ones."""
        self._writer.close()
        self._writer = self._writer_type(str(self._folder), purge_step=step + 1)

    def end(self) -> None:
        self._writer.close()

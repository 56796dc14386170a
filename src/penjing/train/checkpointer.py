"""Checkpoints of a run: their contents, writing them during training, and what happens if the disk refuses."""

import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.checkpoint.background import Background, snapshot
from penjing.checkpoint.load import Checkpoint, newest
from penjing.checkpoint.manifest import OPTIMIZERS, WEIGHTS
from penjing.checkpoint.parts import SharedFolder, own_rows
from penjing.checkpoint.save import flatten_optimizers, save
from penjing.devices.shards import local_part
from penjing.model.lora import trainable_state_dict
from penjing.optim.ema import Loading, averaged, swap
from penjing.optim.low_precision_state import decoded
from penjing.parallel.base import Strategy
from penjing.train.config import CheckpointSettings
from penjing.train.load_model import Place, load_weights
from penjing.train.nonfinite_guard import Record


class Stateful(Protocol):
    """A part of a run with state besides weights: a data source, a meter, a loss scaler."""

    def state(self) -> dict[str, Any]:
        """JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Label:
    """Information about the run that each checkpoint contains."""

    texts: Mapping[str, str] = field(default_factory=dict)  # further text files, by name
    about: Mapping[str, Any] = field(default_factory=dict)  # further JSON values of its state
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # for the manifest


class Checkpointer:
    """Writes a run's checkpoints, and restores one.

    stateful: by name, every part with state besides weights and optimizers. To save further state, add it here only:
    every new checkpoint then contains it and restores it. A checkpoint without it leaves the part unchanged.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        strategy: Strategy,
        *,
        model: nn.Module,
        optimizers: Sequence[Any],
        stateful: Mapping[str, Stateful],
        record: Record,
        label: Label = Label(),
        trainable_only: bool = False,
    ) -> None:
        """trainable_only: save adapters without their base model."""
        self.folder, self.settings, self.strategy = folder, settings, strategy
        self.model, self.trainable_only, self.optimizers = model, trainable_only, optimizers
        self.stateful, self.label, self.record = stateful, label, record
        self._background = Background()
        self._step = 0  # of the pending checkpoint
        self._mismatched_step = -1  # step of a checkpoint with another kind of optimizers than the run's

    def save(self, progress: dict[str, Any], wait: bool) -> bool:
        """Save the run's current state; False if the disk refused, which gives a warning and keeps older checkpoints.

        progress: the loop's state. wait: return once it is on the disk; else a thread writes a copy, and the next save
        reports a failure. Rank 0 writes; with `wait` the others wait for it.
        """
        self.wait()  # before copying: two copies at once would take twice the memory
        with averaged(self.optimizers, self.strategy.loading):
            self._start(progress)
        saved = self.wait() if wait or not self.settings.async_ else True
        return not self.strategy.any(not saved) if wait else saved

    def _start(self, progress: dict[str, Any]) -> None:
        """Copy the state, and start to write it."""
        folder = self._shared_folder()
        weights = trainable_state_dict(self.model) if self.trainable_only else self.model.state_dict()
        optimizers: Any = [optimizer.state_dict() for optimizer in self.optimizers]
        if folder is not None:
            first_row, first_rank = self.strategy.first_row, self.strategy.rank == 0
            weights, optimizers = own_rows([weights, optimizers], first_row, first_rank)
        else:
            weights, optimizers = self.strategy.full_state(weights), self.strategy.full_state(optimizers)
        if self.strategy.rank == 0:
            self._background.start(self._prepare_save(folder or self.folder, progress, weights, optimizers))
        else:
            for part in self.stateful.values():
                part.state()  # some need all ranks
            if folder is not None and folder.number < folder.count:
                self._background.start(self._prepare_part(folder, progress["step"], weights, optimizers))

    def _shared_folder(self) -> SharedFolder | None:
        """Where several ranks write, if the weights are so large that rank 0 should not gather them."""
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        if self.strategy.writers == 1 or num_bytes < self.settings.parts_from_gib * 2**30:
            return None
        mark = self.strategy.broadcast(uuid.uuid4().hex[:8])
        return SharedFolder(self.folder, self.strategy.rank, self.strategy.writers, mark)

    def _prepare_part(
        self, folder: SharedFolder, step: int, weights: dict[str, Tensor], optimizers: list[Any]
    ) -> Callable[[], object]:
        weights, optimizers = snapshot(weights), snapshot(optimizers)
        self._step = step
        files = {WEIGHTS: weights, OPTIMIZERS: flatten_optimizers(optimizers)[0]}
        return lambda: folder.write_aside(step, files)

    def time_save(self, folder: Path, progress: dict[str, Any]) -> float:
        """Save into another folder and wait for it; return the seconds for which training was blocked."""
        original, self.folder = self.folder, folder
        try:
            start = time.perf_counter()
            self.save(progress, False)
            blocked = time.perf_counter() - start
            self.wait()
        finally:
            self.folder = original
        return blocked

    def _prepare_save(
        self, folder: Path | SharedFolder, progress: dict[str, Any], weights: dict[str, Tensor], optimizers: list[Any]
    ) -> Callable[[], object]:
        """Copy the current state; return a function that writes the copy."""
        weights, optimizers = snapshot(weights), snapshot(optimizers)
        random_state = torch.get_rng_state().clone()
        state = {
            **self.label.about,
            **{name: part.state() for name, part in self.stateful.items()},
            "progress": progress,
        }
        every, best = self.settings.keep_every, state.get("best", {}).get("kept", {}).get("step")
        self._step = progress["step"]
        return lambda: save(
            folder,
            progress["step"],
            weights=weights,
            optimizers=optimizers,
            state=state,
            texts=dict(self.label.texts),
            keep=self.settings.keep_last,
            stays=lambda step: step == best or bool(every and step % every == 0),
            random_state=random_state,
            fingerprints=self.label.fingerprints,
        )

    def wait(self) -> bool:
        """Wait for the pending checkpoint; False if the disk refused it."""
        try:
            self._background.wait()
        except DiskError as error:
            self.record({"step": self._step, "kind": "checkpoint not written", "why": error.line()})
            warnings.warn(f"no checkpoint of step {self._step}: {error.line()}", stacklevel=2)
            return False
        return True

    def roll_back(self) -> dict[str, Any] | None:
        """Load the newest checkpoint's weights and optimizers into the run; return its progress, or None without one.

        All other state stays: the position in the data, the meter, and optimizers of another kind.
        """
        self.wait()
        self.strategy.any(False)  # a barrier: the other ranks read what rank 0 has written
        checkpoint = newest(self.folder)
        if checkpoint is None:
            return None
        with self.strategy.loading():
            load_weights(self.model, checkpoint, self.strategy.place)
        if checkpoint.step != self._mismatched_step:
            restore_optimizers(self.optimizers, checkpoint, self.strategy.place, self.strategy.loading)
        progress: dict[str, Any] = checkpoint.state()["progress"]
        return progress

    def restore(self, checkpoint: Checkpoint, *, optimizers: bool) -> None:
        """Restore everything but the weights. optimizers: False if their kind was changed."""
        if optimizers:
            restore_optimizers(self.optimizers, checkpoint, self.strategy.place, self.strategy.loading)
        else:
            self._mismatched_step = checkpoint.step
        saved = checkpoint.state()
        for name, part in self.stateful.items():
            if name in saved:
                part.restore(saved[name])


def restore_optimizers(
    optimizers: Sequence[Any],
    checkpoint: Checkpoint,
    place: Place = lambda full, like: full,
    loading: Loading = nullcontext,
) -> None:
    """Restore optimizers and torch's random state from a checkpoint. Raises UserError if they do not fit.

    place, loading: of the strategy.

    Peak rates, weight decays and similar settings keep their current values; torch would restore the saved ones, even
    if the user changed them.
    """
    parameters = [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]

    def fit(optimizer: int, parameter: int, values: dict[str, Any]) -> dict[str, Any]:
        like = parameters[optimizer][parameter]
        if local_part(like) is not like:
            values = decoded(values)
        return {
            name: place(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value
            for name, value in values.items()
        }

    try:
        states, random_state = checkpoint.optimizers(fit)
        for optimizer, state in zip(optimizers, states, strict=True):
            settings = [
                {name: value for name, value in group.items() if name not in ("params", "lr")}
                for group in optimizer.param_groups
            ]
            optimizer.load_state_dict(state)
            for group, current in zip(optimizer.param_groups, settings, strict=True):
                group.update(current)
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"the optimizers' state does not fit: {error}", where=checkpoint.folder) from None
    swap(optimizers, loading, to_average=False)  # the average was saved as the weights
    torch.set_rng_state(random_state)

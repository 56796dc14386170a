"""Checkpoints of a run: what goes into one, written beside training, and what happens when the disk refuses."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.checkpoint.background import Background, snapshot
from penjing.checkpoint.load import Checkpoint, newest
from penjing.checkpoint.save import save
from penjing.model.lora import trainable_state_dict
from penjing.parallel.base import Strategy
from penjing.train.config import CheckpointSettings
from penjing.train.load_model import load_weights
from penjing.train.nonfinite_guard import Record


class Stateful(Protocol):
    """Something of a run whose state is more than weights: a place in the data, a meter, a loss scaler."""

    def state(self) -> dict[str, Any]:
        """JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a checkpoint says of its run."""

    texts: Mapping[str, str] = field(default_factory=dict)  # files to put beside, by name
    about: Mapping[str, Any] = field(default_factory=dict)  # further JSON values of its state
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # for the manifest


class Checkpointer:
    """Makes a run's checkpoints, and restores one.

    stateful: by name, everything that has state beside weights and optimizers. This is the one place to add to: what
    stands here is in every checkpoint from then on, and comes back from it; a checkpoint from before leaves it as it
    is.
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
        only_trained: bool = False,
    ) -> None:
        """only_trained: of adapters, not the base they sit on."""
        self.folder, self.settings, self.strategy = folder, settings, strategy
        self.model, self.only_trained, self.optimizers = model, only_trained, optimizers
        self.stateful, self.label, self.record = stateful, label, record
        self._background = Background()
        self._step = 0  # of the checkpoint under way
        self._other_optimizers = -1  # step of a checkpoint whose optimizers are of another kind than the run's

    def save(self, progress: dict[str, Any], wait: bool) -> bool:
        """Save the run as it is now; False if the disk refused, which is told and leaves what was there.

        progress: the loop's. wait: until it is on the disk; else a thread writes a copy, and a refusal is told at the
        next save. Rank 0 writes; with `wait` the others wait for it.
        """
        saved = True
        if self.strategy.rank == 0:
            self.wait()  # before anything is copied: two copies at once would take twice the memory
            self._background.start(self._prepared(progress))
            if wait or not self.settings.async_:
                saved = self.wait()
        else:
            for each in self.stateful.values():
                each.state()  # some ask all ranks
        return not self.strategy.any(not saved) if wait else saved

    def time_save(self, folder: Path, progress: dict[str, Any]) -> float:
        """Save into another folder and wait for it, to see how long it takes; the seconds that training stood still."""
        own, self.folder = self.folder, folder
        try:
            start = time.perf_counter()
            self.save(progress, False)
            held = time.perf_counter() - start
            self.wait()
        finally:
            self.folder = own
        return held

    def _prepared(self, progress: dict[str, Any]) -> Callable[[], object]:
        """A call that writes the state of this instant, whatever becomes of the run meanwhile."""
        tensors = trainable_state_dict(self.model) if self.only_trained else self.model.state_dict()
        weights: dict[str, Tensor] = snapshot(tensors)
        optimizers = snapshot([optimizer.state_dict() for optimizer in self.optimizers])
        random_state = torch.get_rng_state().clone()
        state = {
            **self.label.about,
            **{name: each.state() for name, each in self.stateful.items()},
            "progress": progress,
        }
        self._step = progress["step"]
        return lambda: save(
            self.folder,
            progress["step"],
            weights=weights,
            optimizers=optimizers,
            state=state,
            texts=dict(self.label.texts),
            keep=self.settings.keep_last,
            milestones=self.settings.keep_every,
            random_state=random_state,
            fingerprints=self.label.fingerprints,
        )

    def wait(self) -> bool:
        """Until no checkpoint is under way; False if the disk refused it."""
        try:
            self._background.wait()
        except DiskError as error:
            self.record({"step": self._step, "kind": "checkpoint not written", "why": error.line()})
            warnings.warn(f"no checkpoint of step {self._step}: {error.line()}", stacklevel=2)
            return False
        return True

    def go_back(self) -> dict[str, Any] | None:
        """Load the newest checkpoint's weights and optimizers into the run; returns its progress, None without one.

        The place in the data, the meter and the rest stay as they are, and optimizers whose kind was changed since.
        """
        self.wait()
        self.strategy.any(False)  # the others read what rank 0 has written
        checkpoint = newest(self.folder)
        if checkpoint is None:
            return None
        load_weights(self.model, checkpoint)
        if checkpoint.step != self._other_optimizers:
            restore_optimizers(self.optimizers, checkpoint)
        progress: dict[str, Any] = checkpoint.state()["progress"]
        return progress

    def restore(self, checkpoint: Checkpoint, *, optimizers: bool) -> None:
        """Everything but the weights. optimizers: not where their kind was allowed to change."""
        if optimizers:
            restore_optimizers(self.optimizers, checkpoint)
        else:
            self._other_optimizers = checkpoint.step
        saved = checkpoint.state()
        for name, each in self.stateful.items():
            if name in saved:
                each.restore(saved[name])


def restore_optimizers(optimizers: Sequence[Any], checkpoint: Checkpoint) -> None:
    """Put optimizers and torch's random numbers back to a checkpoint's. Raises UserError if they do not fit.

    Peak rates, decays and the like stay as they are set now: torch would take the saved ones, also where a change was
    allowed.
    """
    states, random_state = checkpoint.optimizers()
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            settings = [
                {name: value for name, value in group.items() if name not in ("params", "lr")}
                for group in optimizer.param_groups
            ]
            optimizer.load_state_dict(state)
            for group, now in zip(optimizer.param_groups, settings, strict=True):
                group.update(now)
    except (ValueError, KeyError) as error:
        raise UserError(f"the optimizers' state does not fit: {error}", where=checkpoint.folder) from None
    torch.set_rng_state(random_state)

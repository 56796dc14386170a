"""Run a command in several processes, one for each device, by torchrun's agent: on one machine, or on several."""

import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api

from penjing import devices
from penjing.base import config
from penjing.base.errors import EXIT_FOLLOWED, EXIT_SMALLER_PASSES, EXIT_USER_ERROR, UserError
from penjing.base.files import write_text
from penjing.base.process_info import say
from penjing.devices.choose import local_device
from penjing.track.run_record import RunRecord
from penjing.train.config import Run
from penjing.train.signals import ECHO_SECONDS, NUMBERS, Ended
from penjing.workflows.train import execute

GRACE_SECONDS = 10.0  # between the end of the first rank and that of the others, which are then killed
POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Which processes run a command. gpus, nproc_per_node: how many on this machine; gpus: each with one of its own."""

    gpus: int = 0
    nproc_per_node: int = 0
    nnodes: int = 1
    rdzv_endpoint: str = ""
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.gpus and self.nproc_per_node:
            raise UserError("both set the number of processes", where="--gpus, --nproc-per-node", wanted="one of them")
        if (self.nnodes > 1) != bool(self.rdzv_endpoint):
            where = "--nnodes, --rdzv-endpoint"
            raise UserError("several machines need both", where=where, wanted="--nnodes 2 --rdzv-endpoint HOST:29500")

    @property
    def processes(self) -> int:
        return self.gpus or self.nproc_per_node or 1

    def starts_others(self) -> bool:
        """Whether this process has to start others. Raises UserError if a launcher has started another number."""
        if self == LaunchOptions():
            return False
        started = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if started and started != self.processes:
            got = f"{self.processes} beside {started} of another launcher"
            raise UserError("two launchers", where="--gpus, --nproc-per-node", got=got, wanted="one of them")
        return not started

    def check_device(self, name: str) -> None:
        """Raises UserError if `--gpus` wants more than there are, or the run is for the CPU."""
        kind = devices.of(local_device(name))
        if self.gpus and kind.is_host:
            next_step = f"For processes on the CPU: --nproc-per-node {self.gpus}."
            raise UserError(f"the run is on {kind.type}", where="--gpus", got=self.gpus, next_step=next_step)


class Interrupted(Ended):
    """A signal while no rank ran, or a second one."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"ended by {signal.Signals(number).name}")


class Agent(LocalElasticAgent):
    """torchrun's agent on this machine. It hands signals on to the ranks, names the rank that ended first, and does
    not restart what the user stopped or has to correct."""

    # Private names of torch 2.13 that this class builds on. Without one of them it is torch's agent, and no more.
    needs = ("_monitor_workers", "_pcontext", "_remaining_restarts", "_worker_group")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[int, float] = {}  # signals, with their times
        self.lacks = [name for name in self.needs if not hasattr(self, name)]
        if self.lacks:
            what = f"the agent of torch {torch.__version__} has no {self.lacks[0]}"
            say(f"{what}: a rank that ends is not named, and Ctrl-C ends all ranks at once")
            return
        for number in NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it for SIGHUP
                signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """The first signal stops the ranks after their step; a second one ends them at once."""
        repeated, now = bool(self.received), time.monotonic()
        if now - self.received.get(number, -math.inf) < ECHO_SECONDS:
            return
        self.received[number] = now
        if not self._send(signal.SIGKILL if repeated else number) or repeated:
            raise Interrupted(number)

    def _processes(self) -> dict[int, Popen[bytes]]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})  # none before the machines have met
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _exit_codes(self) -> dict[int, int | None]:
        """Of each rank of this machine: minus the signal that killed it; None while it runs."""
        return {local_rank: process.poll() for local_rank, process in self._processes().items()}

    def _send(self, number: int) -> bool:
        """Send a signal to the ranks that run; returns whether there are any."""
        running = [process for process in self._processes().values() if process.poll() is None]
        for process in running:
            process.send_signal(number)
        return bool(running)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {} if self.lacks else self._exit_codes()
        if any(codes.values()):
            until = time.monotonic() + GRACE_SECONDS
            while None in codes.values() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
                codes = self._exit_codes()
            self._send(signal.SIGKILL)
        result: RunResult = super()._monitor_workers(worker_group)
        if not self.lacks and result.is_failed():
            failed = {local_rank: code for local_rank, code in codes.items() if code}
            failed = failed or {failure.local_rank: failure.exitcode for failure in result.failures.values()}
            first = min(failed, key=lambda local_rank: (failed[local_rank] == EXIT_FOLLOWED, failed[local_rank]))
            self._decide(f"rank {worker_group.workers[first].global_rank}", failed[first])
        return result

    def _decide(self, name: str, code: int) -> None:
        """Say which rank ended first, and whether all start again."""
        global _exit_code
        _exit_code = code if code > 0 else 128 - code
        if code == EXIT_FOLLOWED:
            name, outcome = "a rank of another machine", "failed"
        else:
            outcome = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed"
        if self.received or _exit_code == EXIT_USER_ERROR or (code > 128 and code - 128 in NUMBERS):
            self._remaining_restarts = 0  # the rank has said why
        elif _exit_code == EXIT_SMALLER_PASSES:
            self._remaining_restarts += 1  # this one does not count
        elif self._remaining_restarts:
            most = self._worker_group.spec.max_restarts
            say(f"{name} {outcome}; restart {most - self._remaining_restarts + 1} of {most}, from the last checkpoint")
        else:
            say(f"{name} {outcome}; the same command continues from the last checkpoint")


_exit_code = 1  # of the rank that ended first


def launch(words: Sequence[str], options: LaunchOptions) -> None:
    """Run `penjing WORDS` in the processes of `options`, and return when all have succeeded.

    Exits with the code of the rank that failed first, which has printed its error.
    """
    handlers = {number: signal.getsignal(number) for number in NUMBERS}
    logging.disable()  # the agent's words, about tracebacks that it does not have
    # A store for each attempt: with the agent's own, the ranks of a restart find what the dead ones left.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    vars(api)["LocalElasticAgent"] = Agent
    several = options.nnodes > 1
    settings: dict[str, Any] = dict(
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.processes,
        run_id="none" if several else uuid.uuid4().hex,  # torchrun's default: its agents may take part
        rdzv_backend="c10d",
        rdzv_endpoint=options.rdzv_endpoint or "localhost:0",
        max_restarts=options.max_restarts,
        local_addr=_own_address(options.rdzv_endpoint) if several else "localhost",
        signals_to_handle="SIGQUIT",  # the agent handles the others
    )
    known = {field.name for field in fields(api.LaunchConfig)}  # an earlier torch has fewer
    config = api.LaunchConfig(**{name: value for name, value in settings.items() if name in known})
    command = [word.replace("$", "$$") for word in ("-m", "penjing", *words)]  # the agent fills templates in
    try:
        api.elastic_launch(config, sys.executable)(*command)
    except ChildFailedError:
        sys.exit(_exit_code)
    except RendezvousError as error:
        next_step = "Start the same command on each machine, at most 10 minutes apart."
        raise UserError(str(error), where=options.rdzv_endpoint, next_step=next_step) from None
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train_in(options: LaunchOptions, run: Run, console: Console) -> dict[str, Any]:
    """Train a run in the processes of `options`, or here if there are none; returns its outcome."""
    if not options.starts_others():
        return execute(run, console)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "run.toml"
        write_text(settings, config.to_toml(run, run.decisions))
        launch(["train", str(settings)], options)
    return dict(RunRecord(Path(run.out)).outcome.raw)


def _own_address(endpoint: str) -> str:
    """The address by which the other machines reach this one: that of its packets to the endpoint."""
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise UserError(
            f"no such address: {error}", where="--rdzv-endpoint", got=endpoint, wanted="HOST:PORT"
        ) from None

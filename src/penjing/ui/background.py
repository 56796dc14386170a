"""A program of penjing for one request: it ends with it, when the page asks no longer, or after a time."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import Request

from penjing.serve.errors import ApiError
from penjing.serve.streams import run_unless_disconnected


async def penjing_json(
    request: Request, words: Sequence[str], folder: Path, seconds: float, *, ok: Sequence[int] = (0,)
) -> dict[str, Any]:
    """The JSON object that `penjing WORDS` prints, run in `folder`. ok: exit codes that have a result.

    Raises ApiError with the last line of its messages if it fails, and if it takes longer than `seconds`;
    ConnectionError if the page asks no longer.
    """
    command = (sys.executable, "-m", "penjing", *words)
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        async with asyncio.timeout(seconds):
            out, messages = await run_unless_disconnected(request, program.communicate())
    except TimeoutError:
        raise ApiError(504, f"it took longer than {seconds:.0f} s, and was ended", code="timeout") from None
    finally:
        if program.returncode is None:
            os.killpg(program.pid, signal.SIGKILL)  # with its workers
            await program.communicate()
    if program.returncode not in ok:
        lines = [line.strip() for line in messages.decode("utf-8", "replace").splitlines() if line.strip()]
        raise ApiError(400, lines[-1] if lines else f"it ended with exit code {program.returncode}")
    printed: dict[str, Any] = json.loads(out)
    return printed

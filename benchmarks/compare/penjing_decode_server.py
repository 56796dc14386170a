"""A trial of penjing's server: `python -m compare.penjing_decode_server SPEC.json bfloat16`.

A client in this process, on the same cores, reads streams of POST /v1/completions. A chunk may hold several tokens; the
server sends their total at the end of the stream.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from compare.decode_measure import Decoder, OnTokens, finish
from compare.trial_spec import DecodeSpec, read_spec
from penjing.base.errors import UserError

STREAMS = (1, 16)


class PenjingServer(Decoder):
    batches = STREAMS

    def __init__(self, folder: Path, dtype: str) -> None:
        arguments = ["serve", str(folder), "--port", "0", "--dtype", dtype, "--slots", str(max(STREAMS))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penjing", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        atexit.register(self.close)  # a failed trial must not leave a server running
        assert self.process.stdout is not None
        match = next(
            (found for line in self.process.stdout if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line))), None
        )
        assert match, "the server did not start"
        self.port, self.model = int(match[1]), folder.name
        self._wait()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models") as answer:
            self.longest = json.load(answer)["data"][0]["penjing"]["context"]
        self.options = ["POST /v1/completions, streamed", dtype, "client in Python on the same cores"]

    def _wait(self) -> None:
        """Wait until the server accepts connections, shortly after it prints its address."""
        while self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the server ended")

    def write(self, prompts: Sequence[Sequence[int]], new_tokens: int, on_tokens: OnTokens) -> None:
        asyncio.run(self._streams(prompts, new_tokens, on_tokens))

    async def _streams(self, prompts: Sequence[Sequence[int]], new_tokens: int, on_tokens: OnTokens) -> None:
        """The first chunk of a stream counts as one token at once; the remaining tokens count when all streams end."""
        uncounted, waiting = [0] * len(prompts), set(range(len(prompts)))

        async def stream(number: int) -> None:
            async for line in self._lines(prompts[number], new_tokens):
                if b'"usage":{' in line:
                    uncounted[number] += json.loads(line)["usage"]["completion_tokens"]
                elif waiting:
                    waiting.discard(number)
                    uncounted[number] -= 1
                    on_tokens([number])

        await asyncio.gather(*map(stream, range(len(prompts))))
        on_tokens([number for number, tokens in enumerate(uncounted) for _ in range(tokens)])

    async def _lines(self, prompt: Sequence[int], new_tokens: int) -> AsyncIterator[bytes]:
        """Events of the server, without `data: `."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(
            {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": new_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                raise UserError(
                    "the server refused", where="/v1/completions", got=(await reader.read()).decode()[-200:]
                )
            async for line in reader:
                if line.startswith(b"data: {"):
                    yield line[6:]
        finally:
            writer.close()

    def peak_bytes(self) -> int:
        """Peak memory of the server process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]  # Linux has it

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    spec = read_spec(DecodeSpec)
    finish(spec, PenjingServer(Path(spec.models) / spec.setting, sys.argv[2]), imported_bytes=0)


if __name__ == "__main__":
    main()

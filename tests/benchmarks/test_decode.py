"""benchmarks/decode.py: what is measured, by a clock of the test's; a trial of ours on a tiny model; the verdict."""

import json
import socketserver
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from compare import decode
from compare.comparison import BenchmarkRequest, Options
from compare.decode import BF16, INT8, Decode, DecodeSizes
from compare.decode_measure import Decoder, TokenTimer, measure
from compare.penjing_decode_server import PenjingServer
from compare.run import run_comparison
from compare.trial_spec import DecodeSpec

from penjing.base.errors import UserError
from penjing.model.presets import PRESETS

LLAMA = ("llama.cpp-f16", "llama.cpp-q8_0")
TINY = {"first_token": (4, 8), "prompt_tokens": 6, "new_tokens": 5, "batches": (1, 3), "seconds": 9.0}


@pytest.fixture
def spec(tmp_path):
    where = {"models": str(tmp_path / "models"), "ids": (300, 380), "out": ""}
    return DecodeSpec(setting="26m", threads=1, steps=2, warmup=1, **where, **TINY)


class TimerCallback:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def watched(*passes, new_tokens=4, seconds=100.0):
    """A watch after passes of (seconds, sequences that got a token)."""
    clock = TimerCallback()
    watch = TokenTimer(2, new_tokens, seconds, clock)
    for took, sequences in passes:
        clock.now += took
        if watch(sequences):
            break
    return watch


def test_all_sequences_at_once():
    watch = watched((5, [0, 1]), *[(2, [0, 1])] * 9)
    assert watch.first_token_seconds == 5 and (watch.tokens, watch.decode_seconds) == (6, 6)


def test_the_rate_is_of_the_time_when_all_are_written():
    """The first prompt is read before the second: it ends first, and what follows would be half a batch."""
    watch = watched((5, [0]), (5, [0, 1]), (2, [0, 1]), (2, [0, 1]), (1, [1]), (1, [1]))
    assert watch.first_token_seconds == 10 and (watch.tokens, watch.decode_seconds) == (4, 4)


def test_a_slow_one_is_stopped():
    watch = watched((5, [0, 1]), *[(2, [0, 1])] * 9, new_tokens=99, seconds=5.0)
    assert (watch.tokens, watch.decode_seconds) == (6, 6)


def test_a_sequence_without_a_token_is_an_error():
    with pytest.raises(UserError, match="no token"):
        _ = watched((5, [0])).first_token_seconds


class Script(Decoder):
    """Writes at once; remembers what was asked."""

    batches = (3,)
    options = ("as it is",)

    def __init__(self):
        self.opened, self.prompts, self.closed = [], [], False

    def open(self, sequences, tokens):
        self.opened.append((sequences, tokens))

    def write(self, prompts, new_tokens, on_tokens):
        self.prompts += map(tuple, prompts)
        for _ in range(new_tokens):
            on_tokens(range(len(prompts)))

    def close(self):
        self.closed = True

    def peak_bytes(self):
        return 70


def test_every_prompt_is_a_new_one_and_a_contestant_may_leave_batches_out(spec):
    decoder = Script()
    one = measure(replace(spec, batches=(3,)), decoder, 40)
    assert len(set(decoder.prompts)) == len(decoder.prompts) and decoder.closed
    assert all(300 <= index < 380 for prompt in decoder.prompts for index in prompt)
    assert {*decoder.opened} == {(1, 11), (3, 11), (1, 5), (1, 9)}
    assert {*one["figures"][1]} == {"rate_3", "read_3", "first_token_4", "first_token_8"}
    assert (one["peak_bytes"], one["peak_bytes_after_imports"], one["options"]) == (70, 40, ["as it is"])
    decoder = Script()
    decoder.longest = 8
    assert "first_token_8" not in measure(spec, decoder, 0)["figures"][1]
    assert "rate_1" not in measure(spec, Script(), 0)["figures"][1]


class Answers(socketserver.StreamRequestHandler):
    """Says what its server is to say, to each request."""

    def handle(self):
        while self.rfile.readline().strip():
            pass
        self.wfile.write(self.server.said)


@pytest.fixture
def client():
    """The benchmark's client of a server that says this."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def make(said):
            server.said = said.encode()
            decoder = PenjingServer.__new__(PenjingServer)
            decoder.port, decoder.model = server.server_address[1], "m"
            return decoder

        yield make
        server.shutdown()


def test_tokens_of_streams_are_those_that_the_server_counts(client):
    pieces = (
        'data: {"text": "a"}\n\ndata: {"text": "b c"}\n\ndata: {"usage":{"completion_tokens":5}}\n\ndata: [DONE]\n\n'
    )
    watch = TokenTimer(2, 5, 9.0)
    client(f"HTTP/1.1 200 OK\r\n\r\n{pieces}").write([[1], [2]], 5, watch)
    assert watch._written == [5, 5] and 0 < watch.tokens <= 8


def test_a_refusal_is_no_token(client):
    with pytest.raises(UserError, match="too long"):
        client("HTTP/1.1 400 Bad Request\r\n\r\ntoo long").write([[1]], 1, TokenTimer(1, 1, 9.0))


@pytest.fixture
def tiny(monkeypatch):
    """Models that are made and measured in no time."""
    shape = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 16}
    monkeypatch.setattr(decode, "PRESETS", {"26m": "small", "1m": "small"})
    monkeypatch.setitem(PRESETS, "small", shape)
    monkeypatch.setattr(decode, "FROM_IDS", (300, 380))
    monkeypatch.setattr(decode, "QUICK", DecodeSizes(**TINY))
    monkeypatch.setattr(decode, "_texts", lambda: ["so it is, and so it was, and 3 + 4"] * 9)


def test_our_own_engine_takes_part(tiny, tmp_path, in_process):
    request = BenchmarkRequest(options=Options(trials=1, threads=1), resolve=None, overrides={}, quick=True)
    prepared = Decode().prepare(tmp_path, request)
    assert not list((tmp_path / "models").glob("*.gguf"))  # nobody asked for llama.cpp
    for kind in ("float32", "int8"):
        one = in_process(f"{decode.TRIAL} {kind}", replace(prepared.spec, setting="1m"), tmp_path / kind)
        assert one["step_units"][1] == TINY["new_tokens"] - 1 and one["options"][0] == kind
        assert all(value > 0 for value in one["figures"][1].values()) and len(one["figures"][1]) == 6


def trial(speed, **figures):
    """A trial as `measure` records it."""
    found = {f"first_token_{length}": 1 / speed for length in TINY["first_token"]}
    found |= {name: value * speed for name, value in figures.items()}
    return {
        "startup_seconds": 1.0, "step_seconds": [1.0, 1 / speed], "step_cpu_seconds": [0.0, 1.0], "step_units": [9, 90],
        "figures": [{}, found], "curve": [], "peak_bytes": 2**30, "peak_bytes_after_imports": 0, "options": ["so"],
    }  # fmt: skip


def test_the_table_has_a_dash_where_one_took_no_part_and_the_verdict_says_who_is_ahead(
    tiny, installed, quiet, monkeypatch
):
    monkeypatch.setattr(decode, "write_model", lambda path, shape, with_gguf: None)
    theirs = {name: f"compare.baselines.llama_cpp {name.split('-')[1]}" for name in LLAMA}
    speeds = {BF16: 2.0, INT8: 3.0, "penjing-float32": 1.0, "penjing-serve": 1.9}
    speeds |= dict(zip(LLAMA, (4.0, 2.0), strict=True))

    def run(module, spec, folder):
        name = next(name for name, of in {**Decode.ours, **theirs}.items() if of == module)
        rates = {"rate_3": 30.0} if name != "penjing-serve" else {}
        return {**trial(speeds[name], rate_1=90.0, **rates), "process_seconds": 1.0}

    words = {"run": None, "data": None, "quick": True, "settings": (), "trials": 1, "threads": 1, "trial": run}
    record = run_comparison(quiet, method="decode", baseline=",".join(LLAMA), **words)
    json.dumps(record)
    table = Decode().table(record, "26m")
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.headings[1:] == list(speeds)
    assert rows["batch 3, tokens/s"][list(speeds).index("penjing-serve")] == "-"
    assert rows["batch 1, tokens/s"][0] == "180" and rows["first token after 4, ms"][0] == "500"
    said = " ".join(quiet.file.getvalue().split())
    assert f"{BF16} / llama.cpp-f16, tokens/s: 0.50 x; goal at least 1 x: missed" in said
    assert f"{INT8} / llama.cpp-q8_0, tokens/s: 1.50 x; goal at least 1 x: reached" in said
    behind = f"{BF16} beside llama.cpp-f16: ahead: peak memory 1.00 x; behind: first token after 4 0.50 x"
    assert behind in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py", "--method", "decode"), "python benchmarks/decode.py"),
        pytest.param(("train.py", "--baseline", "nobody"), "--baseline: no such baseline", marks=pytest.mark.nightly),
        pytest.param(("decode.py", "--resume"), "--resume", marks=pytest.mark.nightly),
    ],
)
def test_the_scripts_refuse_in_one_line(words, said):
    folder = Path(decode.__file__).parents[1]
    command = [sys.executable, str(folder / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1

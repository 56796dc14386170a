"""Small random models behind the real app on a real port."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from small_models import small_model

from penjing.agent_tools.box import Toolbox
from penjing.checkpoint.load import Checkpoint
from penjing.data.tokenizer.train import train_tokenizer
from penjing.infer.generate import make_engine
from penjing.serve.app import make_app
from penjing.serve.connection import make_server
from penjing.serve.models import Models, ServedModel
from penjing.train.config import DataSettings, Run
from penjing.train.load_model import LoadedModel

TEXTS = ["so it is, and so it was: 北京和上海 have 12 kites", '{"name": "calculator", "arguments": {}}'] * 9
CONTEXT = 256


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(TEXTS, 330)


@pytest.fixture(scope="session")
def make_served(tokenizer):
    """A model by name, of random weights; `answers`: as if it had learned conversations."""

    def make(name, *, answers=True, slots=4, seed=0, context=CONTEXT, **engine):
        model = small_model(seed=seed, vocab_size=tokenizer.size, max_position_embeddings=context).eval()
        data = DataSettings(format="chats" if answers else "documents", seq_len=context)
        run = Run(stage="external", out=name, model=model.config, data=data)
        loaded = LoadedModel(model, tokenizer, run, Checkpoint(Path(name), 7, ()))
        return ServedModel(name, loaded, make_engine(model, slots=slots, max_tokens=context, **engine))

    return make


class Running:
    """A server in a thread of its own."""

    def __init__(self, app):
        self.app = app
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(app)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def hub(self):
        return self.app.state.service.hub

    def idle(self, seconds=60):
        """Wait until no answer has a slot or waits."""
        limit = time.monotonic() + seconds
        while any(each["active"] or each["waiting"] for each in self.hub.statistics().values()):
            assert time.monotonic() < limit, self.hub.statistics()
            time.sleep(0.002)

    def chat(self, **fields):
        asked = {"model": "chat", "messages": [{"role": "user", "content": "so it is"}], "max_tokens": 8}
        return self.http.post("/v1/chat/completions", json=asked | fields)

    def stop(self):
        self.server.servers[0].get_loop().call_soon_threadsafe(self.server.stop)  # a loop is not for two threads
        self.thread.join(40)
        assert not self.thread.is_alive()
        self.http.close()
        self.openai.close()


@pytest.fixture(scope="session")
def start():
    """Serve models until the end of a `with` block."""

    @contextlib.contextmanager
    def run(*served, tools=(), **settings):
        settings = {"max_tokens": 64, **settings}
        running = Running(make_app(Models(served), Toolbox(tools), **settings))
        try:
            yield running
        finally:
            running.stop()

    return run


@pytest.fixture(scope="session")
def serving(start, make_served):
    """One server that most tests share: `chat` answers, `base` continues texts."""
    with start(make_served("chat"), make_served("base", answers=False, seed=1), tools=["calculator"]) as running:
        yield running


@pytest.fixture
def client(serving):
    return serving.openai


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tokenizer):
    """A Hugging Face folder of a small model."""
    from penjing.export import hf

    model = small_model(vocab_size=tokenizer.size, max_position_embeddings=512).eval()
    out = tmp_path_factory.mktemp("served") / "kite"
    hf.export(model, tokenizer, out, card="")
    return out

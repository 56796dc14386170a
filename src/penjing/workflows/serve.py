"""Start a server: load the models, say where they are, and answer until told to stop."""

from __future__ import annotations

import ipaddress
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.errors import UserError, import_extra
from penjing.base.markup import print_table

if TYPE_CHECKING:
    from penjing.agent_tools.box import Toolbox
    from penjing.serve.connection import Server
    from penjing.serve.models import Models
    from penjing.workflows.serve_models import ServeOptions

OPEN_FILES = 65_536  # wanted: a connection is one


class OpenServer(NamedTuple):
    """A server whose address is taken and whose models are loaded; `server.run(sockets=[listener])` answers."""

    server: Server
    listener: socket.socket
    models: Models
    address: str


def start(words: Sequence[str], options: ServeOptions, console: Console) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError for models, addresses and keys that cannot be used."""
    with open_server(words, options) as opened:
        print_table(console, ("model", "parameters", "context", "it", "slots", "cache"), _rows(opened.models))
        for line in _greeting(opened.address, opened.models, bool(options.key)):
            console.print(line, highlight=False, soft_wrap=True)
        opened.server.run(sockets=[opened.listener])
    console.print("stopped", highlight=False)


@contextmanager
def open_server(words: Sequence[str], options: ServeOptions) -> Iterator[OpenServer]:
    """Take the address and load the models. Raises UserError for what cannot be used."""
    for module in ("fastapi", "httptools", "llguidance", "uvicorn"):
        import_extra(module, "serve")
    from penjing.agent_tools.box import Toolbox
    from penjing.serve.app import make_app
    from penjing.serve.connection import make_server
    from penjing.train.load_model import set_threads
    from penjing.workflows.serve_models import load_models

    loopback_only = is_loopback(options.host)
    _check_key(options.key, options.host, loopback_only)
    toolbox = Toolbox(options.tools)
    with closing(listen(options.host, options.port)) as listener:
        set_threads(0, 1)
        models = load_models(words, options)
        check_tools(models, toolbox)
        app = make_app(models, toolbox, key=options.key, loopback_only=loopback_only, max_tokens=options.max_tokens)
        _allow_open_files()
        address = f"http://{shown_host(options.host)}:{listener.getsockname()[1]}"
        yield OpenServer(make_server(app), listener, models, address)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_key(key: str, host: str, loopback_only: bool) -> None:
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError("cannot be sent in a header", where="the API key", wanted="letters, digits and signs, no space")
    if not key and not loopback_only:
        hint = "Set PENJING_API_KEY to a long secret; clients send it as their OpenAI key."
        raise UserError("others could reach the server: it needs a key", where="--host", got=host, next_step=hint)


def check_tools(models: Models, toolbox: Toolbox) -> None:
    """Raises UserError where the tools' descriptions leave no model space for an answer."""
    from penjing.data.chat.render import render
    from penjing.data.formats import Message

    chats = [model for model in models.served.values() if model.loaded.answers or model.chat_adapters]
    if not toolbox or not chats:
        return
    model = max(chats, key=lambda model: model.context)
    taken = len(render(model.tokenizer, [Message(role="user", content="")], toolbox.schemas, ask=True).ids)
    if taken >= model.context:
        what = "their descriptions fill what the model reads"
        wanted = f"well under {model.context:,}, of {model.name}"
        hint = "Name fewer tools, or train with a longer data.seq_len."
        raise UserError(what, where="--tools", got=f"{taken:,} tokens", wanted=wanted, next_step=hint)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port in use is told before anything is loaded: two may bind one, one listens."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # IPv4 too at `::`
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"cannot listen there: {error.strerror}", where=f"{host}:{port}", next_step="Another --port may be free."
        ) from None


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _rows(models: Models) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in models.names:
        model, adapter = models.find(name)
        does = "answers" if model.is_chat(adapter) else "continues texts"
        own = (str(model.engine.capacity), units.megabytes(model.cache_bytes)) if name == model.name else ("", "")
        rows.append((name, units.count(model.parameters), f"{model.context:,}", does, *own))
    return rows


def _greeting(address: str, models: Models, has_key: bool) -> list[str]:
    """Where it is, and a line to try."""
    name = models.names[0]
    key = ' -H "Authorization: Bearer $PENJING_API_KEY"' if has_key else ""
    if models.find(name)[0].loaded.answers:
        path, asked = "chat/completions", '"temperature": 0, "messages": [{"role": "user", "content": "Hello"}]'
    else:
        path, asked = "completions", '"prompt": "Once upon a time", "max_tokens": 50'
    return [
        f"chat page: {address}/    OpenAI's API: {address}/v1    Ctrl-C stops",
        f'curl {address}/v1/{path}{key} -H "Content-Type: application/json" -d \'{{"model": "{name}", {asked}}}\'',
    ]


def shown_host(host: str) -> str:
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"[{host}]" if ":" in host else host

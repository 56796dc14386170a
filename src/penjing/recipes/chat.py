"""Talk to a trained model in the terminal. Run: penjing chat runs/quickstart"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penjing.base import units
from penjing.infer.engine import stream
from penjing.infer.sample import Sampling
from penjing.model.lora import names, use
from penjing.model.transformer import Transformer
from penjing.recipes.adapter import attach_adapters
from penjing.text.chat import render
from penjing.text.records import Message
from penjing.train.folder import Trained, load_trained, set_threads

HELP = "Empty line or Ctrl-D ends, /new forgets what was said."
ADAPTERS_HELP = "/adapter NAME switches, /adapter none is the base alone."


def chat(
    path: Path,
    console: Console,
    *,
    prompt: str | None,
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    adapters: Sequence[str] = (),
) -> None:
    """One answer to `prompt`, or a conversation until the user ends it. adapters: DIR or NAME=DIR, the first in use."""
    set_threads(0, 1)
    trained = load_trained(path)
    given = attach_adapters(trained, adapters)
    taught = any(adapter.facts.get("learned_from") == "chats" for adapter in given.values())
    answers = taught or trained.run.data.kind == "chats"
    if prompt is not None:
        _reply(trained, [Message(role="user", content=prompt)], console, answers, sampling, max_tokens, seed)
        return
    what = "answers" if answers else "was only pretrained: it continues what you write"
    console.print(f"{trained.run.out}, step {trained.checkpoint.step}, {what}. {HELP}", highlight=False)
    if names(trained.model):
        console.print(f"adapters: {', '.join(names(trained.model))}. {ADAPTERS_HELP}", highlight=False)
    said: list[Message] = []
    while True:
        try:
            line = console.input("[bold]> [/]")
        except (EOFError, KeyboardInterrupt):
            return
        if not line.strip():
            return
        if line.strip() == "/new":
            said = []
            continue
        if line.split()[0] == "/adapter":
            _switch(trained.model, line.split()[1:], console)
            continue
        said = [*said, Message(role="user", content=line)] if answers else [Message(role="user", content=line)]
        said = _fit(trained, said, max_tokens)
        answer = _reply(trained, said, console, answers, sampling, max_tokens, seed)
        said.append(Message(role="assistant", content=answer))


def _switch(model: Transformer, words: list[str], console: Console) -> None:
    """Use another adapter; without a name, or with a wrong one, say which there are."""
    known = names(model)
    if len(words) == 1 and words[0] in (*known, "none"):
        use(model, None if words[0] == "none" else words[0])
        console.print(f"adapter: {words[0]}", highlight=False)
    else:
        console.print(f"adapters: {', '.join((*known, 'none'))}", highlight=False)


def _fit(trained: Trained, said: list[Message], max_tokens: int) -> list[Message]:
    """Forget the oldest exchanges when the conversation would not leave room for an answer."""
    room = min(trained.run.data.row_tokens, trained.run.model.max_tokens) - min(max_tokens, 64)
    while len(said) > 2 and len(render(trained.tokenizer, said, ask=True).ids) > room:
        said = said[2:]
    return said


def _reply(
    trained: Trained,
    said: list[Message],
    console: Console,
    answers: bool,
    sampling: Sampling,
    max_tokens: int,
    seed: int,
) -> str:
    """Write the answer as it comes; returns it whole."""
    tokenizer = trained.tokenizer
    prompt = said[-1].content
    ids = render(tokenizer, said, ask=True).ids if answers else [tokenizer.begin, *tokenizer.encode(prompt)]
    stop = tokenizer.stop
    written: list[int] = []
    shown = ""
    began = time.perf_counter()
    for pairs in stream(trained.model, [ids], max_new_tokens=max_tokens, stop=stop, sampling=sampling, seed=seed):
        written.append(pairs[0][1])
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # the middle of a character
            console.out(text[len(shown) :], end="", highlight=False)
            shown = text
    whole = tokenizer.decode(written)
    console.out(whole[len(shown) :], highlight=False)
    if console.is_terminal:
        rate = len(written) / max(1e-9, time.perf_counter() - began)
        console.print(f"[dim]{len(written)} tokens, {units.count(rate)}/s[/]", highlight=False)
    return whole

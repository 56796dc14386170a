"""Talk to a trained model in the terminal. Run: penjing chat runs/quickstart"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from penjing.base import units
from penjing.infer.engine import stream
from penjing.infer.sample import Sampling
from penjing.text.chat import render
from penjing.text.records import Message
from penjing.train.folder import Trained, load_trained, set_threads

HELP = "Empty line or Ctrl-D ends, /new forgets what was said."


def chat(path: Path, console: Console, *, prompt: str | None, sampling: Sampling, max_tokens: int, seed: int) -> None:
    """One answer to `prompt`, or a conversation until the user ends it."""
    set_threads(0, 1)
    trained = load_trained(path)
    answers = trained.run.data.kind == "chats"
    if prompt is not None:
        _reply(trained, [Message(role="user", content=prompt)], console, answers, sampling, max_tokens, seed)
        return
    what = "answers" if answers else "was only pretrained: it continues what you write"
    console.print(f"{trained.run.out}, step {trained.checkpoint.step}, {what}. {HELP}", highlight=False)
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
        said = [*said, Message(role="user", content=line)] if answers else [Message(role="user", content=line)]
        said = _fit(trained, said, max_tokens)
        answer = _reply(trained, said, console, answers, sampling, max_tokens, seed)
        said.append(Message(role="assistant", content=answer))


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
    ids = render(tokenizer, said, ask=True).ids if answers else [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    stop = {tokenizer.message_end, tokenizer.end_of_text}
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

"""penjing chat: a conversation with a model in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from penjing.agent_tools.box import Toolbox
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.data.chat.render import parse_switch, render
from penjing.data.chat.turn_parser import TurnSpan, parts
from penjing.data.formats import Message
from penjing.export.adapter import attach_adapters
from penjing.infer.generate import stream
from penjing.infer.sample import Sampling
from penjing.infer.tool_loop import ToolExchange, ToolLoop
from penjing.model.lora import names, set_adapter
from penjing.model.transformer import Transformer
from penjing.train.load_model import LoadedModel, load_trained, set_threads, use_device

HELP = "Empty line or Ctrl-D ends, /new starts a new conversation, /think on, off or auto sets reasoning."
ADAPTERS_HELP = "/adapter NAME switches, /adapter none is the base alone."
MOST_TURNS = 8  # of the model in one answer


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How answers are generated. thinking: see data/chat/render.py. max_tokens: of one turn."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 200
    seed: int = 0
    thinking: bool | None = None
    toolbox: Toolbox = field(default_factory=lambda: Toolbox(()))


def chat(
    path: Path,
    console: Console,
    options: GenerationOptions,
    *,
    prompt: str | None = None,
    adapters: Sequence[str] = (),
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """One answer to `prompt`, or a conversation until the user ends it. adapters: DIR or NAME=DIR, the first is active.

    Raises UserError for reasoning or tools with a model that was only pretrained.
    """
    set_threads(0, 1)
    trained = load_trained(path)
    given = attach_adapters(trained, adapters)
    use_device(trained.model, device, dtype)
    taught = any(adapter.facts.get("learned_from") == "chats" for adapter in given.values())
    answers = taught or trained.answers
    if (options.toolbox or options.thinking is not None) and not answers:
        raise UserError("was only pretrained: it has no reasoning and no tools", where=path)
    if prompt is not None:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError("is not UTF-8", where="--prompt") from None
        _reply(trained, [Message(role="user", content=prompt)], console, answers, options)
        return
    what = "answers" if answers else "was only pretrained: it continues what you write"
    console.print(f"{trained.run.out}, step {trained.checkpoint.step}, {what}. {HELP}", highlight=False)
    if names(trained.model):
        console.print(f"adapters: {', '.join(names(trained.model))}. {ADAPTERS_HELP}", highlight=False)
    if options.toolbox:
        console.print(f"tools: {', '.join(options.toolbox.tools)}", highlight=False)
    said: list[Message] = []
    while True:
        try:
            line = console.input(Text("> ", style="bold"))
            line.encode()  # half a character, if the terminal allows one
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeError:
            console.print("not UTF-8; try again", style="yellow", highlight=False)
            continue
        if not line.strip():
            return
        if line.strip() == "/new":
            said = []
            continue
        if line.split()[0] == "/adapter":
            _switch(trained.model, line.split()[1:], console)
            continue
        if line.split()[0] == "/think":
            options = _think(options, line.split()[1:], console)
            continue
        asked = [*said, Message(role="user", content=line)] if answers else [Message(role="user", content=line)]
        try:
            asked = _fit(trained, asked, options)
            said = asked + _reply(trained, asked, console, answers, options)
        except UserError as error:  # such as a line that is too long: the conversation so far stays
            console.print(error.line(), style="red", highlight=False, markup=False)


def _switch(model: Transformer, words: list[str], console: Console) -> None:
    """Switch the adapter; without a known name, list the adapters."""
    known = names(model)
    if len(words) == 1 and words[0] in (*known, "none"):
        set_adapter(model, None if words[0] == "none" else words[0])
        console.print(f"adapter: {words[0]}", highlight=False)
    else:
        console.print(f"adapters: {', '.join((*known, 'none'))}", highlight=False)


def _think(options: GenerationOptions, words: list[str], console: Console) -> GenerationOptions:
    """Switch reasoning; without a known position, list the positions."""
    if words == ["on"] or words == ["off"] or words == ["auto"]:
        console.print(f"thinking: {words[0]}", highlight=False)
        return replace(options, thinking=parse_switch(words[0]))  # type: ignore[arg-type]  # one of the three
    console.print("thinking: on, off or auto", highlight=False)
    return options


def _fit(trained: LoadedModel, said: list[Message], options: GenerationOptions) -> list[Message]:
    """Drop the oldest exchanges if the conversation leaves too few tokens for an answer."""
    room = trained.context_tokens - min(options.max_tokens, 64)
    while len(said) > 2 and len(_prompt(trained, said, options)) > room:
        following = next((at for at in range(1, len(said)) if said[at].role == "user"), len(said) - 1)
        said = said[following:]
    return said


def _prompt(trained: LoadedModel, said: Sequence[Message], options: GenerationOptions) -> list[int]:
    return render(trained.tokenizer, said, options.toolbox.schemas, ask=True, thinking=options.thinking).ids


def _reply(
    trained: LoadedModel, said: list[Message], console: Console, answers: bool, options: GenerationOptions
) -> list[Message]:
    """Stream the answer, run the tools it calls, and continue; returns the new messages."""
    tokenizer = trained.tokenizer
    if not answers:
        ids = [tokenizer.begin, *tokenizer.encode(said[-1].content)]
        written = _write(trained, ids, console, answers, options)
        return [Message(role="assistant", content=tokenizer.decode(written))]
    turns = ToolLoop(tokenizer, options.toolbox, max_turns=MOST_TURNS, thinking=options.thinking)
    ids = _prompt(trained, said, options)
    longest = trained.model.config.max_position_embeddings
    remembered: list[Message] = []
    for number in range(1, MOST_TURNS + 1):
        written = _write(trained, ids, console, answers, options)
        stopped = len(written) < options.max_tokens and len(ids) + len(written) < longest
        given = turns.after(written) if options.toolbox and stopped else None
        exchange = given.note if given is not None else ToolExchange(said=turns.parsed(written))
        remembered.append(exchange.said.message)
        remembered += [Message(role="tool", content=result.text) for result in exchange.results]
        for result in exchange.results:
            console.print(f"  = {result.text}", style="cyan", highlight=False, markup=False)
        if given is None or number == MOST_TURNS:
            break
        ids = [*ids, *written, tokenizer.message_end, *given.ids]
        if len(ids) >= longest:
            console.print("(the context is full)", style="dim")
            break
    return remembered


def _write(
    trained: LoadedModel, ids: Sequence[int], console: Console, answers: bool, options: GenerationOptions
) -> list[int]:
    """Stream one turn; returns its ids without the stop token."""
    tokenizer = trained.tokenizer
    written: list[int] = []
    screen = _Screen(console)
    began = time.perf_counter()
    for pairs in stream(
        trained.model,
        [ids],
        max_new_tokens=options.max_tokens,
        stop=tokenizer.stop,
        sampling=options.sampling,
        seed=options.seed,
    ):
        written.append(pairs[0][1])
        screen.show(
            parts(tokenizer, written, thinking=options.thinking)
            if answers
            else [TurnSpan("words", tokenizer.decode(written))]
        )
    screen.end()
    if console.is_terminal:
        rate = len(written) / max(1e-9, time.perf_counter() - began)
        console.print(Text(f"{len(written)} tokens, {units.count(rate)}/s", style="dim"))
    return written


class _Screen:
    """A turn on the terminal: reasoning dim and apart from the answer, each tool call on its own line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.part = TurnSpan("words", "")  # that is being written
        self.number = -1  # of that part
        self.shown = 0  # characters of it

    def show(self, found: Sequence[TurnSpan]) -> None:
        """Print what is new since the last call. Line ends and incomplete characters wait for what follows."""
        for number in range(max(0, self.number), len(found)):
            part = found[number]
            if not part.text.strip() and (part.kind == "thought" or (part.kind == "words" and number > 0)):
                continue  # an empty thought, or the newline between two calls
            if number != self.number:
                if self.number >= 0:
                    self._close()
                self.number, self.shown = number, 0
                if part.kind == "thought":
                    self.console.print("thinking: ", style="dim", end="")
            self.part = part
            self._more("\n\ufffd")

    def end(self) -> None:
        """Print what still waits, and the end of the line."""
        self._more("" if self.part.kind == "words" else "\n")
        self._close()

    def _more(self, waiting: str) -> None:
        if self.part.kind == "call":
            return
        is_first = self.part.kind == "words" and self.number == 0
        text = self.part.text if is_first else self.part.text.lstrip("\n")
        text = text.rstrip(waiting) if waiting else text
        if len(text) > self.shown:
            style = "dim" if self.part.kind == "thought" else None
            self.console.out(text[self.shown :], end="", style=style, highlight=False)
            self.shown = len(text)

    def _close(self) -> None:
        if self.part.kind == "call":
            self.console.print(f"  {_call_line(self.part.text)}", style="cyan", highlight=False, markup=False)
            return
        self.console.out("\n" if self.part.kind == "thought" else "", highlight=False)


def _call_line(text: str) -> str:
    """`calculator(expression=1+2)`; a malformed call as it is."""
    try:
        call: Any = json.loads(text)
        words = ", ".join(f"{name}={value}" for name, value in call["arguments"].items())
        return f"{call['name']}({words})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return " ".join(text.split())

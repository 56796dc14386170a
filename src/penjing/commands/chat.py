"""penjing chat: a conversation with a model in the terminal."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from penjing.base.errors import UserError
from penjing.commands.chat_commands import COMMANDS, Answer, command_of
from penjing.commands.chat_input import Reader, is_interactive, make_reader
from penjing.commands.chat_screen import Screen
from penjing.export.adapter import attach_adapters
from penjing.infer.conversation import Conversation, GenerationOptions
from penjing.infer.forward import Weights, bytes_per_slot
from penjing.infer.generate import make_engine
from penjing.model.transformer import Transformer
from penjing.train.load_model import LoadedModel, load_trained, set_threads, use_device

LARGEST_CACHE_BYTES = 1 << 30  # of keys and values


def chat(
    path: Path,
    console: Console,
    options: GenerationOptions,
    *,
    prompt: str | None = None,
    adapters: Sequence[str] = (),
    device: str = "auto",
    dtype: str = "auto",
    weights: Weights = "auto",
) -> None:
    """One answer to `prompt`, or a conversation until the user ends it. adapters: `attach_adapters` reads them.

    Raises UserError for reasoning or tools with a model that was only pretrained.
    """
    set_threads(0, 1)
    trained = load_trained(path)
    given = attach_adapters(trained, adapters)
    use_device(trained.model, device, dtype)
    answers = trained.answers or any(adapter.is_chat_tuned for adapter in given.values())
    if (options.toolbox or options.thinking is not None) and not answers:
        raise UserError("was only pretrained: it has no reasoning and no tools", where=path)
    if prompt is not None:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError("is not UTF-8", where="--prompt") from None
    with make_engine(trained.model, slots=1, max_tokens=_cache_tokens(trained.model), weights=weights) as engine:
        talk = Conversation(
            engine, trained.tokenizer, options, is_chat_model=answers, context_tokens=trained.context_tokens
        )
        if prompt is not None:
            Screen(console).show(talk.ask(prompt))
            return
        _welcome(trained, talk, console)
        reader = make_reader(console, COMMANDS)
        converse(talk, reader, console, ends_with_empty_line=not is_interactive(console))


def _welcome(trained: LoadedModel, talk: Conversation, console: Console) -> None:
    what = "answers" if talk.is_chat_model else "was only pretrained: it continues what you write"
    end = "Ctrl-D" if is_interactive(console) else "an empty line or Ctrl-D"
    lines = [f"{trained.run.out}, step {trained.checkpoint.step}, {what}. /help lists commands, {end} ends."]
    if adapters := talk.engine.forward.adapters:
        lines.append(f"adapters: {', '.join(adapters)}; /adapter NAME switches")
    if tools := talk.options.toolbox.tools:
        lines.append(f"tools: {', '.join(tools)}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _cache_tokens(model: Transformer) -> int:
    """Positions of the cache: the model's longest sequence, halved until keys and values take no more than a GiB."""
    tokens = model.config.max_position_embeddings
    while bytes_per_slot(model.config, tokens, model.compute_dtype or torch.float32) > LARGEST_CACHE_BYTES:
        tokens //= 2
    return tokens


def converse(talk: Conversation, reader: Reader, console: Console, *, ends_with_empty_line: bool) -> None:
    """Answer lines and follow commands until the input ends."""
    while True:
        try:
            line = reader.read()
            line.encode()  # half a character, if the terminal allows one
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeError:
            console.print("not UTF-8; try again", style="yellow", highlight=False)
            continue
        if not line.strip():
            if ends_with_empty_line:
                return
            continue
        try:
            command, rest = command_of(line)
            said: str | Answer = command.run(talk, rest) if command else talk.ask(line)
            if isinstance(said, str):
                console.print(said, highlight=False, markup=False)
            else:
                with _interrupt_stops(talk):
                    Screen(console).show(said)
        except UserError as error:  # such as a line that is too long: the conversation so far stays
            console.print(error.line(), style="red", highlight=False, markup=False)


@contextmanager
def _interrupt_stops(talk: Conversation) -> Iterator[None]:
    """Ctrl-C ends the answer, and what was written is kept; a second one ends the program, as ever."""
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        talk.stop()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What a line of `penjing chat` that begins with a slash does: a table of commands."""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penjing.base.config import convert
from penjing.base.errors import UserError, nearest
from penjing.base.files import disk_errors
from penjing.infer.conversation import ChatEvent, Conversation

Answer = Iterator[ChatEvent]
Run = Callable[[Conversation, str], str | Answer]
SWITCHES = {"on": True, "off": False, "auto": None}


@dataclass(frozen=True)
class ChatCommand:
    """run: takes the conversation and the text behind the command; returns a line to print, or an answer to show."""

    argument: str
    what: str
    run: Run


def command_of(line: str) -> tuple[ChatCommand | None, str]:
    """The command that a line begins with, and the text behind it. None: the line is for the model.

    Raises UserError for a command that there is not.
    """
    found = re.match(r"(/[a-z_]+)(?:\s+|$)", line)
    if not found:
        return None, line
    if found[1] not in COMMANDS:
        begun = [name for name in COMMANDS if name.startswith(found[1])]
        best = begun[0] if begun else nearest(found[1], [*COMMANDS])
        hint = f"Did you mean {best}?" if best else "/help lists them."
        raise UserError("no such command", where=found[1], next_step=hint)
    return COMMANDS[found[1]], line[found.end() :].strip()


def _system(talk: Conversation, text: str) -> str:
    _needs_chats(talk)
    talk.system = text
    return "system prompt set" if text else "no system prompt"


def _sampling(talk: Conversation, text: str, *, name: str) -> str:
    """Set it; without a value show it. Raises UserError for a value out of range."""
    if text:
        value = convert(float, text, f"/{name}")
        talk.options = replace(talk.options, sampling=replace(talk.options.sampling, **{name: value}))
    return f"{name}: {getattr(talk.options.sampling, name):g}"


def _think(talk: Conversation, text: str) -> str:
    _needs_chats(talk)
    if text and text not in SWITCHES:
        raise UserError("no such position", where="/think", got=text, wanted="on, off or auto")
    if text:
        talk.options = replace(talk.options, thinking=SWITCHES[text])
    return f"thinking: {next(word for word, switch in SWITCHES.items() if switch is talk.options.thinking)}"


def _adapter(talk: Conversation, text: str) -> str:
    known = talk.engine.forward.adapters
    if text and text not in (*known, "none"):
        raise UserError("no such adapter", where="/adapter", got=text, wanted=", ".join((*known, "none")))
    if text:
        talk.options = replace(talk.options, adapter="" if text == "none" else text)
        return f"adapter: {text}"
    return f"adapters: {', '.join((*known, 'none'))}"


def _save(talk: Conversation, text: str) -> str:
    """Append the conversation to a file: several saved ones are a data set."""
    if not text:
        raise UserError("no file given", where="/save", wanted="/save chats.jsonl")
    line, path = json.dumps(talk.record(), ensure_ascii=False), Path(os.path.expanduser(text))
    with disk_errors(path), open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    return f"{path}: {len(talk.messages)} messages added"


def _new(talk: Conversation, text: str) -> str:
    talk.clear()
    return "a new conversation"


def _help(talk: Conversation, text: str) -> str:
    shown = [(f"{name} {command.argument}".strip(), command.what) for name, command in COMMANDS.items()]
    return "\n".join(f"{name:<21} {what}" for name, what in shown)


def _needs_chats(talk: Conversation) -> None:
    if not talk.is_chat_model:
        raise UserError("the model was only pretrained: it goes on from your text, and has neither turns nor thoughts")


COMMANDS = {
    "/system": ChatCommand("[TEXT]", "system prompt, from now on; without a text none", _system),
    "/temperature": ChatCommand("[X]", "0: the likeliest token each time", partial(_sampling, name="temperature")),
    "/top_p": ChatCommand(
        "[X]", "draw from the likeliest tokens with this total probability", partial(_sampling, name="top_p")
    ),
    "/think": ChatCommand("[on|off|auto]", "reason before answering; auto: the model decides", _think),
    "/adapter": ChatCommand("[NAME|none]", "switch the adapter; none: the base alone", _adapter),
    "/retry": ChatCommand("", "another answer to the last question, with the next seed", lambda talk, _: talk.retry()),
    "/new": ChatCommand("", "forget the conversation", _new),
    "/save": ChatCommand("FILE", "append the conversation to a JSONL file, for penjing train sft", _save),
    "/help": ChatCommand("", "this list", _help),
}

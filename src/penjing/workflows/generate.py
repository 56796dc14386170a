"""penjing generate: answer a file of prompts.

The output is a file of conversations. Training on it (penjing train sft data.train=ANSWERS.jsonl) distils the model
into another one, with any vocabulary.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penjing.base.errors import UserError
from penjing.base.files import disk_errors, read_json, sha256_text, write_json
from penjing.base.lock import unfinished
from penjing.base.seeds import derive
from penjing.data import formats as records
from penjing.data.chat.render import Switch, parse_switch, render
from penjing.data.chat.turn_parser import parse
from penjing.data.formats import BadRecords, Chat, Message, NoBadRecords, chat_record
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.forward import Weights
from penjing.infer.generate import sample_batch
from penjing.infer.requests import Completion, Request
from penjing.infer.sample import Sampling
from penjing.model.lora import fingerprint
from penjing.train.load_model import LoadedModel, load_trained, set_threads, use_device

PROMPTS_AT_ONCE = 128  # answered between two writes: the most that a stop loses


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """How prompts are answered. Saved beside the answers; must be the same when a file is continued."""

    answers: int = 1  # of each prompt
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    seed: int = 0
    thinking: Switch = "auto"  # on: answers begin inside reasoning; off: after empty reasoning; auto: the model decides
    cut: str = "drop"  # drop: leave out answers truncated at max_tokens; keep: keep them
    turns: str = "last"  # all: every question of a conversation is answered, each after the model's own answers before
    weights: Weights = "auto"  # int8: quantised while loading

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers written, and answers left out: truncated, empty, or with a prompt that is too long. not_asked: prompts
    that are conversations with an empty answer."""

    written: int
    left_out: int
    not_asked: int


def generate_file(
    path: Path,
    prompts: Sequence[Path],
    out: Path,
    console: Console,
    options: AnswerOptions,
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> Outcome:
    """Answer every prompt and write one conversation a line, in the order of the prompts.

    A prompt is a conversation that ends with a question; of one that has an answer already, the last answer is given
    anew (or all of them, with turns=all). Killed anywhere, the same call goes on. Each answer depends on the seed and
    its prompt's place alone.
    Raises UserError if `out` holds answers of another model, other prompts, other settings or another dtype.
    """
    options.sampling  # noqa: B018 (raises on settings that cannot be, before a model is read)
    if options.answers > 1 and options.sampling.is_greedy:
        what = f"all {options.answers} answers to a prompt would be the same one"
        raise UserError(what, where="--answers", wanted="--temperature above 0, such as 0.8")
    set_threads(0, 1)
    counts = NoBadRecords()
    chats = list(read_questions(prompts, counts))
    trained = load_trained(path, adapters="merged")
    if not trained.answers:
        raise UserError("was only pretrained, and does not answer", where=path, wanted="a model taught conversations")
    model_sha256 = fingerprint(trained.model)
    _, chosen = use_device(trained.model, device, dtype)
    about = {
        "model": str(path),
        "model_sha256": model_sha256,
        "prompts": [str(each) for each in prompts],
        "prompts_sha256": sha256_text(
            json.dumps([chat_record(chat.messages, chat.tools) for chat in chats], ensure_ascii=False)
        ),
        "settings": asdict(options),
        "dtype": str(chosen).removeprefix("torch."),
    }
    with unfinished(out):  # for its lock: the answers are written to `out` itself
        state = _take_up(out, about)
        if state["done"] < len(chats):
            _answer(trained, chats, out, state, about, console, options)
    return Outcome(state["written"], state["left_out"], counts.reasons.total())


def read_questions(prompts: Sequence[Path], counts: BadRecords | None = None) -> Iterator[Chat]:
    """Conversations that end with a question, of files of either kind. counts: of those with an empty answer. Raises
    UserError at the first broken record: answers to part of a file would pass for answers to all of it."""
    for path in records.list_files(prompts):
        if records.sniff(path) == "prompts":
            yield from records.read_prompts([path])
            continue
        for chat in records.read_chats([path], bad_records=counts):
            answered = chat.messages[-1].role == "assistant"
            yield replace(chat, messages=chat.messages[:-1] if answered else chat.messages)


def _take_up(out: Path, about: dict[str, Any]) -> dict[str, int]:
    """How far the file is. What was written after the last saved state is truncated."""
    notes, state = _notes(out), {"done": 0, "written": 0, "left_out": 0, "bytes": 0}
    if out.exists() and not notes.is_file():
        raise UserError("is there already", where=out, next_step="Choose another --out.")
    if out.exists():  # notes of answers that were removed count no more
        known = {"dtype": "float32", **read_json(notes)}  # all were, before it was written down
        known["settings"] = {"weights": "auto", **known["settings"]}
        for name, value in about.items():
            if known.get(name) != value and name not in ("model", "prompts"):
                raise UserError(
                    f"these answers were started with another {name.removesuffix('_sha256')}",
                    where=out,
                    got=value if name == "settings" else value[:12],
                    wanted=known.get(name) if name == "settings" else known.get(name, "")[:12],
                    next_step="Choose another --out, or remove it.",
                )
        state = known["state"]
        if out.stat().st_size < state["bytes"]:
            what = "the file of answers is too short"
            wanted = f"at least the {state['bytes']:,} that were written"
            hint = "Choose another --out, or remove it."
            raise UserError(what, where=out, got=f"{out.stat().st_size:,} bytes", wanted=wanted, next_step=hint)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "ab") as stream:
            stream.truncate(state["bytes"])
    write_json(notes, {**about, "state": state})
    return state


def _notes(out: Path) -> Path:
    return out.with_name(out.name + ".about.json")


def _answer(
    trained: LoadedModel,
    chats: Sequence[Chat],
    out: Path,
    state: dict[str, int],
    about: dict[str, Any],
    console: Console,
    options: AnswerOptions,
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("prompts", total=len(chats), completed=state["done"])
        for first in range(state["done"], len(chats), PROMPTS_AT_ONCE):
            part = range(first, min(first + PROMPTS_AT_ONCE, len(chats)))
            lines = list(_lines(trained, chats, part, options))
            with disk_errors(out), open(out, "ab") as stream:
                stream.write("".join(line + "\n" for line in lines).encode())
                stream.flush()
                os.fsync(stream.fileno())
                state["bytes"] = stream.tell()
            state["done"] = part.stop
            state["written"] += len(lines)
            state["left_out"] += len(part) * options.answers - len(lines)
            write_json(_notes(out), {**about, "state": state})
            progress.update(task, completed=state["done"])


@dataclass(slots=True)
class _Dialogue:
    """A conversation in progress: its messages so far, and the messages before each answer to come."""

    chat: Chat  # its prompt
    index: int  # of that
    number: int  # among the answers to that prompt
    messages: list[Message]
    turns: list[tuple[Message, ...]]
    answered: int = 0


def _lines(trained: LoadedModel, chats: Sequence[Chat], part: Iterable[int], options: AnswerOptions) -> Iterator[str]:
    """The conversations of these prompts that got an answer. One that gets none, or has no room, ends before it."""
    talks = [
        _Dialogue(chats[index], index, number, [], split_turns(chats[index], options.turns))
        for index in part
        for number in range(options.answers)
    ]
    going = talks
    while going:
        going = _next_answers(trained, going, options)
    for talk in talks:
        if talk.answered:
            yield json.dumps(chat_record(talk.messages, talk.chat.tools), ensure_ascii=False)


def _next_answers(trained: LoadedModel, talks: Sequence[_Dialogue], options: AnswerOptions) -> list[_Dialogue]:
    """Give each conversation its next answer. Returns those that continue."""
    tokenizer, longest = trained.tokenizer, trained.model.config.max_position_embeddings
    thinks = parse_switch(options.thinking)
    prompts: dict[tuple[int, ...], list[_Dialogue]] = {}  # one read only once, however often it is answered
    for talk in talks:
        messages = [*talk.messages, *talk.turns[talk.answered]]
        ids = tuple(render(tokenizer, messages, talk.chat.tools, ask=True, thinking=thinks).ids)
        if len(ids) < longest:
            prompts.setdefault(ids, []).append(talk)
    requests = [
        Request(prompt=ids, seeds=[_seed(options, talk) for talk in sharing]) for ids, sharing in prompts.items()
    ]
    if not requests:
        return []
    with torch.no_grad():
        written = sample_batch(
            trained.model,
            requests,
            max_new_tokens=options.max_tokens,
            stop=tokenizer.stop,
            sampling=options.sampling,
            weights=options.weights,
        )
    going = []
    for sharing, answers in zip(prompts.values(), written, strict=True):
        for talk, answer in zip(sharing, answers, strict=True):
            message = _message(answer, tokenizer, options)
            if message is None:
                continue
            talk.messages += [*talk.turns[talk.answered], message]
            talk.answered += 1
            if talk.answered < len(talk.turns):
                going.append(talk)
    return going


def _seed(options: AnswerOptions, talk: _Dialogue) -> int:
    return derive(options.seed, "generate", talk.index, talk.number, *([talk.answered] if talk.answered else []))


def split_turns(chat: Chat, turns: str) -> list[tuple[Message, ...]]:
    """The messages before each answer that the model is to give: to the last question, or to each in turn. In turn, a
    conversation ends at a tool's result: it belongs to a call that the model may not make again."""
    if turns == "last":
        return [chat.messages]
    found: list[tuple[Message, ...]] = []
    said: list[Message] = []
    for message in chat.messages:
        if message.role == "tool":
            return found
        if message.role != "assistant":
            said.append(message)
        elif said:
            found.append(tuple(said))
            said = []
    return [*found, tuple(said)] if said else found


def _message(written: Completion, tokenizer: Tokenizer, options: AnswerOptions) -> Message | None:
    """The answer as a message, or None if it is left out."""
    if written.finish_reason != "stop" and options.cut == "drop":
        return None
    message = parse(tokenizer, written.ids, thinking=parse_switch(options.thinking)).message
    if "\\u0000" in json.dumps(message.tool_calls):
        return None
    # A weak model writes zero bytes too, which readers of conversations reject.
    content, thoughts = (text.strip().replace("\0", "\ufffd") for text in (message.content, message.reasoning_content))
    message = replace(message, content=content, reasoning_content=thoughts)
    return message if message.content or message.tool_calls else None

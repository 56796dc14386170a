"""penjing from Python: `from penjing.api import train, load, plan, serve`. docs/python.md shows each.

Settings are a mapping (`{"batch.size": 8}` or `{"batch": {"size": 8}}`), keywords (`max_steps=100`), or both. Mistakes
raise `UserError`. Nothing is imported before it is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.markup import Terminal, silent_console

if TYPE_CHECKING:
    import torch

    from penjing.data.tokenizer.tokenizer import Tokenizer
    from penjing.planner.report import PlanReport
    from penjing.train.load_model import LoadedModel

Messages = Sequence[Mapping[str, str]]  # each with role and content


@dataclass(frozen=True)
class Trained:
    """A finished run. outcome: what `outcome.json` holds."""

    folder: Path
    outcome: dict[str, Any]

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the last validation, such as `val_loss`."""
        return {name: value for name, value in self.outcome.items() if name.startswith("val_")}


def train(recipe: str, settings: Mapping[str, Any] | None = None, *, quiet: bool = False, **more: Any) -> Trained:
    """Train by a recipe or a TOML file. The same call again continues the run in `out`, or returns its outcome.

    quiet: print nothing. Raises UserError for settings, data and folders that cannot be used.
    """
    from penjing.workflows.train import execute, named_run

    run = named_run(recipe, config.nested({**(settings or {}), **more}))
    console = Terminal(markup=False, highlight=False)
    return Trained(Path(run.out), execute(run, silent_console(console) if quiet else console))


class Model:
    """A trained model on its device."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.module: torch.nn.Module = loaded.model
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.is_chat_model = loaded.answers

    def generate(
        self, prompts: Sequence[str | Messages], *, max_tokens: int = 200, seed: int = 0, **sampling: Any
    ) -> list[str]:
        """The text that follows each prompt: an answer of a chat model, else a continuation.

        prompts: texts, or conversations for a chat model. sampling: fields of `Sampling`, such as temperature (0, the
        default, is greedy), top_p and top_k. Raises UserError for a prompt that fills the context.
        """
        from penjing.data.chat.turn_parser import parse
        from penjing.infer.generate import generate
        from penjing.infer.sample import Sampling

        if isinstance(prompts, str):
            raise UserError("is a text", where="prompts", wanted="a list of prompts")
        drawn = config.resolve(Sampling, {}, sampling)
        ids = [self._prompt_ids(prompt) for prompt in prompts]
        stop = self.tokenizer.stop
        answers = generate(self._loaded.model, ids, max_new_tokens=max_tokens, stop=stop, sampling=drawn, seed=seed)
        if self.is_chat_model:
            return [parse(self.tokenizer, answer).content for answer in answers]
        return [self.tokenizer.decode(answer) for answer in answers]

    def logits(self, text: str) -> torch.Tensor:
        """Logits in float32, one row for each token of `text` after the token that begins a document."""
        import torch

        ids = [self.tokenizer.begin, *self.tokenizer.encode(text)]
        longest = self._loaded.model.config.max_position_embeddings
        if len(ids) > longest:
            raise UserError("the text is too long", got=f"{len(ids)} tokens", wanted=f"at most {longest}")
        with torch.inference_mode():
            found: torch.Tensor = self.module(torch.tensor([ids], device=next(self.module.parameters()).device))
        return found[0]

    def _prompt_ids(self, prompt: str | Messages) -> list[int]:
        from penjing.data.chat.render import render
        from penjing.data.formats import Message

        if self.is_chat_model:
            turns: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if any(set(turn) != {"role", "content"} for turn in turns):
                raise UserError("not a message", where="prompts", wanted="role and content")
            return render(
                self.tokenizer, [Message(role=turn["role"], content=turn["content"]) for turn in turns], ask=True
            ).ids
        if not isinstance(prompt, str):
            raise UserError("the model was only pretrained", where="prompts", wanted="texts, not conversations")
        return [self.tokenizer.begin, *self.tokenizer.encode(prompt)]


def load(path: str | Path, *, device: str = "auto", dtype: str = "auto") -> Model:
    """Load a run, a checkpoint's folder or an external model (a Hugging Face directory or hub name).

    Raises UserError if there is no model, or no such device or dtype.
    """
    from penjing.train.load_model import load_trained, use_device

    loaded = load_trained(Path(path), adapters="merged")
    use_device(loaded.model, device, dtype)
    loaded.model.eval()
    return Model(loaded)


def plan(
    recipe: str,
    settings: Mapping[str, Any] | None = None,
    *,
    gpu: str = "",
    gpus: int = 1,
    price: str = "",
    **more: Any,
) -> PlanReport:
    """Estimate a run: `predicted_seconds`, `peak_memory_bytes`, `flops_per_token`, `cost` and the other figures of
    `penjing plan`. Reads no data and times no steps.

    gpu: such as "RTX 3090"; empty: this machine. price: of one device per hour, such as "2.5USD". Raises UserError.
    """
    from penjing.planner.inputs import PlanOptions
    from penjing.planner.report import make_report
    from penjing.workflows.train import named_run

    run = named_run(recipe, config.nested({**(settings or {}), **more}))
    return make_report(recipe, run, PlanOptions(gpu=gpu, gpus=gpus, price=price))


@dataclass(frozen=True)
class Served:
    """A server that answers. OpenAI's API is at `url` + "/v1"."""

    url: str
    thread: threading.Thread

    def wait(self) -> None:
        """Block until Ctrl-C."""
        self.thread.join()


@contextmanager
def serve(*runs: str | Path, **options: Any) -> Iterator[Served]:
    """Serve runs in a thread while the block runs: `with serve("runs/sft", port=8000) as server`.

    options: fields of `ServeOptions`, such as host, port (0: any free one), key, device and dtype. Raises UserError
    for models, addresses and keys that cannot be used.
    """
    from penjing.workflows.serve import open_server
    from penjing.workflows.serve_models import ServeOptions

    unknown = set(options) - set(ServeOptions.__dataclass_fields__)
    if unknown:
        raise UserError(
            "no such option", where=", ".join(sorted(unknown)), wanted=", ".join(ServeOptions.__dataclass_fields__)
        )
    with open_server([str(run) for run in runs], ServeOptions(**options)) as opened:
        thread = threading.Thread(target=opened.server.run, kwargs={"sockets": [opened.listener]}, daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not opened.server.started:
                time.sleep(0.01)
            if not opened.server.started:
                raise UserError("the server did not start", where=opened.address)
            yield Served(opened.address, thread)
        finally:
            opened.server.should_exit = True
            thread.join()

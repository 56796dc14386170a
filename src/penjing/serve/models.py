"""Which models are served, and by what names. All are loaded at the start; no request can name another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import THINK, Tokenizer
from penjing.export.adapter import attach_adapters
from penjing.infer.engine import Engine
from penjing.infer.forward import Weights
from penjing.infer.generate import make_engine
from penjing.infer.grammar import JsonGrammars
from penjing.serve.errors import ApiError
from penjing.train.load_model import LoadedModel, load_trained, use_device
from penjing.train.run_dir import RunDir, is_run, stage_folder

_WORD = re.compile(r"(?:(?P<name>[^=@/]+)=)?(?P<path>[^@]+)(?:@(?P<step>[0-9]+))?")
STAGES = ("sft", "pretrain")  # of a quickstart's folder; the first is what its name means


@dataclass(frozen=True)
class ServedModel:
    """One model with its engine; `adapters` are served as `name:adapter`."""

    name: str
    loaded: LoadedModel
    engine: Engine
    adapters: tuple[str, ...] = ()
    taught: frozenset[str] = frozenset()  # adapters that learned from conversations

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.engine.max_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def answers(self) -> bool:
        """Whether it was taught conversations, and does not only continue texts."""
        return self.loaded.answers

    def answers_with(self, adapter: str | None) -> bool:
        """Whether it, or the adapter that is asked, was taught conversations."""
        return self.answers or (adapter or "") in self.taught

    @property
    def thinking(self) -> bool:
        """Whether `enable_thinking` does something."""
        template = self.tokenizer.template
        own = self.tokenizer.is_ours and self.tokenizer.has(THINK)
        return (self.answers or bool(self.taught)) and (
            own or (not self.tokenizer.is_ours and "enable_thinking" in template)
        )

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.loaded.model.parameters())

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all slots."""
        return self.engine.forward.bytes_per_slot * self.engine.forward.num_slots

    @cached_property
    def grammars(self) -> JsonGrammars:
        return JsonGrammars(self.tokenizer, self.loaded.model.config.vocab_size)


class Models:
    """The served models by every name that a request may use."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        self.served = {model.name: model for model in served}
        self._by_name: dict[str, tuple[ServedModel, str | None]] = {}
        for model in served:
            self._by_name[model.name] = (model, "" if model.adapters else None)
            for adapter in model.adapters:
                self._by_name[f"{model.name}:{adapter}"] = (model, adapter)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, name: str) -> tuple[ServedModel, str | None]:
        """A model, and the adapter that its name asks for. Raises ApiError for a name that is not served."""
        if name not in self._by_name:
            listed = ", ".join(self.names)[:300]
            raise ApiError(404, f"no such model; there are: {listed}", param="model", code="model_not_found")
        return self._by_name[name]


def load_models(
    words: Sequence[str], *, adapters: Sequence[str], device: str, dtype: str, weights: Weights, slots: int
) -> Models:
    """Load what the command line names: each word RUN, RUN@STEP or NAME=RUN; adapters, DIR or NAME=DIR, of the first.

    A quickstart's folder is served with both of its stages. Raises UserError for what is not there, and for two models
    of one name.
    """
    found: dict[str, Path] = {}
    for word in words:
        for name, path in _named(word):
            if name in found:
                raise UserError("two models of one name", where=word, got=name, next_step="Give them as NAME=RUN.")
            found[name] = path
    served = []
    for number, (name, path) in enumerate(found.items()):
        loaded = load_trained(path, adapters="merged")
        given = attach_adapters(loaded, adapters) if number == 0 else {}
        taught = frozenset(each for each, read in given.items() if read.facts.get("learned_from") == "chats")
        use_device(loaded.model, device, dtype)
        engine = make_engine(loaded.model, slots=slots, max_tokens=loaded.context_tokens, weights=weights)
        served.append(ServedModel(name, loaded, engine, tuple(given), taught))
    return Models(served)


def _named(word: str) -> list[tuple[str, Path]]:
    """The names and paths that one word of the command line stands for."""
    whole = None if Path(word).exists() else _WORD.fullmatch(word)
    called, text, step = (whole["name"], whole["path"], whole["step"]) if whole else (None, word, None)
    path = Path(text)
    name = called or (path.resolve().name if path.exists() else text)
    if step is not None:
        folder = RunDir(stage_folder(path)).checkpoints / f"step-{int(step):08d}"
        if not folder.is_dir():
            steps = ", ".join(
                str(int(each.name.removeprefix("step-"))) for each in sorted(folder.parent.glob("step-*"))
            )
            raise UserError("the run has no such checkpoint", where=word, got=step, wanted=steps or "none is there")
        return [(f"{name}@{int(step)}", folder)]
    stages = [stage for stage in STAGES if is_run(path / stage)]
    if RunDir(path).settings.is_file() or not stages:
        return [(name, path)]
    return [(name if number == 0 else f"{name}/{stage}", path / stage) for number, stage in enumerate(stages)]

"""The models that `penjing serve` was told to serve: their names, and where they are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penjing.base.errors import UserError
from penjing.data.corpus import PROMPT_CHARACTERS, Corpus
from penjing.export.adapter import attach_adapters
from penjing.infer.forward import Weights
from penjing.infer.generate import make_engine
from penjing.serve.models import Models, ServedModel
from penjing.track.run_dir import STAGES, RunDir, checkpoint_path, is_run
from penjing.train.config import Run
from penjing.train.load_model import load_trained, use_device

_NAMED = re.compile("([^=@/]+)=(.+)")
MAX_EXAMPLES = 4  # of the chat page


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """As `penjing serve --help` says. key: empty for none."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str = ""
    adapters: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    slots: int = 16
    max_tokens: int = 1024
    context: int = 0
    weights: Weights = "auto"
    device: str = "auto"
    dtype: str = "auto"


def load_models(words: Sequence[str], options: ServeOptions) -> Models:
    """Load what the command line names: each word RUN, RUN@STEP or NAME=RUN; adapters, PATH or NAME=PATH, of the first.
    A quickstart's folder is served with both of its stages. context: tokens of prompt and answer; 0: as in training.
    Raises UserError for what is not there, two models of one name, and a context that is too long for a model."""
    found: dict[str, Path] = {}
    for word in words:
        for name, path in _named(word):
            if name in found:
                raise UserError("two models of one name", where=word, got=name, next_step="Give them as NAME=RUN.")
            found[name] = path
    served, context = [], options.context
    for number, (name, path) in enumerate(found.items()):
        loaded = load_trained(path, adapters="merged")
        given = attach_adapters(loaded, options.adapters) if number == 0 else {}
        chat_adapters = frozenset(each for each, read in given.items() if read.is_chat_tuned)
        use_device(loaded.model, options.device, options.dtype)
        if context > (longest := loaded.model.config.max_position_embeddings):
            raise UserError("too long for the model", where=f"{name}: --context", got=context, wanted=f"<= {longest}")
        tokens = context or loaded.context_tokens
        engine = make_engine(loaded.model, slots=options.slots, max_tokens=tokens, weights=options.weights)
        served.append(ServedModel(name, loaded, engine, tuple(given), chat_adapters, examples_of(loaded.run)))
    return Models(served)


def examples_of(run: Run) -> tuple[str, ...]:
    """Prompts for the chat page: those of the run's samples, else from its training data if the files are there."""
    try:
        found = run.sample.prompts or Corpus(run.data).prompts(MAX_EXAMPLES)
    except UserError:  # the data have been moved, or are token shards
        return ()
    return tuple(text for text in dict.fromkeys(found) if len(text) <= PROMPT_CHARACTERS)[:MAX_EXAMPLES]


def _named(word: str) -> list[tuple[str, Path]]:
    """The names and paths that one word of the command line stands for."""
    path, called, text = checkpoint_path(Path(word)), "", word
    if not path.exists() and (parts := _NAMED.fullmatch(word)):
        called, text = parts.groups()
        path = checkpoint_path(Path(text))
    name = called or (Path(text).resolve().name if path.exists() else text)
    stages = [stage for stage in STAGES if is_run(path / stage)]
    if RunDir(path).settings.is_file() or not stages:
        return [(name, path)]
    return [(name if number == 0 else f"{name}/{stage}", path / stage) for number, stage in enumerate(stages)]

"""The served models and their names. All are loaded at the start; a request cannot load another."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penjing.data.chat.external_templates import THINKING_SWITCHES
from penjing.data.tokenizer.tokenizer import THINK, Tokenizer
from penjing.infer.engine import Engine
from penjing.infer.grammar import JsonGrammars
from penjing.serve.errors import ApiError
from penjing.serve.limits import BODY_BYTES, BODY_BYTES_PER_TOKEN, MAX_BODY_BYTES
from penjing.train.load_model import LoadedModel


@dataclass(frozen=True)
class ServedModel:
    """One model with its engine; `adapters` are served as `name:adapter`."""

    name: str
    loaded: LoadedModel
    engine: Engine
    adapters: tuple[str, ...] = ()
    chat_adapters: frozenset[str] = frozenset()  # adapters trained on conversations
    examples: tuple[str, ...] = ()  # prompts that its data suggest

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.engine.max_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    def is_chat(self, adapter: str | None) -> bool:
        """Whether it or this adapter was trained on conversations; otherwise it only continues texts."""
        return self.loaded.answers or (adapter or "") in self.chat_adapters

    @property
    def thinking(self) -> bool:
        """Whether `enable_thinking` has an effect."""
        tokenizer = self.tokenizer
        has_switch = any(name in tokenizer.template for name in THINKING_SWITCHES)
        can_think = tokenizer.has(THINK) if tokenizer.is_ours else has_switch
        return can_think and (self.loaded.answers or bool(self.chat_adapters))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.loaded.model.parameters())

    @property
    def cache_bytes(self) -> int:
        return self.engine.forward.bytes_per_slot * self.engine.forward.num_slots

    @cached_property
    def grammars(self) -> JsonGrammars:
        return JsonGrammars(self.tokenizer, self.loaded.model.config.vocab_size)


class Models:
    """The served models by every name that a request may use."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        self.served = {model.name: model for model in served}
        context = max((model.context for model in served), default=0)
        self.max_body_bytes = min(MAX_BODY_BYTES, BODY_BYTES + BODY_BYTES_PER_TOKEN * context)
        self._by_name: dict[str, tuple[ServedModel, str | None]] = {}
        for model in served:
            self._by_name[model.name] = (model, "" if model.adapters else None)
            for adapter in model.adapters:
                self._by_name[f"{model.name}:{adapter}"] = (model, adapter)

    def close(self) -> None:
        """End the processes that try grammars."""
        for model in self.served.values():
            if "grammars" in model.__dict__:
                model.grammars.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, name: str) -> tuple[ServedModel, str | None]:
        """The model and adapter of a name. Raises ApiError for a name that is not served."""
        if name not in self._by_name:
            listed = ", ".join(self.names)[:300]
            raise ApiError(404, f"no such model; available: {listed}", param="model", code="model_not_found")
        return self._by_name[name]

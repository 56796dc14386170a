"""JSON that fits a schema, token by token: which ids may come next (a `TokenMask` of infer/requests.py).

The grammar library is llguidance (extra `serve`), chosen over xgrammar and outlines-core by trial: docs/serve.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as `json.dumps` writes


class JsonMask:
    """The state of one answer. A stop id is allowed where the JSON is whole, and nothing else once it can only end."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """A bit for each id of the vocabulary, the lowest bit of a byte first."""
        return self._matcher.compute_bitmask()

    def accept(self, index: int) -> None:
        """Take the id that was drawn. Raises ValueError if it is not one of those allowed."""
        if not self._matcher.consume_token(index):
            raise ValueError(self._matcher.get_error())

    @property
    def finished(self) -> bool:
        """Whether nothing more may come."""
        return self._matcher.is_stopped()


class JsonGrammars:
    """Grammars for one vocabulary. vocab_size: ids of the model, which may be more than the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.definition, n_vocab=vocab_size, eos_token=sorted(tokenizer.stop)
        )

    def of_schema(self, schema: Mapping[str, Any]) -> Callable[[], JsonMask]:
        """Makes masks for JSON that fits the schema, each for one answer. Raises UserError if it cannot be followed."""
        grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)  # type: ignore[arg-type]
        first = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if first.is_error():
            problem = first.get_error().splitlines()[0][:200]
            raise UserError(f"cannot be followed: {problem}", where="JSON schema")
        return lambda: JsonMask(first.deep_copy())


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of a call of one of these: {"name": ..., "arguments": {...}}."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": each.get("parameters") or dict(ANY_OBJECT)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}

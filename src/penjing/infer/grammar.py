"""Constrained decoding to a JSON schema (a `TokenMask` of infer/requests.py).

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
    """The state of one answer. A stop id is allowed once the JSON is complete; only a stop id if nothing can follow."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """A bit for each id of the vocabulary, lowest bit of a byte first."""
        return self._matcher.compute_bitmask()

    def accept(self, token_id: int) -> None:
        """Advance by the sampled id. Raises ValueError if it is not allowed."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(self._matcher.get_error())

    @property
    def finished(self) -> bool:
        """Whether no token is allowed any more."""
        return self._matcher.is_stopped()


class JsonGrammars:
    """Grammars for one vocabulary. vocab_size: the model's, which may be larger than the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.definition, n_vocab=vocab_size, eos_token=sorted(tokenizer.stop)
        )

    def for_schema(self, schema: Mapping[str, Any]) -> Callable[[], JsonMask]:
        """A factory of masks for JSON that fits the schema, one per answer. Raises UserError if it is not supported."""
        grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)  # type: ignore[arg-type]
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            problem = matcher.get_error().splitlines()[0][:200]
            raise UserError(f"not supported: {problem}", where="JSON schema")
        return lambda: JsonMask(matcher.deep_copy())


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of a call to one of these functions: {"name": ..., "arguments": {...}}.

    Each function's parameters get an `$id`, so that a reference like `#/$defs/Color` points into them.
    """
    calls = []
    for number, spec in enumerate(functions):
        arguments = {**(spec.get("parameters") or {}), **ANY_OBJECT, "$id": f"function:{number}"}
        call = {
            "type": "object",
            "properties": {"name": {"const": spec["name"]}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        calls.append(call)
    return calls[0] if len(calls) == 1 else {"anyOf": calls}

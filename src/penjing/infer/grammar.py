"""Constrained decoding to a JSON schema (a `TokenMask` of infer/requests.py).

The grammar library is llguidance (extra `serve`), chosen over xgrammar and outlines-core by trial: docs/serve.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.requests import GrammarError

if TYPE_CHECKING:
    import llguidance

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as `json.dumps` writes


class JsonMask:
    """The state of one answer. A stop id is allowed once the JSON is complete; only a stop id if nothing can follow."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """A bit for each id of the vocabulary, lowest bit of a byte first."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        return mask

    def accept(self, token_id: int) -> None:
        """Advance by the sampled id. Raises GrammarError if it is not allowed."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(self._matcher.get_error())

    @property
    def finished(self) -> bool:
        """Whether no token is allowed any more."""
        return self._matcher.is_stopped()


class JsonGrammars:
    """Grammars for one vocabulary; may be used from any thread. vocab_size: the model's, which may be larger than the
    tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import llguidance

        self._library, self._lock = llguidance, threading.Lock()
        self._facts = [tokenizer.definition, vocab_size, sorted(tokenizer.stop)]
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.definition, n_vocab=vocab_size, eos_token=sorted(tokenizer.stop)
        )
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def for_schema(self, schema: Mapping[str, Any]) -> Callable[[], JsonMask]:
        """A factory of masks for JSON that fits the schema, one per answer. Another process has tried the grammar
        first, so this takes at most twice its limit. Raises UserError if the schema is not supported or too large."""
        from penjing.infer.grammar_process import build

        try:
            grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)  # type: ignore[arg-type]
            problem = self._try(grammar)
        except ValueError as error:  # nested too deeply
            problem = f"not supported: {error}"
        if not problem:
            matcher, problem = build(self._tokenizer, grammar)
        if problem:
            raise UserError(problem, where="JSON schema")
        return lambda: JsonMask(matcher.deep_copy())

    def close(self) -> None:
        """End the other process, also while it tries a grammar."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()  # who waits for its answer keeps the lock
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _try(self, grammar: str) -> str:
        with self._lock:
            if self._is_closed:
                return "the server stops"
            if self._process is None or self._process.poll() is not None:
                script = [sys.executable, "-I", str(Path(__file__).with_name("grammar_process.py"))]
                self._process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                self._send(self._facts)
            return str(json.loads(self._send(grammar).readline() or '"could not be tried"'))

    def _send(self, value: Any) -> IO[str]:
        assert self._process and self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        return self._process.stdout


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of a call to one of these functions: {"name": ..., "arguments": {...}}. Each function's parameters get
    an `$id`, so that a reference like `#/$defs/Color` points into them."""
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

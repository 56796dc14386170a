"""Run a stranger's chat template: no way out, and neither for ever nor into all of memory.

Jinja's sandbox keeps a template from Python's internals, not from looping a billion times or multiplying a text until
memory is full. Here every loop, call and operation is counted against a second of processor time and a few megabytes.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

LARGEST_TEMPLATE = 1 << 18  # characters; the longest in use have some 20,000
SECONDS = 1.0  # of processor time for one conversation: a process that is stopped, or waits for others, takes none
SPARE_BYTES = 1 << 20  # that a template may write of its own, beside a few times what was said
CONTENT_FACTOR = 8  # how often what was said may be written
_MADE_TIMES = 64  # bytes of texts and lists made on the way, in multiples of what may be written
_LARGEST_NUMBER_BITS = 4096
_WIDTH = re.compile(r"\d{5,}")  # of a field, in a format


class TemplateLimit(jinja2.TemplateError):
    """A template took too long or made too much."""


class _Budget(threading.local):
    deadline = 0.0  # by the clock of the thread
    largest = 0  # characters of one text, or entries of one list
    left = 0  # of all texts and lists together


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with limits. `render` is the only door."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        """filters: beside and over Jinja's own."""
        super().__init__(**options)
        self.budget = _Budget()
        for name in ("urlize", "wordwrap"):  # slow on texts made for it, and in no chat template
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.filters = {name: self._limited(name, function) for name, function in (self.filters | filters).items()}

    def render(self, template: jinja2.Template, num_chars: int, values: Mapping[str, Any]) -> str:
        """What the template writes. num_chars: characters of the conversation. Raises TemplateLimit."""
        budget = self.budget
        budget.largest = SPARE_BYTES + CONTENT_FACTOR * num_chars
        budget.left = _MADE_TIMES * budget.largest
        budget.deadline = time.thread_time() + SECONDS
        pieces, written = [], 0
        try:
            for piece in template.generate(values):
                written += len(piece)
                if written > budget.largest:
                    raise TemplateLimit(f"it writes more than {budget.largest:,} characters")
                pieces.append(piece)
        except (RecursionError, MemoryError, OverflowError) as error:
            raise TemplateLimit(f"it goes too deep or too far ({type(error).__name__})") from None
        return "".join(pieces)

    def tick(self) -> str:
        """Called in every round of a loop and every macro."""
        if time.thread_time() > self.budget.deadline:
            raise TemplateLimit(f"it takes more than {SECONDS:g} s of processor time")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def call(self, *arguments: Any, **named: Any) -> Any:
        # (context, function, arguments...): all by position, as the names are the template's to use
        function, given = arguments[1], [*arguments[2:], *named.values()]
        self.tick()
        # The sandbox hands out `str.format` in a wrapper of its own.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        spelled = getattr(function, "__name__", "")
        if isinstance(owner, str) and spelled in ("format", "format_map"):
            self._check_format(owner)
        elif spelled == "_strftime_now" and given:  # strftime knows widths too
            self._check_format(str(given[0]))
        self.check_sizes([owner, *given] if isinstance(owner, (str, bytes, list, tuple)) else given)
        return self.counted(super().call(*arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "**":
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if not (numbers and abs(left) < 1 << 32 and abs(right) <= 64):
                raise TemplateLimit("a power that is too large")
        if operator == "%" and isinstance(left, str):
            self._check_format(left)
        if operator == "*":
            self.check_sizes([left, right])
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > _LARGEST_NUMBER_BITS:
                raise TemplateLimit("a number that is too large")
        return self.counted(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return self.counted(found) if isinstance(argument, slice) else found

    def joined(self, *values: Any) -> str:
        """`a ~ b`."""
        return str(self.counted("".join(map(str, values))))

    def counted(self, value: Any) -> Any:
        """`value`, after its size is taken from what is left."""
        if isinstance(value, (str, bytes, list, tuple, dict)):
            if len(value) > self.budget.largest:
                raise TemplateLimit("it makes a text or list that is too large")
            self.budget.left -= len(value)
            if self.budget.left < 0:
                raise TemplateLimit("it makes too much on the way")
        return value

    def check_sizes(self, values: Sequence[Any]) -> None:
        """Refuse an operation before it is done, whose result could be the product of what it is given."""
        product = 1
        for value in values:
            if isinstance(value, (str, bytes, list, tuple)):
                product *= max(1, len(value))
            elif isinstance(value, int) and not isinstance(value, bool):
                if abs(value) > self.budget.largest:
                    raise TemplateLimit("a number that is too large")
                product *= max(1, abs(value))
            if product > 128 * self.budget.largest:
                raise TemplateLimit("an operation that could make too much")

    def _check_format(self, text: str) -> None:
        if _WIDTH.search(text):
            raise TemplateLimit("a field that is too wide")

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def limited(*given: Any, **named: Any) -> Any:
            self.tick()
            values = [value for value in (*given, *named.values()) if not isinstance(value, jinja2.runtime.Context)]
            if name == "format" and values:
                self._check_format(str(values[0]))
            if name in ("tojson", "indent") and any(isinstance(each, int) and each > 64 for each in values[1:]):
                raise TemplateLimit("an indent that is too wide")
            self.check_sizes(values)
            return self.counted(function(*given, **named))

        return limited


class _Counting(jinja2.visitor.NodeTransformer):
    """Puts a `tick` into every loop and macro, and counts what `~` makes."""

    def _with_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_For = _with_tick
    visit_Macro = _with_tick
    visit_CallBlock = _with_tick

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        joined = jinja2.nodes.EnvironmentAttribute("joined")
        return jinja2.nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

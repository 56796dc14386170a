"""Conversations: chat templates, rendering, and parsing of a model's turn.

chatml.jinja is our chat template, for engines that render conversations themselves; a test compares it with `render`.
A turn: <|im_start|>role, newline, content, <|im_end|>, newline. Assistant turns may open with their thinking and close
with tool calls; tools are listed, one JSON object per line, at the end of the system turn; tool results travel in a
user turn.

transformers switches on `trim_blocks`, which drops a newline right after `%}`; other engines do not. So a newline that
counts and would stand there is written as an expression.

The switch is `enable_thinking`, as Qwen3 calls it: the `thinking` of `render`, whose file says what it does.
"""

from pathlib import Path

CHAT_TEMPLATE = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")
EARLIER_TEMPLATES = {
    "a3007d0847420304b0979c2d3c38ec942177e9d6e5a63efe54d7ae3bf84750ad",
    "34f283456284a2958cf942c6bd643a62d6afdaead60bba1e4bce2c8a29ccb0e4",
}
"""Hashes of its earlier texts, read as the present one: only calls after empty lines were written otherwise."""

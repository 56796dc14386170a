"""How many characters, words or lines a text has, or how often something stands in it."""

import re
from collections.abc import Mapping
from typing import Any

from penjing.agent_tools.base import BadArgumentsError, function, text

# A Chinese character counts as a word, as it does in the reward for repetition.
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")


class Count:
    schema = function(
        "count",
        "Count in a text.",
        {"text": "the text", "what": "characters, words, lines, or occurrences (of the text in `of`)"},
        of="occurrences: what is looked for",
    )

    def call(self, arguments: Mapping[str, Any]) -> str:
        given = text(arguments, "text", longest=20_000)
        what = text(arguments, "what").strip().lower()
        if what == "characters":
            return str(len(given))
        if what == "words":
            return str(len(_WORD.findall(given)))
        if what == "lines":
            return str(len(given.splitlines()))
        if what == "occurrences":
            wanted = text(arguments, "of")
            if not wanted:
                raise BadArgumentsError("argument of is empty")
            return str(given.count(wanted))
        raise BadArgumentsError("argument what is none of characters, words, lines, occurrences")

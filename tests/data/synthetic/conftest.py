"""What kind of text a line of the pretraining file is, told from its words alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penjing.data.synthetic.lexicon import OPENINGS
from penjing.data.synthetic.surface_realization import LANGUAGES

english, chinese = LANGUAGES["en"], LANGUAGES["zh"]
TITLES = {*english.echo_titles, *chinese.echo_titles}
BEGINNINGS = tuple(words for en, zh in OPENINGS for words in (f"{en}, ", f"{zh}，"))


@pytest.fixture(scope="session")
def kind_of() -> Callable[[str], str]:
    def kind_of(text: str) -> str:
        first, *rest = text.split("\n")
        if first in TITLES:
            return "echo"
        if first.startswith(BEGINNINGS):
            return "reading" if rest else "story"
        # A text and then questions and answers, or questions and answers alone.
        return "drills" if len(rest) % 2 else "roll_call"

    return kind_of

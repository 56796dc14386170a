"""A toy world: short stories in English and Chinese from a small simulation, with checkable questions.

It is the corpus of the quickstart: generated on the spot, the same bytes everywhere, learnable by about a million
parameters, and split so that evaluation asks only about combinations that training never shows.

`lexicon` holds the words. `world` and `tasks.plots` simulate stories. `surface_realization` writes the text, from the
phrases of english.toml and chinese.toml. `questions`, `tasks.drills` and `tools` make the questions. `dataset_rows`
mixes them, and `files` writes the files.
"""

from penjing.data.synthetic.files import write

__all__ = ["write"]

"""A toy world: short stories in English and Chinese from a small simulation, with checkable questions.

It is the corpus of the quickstart: generated on the spot, the same bytes everywhere, learnable by about a million
parameters, and split so that evaluation asks only about combinations that training never shows.

`lexicon` holds the words, `world` and `tasks.plots` simulate, `english` and `chinese` hold the phrasings,
`surface_realization` tells, `questions` and `tasks.drills` ask, `dataset_rows` mixes, `tools` has a calculator called,
and `files` writes.
"""

from penjing.data.synthetic.files import write

__all__ = ["write"]

"""A toy world: short stories in English and Chinese from a small simulation, with checkable questions.

It is the corpus of the quickstart: generated on the spot, the same bytes everywhere, learnable by about a million
parameters, and split so that evaluation asks only about combinations that training never shows.

`lexicon` holds the words, `world` and `plots` simulate, `english` and `chinese` hold the phrasings, `wording` tells,
`questions` and `drills` ask, `rows` mixes, `tools` has a calculator called, and `files` writes.
"""

from penjing.data.synthetic.dataset_rows import (
    KINDS,
    conversations,
    evaluation,
    preferences,
    pretrain_documents,
    prompts,
)
from penjing.data.synthetic.files import write
from penjing.data.synthetic.holdout_split import held_out
from penjing.data.synthetic.questions import Story, SyntheticQuestion, story
from penjing.data.synthetic.tasks.drills import drill, story_request
from penjing.data.synthetic.tools import tool_conversations, tool_prompts

__all__ = [
    "KINDS",
    "Story",
    "SyntheticQuestion",
    "conversations",
    "drill",
    "evaluation",
    "held_out",
    "preferences",
    "pretrain_documents",
    "prompts",
    "story",
    "story_request",
    "tool_conversations",
    "tool_prompts",
    "write",
]

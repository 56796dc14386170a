"""The forward pass of objectives that score answers."""

from typing import Any

from torch import Tensor

from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.model.score import LogProbs


def run_model(model: Any, batch: AnswerBatch, *, temperature: float = 1.0, scalar_N: Tensor | None = None) -> Any:
    """logp_2N of the answers' tokens (model/score.py); with `scalar_N` also value_N (model/value_head.py); of a mixture
    of experts also its router statistics."""
    more = {} if scalar_N is None else {"scalar_N": scalar_N}
    return run_rows(model, batch, score=LogProbs(batch.target_N, temperature), scored_N=batch.scored_N, **more)


def run_rows(model: Any, batch: AnswerBatch, **outputs: Any) -> Any:
    """The model on rows of a prompt with several answers. outputs: what it returns, by arguments of its `forward`."""
    places = {"subtree_end_BT": batch.subtree_end_BT, "position_BT": batch.position_BT}
    return model(batch.ids_BT, batch.document_BT, **places, **outputs)

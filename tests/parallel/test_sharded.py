"""Where ranks hold parts of the weights, they learn what one process learns.

They save, resume, validate uneven batches and sample through the methods of `Strategy` that ask all ranks.
"""

import pytest
from short_runs import cut_back


@pytest.fixture
def train(tmp_path, small_run, penjing):
    words = ["max_steps=4", "eval.every=2", "eval.sequences=5", "checkpoint.every=2", "batch.micro_size=2"]
    words = [*small_run, *words, "sample.every=2", "sample.max_new_tokens=5", 'sample.prompts=["a"]']

    def run(out, *more, ranks=1, strategy="auto", recipe="pretrain"):
        command = ["train", recipe, *words, *more, f"parallel.strategy={strategy}", f"out={tmp_path / out}"]
        penjing(*command, ranks=ranks)
        return tmp_path / out

    return run


def test_it_learns_saves_resumes_validates_and_samples_as_one_process_does(train, losses, outcome, tmp_path):
    one, two = train("one"), train("two", ranks=2, strategy="fsdp2")
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    assert outcome(two)["val_loss"] == pytest.approx(outcome(one)["val_loss"], abs=1e-6)
    assert (two / "samples.jsonl").read_text().count("\n") == (one / "samples.jsonl").read_text().count("\n") > 0
    for source, ranks, strategy in ((two, 1, "single"), (one, 2, "fsdp2")):
        cut_back(source, tmp_path / strategy, 2)
        assert losses(train(strategy, ranks=ranks, strategy=strategy)) == pytest.approx(losses(one), abs=1e-6)

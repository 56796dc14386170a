"""Two processes compute what one does."""

import pytest
from short_runs import cut_back, newest


@pytest.fixture(scope="module")
def one(tmp_path_factory, penjing, small_run):
    folder = tmp_path_factory.mktemp("one") / "run"
    penjing("train", "pretrain", *small_run, f"out={folder}")
    return folder


def test_loss_curve_of_two_ranks_equals_one(tmp_path, one, penjing, small_run, losses, outcome):
    folder = tmp_path / "two"
    penjing("train", "pretrain", *small_run, f"out={folder}", ranks=2)
    expected, got = losses(one), losses(folder)
    assert got.keys() == expected.keys()
    assert max(abs(got[step] - expected[step]) for step in expected) < 1e-5
    assert outcome(folder)["tokens"] == outcome(one)["tokens"]
    name = "val_loss"
    assert abs(outcome(folder)[name] - outcome(one)[name]) < 1e-5


def test_ragged_chats_with_noise_on_two_ranks_equal_one(tmp_path, one, toy, penjing, small_run, losses, outcome):
    chats = [
        f"init_from={one}",
        f"data.train={toy / 'sft.jsonl'}",
        "data.seq_len=256",
        "max_steps=6",
        "batch.micro_size=2",
        "regularization.dropout=0.1",
    ]
    words = [word for word in small_run if not word.startswith(("model", "data.seq_len", "data.train", "max_steps"))]
    penjing("train", "sft", *words, *chats, f"out={tmp_path / 'single'}")
    penjing("train", "sft", *words, *chats, f"out={tmp_path / 'double'}", ranks=2)
    expected, got = losses(tmp_path / "single"), losses(tmp_path / "double")
    assert got.keys() == expected.keys()
    assert max(abs(got[step] - expected[step]) for step in expected) < 1e-5
    assert outcome(tmp_path / "double")["tokens"] == outcome(tmp_path / "single")["tokens"]


@pytest.mark.nightly
def test_two_ranks_learn_the_same_bits_in_bfloat16(tmp_path, toy, penjing, small_run, losses, outcome):
    """One process takes a step in two passes, two take one each: every rounding is the same."""
    words = [word for word in small_run if not word.startswith("compute.dtype")] + ["compute.dtype=bfloat16"]
    chats = [word for word in words if not word.startswith(("model", "data.seq_len", "data.train", "max_steps"))]
    chats += [f"data.train={toy / 'sft.jsonl'}", "data.seq_len=256", "max_steps=6"]
    for name, ranks in (("single", 1), ("double", 2)):
        penjing("train", "pretrain", *words, f"out={tmp_path / name}", ranks=ranks)
        penjing("train", "sft", *chats, f"init_from={tmp_path / name}", f"out={tmp_path / name}-sft", ranks=ranks)
    for end in ("", "-sft"):
        single, double = tmp_path / f"single{end}", tmp_path / f"double{end}"
        assert losses(single) == losses(double)
        assert outcome(single)["weights_sha256"] == outcome(double)["weights_sha256"]


def state_of(folder):
    return (newest(folder) / "optimizer.safetensors").read_bytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, one, penjing, small_run, losses, outcome, ranks):
    folder = tmp_path / "run"
    penjing("train", "pretrain", *small_run, f"out={folder}", ranks=3 - ranks)
    cut_back(folder, tmp_path / "again", 9)
    done = penjing("train", "pretrain", *small_run, f"out={tmp_path / 'again'}", ranks=ranks)
    assert "continues after step 9" in done.stdout
    expected, got = losses(one), losses(tmp_path / "again")
    assert max(abs(got[step] - expected[step]) for step in expected) < 1e-5
    assert outcome(tmp_path / "again")["weights_sha256"] == outcome(one)["weights_sha256"]
    assert state_of(tmp_path / "again") == state_of(one)


@pytest.mark.nightly
def test_four_ranks_go_on_with_the_same_bits(tmp_path, penjing, small_run, outcome):
    """The order in which more than two gradients are added is that of DDP's buckets, which a new process makes anew."""
    penjing("train", "pretrain", *small_run, f"out={tmp_path / 'whole'}", ranks=4)
    cut_back(tmp_path / "whole", tmp_path / "again", 9)
    penjing("train", "pretrain", *small_run, f"out={tmp_path / 'again'}", ranks=4)
    assert outcome(tmp_path / "again")["weights_sha256"] == outcome(tmp_path / "whole")["weights_sha256"]


def test_an_error_on_the_way_ends_both_ranks_with_one_line(tmp_path, penjing, small_run):
    done = penjing("train", "pretrain", *small_run, "batch.size=7", f"out={tmp_path / 'x'}", ranks=2, check=False)
    assert done.returncode != 0
    assert done.stderr.count("penjing: batch.size") == 1

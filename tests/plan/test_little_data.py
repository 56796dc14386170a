"""The size and length of a training by bytes, time and speed."""

from dataclasses import replace

import pytest

from penjing.optim.muon import Muon
from penjing.plan.flops import parameters
from penjing.plan.little_data import LEAST_STEPS, MOST_EPOCHS, Text, candidates, chosen, settings_of, sizes

FLOPS = {"fast": 3e11, "slow": 3e10}  # per second


def choose(num_bytes, machine, seconds=345.0):
    def time_step(model):
        size = parameters(model).total
        return 6 * 256 * (size + 1e6) / FLOPS[machine], 8e3 * size / FLOPS[machine]

    text = Text(num_bytes=num_bytes)
    found = candidates(text, seconds, 256, time_step, sizes(text))
    return chosen(found), found


@pytest.mark.parametrize("num_bytes", [200_000, 2_500_000, 20_000_000])
@pytest.mark.parametrize("machine", FLOPS)
def test_the_training_fits_the_time_and_the_text(num_bytes, machine):
    one, found = choose(num_bytes, machine)
    most_epochs = 32 if num_bytes == 200_000 else 16  # below five parameters per token twice as many
    assert 0 < one.seconds <= 345 and one.epochs <= most_epochs * 1.01
    assert one.steps >= LEAST_STEPS or one.rows == 4 or one.epochs > 0.9 * MOST_EPOCHS
    assert not one.against or one is found[0]


def test_more_text_time_or_speed_never_gives_a_smaller_model():
    by_text = [choose(num_bytes, "fast")[0].parameters for num_bytes in (200_000, 2_500_000, 20_000_000)]
    assert by_text == sorted(by_text) and by_text[0] < by_text[-1]
    assert choose(2_500_000, "slow")[0].parameters < choose(2_500_000, "fast")[0].parameters
    assert choose(2_500_000, "fast", 60)[0].parameters < choose(2_500_000, "fast", 600)[0].parameters


def test_every_setting_has_its_reason():
    one, _ = choose(2_500_000, "fast")
    made = settings_of(one)
    assert made["max_steps"][0] == one.steps and made["model.vocab_size"][0] == 4096
    assert all(why for _, why in made.values())


def test_noise_is_for_a_text_that_the_model_could_learn_by_heart():
    diary, corpus = (settings_of(choose(num_bytes, "fast")[0]) for num_bytes in (200_000, 20_000_000))
    assert diary["regularization.dropout"][0] > 0 < diary["optimizer.weight_decay"][0]
    assert "regularization.dropout" not in corpus and "optimizer.weight_decay" not in corpus
    some, few = (settings_of(replace(choose(200_000, "fast")[0], epochs=epochs)) for epochs in (6.0, 1.0))
    assert 0 < some["optimizer.weight_decay"][0] < diary["optimizer.weight_decay"][0]
    assert "regularization.dropout" not in some and "optimizer.weight_decay" not in few
    assert "regularization.bpe_dropout" in diary and "regularization.bpe_dropout" not in some
    assert diary["objective.mtp_weight"] == some["objective.mtp_weight"] and "objective.mtp_weight" not in few
    assert few["optimizer.momentum"][0] == corpus["optimizer.momentum"][0] < Muon().momentum


def test_little_text_has_few_ids_and_chinese_enough_for_its_characters():
    sizes_MB = (0.0, 0.05, 0.2, 0.8, 1.5, 2.5, 20.0)
    english = [Text(num_bytes=int(size * 1e6)).vocab_size for size in sizes_MB]
    assert english == [512, 512, 512, 2048, 4096, 4096, 4096]
    chinese = [Text(num_bytes=int(size * 1e6), min_vocab_size=2048).vocab_size for size in sizes_MB]
    assert chinese == [2048, 2048, 2048, 2048, 4096, 4096, 4096]

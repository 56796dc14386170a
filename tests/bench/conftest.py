"""A spec to try things with."""

import pytest

from penjing.bench.meter import Spec


@pytest.fixture
def spec():
    return Spec(
        method="dpo",
        model="m",
        data="d",
        run="r",
        stage="a:b",
        out="o",
        threads=1,
        batch=4,
        micro=2,
        steps=3,
        learning_rate=1e-3,
        clip_norm=1.0,
        betas=(0.9, 0.95),
    )

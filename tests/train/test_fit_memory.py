"""Training on a CPU takes the largest micro-batch whose step fits, as its plan does: sums and divisions by hand."""

import pytest
import torch

from penjing.base import config
from penjing.base.errors import UserError
from penjing.devices import host
from penjing.parallel.single import Single
from penjing.plan.memory import MemoryPlan
from penjing.train.config import Run
from penjing.train.memory_trace import fit

GIB = 1 << 30


class Ranks(Single):
    """A rank of several; rank 0 said `said` before, in this order."""

    def __init__(self, rank, world, said=()):
        super().__init__(torch.device("cpu"))
        self.rank, self.world, self.said, self.heard = rank, world, list(said), []

    def broadcast(self, value):
        self.heard.append(value if self.rank == 0 else self.said.pop(0))
        return self.heard[-1]


@pytest.fixture
def machine(monkeypatch):
    """Sets the free GiB, and a step's GiB by the rows of a pass; returns the list of the rows that were traced."""
    traced = []

    def of(free, step_gib):
        def predict(run, target, *, micro_size, layout):
            assert target.memory_bytes == free * GIB and target.kind == "cpu"
            assert layout.strategy == ("ddp" if layout.ranks > 1 else "single")
            traced.append(micro_size)
            total = round(step_gib(micro_size) * GIB)
            peak = {"peak_allocated_bytes": total, "peak_reserved_bytes": total, "total_bytes": total}
            return MemoryPlan(**peak, waterfall={}, peak_at="", peak_line="", peak_phase="")

        monkeypatch.setattr(fit.trace, "predict_memory", predict)
        monkeypatch.setattr(host, "available_bytes", lambda processes: free * GIB)
        return traced

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return of


def run_of(size, micro_size=0):
    """1,024 tokens in a row: by the rough formula a pass of 24 rows takes 2.5 GiB."""
    batch = {"size": size, "micro_size": micro_size}
    return config.resolve(Run, {"model": {"preset": "26m"}, "data": {"seq_len": 1024}, "batch": batch})


@pytest.mark.parametrize(
    ("free", "step_gib", "rows"),
    [
        # A fortieth of the memory stays free. Half of 48 rows are a pass, and a smaller one is a divisor of 48.
        (10, lambda rows: 1 + rows / 4, 24),  # 7 GiB
        (7, lambda rows: 1 + rows / 4, 16),  # 24 rows take 7 GiB of 6.83
        (5, lambda rows: 1 + rows / 4, 12),  # 16 rows: 5 of 4.88
        (4, lambda rows: 1 + rows / 4, 8),  # 12 rows: 4 of 3.9
        (2, lambda rows: 1 + rows / 4, 3),  # 4 rows: 2 of 1.95
        # With few rows the optimizer's peak counts, which does not depend on them.
        (6, lambda rows: max(5.5, rows * 0.75 - 10), 16),
        (8, lambda rows: max(7, rows / 2), 12),  # 16 rows: 8 of 7.8
    ],
)
def test_the_largest_pass_that_fits(machine, free, step_gib, rows):
    machine(free, step_gib)
    run = run_of(48)
    fitted, why = fit.fit_memory(run, Single(torch.device("cpu")))
    assert fitted == (rows if rows < 24 else 0)
    assert bool(why) == bool(fitted)
    if fitted:
        assert f"micro_size={rows} " in why and f"accumulation {48 // rows}:" in why
        assert f"24 takes {step_gib(24):.2f} GiB" in why


def test_a_pass_between_the_margin_and_all_of_the_memory_is_taken_if_none_is_smaller(machine):
    machine(10, lambda rows: 9.9)
    assert fit.fit_memory(run_of(48), Single(torch.device("cpu")))[0] == 1


@pytest.mark.parametrize(("micro_size", "rows"), [(0, 1), (12, 12)])
def test_a_run_that_does_not_fit_is_refused_with_its_figures(machine, micro_size, rows):
    machine(2, lambda rows: 2 + rows / 8)
    with pytest.raises(UserError) as refused:
        fit.fit_memory(run_of(48, micro_size), Single(torch.device("cpu")))
    assert f"a micro-batch of {rows}" in str(refused.value)
    assert f"{2 + rows / 8:.2f} GiB" in str(refused.value) and "2.00 GiB" in str(refused.value)


@pytest.mark.parametrize(("free", "device"), [(0, "cpu"), (100, "cpu"), (1, "cuda")])
def test_nothing_is_traced_where_it_does_not_matter(machine, free, device):
    """Unknown memory, four times what the rough formula says, and GPUs, which raise an error in time."""
    traced, strategy = machine(free, lambda rows: 1e6), Single(torch.device("cpu"))
    strategy.device = torch.device(device)
    run = run_of(48)
    assert fit.fit_memory(run, strategy) == (0, "") and not traced


def test_what_is_too_deep_to_trace_is_trained_as_it_is(machine, monkeypatch):
    traced = machine(1, lambda rows: 1e6)
    monkeypatch.setattr(fit.trace, "MAX_LAYERS", 7)
    assert fit.fit_memory(run_of(48), Single(torch.device("cpu"))) == (0, "") and not traced


def test_the_rough_formula_decides_by_four_times_its_bytes(machine, monkeypatch):
    traced = machine(8, lambda rows: 1)
    for bytes_, times in ((2 * GIB - 1, 0), (2 * GIB, 1)):
        monkeypatch.setattr(fit, "rough_memory", lambda work, bytes_=bytes_, **_: {"weights": bytes_})
        fit.fit_memory(run_of(48), Single(torch.device("cpu")))
        assert len(traced) == times


def test_all_ranks_take_what_rank_0_found(machine, monkeypatch):
    """Rank 0 sees 5 GiB for each of two, and takes 12 rows. The other's own figure does not count."""
    shares = []
    machine(5, lambda rows: 1 + rows / 4)
    first = Ranks(0, 2)
    assert fit.fit_memory(run_of(48), first)[0] == 12
    assert first.heard == [5 * GIB, 12]
    monkeypatch.setattr(host, "available_bytes", lambda processes: shares.append(processes) or 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    second = Ranks(5, 8, said=[5 * GIB, 3])
    assert fit.fit_memory(run_of(48), second)[0] == 3
    assert shares == [2]  # of eight ranks, two share this machine


@pytest.fixture
def needs(monkeypatch):
    """Sets the GiB that a step takes under a strategy; returns the strategies that were traced."""
    traced = []

    def of(**gib):
        def predict(run, target, *, micro_size, layout):
            traced.append(layout.strategy)
            total = gib[layout.strategy] * GIB
            peak = {"peak_allocated_bytes": total, "peak_reserved_bytes": total, "total_bytes": total}
            return MemoryPlan(**peak, waterfall={}, peak_at="", peak_line="", peak_phase="")

        monkeypatch.setattr(fit.trace, "predict_memory", predict)
        return traced

    return of


@pytest.mark.parametrize(
    ("free", "words", "chosen", "traced"),
    [
        (100, {}, "ddp", []),  # the rough formula says so
        (9, {}, "ddp", ["ddp"]),
        (4, {}, "fsdp2", ["ddp", "fsdp2"]),
        (2, {}, "ddp", ["ddp", "fsdp2"]),  # neither: the plan then names what would
        (4, {"compute": {"compile": "blocks"}}, "ddp", []),  # not with fsdp2
    ],
)
def test_ranks_share_the_weights_only_if_they_must(needs, free, words, chosen, traced):
    """By the rough formula a pass of 4 rows takes about 0.9 GiB; free memory of up to four times that is not sure."""
    seen = needs(ddp=8, fsdp2=3)
    model = {"model": {"preset": "104m"}, "data": {"seq_len": 1024}, "batch": {"size": 8, "micro_size": 4}}
    run = config.resolve(Run, {**model, **words})
    target = fit.Target(kind="cpu", name="a CPU", memory_bytes=free * GIB)
    name, why = fit.automatic_strategy(run, target, 2)
    assert (name, seen) == (chosen, traced)
    assert ("8.00 GiB of the 4.00 GiB" in why and "3.00 GiB" in why) == (name == "fsdp2")
    assert fit.automatic_strategy(run, target, 1)[0] == "single"

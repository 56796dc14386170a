"""Which configurations of a step a search shows."""

from penjing.plan.shape import shape_of
from penjing.plan.step_workload import Workload
from penjing.planner.search import Candidate, fitting_candidates, pareto
from penjing.train.config import Run


def candidate(rows: int, peak: int, rate: float, seq_len: int = 512) -> Candidate:
    work = Workload(shape=shape_of(Run().model), tokens=rows * seq_len, seq_len=seq_len, keys=1.0)
    return Candidate(work=work, micro_size=rows, peak_bytes=peak, seconds=1.0, tokens_per_second=rate)


def test_the_search_keeps_what_nothing_beats():
    small, middle, large = candidate(1, 10, 1.0), candidate(2, 20, 2.0), candidate(4, 40, 3.0)
    worse, twin = candidate(8, 41, 2.5), candidate(16, 20, 2.0)
    other_length = candidate(4, 100, 0.5, seq_len=1024)
    found = [large, worse, middle, twin, small, other_length]
    assert pareto(found) == [small, middle, large, other_length]
    assert fitting_candidates(found, 40) == [large, middle, twin, small]
    assert fitting_candidates(found, 5) == []

"""Counters and histograms in Prometheus' text format."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from starlette.types import Scope

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds


class Histogram:
    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BUCKETS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[sum(seconds > edge for edge in BUCKETS)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        total = 0
        for edge, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{edge}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Metrics of one server. Those of its engines are passed to `text`."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.first_token, self.total = Histogram(), Histogram()

    def count_response(self, scope: Scope, status: int) -> None:
        """Count a response by its route's path; unknown paths count as "other"."""
        unrouted = scope["path"] if status == 429 else "other"
        self.requests[str(getattr(scope.get("route"), "path", unrouted)), status] += 1

    def text(self, engines: Mapping[str, Mapping[str, float]]) -> str:
        """engines: by model, the engine's values by name. Names that end in `_total` are counters."""
        lines = ["# TYPE penjing_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'penjing_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += self.first_token.lines("penjing_time_to_first_token_seconds")
        lines += self.total.lines("penjing_answer_seconds")
        for name in sorted({name for numbers in engines.values() for name in numbers}):
            lines.append(f"# TYPE penjing_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            for model, numbers in engines.items():
                lines.append(f"penjing_{name}{{model={json.dumps(model, ensure_ascii=False)}}} {numbers[name]:g}")
        return "\n".join(lines) + "\n"

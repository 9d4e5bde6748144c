"""Counters of the HTTP service, in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts of values by upper bound, as Prometheus wants them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        total = 0
        for bound, count in zip((*(f"{one:g}" for one in self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f"{name}_bucket{_labels({**labels, 'le': bound})} {total}"
        yield f"{name}_sum{_labels(labels)} {self._sum:.6f}"
        yield f"{name}_count{_labels(labels)} {total}"


@dataclass
class ServiceMetrics:
    """Thread-safe: the event loop counts requests, the thread that computes counts batches."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _requests: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    _latencies: dict[str, Histogram] = field(default_factory=lambda: defaultdict(lambda: Histogram(_SECONDS)))
    _batches: Histogram = field(default_factory=lambda: Histogram(_SIZES))
    _batch_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    _amounts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def count_request(self, route: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[route, status] += 1
            self._latencies[route].add(seconds)

    def count_batch(self, inputs: int, seconds: float) -> None:
        with self._lock:
            self._batches.add(inputs)
            self._batch_seconds.add(seconds)

    def count_amounts(self, amounts: Mapping[str, int]) -> None:
        """Add to what was processed: texts or images, tokens that were read and written."""
        with self._lock:
            for name, amount in amounts.items():
                self._amounts[name] += amount

    def text(self, gauges: Mapping[str, tuple[str, float]], labels: Mapping[str, str]) -> str:
        """Return all metrics; `gauges` have a description and a value, `labels` describe the model."""
        lines = [*_heading("packtrain_model_info", "gauge", "The model that is served.")]
        lines.append(f"packtrain_model_info{_labels(labels)} 1")
        for name, (words, value) in gauges.items():
            lines += [*_heading(name, "gauge", words), f"{name} {value:g}"]
        with self._lock:
            name = "packtrain_http_requests_total"
            lines += _heading(name, "counter", "Requests by route and status.")
            for (route, status), count in sorted(self._requests.items()):
                lines.append(f"{name}{_labels({'route': route, 'code': str(status)})} {count}")
            name = "packtrain_http_request_seconds"
            lines += _heading(name, "histogram", "Time from the headers of a request to the end of its response.")
            for route, histogram in sorted(self._latencies.items()):
                lines += histogram.lines(name, {"route": route})
            for name, histogram, words in (
                ("packtrain_batch_inputs", self._batches, "Inputs that were computed together."),
                ("packtrain_batch_seconds", self._batch_seconds, "Time to compute a batch."),
            ):
                lines += [*_heading(name, "histogram", words), *histogram.lines(name, {})]
            name = "packtrain_processed_total"
            lines += _heading(name, "counter", "Inputs, and tokens that were read and written.")
            lines += [f"{name}{_labels({'unit': unit})} {count}" for unit, count in sorted(self._amounts.items())]
        return "\n".join(lines) + "\n"


def _heading(name: str, kind: str, words: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, text in labels.items()
    )
    inside = ",".join(f'{name}="{text}"' for name, text in escaped)
    return f"{{{inside}}}" if inside else ""

"""The statistics in Prometheus' text format, made from the same snapshot as `/v1/stats`.

Totals become counters, every other number a gauge; lists get a label with their index, and records
in them a metric for each field. So the two views cannot disagree, and a field added to the snapshot
shows up in both.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

PREFIX = "ds41jax"
_COUNTERS = ("totals_", "_total", "http_queue_waits", "http_queue_rejects", "_sum")


class _Snapshot:
    """A collector of one snapshot."""

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for name, samples in _flattened(self._values):
            full = f"{PREFIX}_{name}"
            counter = any(part in name for part in _COUNTERS)
            family = CounterMetricFamily if counter else GaugeMetricFamily
            labelled = samples[0][0] is not None
            metric = family(full, name.replace("_", " "), labels=["index"] if labelled else [])
            for index, value in samples:
                metric.add_metric([str(index)] if labelled else [], value)
            yield metric


def render_metrics(snapshot: dict[str, Any]) -> bytes:
    """The text that `/metrics` answers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(snapshot))
    return generate_latest(registry)


def _flattened(
    values: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, list[tuple[int | None, float]]]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, bool | int | float):
            yield name, [(None, float(value))]
        elif isinstance(value, dict):
            yield from _flattened(value, f"{name}_")
        elif isinstance(value, list | tuple) and value:
            yield from _indexed(name, value)


def _indexed(
    name: str, values: Sequence[Any]
) -> Iterator[tuple[str, list[tuple[int | None, float]]]]:
    """A list of numbers as one metric, a list of records as one for each of their numbers."""
    if all(isinstance(value, dict) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            yield from _indexed(f"{name}_{key}", [value.get(key) for value in values])
        return
    samples = [(n, float(v)) for n, v in enumerate(values) if isinstance(v, bool | int | float)]
    if samples:
        yield name, list(samples)

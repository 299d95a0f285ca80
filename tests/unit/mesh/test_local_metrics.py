"""Metrics of one thread read like the Prometheus library's own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mesh.telemetry.local_metrics import LocalCounter, LocalHistogram

BUCKETS = (0.01, 0.5, 1.0)
VALUES = (0.001, 0.01, 0.0100001, 0.5, 0.7, 1.0, 1.5, 900.0)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Every sample but ``_created``, by name and bucket."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_histogram_equals_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = LocalHistogram("pdmesh:gap_seconds", "Gap.", buckets=BUCKETS, registry=ours)
    other = Histogram("pdmesh:gap_seconds", "Gap.", buckets=BUCKETS, registry=theirs)
    assert samples(ours) == samples(theirs)
    for value in VALUES:
        mine.observe(value)
        other.observe(value)
    assert samples(ours) == samples(theirs)
    assert samples(ours)["pdmesh:gap_seconds_bucket", "0.01"] == 2
    assert samples(ours)["pdmesh:gap_seconds_count", ""] == len(VALUES)


def test_a_counter_equals_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = LocalCounter("pdmesh:tokens", "Tokens.", registry=ours)
    other = Counter("pdmesh:tokens", "Tokens.", registry=theirs)
    for amount in (1, 3):
        mine.inc(amount)
        other.inc(amount)
    assert samples(ours) == samples(theirs) == {("pdmesh:tokens_total", ""): 4.0}

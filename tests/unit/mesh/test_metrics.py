"""The metrics registry: names, look-up of existing metrics, text form."""

import pytest

from mesh.telemetry import metrics


def test_a_second_use_of_a_name_finds_the_first() -> None:
    first = metrics.counter("pdmesh:test_events", "Events.", ["kind"])
    first.labels(kind="a").inc()
    assert metrics.counter("pdmesh:test_events", "Events.", ["kind"]) is first
    assert b'pdmesh:test_events_total{kind="a"} 1.0\n' in metrics.render()


def test_a_name_has_one_kind() -> None:
    metrics.gauge("pdmesh:test_level", "Level.")
    with pytest.raises(ValueError, match="already a Gauge"):
        metrics.counter("pdmesh:test_level", "Level.")


def test_vllm_names_are_kept_whole() -> None:
    # A name of its own: the gateway's tests, in the same process, register the real one unlabelled.
    seconds = metrics.histogram(
        "vllm:test_seconds", "TTFT.", ["model_name"], buckets=metrics.TTFT_BUCKETS_S
    )
    seconds.labels(model_name="m").observe(0.03)
    text = metrics.render().decode()
    assert 'vllm:test_seconds_bucket{le="0.04",model_name="m"} 1.0\n' in text
    assert 'vllm:test_seconds_bucket{le="0.02",model_name="m"} 0.0\n' in text
    assert "process_resident_memory_bytes" in text


def test_a_counter_follows_a_count_that_is_kept_elsewhere() -> None:
    for count in (0, 3, 3, 10):
        metrics.count_to("test_count_kept_elsewhere", "A count.", count)
        assert f"test_count_kept_elsewhere_total {float(count)}\n" in metrics.render().decode()


def test_vllm_samples_carry_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_IDENTITY", {})
    metrics.gauge("vllm:test_running", "Running.").set(2)
    metrics.gauge("pdmesh:test_open", "Open.").set(3)
    metrics.identify("m", "decode-0")
    text = metrics.render().decode()
    assert 'vllm:test_running{engine="decode-0",model_name="m"} 2.0\n' in text
    assert "pdmesh:test_open 3.0\n" in text

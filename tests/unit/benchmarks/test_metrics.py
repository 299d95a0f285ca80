"""What a gateway's metrics grew by, as means."""

import math

from benchmarks.metrics import change
from mesh.telemetry import metrics

TTFT = metrics.TIME_TO_FIRST_TOKEN


def test_means_are_of_what_came_between_two_readings() -> None:
    before = {f"{TTFT}_sum": 10.0, f"{TTFT}_count": 2.0, "vllm:generation_tokens_total": 7.0}
    after = {
        f"{TTFT}_sum": 10.6,
        f"{TTFT}_count": 5.0,
        "vllm:generation_tokens_total": 19.0,
        "vllm:request_success_total": 3.0,
    }
    rows = {name: (count, mean) for name, count, mean in change(before, after)}
    assert rows["TTFT ms"][0] == 3
    assert math.isclose(rows["TTFT ms"][1], 200.0)
    assert rows["output tokens"] == (3, 4.0)
    assert math.isnan(rows["ITL ms"][1])

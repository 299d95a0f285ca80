"""What a gateway's own /metrics say about the load that a command puts on it.

    pdmesh bench metrics --url http://127.0.0.1:8000 -- vllm bench serve …
    pdmesh bench metrics --url http://127.0.0.1:8000 -- ./pdmesh bench serving --url …

Runs the command and prints how the gateway's histograms and counters changed meanwhile, to be laid
beside the command's own figures. Means, because a histogram's mean is exact and its percentiles are
not. The command's warm-up counts too: have it make none.
"""

from __future__ import annotations

import argparse
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.table import format_table
from mesh.errors import ConfigError, Unavailable
from mesh.telemetry import metrics

_TIMEOUT_S = 5.0
_MEANS = {
    "TTFT ms": metrics.TIME_TO_FIRST_TOKEN,
    "ITL ms": metrics.INTER_TOKEN_LATENCY,
    "TPOT ms": metrics.TIME_PER_OUTPUT_TOKEN,
    "latency ms": metrics.E2E_LATENCY,
}

Samples = Mapping[str, float]
"""Value of every sample, summed over its labels."""


def main(argv: Sequence[str]) -> int:
    """Run the command, print the table; the exit status is the command's."""
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="pdmesh bench metrics",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway")
    options = parser.parse_args(argv[:split])
    command = argv[split + 1 :]
    if not command:
        raise ConfigError("a command is needed after --")
    before = read_samples(options.url)
    status = subprocess.run(command, check=False).returncode
    print("\n" + format_table(("mean", "of", "gateway"), change(before, read_samples(options.url))))
    return status


def read_samples(url: str) -> dict[str, float]:
    """All samples of a gateway.

    Raises:
        Unavailable: it does not answer.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError as error:
        raise Unavailable(f"{url} has no metrics: {error}") from error
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def change(before: Samples, after: Samples) -> list[tuple[str, int, float]]:
    """Rows of name, number of observations and their mean between two readings."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    rows = []
    for title, name in _MEANS.items():
        count = grown(f"{name}_count")
        mean_s = grown(f"{name}_sum") / count if count else float("nan")
        rows.append((title, round(count), mean_s * 1000))
    requests = round(grown(f"{metrics.REQUEST_SUCCESS}_total"))
    for title, name in (
        ("prompt tokens", metrics.PROMPT_TOKENS),
        ("output tokens", metrics.GENERATION_TOKENS),
    ):
        total = grown(f"{name}_total")
        rows.append((title, requests, total / requests if requests else float("nan")))
    return rows

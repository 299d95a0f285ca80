"""Load on the HTTP API: tokens/s, TTFT, ITL and TPOT; also beside llama.cpp's server in one run.

    pdmesh bench serving                                  starts a cluster of its own
    pdmesh bench serving --clients 1,16 -- --prefill 2    … with flags of `pdmesh up`
    pdmesh bench serving --url http://127.0.0.1:8000      a server that runs already
    pdmesh bench serving --compare-llama-server PATH      both, alternately: A B A B

Every prompt is its own random token array, so no prefix cache helps; output lengths are exact.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.load import LoadResult, OpenAICompletions, run_load
from benchmarks.servers import Server, llama_server, pdmesh_cluster, served_model
from benchmarks.table import format_table, machine, num_cores, write_json
from benchmarks.workload import random_prompts
from mesh.errors import ConfigError, Unavailable
from mesh.model_text.model_files import resolve_model

_IDLE_S = 3.0
_MAX_IDLE_CORES = 0.1
"""A server that takes more than this while it waits would be in the other one's way."""

_SLOT_SPARE_TOKENS = 16
_COLUMNS = {
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "p99",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "p99",
    "tpot_mean_ms": "TPOT ms",
    "prompt_tokens_per_s": "prompt tok/s",
}

Results = dict[tuple[str, int], list[LoadResult]]
"""By server and number of clients, one result a round."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its tables."""
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:split])
    _run(options, argv[split + 1 :])
    return 0


def _parser() -> argparse.ArgumentParser:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="pdmesh bench serving",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--clients", default="1,16", help="numbers of concurrent clients (default: 1,16)")
    add("--input", type=int, default=128, help="prompt tokens (default: 128)")
    add("--output", type=int, default=64, help="output tokens (default: 64)")
    add("--requests", type=int, default=0, help="requests a run (default: 4 a client, at least 8)")
    add("--warm-up", type=int, default=2, help="unmeasured requests before each run (default: 2)")
    add("--rounds", type=int, default=0, help="runs of each kind (default: 1; 2 with a peer)")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--end-token", type=int, default=30_000, help="prompt ids are below (default: 30000)")
    add("--url", default="", help="a server that runs already, instead of an own cluster")
    add("--model", default="", help="GGUF file or folder (default: the packaged model)")
    add("--compare-llama-server", default="", metavar="PATH", help="llama.cpp's llama-server")
    add("--threads", type=int, default=num_cores(), help="of llama-server (default: all cores)")
    add("--json", default="", metavar="FILE", help="write every round's figures there")
    return parser


def _run(options: argparse.Namespace, up_flags: list[str]) -> None:
    levels = [int(clients) for clients in options.clients.split(",")]
    num_rounds = options.rounds or (2 if options.compare_llama_server else 1)
    print(machine())
    with ExitStack() as stack:
        servers = _start(stack, options, up_flags, max(levels))
        results: Results = {}
        for number in range(num_rounds):
            for clients in levels:
                for server in servers:
                    result = asyncio.run(_measure(server, options, clients, number))
                    results.setdefault((server.name, clients), []).append(result)
                    print(
                        f"round {number + 1}/{num_rounds}, {clients} clients, {server.name}: "
                        f"{result.output_tokens_per_s:.1f} output tok/s",
                        flush=True,
                    )
    print(f"\n{options.input} tokens in, {options.output} out; median of {num_rounds} rounds\n")
    print(_report(servers, levels, results))
    if options.json:
        rounds = [
            {"server": name, "round": number, **asdict(result)}
            for (name, _), of_kind in results.items()
            for number, result in enumerate(of_kind)
        ]
        write_json(options.json, {"machine": machine(), "options": vars(options), "runs": rounds})


def _start(
    stack: ExitStack, options: argparse.Namespace, up_flags: list[str], max_clients: int
) -> list[Server]:
    peer = options.compare_llama_server
    log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdmesh-bench-")))
    if options.url:
        if peer or up_flags:
            raise ConfigError("--url: takes neither a peer nor flags of `pdmesh up`")
        url = options.url.rstrip("/")
        return [Server(url, url, OpenAICompletions(served_model(url)), 0)]
    flags = [*up_flags, f"--model={options.model}"] if options.model else up_flags
    servers = [stack.enter_context(pdmesh_cluster(log_dir, flags))]
    if peer:
        files = resolve_model(options.model)
        if files.kind != "gguf":
            raise ConfigError("--model: llama-server needs a GGUF file")
        slots = max(16, max_clients)
        context = slots * max(1024, options.input + options.output + _SLOT_SPARE_TOKENS)
        server = llama_server(
            log_dir, peer, files.path, threads=options.threads, slots=slots, context=context
        )
        servers.append(stack.enter_context(server))
        _check_idle(servers)
    return servers


def _check_idle(servers: Sequence[Server]) -> None:
    """Both run all the time and work in turns; that is fair only if waiting costs nothing."""
    for server in servers:
        share = server.cpu_share(_IDLE_S)
        print(f"{server.name} takes {share:.3f} cores while it waits")
        if share > _MAX_IDLE_CORES:
            raise Unavailable(f"{server.name} does not idle: the comparison would not be fair")


async def _measure(
    server: Server, options: argparse.Namespace, clients: int, number: int
) -> LoadResult:
    num_requests = options.requests or max(8, 4 * clients)
    # The same prompts for every server, others in each round.
    prompts = random_prompts(
        options.warm_up + num_requests,
        options.input,
        seed=(options.seed, number, clients),
        end_token=options.end_token,
    )
    warm, measured = prompts[: options.warm_up], prompts[options.warm_up :]
    if warm:
        await run_load(server.url, server.api, warm, clients=clients, num_output=options.output)
    return await run_load(
        server.url, server.api, measured, clients=clients, num_output=options.output
    )


def _report(servers: Sequence[Server], levels: Sequence[int], results: Results) -> str:
    rows: list[list[object]] = []
    for clients in levels:
        medians = [_median(results[server.name, clients]) for server in servers]
        for server, median in zip(servers, medians, strict=True):
            rows.append([clients, server.name, *median])
        for peer, theirs in zip(servers[1:], medians[1:], strict=True):
            ratios = [a / b for a, b in zip(medians[0], theirs, strict=True)]
            rows.append([clients, f"{servers[0].name} / {peer.name}", *ratios])
    return format_table(["clients", "server", *_COLUMNS.values()], rows)


def _median(runs: Sequence[LoadResult]) -> list[float]:
    assert set(_COLUMNS) <= {field.name for field in fields(LoadResult)}
    return [statistics.median(getattr(run, name) for run in runs) for name in _COLUMNS]

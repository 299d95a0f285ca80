"""The ``pdmesh`` command: flags in, exit code out.

Exit codes: 0 done, 1 failed (the reason is on stderr), 2 wrong use, 130 stopped by Ctrl-C.

Nothing heavy is imported before the command is known: ``pdmesh --help`` must be quick, and only
the workers need torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cli import flags
from cli.bench import run_bench
from cli.checks import run_checks, run_tests
from cli.roles import run_gateway, run_worker
from mesh.config import ROLES
from mesh.errors import PdmeshError

_MAX_WORKERS = 64
_DESCRIPTION = "LLM inference with disaggregated prefill and decode, behind the OpenAI API."
_EPILOG = """\
examples:
  pdmesh up                             a whole cluster on this machine, with the packaged model
  pdmesh up --prefill 2 --decode 2      two workers of each role
  pdmesh decode --redis redis://registry:6379/0 --host 0.0.0.0 --advertise-host node-3
                                        one more decode worker of a cluster on several hosts

`pdmesh COMMAND --help` explains each flag.
"""


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="pdmesh",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    up = _add(commands, "up", "start a whole cluster on this machine, until Ctrl-C")
    flags.add_flags(up, flags.UP, redis_else="an embedded Valkey")
    up.add_argument(
        "--prefill", type=_count, default=1, metavar="N", help="prefill workers (default: 1)"
    )
    up.add_argument(
        "--decode", type=_count, default=1, metavar="N", help="decode workers (default: 1)"
    )
    for role in ROLES:
        up.add_argument(
            f"--{role}-tp",
            type=int,
            default=0,
            metavar="RANKS",
            help=f"--tensor-parallel of the {role} workers (default: as of all)",
        )
    up.add_argument(
        "--log-dir",
        default="",
        metavar="FOLDER",
        help="keep the processes' logs there (default: a temporary folder, removed at the end)",
    )
    up.add_argument(
        "--start-timeout-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="give up when the cluster is not ready by then (default: 600)",
    )

    gateway = _add(commands, "gateway", "run one gateway (HTTP front) in this process")
    flags.add_flags(gateway, flags.GATEWAY_ROLE)
    prefill = _add(commands, "prefill", "run one prefill worker in this process")
    flags.add_flags(prefill, flags.WORKER_ROLE)
    decode = _add(commands, "decode", "run one decode worker in this process")
    flags.add_flags(decode, flags.WORKER_ROLE)

    top = _add(commands, "top", "show the workers of a running cluster, refreshed each second")
    top.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the gateway (default: http://127.0.0.1:8000)",
    )
    top.add_argument("--once", action="store_true", help="print one table and end")

    profile = _add(commands, "profile", "show what the steps of a cluster's workers are bound by")
    profile.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the gateway (default: http://127.0.0.1:8000)",
    )
    profile.add_argument("--worker", default="", metavar="ID", help="only this one (default: all)")
    profile.add_argument(
        "--steps", type=int, default=20, metavar="N", help="steps of each worker (default: 20)"
    )
    profile.add_argument(
        "--timeout-s",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="end with fewer steps after this long (default: 10)",
    )

    _add(commands, "check", "check formatting, lint, types and layers of the source")
    # Only listed here: main() hands their arguments on unparsed.
    _add(commands, "test", "run the test suite; the arguments are pytest's")
    _add(commands, "bench", "run one of the benchmarks; without a name, list them")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    command = arguments[0] if arguments else ""
    try:
        if command == "test":
            return run_tests(arguments[1:])
        if command == "bench":
            return run_bench(arguments[1:])
        return _dispatch(build_parser().parse_args(arguments))
    except PdmeshError as error:
        print(f"pdmesh {command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(options: argparse.Namespace) -> int:
    match options.command:
        case "up":
            from cli.up import run_up

            return run_up(options)
        case "gateway":
            return run_gateway(options)
        case "prefill" | "decode":
            return run_worker(options.command, options)
        case "top":
            from cli.top import run_top

            return run_top(options.url, once=options.once)
        case "profile":
            from cli.profile import run_profile

            return run_profile(
                options.url,
                worker=options.worker,
                steps=options.steps,
                timeout_s=options.timeout_s,
            )
        case _:
            return run_checks()


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= _MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {_MAX_WORKERS}")
    return count


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

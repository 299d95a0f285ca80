"""A worker without a model: what ``run_placed`` gives it is all it has. Run as a process.

It computes nothing, so it does without torch's CUDA build; everything else is the worker's own.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys

import msgspec

from engine import device
from engine.device import Placement
from mesh.config import WorkerConfig
from mesh.errors import PdmeshError
from mesh.service import run_service, setup_logging
from worker import placement
from worker.placement import run_placed


def main() -> int:
    """Print one line when placed; exit code 3 and the error's code where that fails."""
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    setup_logging("info", config.worker_id)
    device.missing_for_cuda = lambda: ""
    placement.take_gpus = functools.partial(placement.take_gpus, settle_s=0.0)

    async def run(stop: asyncio.Event) -> None:
        async def serve(placed: Placement) -> None:
            line = {
                "device": placed.device,
                "gpus": msgspec.to_builtins(placed.worker_gpus()),
                "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "torch": "torch" in sys.modules,
            }
            print(json.dumps(line), flush=True)
            await stop.wait()

        await run_placed(config, stop, serve)

    try:
        run_service(run)
    except PdmeshError as error:
        print(json.dumps({"code": error.code, "message": str(error)}), flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

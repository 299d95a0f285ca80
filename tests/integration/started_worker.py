"""A worker's engine in a process of its own: which kernels it compiles, and what it computes.

``python -m tests.integration.started_worker FOLDER`` prints a JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from typing import Any

from mesh.threads import configure_threads

configure_threads()  # before torch is loaded

import numba.core.event  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from engine.backends.cpu.backend import CpuBackend  # noqa: E402
from engine.batch import BatchInputs  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.warm_up import warm_up  # noqa: E402
from mesh.config import WorkerConfig  # noqa: E402
from tests.unit.engine.tiny_llama import random_prompt  # noqa: E402
from worker.start import build_engine  # noqa: E402

_NUM_TOKENS = 70


class _Compiled(numba.core.event.Listener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, event: Any) -> None:
        self.names.append(event.data["dispatcher"].py_func.__qualname__)

    def on_end(self, event: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--weights", default="fp32")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--alone", action="store_true", help="compile nothing ahead of the steps")
    options = parser.parse_args()
    compiled = _Compiled()
    numba.core.event.register("numba:compile", compiled)
    logging.basicConfig(level="INFO", stream=sys.stderr)
    config = WorkerConfig(
        role="decode", worker_id="w", redis_url="redis://127.0.0.1:1", model=options.folder,
        weights=options.weights, kv_dtype=options.kv_dtype, kv_blocks=64, threads=2,
    )  # fmt: skip
    if options.alone:
        engine = Engine(config, CpuBackend(options.weights, 2))
        warm_up(engine)
    else:
        engine = build_engine(config)
    print(json.dumps({"compiled": compiled.names, "digest": _digest(engine)}))


@torch.inference_mode()
def _digest(engine: Engine) -> str:
    """Of the logits at every position of a prompt, and of those of a step for its last one."""
    tokens = np.array(random_prompt(_NUM_TOKENS, seed=1))
    digest = hashlib.sha256()
    for start in (0, _NUM_TOKENS - 1):
        positions = np.arange(start, _NUM_TOKENS, dtype=np.int32)
        batch = BatchInputs(
            token_ids=tokens[start:],
            token_sources=np.full(len(positions), -1, np.int32),
            positions=positions,
            slot_mapping=positions.astype(np.int64),
            query_starts=np.array([0, len(positions)], np.int32),
            context_lens=np.array([_NUM_TOKENS], np.int32),
            block_tables=np.arange(-(-_NUM_TOKENS // 16), dtype=np.int32)[None],
            sample_rows=np.arange(len(positions)),
        )
        digest.update(engine.model.forward(batch).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()

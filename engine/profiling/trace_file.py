"""Chrome traces of profiles in the operator's folder: named here, bounded in size and number."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from torch.profiler import profile

MAX_TRACE_BYTES = 64 << 20
"""A larger one is not kept; fewer steps make a smaller one."""
MAX_TRACES = 20
"""Of one worker; the oldest go."""


def write_trace(profiler: profile, folder: str, worker_id: str) -> tuple[str, str]:
    """Write one.

    Args:
        profiler: Stopped.
        folder: Exists; chosen by the operator, never by a request.
        worker_id: Begins the file's name.

    Returns:
        Path and why there is none; one of them is empty.
    """
    root = Path(folder)
    name = f"{worker_id}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    path, partial = root / f"{name}.trace.json", root / f".{name}.part.json"
    try:
        profiler.export_chrome_trace(str(partial))
        if partial.stat().st_size > MAX_TRACE_BYTES:
            return "", f"the trace is over {MAX_TRACE_BYTES >> 20} MiB: ask for fewer steps"
        partial.replace(path)
        for old in sorted(root.glob(f"{worker_id}-*.trace.json"))[:-MAX_TRACES]:
            old.unlink()
        return str(path), ""
    except (OSError, RuntimeError) as error:
        return "", f"the trace could not be written: {error}"
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()

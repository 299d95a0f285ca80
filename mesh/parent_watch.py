"""Makes a child process die with its parent, so that ``kill -9`` of ``pdmesh up`` leaves nothing.

Linux only (``PR_SET_PDEATHSIG``); elsewhere a thread watches the parent's id. SIGKILL and not
SIGTERM: a supervisor that vanished can no longer kill a child which hangs while stopping.

Run as a script it wraps a program that is not ours:
``python mesh/parent_watch.py PARENT_PID program args…``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_INTERVAL_S = 0.5


def die_with_parent(parent_pid: int) -> None:
    """From now on, be killed when the process ``parent_pid`` (our parent) ends.

    The kernel watches the parent's *thread* that started us: supervisors start children from
    their main thread. Exits at once if the parent is already gone.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_poll_parent, args=(parent_pid,), daemon=True).start()
    # The parent may have died before the call above; then no signal will ever come.
    if os.getppid() != parent_pid:
        os._exit(1)


def _poll_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_INTERVAL_S)
    os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])

"""Control links between processes: a ``WorkerServer`` listens, ``WorkerLink`` dials it.

Greeting, liveness and refusal are handled inside; users see their own messages and one call when
the other side is lost. A killed local peer is noticed through its broken connection at once, a
frozen or unreachable one after 2 s without a sign of life.
"""

from mesh.worker_link import WorkerLink
from mesh.worker_server import PING_INTERVAL_S, SILENCE_S, WorkerServer

__all__ = ["PING_INTERVAL_S", "SILENCE_S", "WorkerLink", "WorkerServer"]

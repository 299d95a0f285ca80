"""The registry in Redis: a worker writes its ``Registration``, a gateway reads a ``ClusterView``.

Never on a request's critical path, never per-token data. When Redis is lost both sides keep going
and come back by themselves.
"""

from mesh.cluster_view import ClusterView, WorkerEntry
from mesh.registration import Registration

__all__ = ["ClusterView", "Registration", "WorkerEntry"]

"""Real processes, a real Redis-protocol server, the real model."""

from mesh.threads import configure_threads

configure_threads()  # before any of these modules loads torch, which reads them then

"""Errors of the transfer package, under the project's tree.

TransferFailed (mesh.errors)
└── TransportError      the data plane refused or broke
    ├── PeerLost        the peer (or the agent it wrote to) is gone: no write is in flight any more
    │   └── Unreachable not one write got through: another transport might reach it
    └── BadAddress      a data-plane address we do not accept
"""

from __future__ import annotations

from mesh.errors import TransferFailed


class TransportError(TransferFailed):
    """The data plane refused or broke."""

    code = "transport_error"


class PeerLost(TransportError):
    """The connection is dead; none of its writes can touch memory any more."""

    code = "peer_lost"


class Unreachable(PeerLost):
    """The peer's endpoint was never reached over this connection."""

    code = "unreachable"


class BadAddress(TransportError):
    """An address that is malformed, too large or of another geometry."""

    code = "bad_address"


WRITE_ABORTED = "write_aborted"
"""TransferNack code: the sender tore its connection down under a write. Unlike every other Nack it
does not say that the blocks are quiet: the receiver fences the sender's endpoint."""

"""What can happen to a cluster in a network of its own, when, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.integration.network import Network
from tests.integration.separate_roles import SeparateRoles

LEASE_S = 2.2
SLOW_MBIT_S = 25.0
"""At this speed 400 tokens' KV in fp32 travels for 6 s, also beside what slows the prefill down."""

_HOLD_S = 2.6
"""Longer than a lease, and than the silence after which a link is given up."""

Moment = Literal["start", "prefill", "transfer", "decode"]
"""Where the request is when the fault strikes; at ``start`` the fault stays until the answer."""

Act = Callable[[SeparateRoles, Network], None]


@dataclass(frozen=True)
class Fault:
    """One fault; ``heal`` is called in any case, also when ``strike`` was not."""

    name: str
    moment: Moment
    strike: Act
    heal: Act
    hold_s: float = _HOLD_S
    """How long it lasts before it is healed."""
    kills: str = ""
    """The role whose process it ends."""

    def __str__(self) -> str:
        return f"{self.name}-in-{self.moment}"


def parted(moment: Moment, one: str, other: str, hold_s: float = _HOLD_S) -> Fault:
    """Nothing gets through between two nodes; all others are reached."""

    def strike(roles: SeparateRoles, network: Network) -> None:
        network.drop(one, other, 1.0)

    return Fault(f"{one}-{other}-parted-{hold_s:g}s", moment, strike, _heal, hold_s)


def unplugged(moment: Moment, node: str) -> Fault:
    """A node's link is down."""

    def strike(roles: SeparateRoles, network: Network) -> None:
        network.pull_cable(node)

    return Fault(f"{node}-unplugged", moment, strike, _heal)


def frozen(moment: Moment, role: str) -> Fault:
    """A process is stopped and goes on later, not knowing."""

    def strike(roles: SeparateRoles, network: Network) -> None:
        roles.send_signal(role, signal.SIGSTOP)

    def heal(roles: SeparateRoles, network: Network) -> None:
        network.heal()
        roles.send_signal(role, signal.SIGCONT)

    return Fault(f"{role}-frozen", moment, strike, heal)


def killed(moment: Moment, role: str) -> Fault:
    """A process dies and is started again under its old id and address."""

    def strike(roles: SeparateRoles, network: Network) -> None:
        roles.send_signal(role, signal.SIGKILL)

    def heal(roles: SeparateRoles, network: Network) -> None:
        network.heal()
        if not roles.runs(role):
            roles.start(role)

    return Fault(f"{role}-killed", moment, strike, heal, hold_s=0.1, kills=role)


def lossy(share: float) -> Fault:
    """Packets are lost on every way of the request."""

    def strike(roles: SeparateRoles, network: Network) -> None:
        for one, other in (("prefill", "decode"), ("gateway", "decode"), ("gateway", "prefill")):
            network.drop(one, other, share)

    return Fault(f"{share:.0%}-lost", "start", strike, _heal)


def delayed() -> Fault:
    """A slow link between the workers, both ways."""

    def strike(roles: SeparateRoles, network: Network) -> None:
        for sender, receiver in (("prefill", "decode"), ("decode", "prefill")):
            network.slow_down(sender, receiver, mbit_s=SLOW_MBIT_S, delay_ms=20)

    return Fault("delayed", "start", strike, _heal)


def _heal(roles: SeparateRoles, network: Network) -> None:
    network.heal()


_ON_BOTH = (
    lossy(0.02),
    parted("transfer", "prefill", "decode"),
    frozen("transfer", "prefill"),
    frozen("transfer", "decode"),
    killed("transfer", "prefill"),
    killed("transfer", "decode"),
)

FAULTS = {
    "tcp": (
        *_ON_BOTH,
        parted("transfer", "prefill", "decode", 1.0),
        unplugged("prefill", "registry"),
        parted("decode", "gateway", "decode"),
        frozen("prefill", "prefill"),
        killed("decode", "decode"),
    ),
    "ucx": (
        *_ON_BOTH,
        delayed(),
        unplugged("transfer", "decode"),
        parted("prefill", "gateway", "prefill"),
        frozen("decode", "decode"),
        killed("prefill", "prefill"),
    ),
}
"""By transport. What the data plane feels is on both."""

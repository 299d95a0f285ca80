"""A network of namespaces that the test owns: nodes on one switch, whose links it spoils at will.

    node p ─ eth0 ═══╗
    node d ─ eth0 ═══╬═ bridge in a namespace of its own
    node … ─ eth0 ═══╝

Nothing is added to the machine's own namespace, so removing the namespaces removes everything.
Packets of one pair of nodes are dropped by a BPF program at the sender's ``eth0``, without touching
what the two exchange with others; a slow link is a token bucket, and ``netem`` adds delay where the
kernel has it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "pdmesh-test-"
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SWITCH = "switch"
_SUBNET = (10, 203, 0)

_QUEUE_PACKETS = 20_000
"""More than any transfer of these tests: a slow link delays, it does not drop."""

_SHOT, _PASS = 2, 0xFFFFFFFF
_SKF_AD_RANDOM = 0xFFFFF000 + 56
"""Offset at which a classic BPF program reads a random 32-bit number."""


def missing() -> str:
    """Why no network can be made here; empty when it can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"'{tool}' is not installed (Debian: iproute2)"
    if os.geteuid() != 0:
        return "namespaces need root"
    name = f"{_PREFIX}{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "clsact")
        _run("tc", "-n", name, "filter", "add", "dev", "lo", "egress", *_dropper("127.0.0.1", 1.0))
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb")
    except RuntimeError as error:
        return str(error)
    finally:
        _remove(name)
    return ""


class Network:
    """Owns the namespaces; ``close()`` removes them and kills what still runs inside."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Make ``nodes``; first remove what a test process that is no more left behind.

        Raises:
            RuntimeError: a command failed; nothing is left.
        """
        remove_stale()
        self.addresses = {
            node: ".".join(map(str, (*_SUBNET, host))) for host, node in enumerate(nodes, 1)
        }
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self._add_namespace(_SWITCH)
            self._ip(_SWITCH, "link add bridge type bridge")
            self._ip(_SWITCH, "link set bridge up")
            for node in nodes:
                self._add_node(node)
            self.has_netem = self._try_netem()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove everything. Idempotent."""
        for node in (*self.addresses, _SWITCH):
            _remove(_name(node))
        if self._home >= 0:
            os.close(self._home)
            self._home = -1

    def inside(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` in a node; the process id stays."""
        return ["ip", "netns", "exec", _name(node), *argv]

    @contextmanager
    def entered(self, node: str) -> Iterator[None]:
        """Let this thread open its sockets in a node."""
        with (_FOLDER / _name(node)).open("rb") as namespace:
            _set_namespace(namespace.fileno())
        try:
            yield
        finally:
            _set_namespace(self._home)

    def drop(self, one: str, other: str, share: float) -> None:
        """Lose this share of the packets between two nodes, both ways; 1 parts them."""
        for sender, receiver in ((one, other), (other, one)):
            dropper = _dropper(self.addresses[receiver], share)
            self._tc(sender, "filter add dev eth0 egress", *dropper)

    def slow_down(self, sender: str, receiver: str, *, mbit_s: float, delay_ms: float = 0) -> None:
        """Limit what one node sends to another, and delay it where the kernel can."""
        self._tc(sender, "qdisc add dev eth0 root handle 1: htb r2q 1")
        self._tc(sender, f"class add dev eth0 parent 1: classid 1:1 htb rate {mbit_s}mbit")
        netem = f"netem delay {delay_ms}ms {delay_ms / 4}ms limit {_QUEUE_PACKETS}"
        leaf = netem if delay_ms and self.has_netem else f"pfifo limit {_QUEUE_PACKETS}"
        self._tc(sender, f"qdisc add dev eth0 parent 1:1 handle 10: {leaf}")
        address = self.addresses[receiver]
        match = f"protocol ip u32 match ip dst {address}/32 flowid 1:1"
        self._tc(sender, f"filter add dev eth0 parent 1: {match}")

    def pull_cable(self, node: str) -> None:
        """Take a node's link down, at the switch."""
        self._ip(_SWITCH, f"link set {node} down")

    def heal(self) -> None:
        """Undo every fault."""
        for node in self.addresses:
            self._tc(node, "filter del dev eth0 egress")
            with suppress(RuntimeError):  # there is none
                self._tc(node, "qdisc del dev eth0 root")
            self._ip(_SWITCH, f"link set {node} up")

    def _add_namespace(self, node: str) -> None:
        _run("ip", "netns", "add", _name(node))
        self._ip(node, "link set lo up")

    def _add_node(self, node: str) -> None:
        self._add_namespace(node)
        self._ip(node, f"link add eth0 type veth peer name {node} netns {_name(_SWITCH)}")
        # One packet is one packet: else loss hits 64 KiB at a time.
        self._ip(node, "link set eth0 gso_max_segs 1")
        self._ip(node, f"address add {self.addresses[node]}/24 dev eth0")
        self._ip(node, "link set eth0 up")
        self._tc(node, "qdisc add dev eth0 clsact")
        self._ip(_SWITCH, f"link set {node} master bridge up")

    def _try_netem(self) -> bool:
        try:
            self._tc(_SWITCH, "qdisc add dev lo root netem delay 1ms")
        except RuntimeError:
            return False
        return True

    def _ip(self, node: str, command: str) -> None:
        _run("ip", "-n", _name(node), *command.split())

    def _tc(self, node: str, command: str, *more: str) -> None:
        _run("tc", "-n", _name(node), *command.split(), *more)


def remove_stale() -> None:
    """Remove the namespaces of test processes that are no more."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _remove(path.name)


def _name(node: str) -> str:
    return f"{_PREFIX}{os.getpid()}-{node}"


def _remove(name: str) -> None:
    if not (_FOLDER / name).exists():
        return
    # A namespace lives on with its last process.
    for pid in _run("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "del", name)


def _dropper(address: str, share: float) -> list[str]:
    """A classifier that drops this share of the IPv4 packets to ``address``."""
    destination = int.from_bytes(bytes(map(int, address.split("."))))
    program = [
        (0x28, 0, 0, 12),  # the EtherType
        (0x15, 0, 5, 0x0800),  # is it IPv4? else pass
        (0x20, 0, 0, 30),  # the destination
        (0x15, 0, 3, destination),  # is it the one? else pass
        (0x20, 0, 0, _SKF_AD_RANDOM),
        (0x25, 1, 0, min(round(share * 2**32), 2**32 - 1)),  # above the share? pass
        (0x06, 0, 0, _SHOT),
        (0x06, 0, 0, _PASS),
    ]
    words = ",".join(" ".join(map(str, line)) for line in program)
    return ["bpf", "da", "bytecode", f"{len(program)},{words}"]


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout

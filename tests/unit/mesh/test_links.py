"""Control links over real sockets: greeting, refusal, bad bytes, and every way a peer is lost."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio

from mesh.codec import MAX_MESSAGE_BYTES, decode, encode
from mesh.errors import (
    ConfigError,
    IncompatiblePeer,
    MessageTooLarge,
    ProtocolError,
    VersionMismatch,
    WorkerLost,
)
from mesh.links.listen import SILENCE_S
from mesh.links.socket import HIGH_WATER_MARK
from mesh.messages import (
    AnyMessage,
    DataPlaneOffer,
    Hello,
    PeerRef,
    Ping,
    Refused,
    StatusRequest,
    TransferNack,
)
from mesh.telemetry import metrics
from tests.unit.loop_lag import watched_loop
from tests.unit.mesh.recording_links import EPOCH, Dialer, Server
from tests.unit.mesh.until import until


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.links.start()
    yield server
    await server.links.close()


@pytest.fixture
async def dialer(server: Server) -> AsyncIterator[Dialer]:
    dialer = Dialer(server.ref)
    await dialer.link.connect()
    yield dialer
    await dialer.link.close()


@pytest.fixture
def rogue(server: Server) -> Iterator[zmq.Socket[bytes]]:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = 60_000
    dealer.connect(server.links.endpoint)
    yield dealer
    dealer.close()


async def test_messages_flow_both_ways_in_order(server: Server, dialer: Dialer) -> None:
    sent = [StatusRequest(seq=i) for i in range(1000)]
    for message in sent:
        assert dialer.link.send(message)
        await asyncio.sleep(0)
    await until(lambda: len(server.messages) == 1000)
    assert server.messages == [("g0", message) for message in sent]
    for message in sent:
        assert server.links.send("g0", message)
        await asyncio.sleep(0)
    await until(lambda: len(dialer.messages) == 1000)
    assert dialer.messages == sent


async def test_a_message_near_the_cap_arrives_whole(server: Server, dialer: Dialer) -> None:
    big = TransferNack(transfer_id="t", code="c", message="x" * (MAX_MESSAGE_BYTES - 100))
    assert dialer.link.send(big)
    await until(lambda: server.messages)
    assert server.messages == [("g0", big)]


async def test_a_message_over_the_cap_is_refused_at_the_sender(
    server: Server, dialer: Dialer
) -> None:
    with pytest.raises(MessageTooLarge):
        dialer.link.send(TransferNack(transfer_id="t", code="c", message="x" * MAX_MESSAGE_BYTES))
    assert dialer.link.is_up


async def test_send_to_an_unknown_peer_says_no(server: Server) -> None:
    assert not server.links.send("nobody", StatusRequest(seq=1))


async def test_send_says_no_before_connect_and_after_close(server: Server) -> None:
    dialer = Dialer(server.ref)
    assert not dialer.link.send(StatusRequest(seq=1))
    await dialer.link.connect()
    await dialer.link.close()
    assert not dialer.link.send(StatusRequest(seq=1))
    assert dialer.down == [], "closing is the owner's own act, not a loss"


async def test_a_full_queue_says_no_and_never_blocks(server: Server, dialer: Dialer) -> None:
    # The loop does not turn here, so nobody reads: the queues on both sides must fill up.
    big = TransferNack(transfer_id="t", code="c", message="x" * 65536)
    num_accepted = 0
    while num_accepted < 10 * HIGH_WATER_MARK and dialer.link.send(big):
        num_accepted += 1
    assert 0 < num_accepted < 10 * HIGH_WATER_MARK
    await until(lambda: len(server.messages) == num_accepted)
    assert dialer.link.send(StatusRequest(seq=1))


async def test_a_closed_dialer_is_down_at_once(
    server: Server, dialer: Dialer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await dialer.link.close()
        await until(lambda: server.down == ["g0"])
    assert "connection broke" in caplog.text, "not by its silence"
    assert not server.links.send("g0", StatusRequest(seq=1))


async def test_what_a_dialer_sent_before_it_left_is_delivered_before_its_loss(
    server: Server, rogue: zmq.Socket[bytes]
) -> None:
    events: list[str] = []
    server.links._on_message = lambda peer, message: events.append(str(message.seq))
    server.links._on_peer_down = lambda peer: events.append("down")
    rogue.send(encode(Hello(peer_id="g0", epoch=1)))
    for seq in range(500):
        rogue.send(encode(StatusRequest(seq=seq)))
    await until(lambda: len(events) > 0)
    rogue.close(linger=1000)
    await until(lambda: "down" in events)
    assert events == [*map(str, range(500)), "down"]


async def test_a_closed_server_is_down_at_once(server: Server, dialer: Dialer) -> None:
    await server.links.close()
    await until(lambda: dialer.down)
    assert "broke" in str(dialer.down[0]), "not by its silence"
    assert [type(error) for error in dialer.down] == [WorkerLost]
    assert not dialer.link.is_up
    assert server.down == []


async def test_the_loss_is_reported_once(server: Server, dialer: Dialer) -> None:
    await server.links.close()
    await until(lambda: dialer.down)
    await asyncio.sleep(0.3)
    await dialer.link.close()
    assert len(dialer.down) == 1


async def test_nobody_listening_fails_at_once() -> None:
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
    dialer = Dialer(PeerRef(worker_id="w0", epoch=1, endpoint=f"tcp://127.0.0.1:{port}"))
    with pytest.raises(WorkerLost, match="cannot be reached"):  # it would else not have answered
        await dialer.link.connect(timeout_s=60.0)
    assert len(dialer.down) == 1


async def test_a_silent_listener_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        dialer = Dialer(PeerRef(worker_id="w0", epoch=1, endpoint=f"tcp://127.0.0.1:{port}"))
        with pytest.raises(WorkerLost, match="did not answer"):
            await dialer.link.connect(timeout_s=0.1)
        assert len(dialer.down) == 1


async def test_a_malformed_endpoint_is_a_lost_worker() -> None:
    dialer = Dialer(PeerRef(worker_id="w0", epoch=1, endpoint="tcp://:::"))
    with pytest.raises(WorkerLost, match="bad endpoint"):
        await dialer.link.connect()
    assert len(dialer.down) == 1


async def test_cancelling_connect_closes_without_a_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        dialer = Dialer(PeerRef(worker_id="w0", epoch=1, endpoint=f"tcp://127.0.0.1:{port}"))
        task = asyncio.create_task(dialer.link.connect())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert dialer.down == []
    assert not dialer.link.is_up


@pytest.mark.parametrize(("worker_id", "epoch"), [("w0", EPOCH + 1), ("w1", EPOCH)])
async def test_another_start_or_another_worker_in_its_place_is_a_loss(
    worker_id: str, epoch: int
) -> None:
    server = Server(worker_id=worker_id, epoch=epoch)
    await server.links.start()
    dialer = Dialer(server.ref)
    with pytest.raises(WorkerLost, match="listens in its place"):
        await dialer.link.connect()
    await server.links.close()


async def test_a_different_fingerprint_is_refused_with_the_reason(server: Server) -> None:
    dialer = Dialer(server.ref, peer_id="d0", fingerprint="layout-b")
    with pytest.raises(ProtocolError, match=r"layout-b.*layout-a"):
        await dialer.link.connect()
    assert server.links.num_peers == 0
    assert server.down == [], "it was never up"


async def test_the_same_fingerprint_is_welcome(server: Server) -> None:
    dialer = Dialer(server.ref, peer_id="d0", fingerprint="layout-a")
    await dialer.link.connect()
    assert dialer.link.is_up
    await dialer.link.close()


async def test_a_newer_start_replaces_the_old_link(server: Server, dialer: Dialer) -> None:
    newer = Dialer(server.ref, epoch=2)
    await newer.link.connect()
    assert server.down == ["g0"]
    assert server.links.send("g0", StatusRequest(seq=5))
    await until(lambda: newer.messages)
    assert dialer.messages == []
    # The old one's next ping tells it that it is no longer known.
    await until(lambda: dialer.down)
    assert server.down == ["g0"], "the old connection's end is not the new one's"
    assert newer.link.is_up
    await newer.link.close()


async def test_an_older_start_cannot_take_the_link_over(server: Server, dialer: Dialer) -> None:
    older = Dialer(server.ref, epoch=0)
    with pytest.raises(ProtocolError, match="newer start"):
        await older.link.connect()
    assert dialer.link.is_up
    assert server.down == []


async def test_redialing_many_times_never_mistakes_a_reused_descriptor(server: Server) -> None:
    for num_before in range(50):
        dialer = Dialer(server.ref)
        await dialer.link.connect()
        assert dialer.link.send(StatusRequest(seq=num_before))
        await until(lambda n=num_before: len(server.messages) == n + 1)
        assert dialer.link.is_up
        await dialer.link.close()
    await until(lambda: len(server.down) == 50)
    assert server.links.num_peers == 0


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"not a message"],
        [b"\x92\x02\x91\xa4nope"],
        [encode(StatusRequest(seq=1)), b"extra"],
        [b"", encode(StatusRequest(seq=1))],
    ],
)
async def test_bad_bytes_are_counted_and_dropped(
    server: Server, dialer: Dialer, rogue: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    before = metrics.LINK_BAD_MESSAGES.labels(code="protocol_error")._value.get()
    rogue.send(encode(Hello(peer_id="rogue", epoch=1)))
    rogue.send_multipart(frames)
    rogue.send(encode(StatusRequest(seq=2)))
    await until(lambda: server.messages)
    assert server.messages == [("rogue", StatusRequest(seq=2))]
    assert metrics.LINK_BAD_MESSAGES.labels(code="protocol_error")._value.get() == before + 1
    assert dialer.link.is_up


async def test_an_oversized_frame_costs_its_sender_the_connection(
    server: Server, dialer: Dialer, rogue: zmq.Socket[bytes]
) -> None:
    rogue.send(encode(Hello(peer_id="rogue", epoch=1)))
    await until(lambda: server.links.num_peers == 2)
    rogue.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    await until(lambda: server.down == ["rogue"])
    assert dialer.link.is_up


async def test_another_version_is_refused_and_raises_at_the_dialer(
    server: Server, rogue: zmq.Socket[bytes]
) -> None:
    rogue.send(b"\x93\x63" + encode(Hello(peer_id="g9", epoch=1))[2:])
    await until(lambda: rogue.poll(0))
    reply = decode(rogue.recv())
    assert isinstance(reply, Refused)
    assert reply.code == "version_mismatch"
    assert server.links.num_peers == 0


async def test_a_worker_of_another_version_raises_version_mismatch() -> None:
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dialer = Dialer(PeerRef(worker_id="w0", epoch=1, endpoint=f"tcp://127.0.0.1:{port}"))
        task = asyncio.create_task(dialer.link.connect())
        routing_id, _ = await router.recv_multipart()
        await router.send_multipart([routing_id, b"\x92\x63\x91\xa1x"])
        with pytest.raises(VersionMismatch):
            await task


async def test_a_message_without_a_hello_is_answered_with_a_refusal(
    server: Server, rogue: zmq.Socket[bytes]
) -> None:
    rogue.send(encode(Ping(seq=1)))
    await until(lambda: rogue.poll(0))
    reply = decode(rogue.recv())
    assert isinstance(reply, Refused)
    assert reply.code == "worker_lost"
    assert server.messages == []


@pytest.mark.parametrize("peer_id", ["", "x" * 257])
async def test_an_unusable_peer_id_is_refused(server: Server, peer_id: str) -> None:
    dialer = Dialer(server.ref, peer_id=peer_id)
    with pytest.raises(ProtocolError, match="peer_id"):
        await dialer.link.connect()


async def test_a_failing_handler_keeps_the_link(
    server: Server, dialer: Dialer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(peer: str, message: AnyMessage) -> None:
        server.messages.append((peer, message))
        raise RuntimeError("handler bug")

    server.links._on_message = fail
    dialer.link.send(StatusRequest(seq=1))
    dialer.link.send(StatusRequest(seq=2))
    await until(lambda: len(server.messages) == 2)
    assert "handler bug" in caplog.text
    assert dialer.link.is_up


async def test_a_dialer_that_falls_silent_is_down(server: Server, rogue: zmq.Socket[bytes]) -> None:
    rogue.send(encode(Hello(peer_id="rogue", epoch=1)))
    await until(lambda: server.links.num_peers == 1)
    started_s = time.monotonic()
    async with watched_loop() as lag:
        await until(lambda: server.down == ["rogue"])
    assert SILENCE_S - 0.5 < time.monotonic() - started_s < SILENCE_S + 1.0 + 10 * lag.worst_s


async def test_a_stalled_loop_does_not_blame_its_peers(server: Server, dialer: Dialer) -> None:
    await asyncio.sleep(0.3)
    time.sleep(SILENCE_S + 0.5)  # noqa: ASYNC251 - the stall is what is tested
    await asyncio.sleep(1.0)
    assert dialer.link.is_up
    assert server.down == []


async def test_a_taken_port_is_a_config_error(server: Server) -> None:
    other = Server()
    other.links.endpoint = server.links.endpoint
    with pytest.raises(ConfigError, match="cannot bind"):
        await other.links.start()


OFFER = DataPlaneOffer(transports=("shm", "tcp"), host_id="here")


async def test_both_ends_hear_what_the_other_moves_kv_over() -> None:
    server = Server(offer=OFFER)
    await server.links.start()
    dialer = Dialer(server.ref, offer=DataPlaneOffer(transports=("tcp",), host_id="there"))
    try:
        await dialer.link.connect()
        assert dialer.link.remote_offer == OFFER
    finally:
        await dialer.link.close()
        await server.links.close()


async def test_a_dialer_without_a_common_transport_is_refused_with_the_reason() -> None:
    server = Server(offer=OFFER)
    await server.links.start()
    dialer = Dialer(server.ref, offer=DataPlaneOffer(transports=("ucx",), host_id="here"))
    try:
        with pytest.raises(IncompatiblePeer, match=r"reads KV over ucx.*writes over shm, tcp"):
            await dialer.link.connect()
    finally:
        await dialer.link.close()
        await server.links.close()

"""The store over real sockets; ranks are threads of this process."""

from __future__ import annotations

import errno
import logging
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from commrt.bootstrap import Store, auth, detect, join, net, rendezvous, store, wire
from commrt.bootstrap.auth import Hello
from commrt.bootstrap.server import StoreServer
from commrt.bootstrap.wire import FrameDecoder
from commrt.errors import AuthenticationError, BootstrapError, BootstrapTimeout, ConfigError, InvalidArgument

SECRET = b"the test's secret of its own"


@pytest.fixture
def place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def address_of(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host, int(port)


def enter(place: str, rank: int, size: int, *, timeout_s: float = 20, secret: bytes | None = SECRET) -> Store:
    return join(detect({}, rank=rank, size=size, rendezvous=place), secret=secret, timeout_s=timeout_s)


Timed = tuple[Any, float]


def at_once(calls: list[Callable[[], Any]]) -> list[Timed]:
    """Each call's result or exception, and how long it took; all in threads of their own."""

    def timed(call: Callable[[], Any]) -> Timed:
        start = time.monotonic()
        try:
            result = call()
        except BootstrapError as error:
            result = error
        return result, time.monotonic() - start

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(timed, calls))


def world(place: str, size: int) -> list[Store]:
    stores = [result for result, _ in at_once([lambda rank=rank: enter(place, rank, size) for rank in range(size)])]
    assert not any(isinstance(store, BootstrapError) for store in stores), stores
    return stores


def close_all(stores: list[Store]) -> None:
    at_once([store.close for store in stores])


def exchange(stores: list[Store], key: str, values: list[bytes]) -> list[Any]:
    return [result for result, _ in at_once([lambda s=s: s.exchange(key, values[s.rank]) for s in stores])]


@pytest.fixture
def four(place: str) -> Iterator[list[Store]]:
    stores = world(place, 4)
    yield stores
    close_all(stores)


def test_exchange_gives_every_rank_all_values_by_rank(four: list[Store]) -> None:
    for turn in range(3):
        values = [b"%d" % rank * (rank * 1000 + turn) for rank in range(4)]
        assert exchange(four, f"turn {turn}", values) == [values] * 4


def test_values_of_many_frames(four: list[Store]) -> None:
    values = [random.Random(rank).randbytes(15 << 20) for rank in range(4)]
    assert exchange(four, "large", values) == [values] * 4


def test_more_than_the_total_fails_on_all(place: str) -> None:
    stores = world(place, 5)
    results = at_once([lambda s=s: s.exchange("too large", bytes(15 << 20)) for s in stores])
    close_all(stores)
    assert all(isinstance(result, BootstrapError) and str(wire.MAX_TOTAL) in str(result) for result, _ in results)


def test_a_missing_rank_is_named_on_all_in_time(four: list[Store]) -> None:
    results = at_once([lambda s=s: s.exchange("k", b"", timeout_s=0.5) for s in four[:2]])
    for result, took in results:
        assert isinstance(result, BootstrapTimeout)
        assert result.missing == [2, 3]
        assert 0.4 < took < 1.5
    with pytest.raises(BootstrapTimeout):
        four[2].exchange("k", b"")
    assert [result for result, _ in at_once([lambda s=s: s.exchange("next", b"") for s in four])] == [[b""] * 4] * 4


def test_a_rank_missing_at_join_is_named(place: str) -> None:
    results = at_once([lambda rank=rank: enter(place, rank, 4, timeout_s=1) for rank in (0, 1, 3)])
    for result, took in results:
        assert isinstance(result, BootstrapTimeout)
        assert result.missing == [2]
        assert took < 2


def test_rank_0_missing(place: str) -> None:
    (result, took), *_ = at_once([lambda: enter(place, 1, 2, timeout_s=0.5)])
    assert isinstance(result, BootstrapTimeout)
    assert result.missing == [0]
    assert took < 1.5


@pytest.mark.parametrize(
    ("extra", "words"),
    [((1, 4), ["rank 1 joined twice"]), ((2, 5), ["world size 5", "world size 4"])],
    ids=["twice", "size"],
)
def test_a_bad_join_is_an_error_on_all(place: str, extra: tuple[int, int], words: list[str]) -> None:
    """The faulty one comes with the others, while one rank is still to come: nobody may be left waiting."""
    present = [(0, 4), (1, 4), (3, 4)]

    def late() -> Store:
        time.sleep(0.2)
        # As a rank of its own process: this process's memory of the rank that is there already plays no part.
        hello = Hello(wire.PROTOCOL_VERSION, extra[1], extra[0], 0)
        store.connect(where(place), hello, time.monotonic() + 10)
        raise AssertionError("admitted")

    results = at_once([*(lambda r=r, n=n: enter(place, r, n) for r, n in present), late])
    for result, took in results:
        assert isinstance(result, BootstrapError)
        assert all(word in str(result) for word in words), result
        assert took < 2.2


def where(place: str, secret: bytes = SECRET) -> store.Where:
    host, port = address_of(place)
    address = net.Address(socket.AF_INET, (host, port))
    return lambda: ("at a test", [address], secret)


def test_another_protocol_version_is_an_error_on_both_sides(place: str) -> None:
    def foreign() -> None:
        store.connect(where(place), Hello(99, 2, 1, 0), time.monotonic() + 10)

    for result, took in at_once([lambda: enter(place, 0, 2), foreign]):
        assert isinstance(result, BootstrapError)
        assert "version 99" in str(result)
        assert f"speaks {wire.PROTOCOL_VERSION}" in str(result)
        assert took < 2


def test_a_wrong_secret_is_refused_and_the_job_unaffected(place: str) -> None:
    def wrong() -> None:
        store.connect(where(place, b"x" * 16), Hello(wire.PROTOCOL_VERSION, 2, 1, 0), time.monotonic() + 10)

    with ThreadPoolExecutor(2) as pool:
        root = pool.submit(enter, place, 0, 2)
        result, took = at_once([wrong])[0]
        assert isinstance(result, AuthenticationError)
        assert took < 1
        stores = [enter(place, 1, 2), root.result()]
    close_all(stores)


def answer_of(sock: socket.socket, opening: bytes) -> bytes:
    sock.settimeout(10)
    sock.sendall(opening)
    answer = b""
    while len(answer) < auth.SERVER_ANSWER_NBYTES:
        answer += sock.recv(1000)
    return answer


def is_dropped(sock: socket.socket) -> bool:
    sock.settimeout(2)
    try:
        return sock.recv(1000) == b""
    except ConnectionError:
        return True


def test_a_recorded_handshake_is_refused(place: str, four: list[Store]) -> None:
    nonce, hello = auth.fresh_nonce(), Hello(wire.PROTOCOL_VERSION, 4, 1, 7)
    opening = auth.client_opening(nonce)
    with socket.create_connection(address_of(place)) as genuine, socket.create_connection(address_of(place)) as replay:
        proof = auth.client_proof(SECRET, nonce, answer_of(genuine, opening), hello)
        assert proof is not None
        genuine.sendall(proof)
        answer_of(replay, opening)
        replay.sendall(proof)
        assert is_dropped(replay)
        # The genuine one waits for a world that is to come.
        assert select.select([genuine], [], [], 0.2)[0] == []


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01" + bytes(600),
    auth.MAGIC,
    auth.client_opening(bytes(32)),
    auth.client_opening(bytes(32)) + bytes(auth.CLIENT_PROOF_NBYTES),
    auth.client_opening(bytes(32)) + struct.pack("!Q", 1 << 63),
    bytes(100_000),
]


def flood(place: str, count: int, stack: ExitStack) -> None:
    for at in range(count):
        sock = stack.enter_context(socket.create_connection(address_of(place)))
        sock.setblocking(False)
        with suppress(OSError):
            sock.send(GARBAGE[at % len(GARBAGE)])


def test_a_flood_of_strangers_leaves_the_job_alone(place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commrt.init")
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        early = [pool.submit(enter, place, rank, 4) for rank in (0, 1)]
        wait_until(lambda: accepts(place))
        flood(place, 200, stack)
        late = [pool.submit(enter, place, rank, 4) for rank in (2, 3)]
        start = time.monotonic()
        stores: list[Store] = [future.result() for future in early + late]
        assert time.monotonic() - start < 3
        flood(place, 100, stack)
        values = [b"0", b"1", b"2", b"3"]
        assert exchange(stores, "k", values) == [values] * 4
        close_all(stores)
    dropped = [record for record in caplog.records if "dropped a connection" in record.getMessage()]
    assert 1 <= len(dropped) <= 20
    assert SECRET.decode() not in caplog.text


def accepts(place: str) -> bool:
    with suppress(OSError), socket.create_connection(address_of(place), 1):
        return True
    return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "body",
    [struct.pack("!Q", 1 << 63), struct.pack("!Q", 100_000) + b"\x91" * 100_000, struct.pack("!Q", 1) + b"\x00"],
    ids=["length 2^63", "deep nesting", "unknown"],
)
def test_a_rank_that_breaks_the_protocol_is_dropped_and_named(place: str, four: list[Store], body: bytes) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(four[1].exchange, "k", b"")
        link = four[2]._link  # type: ignore[attr-defined]
        link.sock.sendall(body)
        with pytest.raises(BootstrapError, match="rank 2 broke the protocol") as caught:
            waiting.result(2)
        assert caught.value.context.peer == 2


def test_a_rank_that_disconnects_is_named_promptly(four: list[Store]) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(s.exchange, "k", b"") for s in four[:2]]
        four[3]._link.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        start = time.monotonic()
        for future in waiting:
            with pytest.raises(BootstrapError, match="rank 3 disconnected"):
                future.result(5)
        assert time.monotonic() - start < 1


def test_a_rank_that_closes_is_named_promptly(four: list[Store]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[list[bytes]] = pool.submit(four[0].exchange, "k", b"")
        four[1].close()
        with pytest.raises(BootstrapError, match="rank 1 left"):
            waiting.result(5)


def test_after_rank_0_is_closed_nobody_hangs(four: list[Store]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(four[1].exchange, "k", b"")
        four[0].close()
        with pytest.raises(BootstrapError):
            waiting.result(5)
    start = time.monotonic()
    with pytest.raises(BootstrapError, match="rank 0"):
        four[2].exchange("k", b"")
    four[3].close()
    assert time.monotonic() - start < 1


def test_a_closed_store_raises_and_closes_again(four: list[Store]) -> None:
    four[1].close()
    four[1].close()
    with pytest.raises(BootstrapError, match="closed"):
        four[1].exchange("k", b"")


def test_a_result_on_its_way_survives_the_close_of_rank_0(place: str) -> None:
    stores = world(place, 3)
    value = bytes(10 << 20)

    def last(s: Store) -> list[bytes]:
        result = s.exchange("last", value)
        s.close()
        return result

    assert all(result == [value] * 3 for result, _ in at_once([lambda s=s: last(s) for s in stores]))


def test_two_hundred_clients_join(place: str) -> None:
    """One thread plays all of them, over raw connections, so that the server's work is what is timed."""
    size = 200
    host, port = address_of(place)
    server = StoreServer(net.listen([net.Address(socket.AF_INET, (host, port))], time.monotonic()), SECRET)
    server.open_world(0, size)
    start = time.monotonic()
    with ExitStack() as stack:
        stack.callback(server.stop)
        links = []
        for rank in range(size):
            hello = Hello(wire.PROTOCOL_VERSION, size, rank, 0)
            links.append(store.connect(where(place), hello, time.monotonic() + 20))
            stack.enter_context(closing(links[-1].sock))
        for rank, link in enumerate(links):
            link.send(wire.encode(wire.Put("k", b"%d" % rank)), time.monotonic() + 5)
        for link in links:
            part = link.receive(time.monotonic() + 5)
            assert isinstance(part, wire.Part)
            assert part.values == [b"%d" % rank for rank in range(size)]
    assert time.monotonic() - start < 10


def test_a_hundred_cycles_on_one_port(place: str) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()

    def cycles(rank: int) -> int:
        for turn in range(100):
            s = enter(place, rank, 3)
            assert s.exchange("k", b"%d %d" % (turn, rank)) == [b"%d %d" % (turn, other) for other in range(3)]
            s.close()
        return 100

    assert [result for result, _ in at_once([lambda rank=rank: cycles(rank) for rank in range(3)])] == [100] * 3
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads


def test_two_worlds_at_one_address_at_a_time(place: str) -> None:
    first, second = world(place, 2), world(place, 2)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(exchange, first, "k", [b"1"] * 2)
        two = pool.submit(exchange, second, "k", [b"2"] * 2)
        assert one.result() == [[b"1"] * 2] * 2
        assert two.result() == [[b"2"] * 2] * 2
    close_all(first)
    assert exchange(second, "k", [b"3"] * 2) == [[b"3"] * 2] * 2
    close_all(second)


def test_a_failed_join_can_be_tried_again(place: str) -> None:
    with pytest.raises(BootstrapTimeout):
        enter(place, 0, 2, timeout_s=0.3)
    close_all(world(place, 2))


def test_ipv6(place: str) -> None:
    if not socket.has_ipv6 or not can_bind_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    stores = world(f"[::1]:{address_of(place)[1]}", 2)
    close_all(stores)


def can_bind_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        return sock.connect_ex(("::1", 1)) in (0, errno.ECONNREFUSED)


def test_localhost_by_name(place: str) -> None:
    close_all(world(f"localhost:{address_of(place)[1]}", 2))


def test_a_port_in_use_is_waited_for(place: str) -> None:
    blocker = socket.create_server(address_of(place))
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(enter, place, rank, 2) for rank in range(2)]
        time.sleep(0.3)
        assert not any(future.done() for future in futures)
        blocker.close()
        close_all([future.result(10) for future in futures])


def test_a_port_that_stays_in_use(place: str) -> None:
    with socket.create_server(address_of(place)), pytest.raises(BootstrapTimeout, match="in use"):
        enter(place, 0, 2, timeout_s=0.3)


def test_a_host_that_is_not_this_one() -> None:
    with pytest.raises(BootstrapError, match=r"192\.0\.2\.1:1234"):
        enter("192.0.2.1:1234", 0, 2, timeout_s=2)


def test_a_bad_host_name() -> None:
    with pytest.raises(BootstrapError, match="no-such-host"):
        enter("no-such-host.invalid:1234", 1, 2, timeout_s=2)


def test_beyond_loopback_without_a_secret_is_refused() -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match="secret"):
            enter("192.0.2.1:1234", rank, 2, secret=None)


def test_loopback_without_a_secret(place: str) -> None:
    stores = [r for r, _ in at_once([lambda rank=rank: enter(place, rank, 2, secret=None) for rank in range(2)])]
    close_all(stores)


def test_a_short_secret_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="secret"):
        enter(place, 0, 2, secret=b"short")


def test_the_listener_is_bound_to_its_interface_alone(place: str, four: list[Store]) -> None:
    port = f":{address_of(place)[1]:04X}"
    with open("/proc/net/tcp") as tcp, open("/proc/net/tcp6") as tcp6:
        lines = [line.split() for line in (*tcp, *tcp6)]
    listening = [fields[1] for fields in lines if fields[1].endswith(port) and fields[3] == "0A"]
    assert listening == ["0100007F" + port]


def test_sockets_are_not_inherited(four: list[Store]) -> None:
    assert not any(s._link.sock.get_inheritable() for s in four)  # type: ignore[attr-defined]


def test_bad_keys_and_values(four: list[Store]) -> None:
    for key, value in (("", b""), ("k" * 257, b""), ("k", bytes(wire.MAX_VALUE + 1))):
        with pytest.raises(InvalidArgument):
            four[0].exchange(key, value)


def test_a_server_that_sends_too_much_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        s = store.TcpStore(store._Link(ours), 0, 2, 5, lambda: None)
        for frame in wire.part_frames("k", [b"", b"", b""]):
            theirs.sendall(frame)
        with pytest.raises(BootstrapError, match="3 values"):
            s.exchange("k", b"")
        s.close()


def test_a_single_rank_needs_no_store() -> None:
    s = join(detect({}))
    assert (s.rank, s.size, s.exchange("k", b"v")) == (0, 1, [b"v"])
    s.barrier("b")
    s.close()
    s.close()
    with pytest.raises(BootstrapError):
        s.exchange("k", b"v")


def test_no_place_to_meet() -> None:
    with pytest.raises(ConfigError, match="COMMRT_RENDEZVOUS"):
        join(detect({}, rank=0, size=2))


def test_a_stranger_that_says_nothing_is_dropped(
    place: str, four: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commrt.bootstrap.peer.HANDSHAKE_TIMEOUT_S", 0.2)
    with socket.create_connection(address_of(place)) as silent:
        assert is_dropped(silent)


def test_a_crowd_of_silent_strangers_does_not_keep_a_rank_out(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commrt.bootstrap.server._SPARE_STRANGERS", 20)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        root = pool.submit(enter, place, 0, 2)
        wait_until(lambda: accepts(place))
        silent = [stack.enter_context(socket.create_connection(address_of(place))) for _ in range(100)]
        close_all([enter(place, 1, 2), root.result(10)])
        assert is_dropped(silent[0])


def test_meetings_are_told_apart_by_rank() -> None:
    assert rendezvous._meetings.get("x rank 0") is not rendezvous._meetings.get("x rank 1")


def test_frames_of_a_slow_writer(four: list[Store]) -> None:
    frame = wire.encode(wire.Put("slow", b"v"))
    link = four[3]._link  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(s.exchange, "slow", b"") for s in four[:3]]
        for at in range(len(frame)):
            link.sock.sendall(frame[at : at + 1])
        assert [future.result(5) for future in waiting] == [[b"", b"", b"", b"v"]] * 3
    decoder = FrameDecoder()
    bodies: list[bytes] = []
    while not bodies:
        bodies = decoder.feed(link.sock.recv(1000))
    assert isinstance(wire.decode_from_server(bodies[0]), wire.Part)

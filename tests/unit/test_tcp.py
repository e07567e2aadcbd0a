"""Setting up tcp connections: proofs, strangers at the door, interfaces by name, and what is left behind."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from commrt.errors import ConfigError, TransportError
from commrt.plugins import default_registry
from commrt.settings import Settings
from commrt.testing import World
from commrt.testing._conformance import until
from commrt.testing._links import Joined
from commrt.transport import Context
from commrt.transports.tcp import handshake, interfaces, meeting
from commrt.transports.tcp.handshake import ANSWER_NBYTES, MAGIC, Callee, Caller, HandshakeError
from commrt.transports.tcp.interfaces import Interface, choose
from commrt.transports.tcp.meeting import Door, call, listen

TOKEN, OTHER = b"t" * 16, b"o" * 16
PATIENCE_S = 20.0


def soon() -> float:
    return time.monotonic() + PATIENCE_S


class Calling(threading.Thread):
    """A call in a thread of its own, over at the end of the block: its link, or its error."""

    link: socket.socket
    error: Exception | None = None

    def __init__(self, place: Any, caller: Caller) -> None:
        super().__init__()
        self._place, self._caller = place, caller

    def run(self) -> None:
        try:
            self.link = call(self._place, self._caller, soon())
        except (HandshakeError, OSError) as error:
            self.error = error

    def __enter__(self) -> Calling:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()


# --- proofs ---


def test_both_who_know_the_token_meet() -> None:
    caller = Caller(TOKEN, 4, 1, 2)
    callee = Callee(TOKEN, 4, 2, caller.opening)
    assert len(callee.answer) == ANSWER_NBYTES
    assert callee.caller(caller.proof(callee.answer)) == 1


@pytest.mark.parametrize(("callers", "callees"), [(TOKEN, OTHER), (OTHER, TOKEN), (b"", TOKEN), (TOKEN, b"")])
def test_another_token_is_found_out_by_either(callers: bytes, callees: bytes) -> None:
    caller = Caller(callers, 4, 1, 2)
    callee = Callee(callees, 4, 2, caller.opening)
    with pytest.raises(HandshakeError, match="does not know"):
        caller.proof(callee.answer)
    own = Callee(callers, 4, 2, caller.opening)
    with pytest.raises(HandshakeError, match="does not know"):
        callee.caller(caller.proof(own.answer))


def test_a_recorded_handshake_proves_nothing_later() -> None:
    caller = Caller(TOKEN, 4, 1, 2)
    callee = Callee(TOKEN, 4, 2, caller.opening)
    proof = caller.proof(callee.answer)
    with pytest.raises(HandshakeError):
        Callee(TOKEN, 4, 2, caller.opening).caller(proof)
    with pytest.raises(HandshakeError):
        Caller(TOKEN, 4, 1, 2).proof(callee.answer)


def test_a_proof_played_back_is_none() -> None:
    caller = Caller(TOKEN, 4, 1, 2)
    callee = Callee(TOKEN, 4, 2, caller.opening)
    with pytest.raises(HandshakeError):
        callee.caller(callee.answer[-handshake.PROOF_NBYTES :])


@pytest.mark.parametrize(
    "caller", [Caller(TOKEN, 4, 1, 3), Caller(TOKEN, 5, 1, 2), Caller(TOKEN, 4, 3, 2), Caller(TOKEN, 4, 2, 2)]
)
def test_who_knows_the_token_and_means_somebody_else(caller: Caller) -> None:
    callee = Callee(TOKEN, 4, 2, caller.opening)
    with pytest.raises(HandshakeError, match="calls rank"):
        callee.caller(caller.proof(callee.answer))


@pytest.mark.parametrize("at", range(0, handshake.OPENING_NBYTES, 7))
def test_every_byte_of_the_opening_is_covered(at: int) -> None:
    caller = Caller(TOKEN, 4, 1, 2)
    opening = bytearray(caller.opening)
    opening[at] ^= 1
    with pytest.raises(HandshakeError):
        caller.proof(Callee(TOKEN, 4, 2, bytes(opening)).answer)


# --- at the door ---


class House:
    """Rank 1 of 2, waiting for rank 0 in a thread."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.listener = listen(address, 256)
        self.place = self.listener.getsockname()[:2]
        self.door = Door([self.listener], TOKEN, 2, 1)
        self.guest: socket.socket | None = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        self.guest = self.door.answer(0, soon())

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=PATIENCE_S)

    def lets_in(self) -> None:
        """The right one, now; both can talk, and nothing of what follows the handshake was taken away."""
        link = call(self.place, Caller(TOKEN, 2, 0, 1), soon())
        with link:
            link.sendall(b"behind")
            self._thread.join(PATIENCE_S)
            assert self.guest is not None
            self.guest.setblocking(True)
            assert self.guest.recv(100) == b"behind"

    def close(self) -> None:
        if self._thread.is_alive():
            self.lets_in()
        self.door.close()
        self.listener.close()
        if self.guest is not None:
            self.guest.close()


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def test_over_ipv6() -> None:
    try:
        house = House("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    house.lets_in()
    house.close()


def hung_up(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def test_garbage_is_dropped(house: House) -> None:
    with house.stranger() as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: everything\r\n\r\n")
        assert hung_up(link)
    house.lets_in()


def test_a_wrong_secret_is_dropped(house: House) -> None:
    with house.stranger() as link:
        caller = Caller(OTHER, 2, 0, 1)
        link.sendall(caller.opening)
        assert len(link.recv(1000)) == ANSWER_NBYTES
        link.sendall(bytes(handshake.PROOF_NBYTES))
        assert hung_up(link)
    house.lets_in()


def test_a_replayed_handshake_is_dropped(house: House) -> None:
    """Everything that the right one said, said again by another."""
    recorded: list[bytes] = []
    caller = Caller(TOKEN, 2, 0, 1)
    with house.stranger() as link:
        link.sendall(caller.opening)
        recorded += [caller.opening, caller.proof(link.recv(1000))]
    with house.stranger() as link:
        link.sendall(recorded[0])
        assert len(link.recv(1000)) == ANSWER_NBYTES
        link.sendall(recorded[1])
        assert hung_up(link)
    house.lets_in()


def test_slow_callers_keep_nobody_waiting(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing, or a byte now and then, are shown out in the end."""
    monkeypatch.setattr(meeting, "HANDSHAKE_S", 0.3)
    with house.stranger() as silent, house.stranger() as dripping:
        began = time.monotonic()
        at = 0
        while not select.select([dripping], [], [], 0.05)[0]:
            assert time.monotonic() - began < PATIENCE_S
            at = (at + 1) % len(MAGIC)
            dripping.send(MAGIC[at : at + 1])
        assert hung_up(dripping)
        assert hung_up(silent)
    house.lets_in()


def test_slow_callers_that_stay_are_not_waited_for(house: House) -> None:
    slow = [house.stranger() for _ in range(5)]
    slow[0].sendall(MAGIC)
    began = time.monotonic()
    house.lets_in()
    assert time.monotonic() - began < meeting.HANDSHAKE_S / 2
    for link in slow:
        link.close()


def test_a_crowd_pushes_its_oldest_out(house: House) -> None:
    crowd = [house.stranger() for _ in range(100)]
    assert hung_up(crowd[0])
    house.lets_in()
    for link in crowd:
        link.close()


def test_a_second_call_of_one_rank_is_dropped() -> None:
    house = House()
    house.lets_in()
    with Calling(house.place, Caller(TOKEN, 2, 0, 1)) as second, pytest.raises(TimeoutError):
        house.door.answer(5, time.monotonic() + 0.5)
    with second.link as link:
        assert hung_up(link)
    house.close()


def test_nobody_comes() -> None:
    listener = listen("127.0.0.1", 1)
    door = Door([listener], TOKEN, 2, 1)
    with pytest.raises(TimeoutError):
        door.answer(0, time.monotonic() + 0.1)
    door.close()
    door.close()


# --- whoever is called ---


def impostor(listener: socket.socket, says: bytes, times: int) -> None:
    for _ in range(times):
        link, _ = listener.accept()
        with link:
            link.recv(handshake.OPENING_NBYTES)
            link.sendall(says)


@pytest.mark.parametrize("says", [MAGIC + bytes(64), bytes(ANSWER_NBYTES), b"SSH-2.0-" + b"x" * 100])
def test_an_impostor_is_found_out(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener, says, 1))
        thread.start()
        with pytest.raises(HandshakeError, match="does not know"):
            call(listener.getsockname(), Caller(TOKEN, 2, 0, 1), soon())
        thread.join()


def test_a_listener_that_says_nothing_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        call(listener.getsockname(), Caller(TOKEN, 2, 0, 1), time.monotonic() + 0.2)


def test_a_listener_that_hangs_up_is_called_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener, b"", 3))
        thread.start()
        with Calling(listener.getsockname(), Caller(TOKEN, 2, 0, 1)) as calling:
            thread.join()
            impostor(listener, bytes(ANSWER_NBYTES), 1)
        assert isinstance(calling.error, HandshakeError)


# --- interfaces ---

THERE = [
    Interface("lo", "127.0.0.1"), Interface("docker0", "172.17.0.1"), Interface("eth0", "10.0.0.1"),
    Interface("eth1", "10.0.1.1"), Interface("ib0", "10.0.2.1"), Interface("eth10", "10.0.3.1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (None, "eth0"), ("eth", "eth0"), ("eth1", "eth1"), ("eth10", "eth10"), ("=eth1", "eth1"), ("ib,eth", "ib0"),
        ("xx,ib", "ib0"), ("=xx,ib0", "ib0"), ("^eth", "ib0"), ("^eth,ib", "docker0"), ("^=eth0", "eth1"), ("lo", "lo"),
        ("^=eth", "eth0"), ("^eth,ib,docker", "lo"), ("docker", "docker0"),
    ],
)  # fmt: skip
def test_choosing(spec: str | None, name: str) -> None:
    chosen = choose(spec, THERE)
    assert chosen is not None
    assert chosen.name == name


@pytest.mark.parametrize("spec", ["wlan", "=eth", "^lo,docker,eth,ib"])
def test_what_is_asked_for_and_not_there(spec: str) -> None:
    with pytest.raises(ConfigError, match=rf"COMMRT_NET_INTERFACE={spec.replace('^', '.')} .*lo, docker0, eth0"):
        choose(spec, THERE)


def test_nothing_there() -> None:
    assert choose(None, []) is None
    assert choose(None, THERE[:1]) == THERE[0]


@pytest.mark.parametrize("text", ["", "^", "=", "a b", "a,,b", ",a", "a=b", "a^b", "^^a", "=^a", "a/b"])
def test_malformed_settings(text: str) -> None:
    if text:
        with pytest.raises(ConfigError, match=r"COMMRT_NET_INTERFACE=.*expected prefixes of interface names"):
            Settings.from_environment({"COMMRT_NET_INTERFACE": text})
    else:
        assert Settings.from_environment({"COMMRT_NET_INTERFACE": text}).net_interface is None


def test_the_setting_is_each_ranks_own() -> None:
    assert "net_interface" not in Settings.from_environment({"COMMRT_NET_INTERFACE": "=eth0,eth1"}).shared()


def test_this_hosts_interfaces() -> None:
    found = interfaces.interfaces()
    assert {one.name for one in found} <= {name for _, name in socket.if_nameindex()}
    assert all(one.is_loopback == (one.name == "lo") for one in found if one.name in ("lo", "eth0"))


# --- endpoints ---


def endpoint(rank: int, token: bytes = TOKEN, patience_s: float = PATIENCE_S, **settings: Any) -> Any:
    backend = default_registry().require("backends", "cpu")
    transport = default_registry().require("transports", "tcp")
    own = Settings.from_environment({}, init_timeout_s=patience_s, **settings)
    return transport.open(Context(rank, 2, token, backend, {}, own))


def test_it_listens_at_its_interfaces_alone() -> None:
    before = listening()
    one = endpoint(1)
    opened = {host for host, _ in listening() - before}
    assert "0.0.0.0" not in opened
    assert opened <= {each.address for each in interfaces.interfaces()}
    one.close()
    assert listening() == before
    one = endpoint(1, net_interface="=lo")
    assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    one.close()


def test_an_interface_that_is_not_there_is_an_error() -> None:
    before = listening()
    with pytest.raises(ConfigError, match="COMMRT_NET_INTERFACE=none-such"):
        endpoint(0, net_interface="none-such")
    assert listening() == before


def test_nobody_listens_any_more_once_all_have_come() -> None:
    before = listening()
    with World(3, "tcp"):
        assert listening() == before
    with World(2, "shm"):
        assert listening() == before


def test_another_communicators_endpoint_is_refused() -> None:
    one, other = endpoint(0), endpoint(1, OTHER, 1.0)
    answering = threading.Thread(target=lambda: suppressed(other.connect, 0, one.address, bytes(8)))
    answering.start()
    with pytest.raises(TransportError, match="does not know the communicator's token") as caught:
        one.connect(1, other.address, bytes(8))
    assert caught.value.context.peer == 1
    answering.join()
    one.close()
    other.close()


def suppressed(function: Any, *arguments: Any) -> None:
    with suppress(TransportError):
        function(*arguments)


def test_last_words_though_something_is_unread() -> None:
    """A socket that is closed with something unread takes back what has not arrived; a connection does not."""
    nbytes = 8 << 20
    backend, transport = (default_registry().require(*what) for what in (("backends", "cpu"), ("transports", "tcp")))
    joined = Joined(transport, backend, {}, 2, nbytes + 64, PATIENCE_S)
    out, back = joined.link(0, 1), joined.link(1, 0)
    back.connection.link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)  # what is sent stays with its sender
    source = bytearray(secrets.token_bytes(nbytes))
    assert back.put(0, bytearray(b"unread" * 1000)) == back.flush() == 1
    assert out.put(0, source) == out.signal(nbytes, 1) == 1
    until(lambda: out.flush() or (back.poll() and False), "a flush", PATIENCE_S)
    closing = threading.Thread(target=joined.endpoints[0].close)
    closing.start()
    until(lambda: back.poll() and out.seen(nbytes), "the last signal", PATIENCE_S)
    closing.join()
    assert back.arrived(0, 100) == bytes(100)
    assert out.arrived(0, nbytes) == source
    joined.close()


def test_forked_children_keep_no_socket() -> None:
    with World(2, "tcp"):
        assert connected()
        pid = os.fork()
        if not pid:
            os._exit(int(bool(connected())))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def sockets() -> set[str]:
    """This process's, by inode."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def rows() -> Iterator[list[str]]:
    """This process's rows in the system's table of TCP over IPv4."""
    own = sockets()
    with open("/proc/net/tcp") as table:
        yield from (cells for cells in map(str.split, list(table)[1:]) if f"socket:[{cells[9]}]" in own)


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    places = [cells[1].split(":") for cells in rows() if cells[3] == "0A"]
    return {(socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)) for host, port in places}


def connected() -> int:
    """How many connections it has."""
    return sum(cells[3] == "01" for cells in rows())

"""The ways in which ranks meet. `join` picks by the kind of rendezvous; each way ends in a `Store` that all ranks have
joined.
"""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from commrt.bootstrap import net, published
from commrt.bootstrap.adapter import SingleStore, StoreAdapter
from commrt.bootstrap.auth import Hello
from commrt.bootstrap.contract import FileRendezvous, LaunchInfo, Store, TcpRendezvous, TorchRendezvous
from commrt.bootstrap.published import Published
from commrt.bootstrap.secrets import check_secret, read_secret_fd, read_secret_file, require_secret
from commrt.bootstrap.server import StoreServer
from commrt.bootstrap.store import NotYet, TcpStore, Where, connect
from commrt.bootstrap.wire import PROTOCOL_VERSION
from commrt.errors import BootstrapTimeout, ConfigError, Unavailable

JOIN_KEY = "commrt/join"
_FILE_ANSWER_S = 3.0


@dataclass
class _Meeting:
    """What this process keeps of one rendezvous from one world to the next. Worlds that were joined are counted alike
    on all ranks.
    """

    joining: threading.Lock = field(default_factory=threading.Lock)
    hosting: threading.Lock = field(default_factory=threading.Lock)
    joined_worlds: int = 0
    open_worlds: int = 0
    server: StoreServer | None = None
    listener: socket.socket | None = None
    secret: bytes = b""

    def host(self, generation: int, size: int, listen: Callable[[], socket.socket], secret: bytes) -> StoreServer:
        """Rank 0: open a world on the running server, or on a new one."""
        with self.hosting:
            if self.server is None:
                self.server = StoreServer(self.listener.dup() if self.listener else listen(), secret)
            self.server.open_world(generation, size)
            self.open_worlds += 1
            return self.server

    def release(self, generation: int) -> None:
        """Rank 0: close a world; the last one takes the server with it."""
        with self.hosting:
            if self.server is None:
                return
            self.server.close_world(generation)
            self.open_worlds -= 1
            if not self.open_worlds:
                self.server.stop()
                self.server = None


class _Meetings:
    """This process's meetings, by the words for rendezvous and rank: ranks may be threads of one process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._guard = threading.Lock()
        self._by_name: dict[str, _Meeting] = {}

    def get(self, name: str) -> _Meeting:
        with self._guard:
            return self._by_name.setdefault(name, _Meeting())

    def forget(self) -> None:
        """In a forked child, which starts with none: the listeners are the parent's."""
        for meeting in self._by_name.values():
            if meeting.listener:
                meeting.listener.close()
        self.reset()


_meetings = _Meetings()
os.register_at_fork(after_in_child=_meetings.forget)


def join(info: LaunchInfo, *, secret: bytes | None, timeout_s: float, insecure: bool) -> Store:
    """See `commrt.bootstrap.join`."""
    rendezvous = info.rendezvous
    if secret is not None:
        secret = check_secret(secret, "secret=")
    meeting = _meetings.get(f"{rendezvous} rank {info.rank}")
    if isinstance(rendezvous, TcpRendezvous):
        _take_inherited(rendezvous, meeting)
    if info.size == 1:
        return SingleStore()
    if rendezvous is None:
        raise ConfigError(
            f"{info.size} ranks and no place to meet: give rendezvous='host:port' or set COMMRT_RENDEZVOUS",
            rank=info.rank,
        )
    deadline = time.monotonic() + timeout_s
    if not meeting.joining.acquire(timeout=max(timeout_s, 0)):
        raise BootstrapTimeout(f"another thread is still joining at {rendezvous}", rank=info.rank)
    try:
        store = _meet(_Attempt(info, meeting, timeout_s, deadline), rendezvous, secret, insecure)
        meeting.joined_worlds += 1
        return store
    finally:
        meeting.joining.release()


@dataclass(frozen=True)
class _Attempt:
    """One rank's attempt to join one world."""

    info: LaunchInfo
    meeting: _Meeting
    timeout_s: float
    deadline: float

    @property
    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self.info.size, self.info.rank, self.meeting.joined_worlds)

    def host(self, listen: Callable[[], socket.socket], secret: bytes) -> StoreServer:
        return self.meeting.host(self.hello.generation, self.info.size, listen, secret)

    def enter(self, where: Where, **how: float | bool) -> Store:
        """Connect, and wait until all ranks have; rank 0 has opened the world before."""
        generation = self.hello.generation
        leave = partial(self.meeting.release, generation) if self.info.rank == 0 else _nothing
        try:
            link = connect(where, self.hello, self.deadline, **how)  # type: ignore[arg-type]
        except BaseException:
            leave()
            raise
        store = TcpStore(link, self.info.rank, self.info.size, self.timeout_s, leave)
        try:
            store.barrier(JOIN_KEY, max(0.0, self.deadline - time.monotonic()))
        except BaseException:
            store.close()
            raise
        return store


def _nothing() -> None:
    pass


def _meet(
    attempt: _Attempt,
    rendezvous: TcpRendezvous | FileRendezvous | TorchRendezvous,
    secret: bytes | None,
    insecure: bool,
) -> Store:
    if isinstance(rendezvous, TcpRendezvous):
        return _meet_at_address(attempt, rendezvous, secret, insecure)
    if isinstance(rendezvous, FileRendezvous):
        return _meet_by_file(attempt, rendezvous, secret or b"")
    return _meet_at_torch(attempt, rendezvous)


def _meet_at_address(attempt: _Attempt, rendezvous: TcpRendezvous, secret: bytes | None, insecure: bool) -> Store:
    if secret is None:
        file = attempt.info.secret_file
        secret = attempt.meeting.secret or (read_secret_file(file) if file else b"")
    addresses = net.resolve(rendezvous.host, rendezvous.port, attempt.deadline)
    if not (insecure or rendezvous.insecure):
        remedy = "give secret= or COMMRT_SECRET_FILE (insecure=True lets anyone who reaches the port join)"
        require_secret(secret, rendezvous, addresses, remedy)
    if attempt.info.rank == 0:
        addresses = [attempt.host(lambda: net.listen(addresses, attempt.deadline), secret).address]
    return attempt.enter(lambda: (f"at {rendezvous}", addresses, secret))


def _meet_by_file(attempt: _Attempt, rendezvous: FileRendezvous, secret: bytes) -> Store:
    published.check_directory(rendezvous.path, private=rendezvous.private)
    if attempt.info.rank != 0:
        return attempt.enter(
            lambda: _look_up(rendezvous, secret, attempt.deadline), answer_s=_FILE_ANSWER_S, stubborn=True
        )
    meeting = attempt.meeting
    fresh = meeting.secret = meeting.secret or secrets.token_bytes(32)
    server = attempt.host(
        lambda: net.listen(net.resolve(rendezvous.host, 0, attempt.deadline), attempt.deadline), fresh + secret
    )
    address = server.address
    try:
        identity = published.publish(
            rendezvous.path, Published(str(address.sockaddr[0]), int(address.sockaddr[1]), fresh.hex())
        )
    except BaseException:
        meeting.release(attempt.hello.generation)
        raise
    try:
        return attempt.enter(lambda: (f"at {address}", [address], fresh + secret))
    finally:
        published.withdraw(rendezvous.path, identity)


def _look_up(rendezvous: FileRendezvous, secret: bytes, deadline: float) -> tuple[str, list[net.Address], bytes]:
    found = published.read(rendezvous.path)
    if found is None:
        raise NotYet(f"nothing is published in {rendezvous.path}")
    words = f"at {found.host}:{found.port}, read from {rendezvous.path},"
    return words, net.resolve(found.host, found.port, deadline), bytes.fromhex(found.secret) + secret


def _meet_at_torch(attempt: _Attempt, rendezvous: TorchRendezvous) -> Store:
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise Unavailable(
            f"the ranks of torchrun meet in its own store, which needs torch: {error}", rank=attempt.info.rank
        ) from None
    info, left = attempt.info, timedelta(seconds=max(0.001, attempt.deadline - time.monotonic()))
    try:
        store = distributed.TCPStore(rendezvous.host, rendezvous.port, None, False, left, wait_for_workers=False)
    except RuntimeError as error:
        raise BootstrapTimeout(f"{rendezvous} was not reached: {error}", rank=info.rank) from None
    prefix = f"{rendezvous.prefix}/{attempt.meeting.joined_worlds}"
    adapter = StoreAdapter(store, info.rank, info.size, prefix=prefix, timeout_s=attempt.timeout_s)
    adapter.barrier(JOIN_KEY, max(0.0, attempt.deadline - time.monotonic()))
    return adapter


def _take_inherited(rendezvous: TcpRendezvous, meeting: _Meeting) -> None:
    """Take over the launcher's descriptors, so that no child of this process gets them; later worlds find them in the
    meeting.
    """
    if rendezvous.secret_fd is not None:
        meeting.secret = read_secret_fd(rendezvous.secret_fd)
        os.close(rendezvous.secret_fd)
        _unset("COMMRT_SECRET_FD", rendezvous.secret_fd)
    if rendezvous.listen_fd is not None:
        meeting.listener = _inherited_listener(rendezvous, rendezvous.listen_fd)
        _unset("COMMRT_STORE_FD", rendezvous.listen_fd)


def _inherited_listener(rendezvous: TcpRendezvous, fd: int) -> socket.socket:
    fault = ConfigError(f"COMMRT_STORE_FD={fd} is not a socket that listens at COMMRT_RENDEZVOUS={rendezvous}")
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        raise fault from None
    try:
        fits = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[:2] == (
            rendezvous.host,
            rendezvous.port,
        )
        os.set_inheritable(fd, False)
    except OSError:
        fits = False
    if not fits:
        sock.detach()
        raise fault
    return sock


def _unset(name: str, fd: int) -> None:
    with suppress(KeyError):
        if os.environ[name] == str(fd):
            del os.environ[name]

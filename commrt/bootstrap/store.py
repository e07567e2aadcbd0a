"""The client's side of the store, which every rank has, rank 0 included."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from commrt.bootstrap import auth, net
from commrt.bootstrap.auth import Hello
from commrt.bootstrap.wire import (
    MAX_FRAME,
    MAX_KEY,
    MAX_TOTAL,
    MAX_VALUE,
    Bye,
    FrameDecoder,
    FrameError,
    FromServer,
    GiveUp,
    Part,
    Put,
    Refused,
    Welcome,
    decode_from_server,
    encode,
)
from commrt.errors import AuthenticationError, BootstrapError, BootstrapTimeout, InvalidArgument

GRACE_S = 0.7
CONNECT_TIMEOUT_S = 5.0
_CHUNK = 1 << 18

Where = Callable[[], tuple[str, list[net.Address], bytes]]


class NotYet(Exception):
    """No usable server there for the moment."""


class _Late(NotYet):
    """The deadline passed."""


class _Link:
    """An authenticated connection to the server, carrying frames."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = FrameDecoder(MAX_FRAME)
        self._bodies: list[bytes] = []

    def send(self, frame: bytes, deadline: float) -> None:
        """Raises `_Late` at the deadline, perhaps with half the frame sent."""
        self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self.sock.sendall(frame)
        except TimeoutError:
            raise _Late("no answer") from None

    def receive(self, deadline: float) -> FromServer:
        """The next message. `_Late` at the deadline, OSError if the server is gone, FrameError if it talks nonsense."""
        while not self._bodies:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self.sock.recv(_CHUNK)
            except TimeoutError:
                raise _Late("no answer") from None
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._bodies = self._decoder.feed(data)
        return decode_from_server(self._bodies.pop(0))


def _receive_exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError("closed in the handshake")
        data += more
        if not auth.MAGIC.startswith(bytes(data[: len(auth.MAGIC)])):
            raise NotYet("something other than a commrt store answers there")
    return bytes(data)


def _greet(sock: socket.socket, secret: bytes, hello: Hello, answer_deadline: float, deadline: float) -> _Link:
    """Handshake, then wait to be admitted. A server that has proved itself is waited for until `deadline`."""
    nonce = auth.fresh_nonce()
    sock.sendall(auth.client_opening(nonce))
    answer = _receive_exactly(sock, auth.SERVER_ANSWER_NBYTES, answer_deadline)
    proof = auth.client_proof(secret, nonce, answer, hello)
    if proof is None:
        raise AuthenticationError("the store there was given another secret", rank=hello.rank)
    link = _Link(sock)
    link.send(proof, deadline)
    message = link.receive(deadline)
    if isinstance(message, Refused):
        raise BootstrapError(message.message, rank=hello.rank)
    if not isinstance(message, Welcome):
        raise FrameError("the store did not greet", rank=hello.rank)
    return link


def _try_addresses(
    addresses: list[net.Address], secret: bytes, hello: Hello, answer_s: float, deadline: float
) -> _Link:
    reasons: list[str] = []
    refused: AuthenticationError | None = None
    if len(addresses) > 1:
        answer_s = min(answer_s, CONNECT_TIMEOUT_S)
    for address in addresses:
        sock = None
        try:
            sock = net.connect_once(address, min(answer_s, CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            return _greet(sock, secret, hello, min(deadline, time.monotonic() + answer_s), deadline)
        except NotYet as error:
            reasons.append(f"{address}: {error}")
        except AuthenticationError as error:
            refused = error
        except OSError as error:
            if not net.is_passing(error) and len(addresses) == 1:
                raise BootstrapError(f"can't reach the store at {address}: {error.strerror}", rank=hello.rank) from None
            reasons.append(f"{address}: {error.strerror or error or 'no answer'}")
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        if sock is not None:
            sock.close()
    if refused is not None:
        raise refused
    raise NotYet("; ".join(reasons))


def connect(where: Where, hello: Hello, deadline: float, *, answer_s: float = 3600.0, stubborn: bool = False) -> _Link:
    """Try until rank 0's server admits this rank.

    `where` is asked anew each time for (words, addresses, secret) and may raise `NotYet`. A server that has not proved
    itself within `answer_s` is left and tried again. `stubborn` tries again even if the server has another secret: it
    may be that of an earlier run.
    """
    reason, words = "", ""
    for pause in net.pauses(deadline):
        try:
            words, addresses, secret = where()
            return _try_addresses(addresses, secret, hello, answer_s, deadline)
        except NotYet as error:
            reason = str(error)
        except AuthenticationError as error:
            if not stubborn:
                raise
            reason = str(error)
        time.sleep(pause)
    raise BootstrapTimeout(
        f"rank 0's store {words} was not reached in time ({reason or 'no answer'})", missing=[0], rank=hello.rank
    )


class TcpStore:
    """A `Store` over one connection to rank 0's server. `on_close` runs once, after the connection is closed."""

    def __init__(self, link: _Link, rank: int, size: int, timeout_s: float, on_close: Callable[[], None]) -> None:
        self.rank, self.size = rank, size
        self._link, self._timeout_s, self._on_close = link, timeout_s, on_close
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._broken: str | None = None
        _stores.add(self)

    def exchange(self, key: str, value: bytes, timeout_s: float | None = None) -> list[bytes]:
        """See `Store.exchange`. Raises `InvalidArgument` for a value over 16 MiB or a key over 256 characters."""
        if len(key) > MAX_KEY or not key or len(value) > MAX_VALUE:
            raise InvalidArgument(
                f"key of 1..{MAX_KEY} characters and value of at most {MAX_VALUE} bytes, got {key[:40]!r}, {len(value)}"
            )
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(timeout_s, 0)):
            raise BootstrapTimeout(f"another exchange of this rank is still under way at {key!r}", rank=self.rank)
        try:
            return self._exchange(key, value, deadline)
        except BootstrapTimeout:
            raise
        except (OSError, FrameError) as error:
            self._broken = self._broken or f"rank 0's store is gone ({error})"
            raise BootstrapError(f"{self._broken}, at {key!r}", rank=self.rank, peer=0) from None
        finally:
            self._lock.release()

    def barrier(self, key: str, timeout_s: float | None = None) -> None:
        """See `Store.barrier`."""
        self.exchange(key, b"", timeout_s)

    def _exchange(self, key: str, value: bytes, deadline: float) -> list[bytes]:
        self._usable()
        try:
            self._send(Put(key, value), deadline)
            with suppress(_Late):
                return self._collect(key, deadline)
            grace = time.monotonic() + GRACE_S
            self._send(GiveUp(key), grace)
            return self._collect(key, grace)
        except _Late:
            self._broken = "rank 0's store does not answer"
            raise BootstrapTimeout(f"{self._broken}, at {key!r}", missing=[0], rank=self.rank, peer=0) from None

    def _send(self, message: Put | GiveUp, deadline: float) -> None:
        try:
            self._link.send(encode(message), deadline)
        except BaseException:
            # Half a frame may be under way: nothing that follows on this connection would be understood.
            self._broken = "an earlier exchange was interrupted"
            raise

    def _usable(self) -> None:
        if not net.in_this_process(self._pid):
            raise BootstrapError("this store belongs to the process that this one was forked from", rank=self.rank)
        if self._closed:
            raise BootstrapError("this store is closed", rank=self.rank)
        if self._broken:
            raise BootstrapError(self._broken, rank=self.rank)

    def _collect(self, key: str, deadline: float) -> list[bytes]:
        values: list[bytes] = []
        nbytes = 0
        while True:
            message = self._link.receive(deadline)
            if isinstance(message, Refused) and message.key in ("", key):
                self._raise(message)
            if not isinstance(message, Part) or message.key != key:
                continue
            values += message.values
            nbytes += sum(map(len, message.values))
            if nbytes > MAX_TOTAL or len(values) > self.size or (message.last and len(values) != self.size):
                raise FrameError(f"{len(values)} values of {nbytes} bytes for a world of {self.size} at {key!r}")
            if message.last:
                return values

    def _raise(self, message: Refused) -> None:
        if not message.key:
            self._broken = message.message
        if message.kind == "timeout":
            raise BootstrapTimeout(message.message, missing=message.ranks, rank=self.rank)
        peer = message.ranks[0] if len(message.ranks) == 1 else None
        raise BootstrapError(message.message, rank=self.rank, peer=peer)

    def close(self) -> None:
        """See `Store.close`. In a forked child, drops the child's copy of the connection only."""
        if self._closed:
            return
        self._closed = True
        if net.in_this_process(self._pid):
            with suppress(OSError):
                self._link.send(encode(Bye()), time.monotonic() + GRACE_S)
            # Not only close(): a thread that waits in exchange() returns, and a copy in some child does not keep the
            # connection up.
            with suppress(OSError):
                self._link.sock.shutdown(socket.SHUT_RDWR)
            self._link.sock.close()
            self._on_close()
        else:
            self._link.sock.close()

    def forget(self) -> None:
        """In a forked child: give back the descriptor."""
        self._link.sock.close()

    def __enter__(self) -> TcpStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_stores: weakref.WeakSet[TcpStore] = weakref.WeakSet()


def _forget_in_child() -> None:
    for store in list(_stores):
        store.forget()


os.register_at_fork(after_in_child=_forget_in_child)

"""How two ranks get a connection: the lower one calls, the higher one answers. Every step has a deadline."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from commrt.transports.tcp.handshake import ANSWER_NBYTES, OPENING_NBYTES, PROOF_NBYTES, Callee, Caller, HandshakeError

HANDSHAKE_S = 10.0  # for a caller to say what it has to say
_MOST_STRANGERS = 64  # connections that have proven nothing, beside those of the communicator's ranks
_PAUSE_S = 0.05

_log = logging.getLogger("commrt.net")

_own: weakref.WeakSet[socket.socket] = weakref.WeakSet()

Place = tuple[str, int]  # numeric address, port


def listen(address: str, backlog: int) -> socket.socket:
    """A listener at that address alone, at a port that the system picks. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    close_in_children(listener)
    return listener


def close_in_children(sock: socket.socket) -> None:
    """Forked children don't keep it: a peer would not see this process's end."""
    _own.add(sock)


def _forked() -> None:
    for sock in _own:
        sock.close()


def call(place: Place, caller: Caller, deadline: float) -> socket.socket:
    """A connection whose other end has proven to be the callee. A listener that hangs up is called again.

    Raises HandshakeError if whoever answers proves nothing, OSError (TimeoutError) if nobody does.
    """
    while True:
        link = socket.create_connection(place, timeout=_left(deadline))
        try:
            link.sendall(caller.opening)
            link.sendall(caller.proof(_receive(link, ANSWER_NBYTES, deadline)))
            return link
        except ConnectionError:
            link.close()
            time.sleep(min(_PAUSE_S, _left(deadline)))
        except BaseException:
            link.close()
            raise


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _receive(link: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Exactly so many bytes: what follows belongs to whoever reads next."""
    data = b""
    while len(data) < nbytes:
        link.settimeout(_left(deadline))
        part = link.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError("the other end hung up")
        data += part
    return data


@dataclass(eq=False)
class _Stranger:
    """A connection that has proven nothing yet. `callee`: this end's part, once the opening is there."""

    link: socket.socket
    deadline: float
    callee: Callee | None = None
    heard: bytes = b""


class Door:
    """Answers callers at some listeners. Strangers keep nobody waiting: all handshakes are served side by side."""

    def __init__(self, listeners: Iterable[socket.socket], token: bytes, size: int, rank: int) -> None:
        self._token, self._size, self._rank = token, size, rank
        self._selector = selectors.DefaultSelector()
        self._listeners = list(listeners)
        self._strangers: dict[_Stranger, None] = {}  # the longest there first
        self._admitted: dict[int, socket.socket] = {}
        self._joined: set[int] = set()
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def answer(self, rank: int, deadline: float) -> socket.socket:
        """The connection of a lower rank. Raises TimeoutError."""
        while rank not in self._admitted:
            for key, _ in self._selector.select(min(_PAUSE_S, _left(deadline))):
                if key.data is None:
                    self._admit(key.fileobj)  # type: ignore[arg-type]
                elif key.data in self._strangers:
                    self._listen_to(key.data)
            self._show_out()
        return self._admitted.pop(rank)

    def shut(self, listener: socket.socket) -> None:
        """Nobody is to come there any more. Idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._selector.unregister(listener)
            listener.close()

    def close(self) -> None:
        """Shut all; whoever is in the door has to leave. Idempotent."""
        for listener in list(self._listeners):
            self.shut(listener)
        for stranger in list(self._strangers):
            self._drop(stranger, "the communicator is closed")
        while self._admitted:
            self._admitted.popitem()[1].close()
        self._selector.close()

    def _admit(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it hung up already, or this process is short of something for the moment
            link = listener.accept()[0]
            link.setblocking(False)
            stranger = _Stranger(link, time.monotonic() + HANDSHAKE_S)
            self._strangers[stranger] = None
            self._selector.register(link, selectors.EVENT_READ, stranger)
        if len(self._strangers) > _MOST_STRANGERS + self._size:
            self._drop(next(iter(self._strangers)), "too many callers at once")

    def _listen_to(self, stranger: _Stranger) -> None:
        wanted = (PROOF_NBYTES if stranger.callee else OPENING_NBYTES) - len(stranger.heard)
        try:
            part = stranger.link.recv(wanted)
            stranger.heard += part
            if not part:
                self._drop(stranger, "it hung up")
            elif len(part) == wanted:
                self._proceed(stranger)
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            self._drop(stranger, str(error))

    def _proceed(self, stranger: _Stranger) -> None:
        heard, stranger.heard = stranger.heard, b""
        if stranger.callee is None:
            stranger.callee = Callee(self._token, self._size, self._rank, heard)
            answer = stranger.callee.answer
            if stranger.link.send(answer) < len(answer):
                raise HandshakeError("a caller that reads nothing")
            return
        rank = stranger.callee.caller(heard)
        if rank in self._joined:
            raise HandshakeError(f"rank {rank} calls a second time")
        self._forget(stranger)
        self._joined.add(rank)
        self._admitted[rank] = stranger.link

    def _show_out(self) -> None:
        now = time.monotonic()
        for stranger in [one for one in self._strangers if one.deadline < now]:
            self._drop(stranger, "it was too slow")

    def _drop(self, stranger: _Stranger, why: str) -> None:
        _log.info("rank %d dropped a connection: %s", self._rank, why)
        self._forget(stranger)
        stranger.link.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.link)


os.register_at_fork(after_in_child=_forked)

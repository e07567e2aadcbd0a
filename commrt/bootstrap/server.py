"""The store's server: one daemon thread of rank 0 and one selector, for any number of clients.

Everything a client sends is bounded and checked; whatever is wrong with a client ends that client alone, with a
rate-limited line in the log. All state below `_loop` belongs to the thread; other threads hand it functions through
`_call`.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import logging
import os
import resource
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from commrt.bootstrap import auth, net
from commrt.bootstrap.peer import HANDSHAKE_TIMEOUT_S, NOT_NOW, Peer, RateLimitedLog
from commrt.bootstrap.wire import (
    Bye,
    FrameDecoder,
    FrameError,
    GiveUp,
    Put,
    Refused,
    decode_from_client,
    encode,
)
from commrt.bootstrap.world import World
from commrt.errors import BootstrapError

log = logging.getLogger("commrt.init")

LINGER_S = 2.0
FAILURE_LINGER_S = 1.0
_CHUNK = 1 << 18
_SPARE_STRANGERS = 256
_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass
class _Closing:
    generation: int
    world: World
    since: float
    done: threading.Event


class StoreServer:
    """Serves worlds on a listening socket, which becomes its own. Public methods may be called from any thread."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self.address = net.Address(listener.family, listener.getsockname())
        listener.setblocking(False)
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        for sock in (self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._peers: dict[socket.socket, Peer] = {}
        self._strangers: dict[Peer, None] = {}
        self._worlds: dict[int, World] = {}
        self._parked: list[Peer] = []
        self._closing: list[_Closing] = []
        self._generation = 0
        self._attention: set[Peer] = set()
        self._accept_after: float | None = None
        self._stopping = False
        self._complaints = RateLimitedLog()
        self._thread = threading.Thread(target=self._run, name="commrt-store", daemon=True)
        self._thread.start()
        _servers.add(self)

    def open_world(self, generation: int, size: int, noun: str = "rank") -> None:
        """Admit the ranks of world `generation`; those that came early are waiting. `noun`: what messages call them."""
        _allow_descriptors(size)
        self._call(lambda: self._open_world(generation, World(size, noun)))

    def stop_listening(self) -> None:
        """Take no more connections, from when it returns: whoever has a copy of the listening socket may do so."""
        done = threading.Event()
        self._call(lambda: self._stop_listening(done))
        while self._thread.is_alive() and not done.wait(0.1):
            pass

    def close_world(self, generation: int) -> None:
        """Tell whoever waits, send what is due, drop the world's connections. Bounded by about `LINGER_S`."""
        done = threading.Event()
        self._call(lambda: self._close_world(generation, done))
        while self._thread.is_alive() and not done.wait(0.1):
            pass

    def stop(self) -> None:
        """Close what worlds are open, end the thread and close every socket. Idempotent, bounded as `close_world`."""

        def stop() -> None:
            for generation in self._worlds:
                self._close_world(generation, threading.Event())
            self._stopping = True

        self._call(stop)
        self._thread.join(2 * LINGER_S)

    def forget(self) -> None:
        """In a forked child: close this process's copies of the sockets; the parent's connections stay as they are."""
        for sock in (*self._peers, self._listener, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        # A full pipe wakes the thread as well as one more byte would; a closed one means that it has ended.
        with suppress(OSError):
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stopping or self._closing:
                self._loop()
        except Exception:
            log.exception("the bootstrap store failed")
        finally:
            for sock in (*self._peers, self._listener, self._wake_in, self._wake_out):
                sock.close()
            self._selector.close()
            for closing in self._closing:
                closing.done.set()

    def _loop(self) -> None:
        for key, events in self._selector.select(self._patience()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_in:
                self._take_calls()
            else:
                self._serve(key.data, events)
        self._expire()
        self._sweep()
        self._finish_closing()

    def _patience(self) -> float | None:
        moments = [closing.since + LINGER_S for closing in self._closing]
        if self._strangers:
            moments.append(next(iter(self._strangers)).deadline)
        if self._accept_after is not None:
            moments.append(self._accept_after)
        if not moments:
            return None
        patience = max(0.0, min(moments) - time.monotonic())
        return min(patience, 0.02) if self._closing else patience

    def _take_calls(self) -> None:
        with suppress(*NOT_NOW):
            self._wake_in.recv(4096)
        while self._calls:
            self._calls.popleft()()

    # Worlds

    def _open_world(self, generation: int, world: World) -> None:
        self._worlds[generation] = world
        self._generation = generation
        parked, self._parked = self._parked, []
        for peer in parked:
            self._admit(peer)

    def _close_world(self, generation: int, done: threading.Event) -> None:
        world = self._worlds.get(generation)
        if world is None:
            done.set()
            return
        world.close()
        self._closing.append(_Closing(generation, world, time.monotonic(), done))

    def _finish_closing(self) -> None:
        for closing in list(self._closing):
            members = [peer for peer in self._peers.values() if peer.world is closing.world]
            waited_s = time.monotonic() - closing.since
            told = closing.world.everyone_told or waited_s >= FAILURE_LINGER_S
            if (told and not any(peer.unsent for peer in members)) or waited_s >= LINGER_S:
                for peer in members:
                    peer.world = None
                    self._drop(peer, None)
                if self._worlds.get(closing.generation) is closing.world:
                    del self._worlds[closing.generation]
                self._closing.remove(closing)
                closing.done.set()

    def _admit(self, peer: Peer) -> None:
        hello = peer.hello
        if hello is None or peer.doomed:
            return
        world = self._worlds.get(hello.generation)
        if world is not None:
            if world.join(hello, peer):
                peer.world = world
            else:
                peer.last_words = True
        elif hello.generation < self._generation:
            message = f"rank {hello.rank} joins its world number {hello.generation} at this address, rank 0 is past it"
            peer.send(encode(Refused("", "error", message, [])))
            peer.last_words = True
        else:
            self._parked.append(peer)

    # Connections

    def _stop_listening(self, done: threading.Event) -> None:
        if self._accept_after is None:
            self._selector.unregister(self._listener)
        self._accept_after = None
        self._listener.close()
        done.set()

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, address = self._listener.accept()
            except NOT_NOW:
                return
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._pause_accepting(error)
                    return
                continue
            sock.setblocking(False)
            net.tune(sock)
            peer = Peer(sock, f"{address[0]}:{address[1]}", self._attention)
            self._peers[sock] = peer
            self._strangers[peer] = None
            self._selector.register(sock, selectors.EVENT_READ, peer)
            self._crowd_out()

    def _crowd_out(self) -> None:
        """Strangers never take all the room: a rank proves itself in no time, so the oldest has had its chance."""
        allowed = _SPARE_STRANGERS + max((world.size for world in self._worlds.values()), default=0)
        if len(self._strangers) > allowed:
            self._drop(next(iter(self._strangers)), "too many connections that prove nothing")

    def _pause_accepting(self, error: OSError) -> None:
        self._complaints.warning("can't accept a connection: %s", error.strerror)
        if self._strangers:
            self._drop(next(iter(self._strangers)), "its descriptor is needed")
        self._selector.unregister(self._listener)
        self._accept_after = time.monotonic() + 0.1

    def _expire(self) -> None:
        now = time.monotonic()
        if self._accept_after is not None and now >= self._accept_after:
            self._accept_after = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for peer in list(itertools.takewhile(lambda stranger: stranger.deadline <= now, self._strangers)):
            self._drop(peer, f"proved nothing within {HANDSHAKE_TIMEOUT_S:g} s")

    def _serve(self, peer: Peer, events: int) -> None:
        if peer.sock not in self._peers:
            return
        self._attention.add(peer)
        if events & selectors.EVENT_WRITE:
            peer.flush()
        if events & selectors.EVENT_READ and not peer.doomed:
            try:
                self._read(peer)
            except FrameError as error:
                peer.doomed = f"broke the protocol ({error})"

    def _read(self, peer: Peer) -> None:
        wanted = _CHUNK if peer.decoder else self._wanted(peer) - len(peer.inbox)
        try:
            data = peer.sock.recv(wanted)
        except NOT_NOW:
            return
        except OSError as error:
            peer.doomed = f"disconnected ({error.strerror})"
            return
        if not data:
            peer.doomed = "disconnected"
        elif peer.decoder:
            for body in peer.decoder.feed(data):
                self._handle(peer, body)
        else:
            peer.inbox += data
            self._greet(peer)

    @staticmethod
    def _wanted(peer: Peer) -> int:
        return auth.CLIENT_PROOF_NBYTES if peer.opening else auth.CLIENT_OPENING_NBYTES

    def _greet(self, peer: Peer) -> None:
        """The handshake: exactly as many bytes are read as it has, and none is interpreted before the proof."""
        if not peer.opening and not auth.MAGIC.startswith(bytes(peer.inbox[: len(auth.MAGIC)])):
            peer.doomed = "speaks another protocol"
        if peer.doomed or len(peer.inbox) < self._wanted(peer):
            return
        message = bytes(peer.inbox)
        peer.inbox.clear()
        if not peer.opening:
            peer.opening = message
            peer.send(auth.server_answer(self._secret, message, peer.nonce) or b"")
            return
        peer.hello = auth.check_client_proof(self._secret, peer.opening, peer.nonce, message)
        if peer.hello is None:
            peer.doomed = "does not know the secret"
            return
        self._strangers.pop(peer, None)
        peer.decoder = FrameDecoder()
        self._admit(peer)

    def _handle(self, peer: Peer, body: bytes) -> None:
        message = decode_from_client(body)
        if peer.world is None or peer.hello is None:
            return
        if isinstance(message, Put):
            peer.world.put(peer.hello.rank, message.key, message.value)
        elif isinstance(message, GiveUp):
            peer.world.give_up(message.key)
        elif isinstance(message, Bye):
            self._drop(peer, "left")

    def _sweep(self) -> None:
        """Drop the doomed until dropping dooms no more; watch for room where something is unsent."""
        while self._attention:
            peer = self._attention.pop()
            if peer.sock not in self._peers:
                continue
            if peer.doomed or (peer.last_words and not peer.unsent):
                self._drop(peer, peer.doomed)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            if events != peer.events:
                self._selector.modify(peer.sock, events, peer)
                peer.events = events

    def _drop(self, peer: Peer, reason: str | None) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self._selector.unregister(peer.sock)
        peer.sock.close()
        peer.doomed = reason or "dropped"
        if peer in self._strangers:
            del self._strangers[peer]
            self._complaints.warning("dropped a connection from %s: it %s", peer.name, reason)
        if peer in self._parked:
            self._parked.remove(peer)
        if peer.world is not None and peer.hello is not None:
            peer.world.leave(peer.hello.rank, reason or "left")


def _allow_descriptors(size: int) -> None:
    """A large world needs more descriptors than most shells allow; take them from the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = size + _SPARE_STRANGERS + 256
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed < size + 64:
        raise BootstrapError(
            f"a world of {size} ranks needs {needed} open files on rank 0, the limit is {hard}", rank=0
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _forget_in_child() -> None:
    for server in list(_servers):
        server.forget()
    _servers.clear()


@atexit.register
def _stop_at_exit() -> None:
    """A program that ends without closing its stores still lets the other ranks hear the last word."""
    for server in list(_servers):
        server.stop()


os.register_at_fork(after_in_child=_forget_in_child)

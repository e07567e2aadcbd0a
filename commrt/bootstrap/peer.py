"""One connection as the store's server sees it, and the log of those that were dropped."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque

from commrt.bootstrap import auth
from commrt.bootstrap.wire import MAX_TOTAL, FrameDecoder
from commrt.bootstrap.world import World

log = logging.getLogger("commrt.init")

HANDSHAKE_TIMEOUT_S = 10.0
NOT_NOW = (BlockingIOError, InterruptedError)


class RateLimitedLog:
    """A handful of warnings at once, then one each `period_s` with the number left out."""

    def __init__(self, burst: int = 5, period_s: float = 10.0) -> None:
        self._burst, self._period_s = burst, period_s
        self._shown, self._left_out, self._next = 0, 0, 0.0

    def warning(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if self._shown >= self._burst and now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more such lines left out)" if self._left_out else ""
        log.warning(message + more, *args)
        self._shown, self._left_out, self._next = self._shown + 1, 0, now + self._period_s


class Peer:
    """One connection, from its first byte to its last."""

    def __init__(self, sock: socket.socket, name: str, attention: set[Peer]) -> None:
        self.sock, self.name = sock, name
        self.attention = attention
        self.events = selectors.EVENT_READ
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self.inbox = bytearray()
        self.opening = b""
        self.nonce = auth.fresh_nonce()
        self.decoder: FrameDecoder | None = None
        self.hello: auth.Hello | None = None
        self.world: World | None = None
        self.outbox: deque[memoryview] = deque()
        self.unsent = 0
        self.doomed: str | None = None
        self.last_words = False

    def send(self, frame: bytes) -> None:
        self.outbox.append(memoryview(frame))
        self.unsent += len(frame)
        self.attention.add(self)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes; a connection that can't go on is marked, and dropped by the loop."""
        try:
            while self.outbox and not self.doomed:
                sent = self.sock.send(self.outbox[0])
                self.unsent -= sent
                if sent == len(self.outbox[0]):
                    self.outbox.popleft()
                else:
                    self.outbox[0] = self.outbox[0][sent:]
        except NOT_NOW:
            if self.unsent > 4 * MAX_TOTAL:
                self.doomed = "does not read what it is sent"
        except OSError as error:
            self.doomed = f"disconnected ({error.strerror})"

"""The supervision of a host's ranks, from start to end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from commrt.launching.ending import TIMED_OUT, Ending
from commrt.launching.meeting import Handout, Meeting
from commrt.launching.nodes import Nodes
from commrt.launching.output import Output, Stream
from commrt.launching.ranks import Guardian, Rank, living_groups

_CHUNK = 1 << 16


class Job:
    """The ranks of this host. One thread; signal handlers run in it too."""

    def __init__(self, out: Output, grace_s: float, deadline: float | None, nodes: Nodes | None) -> None:
        self._out, self._grace_s, self._deadline, self._nodes = out, grace_s, deadline, nodes
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._guardian: Guardian | None = None
        self._stop_with: int | None = None
        self._kill_at: float | None = None
        self._ending = Ending()
        self._hurried = False
        self._all_pidfds = True

    # Starting

    def start(self, argv: list[str], meeting: Meeting, env: Mapping[str, str], stdin: int | IO[Any] | None) -> None:
        """Start all ranks that `meeting` places here; its listener is closed. Raises OSError."""
        self._guardian = Guardian()
        handout = Handout(meeting, env)
        try:
            for local_rank in range(meeting.local_size):
                if self._stop_with is not None:
                    break
                rank = meeting.first + local_rank
                environ, fds = handout.of(local_rank)
                self._add(Rank.start(rank, argv, environ, fds, stdin if rank == 0 else None), self._guardian)
        finally:
            handout.close()

    def _add(self, rank: Rank, guardian: Guardian) -> None:
        self._ranks.append(rank)
        process = rank.process
        guardian.watch(process.pid)
        for pipe, sink in ((process.stdout, self._out.stdout), (process.stderr, self._out.stderr)):
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ, self._out.stream(rank.rank, pipe, sink))
        try:
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
        except OSError:
            self._all_pidfds = False

    # Watching

    def watch(self) -> tuple[Ending, int | None]:
        """Until all ranks and what they left behind have ended, and those of all other nodes: how, and on which node.

        The node is None if there is one node only, or all is well.
        """
        while not all(rank.exited for rank in self._ranks):
            self._step()
        self._end_leftovers()
        for stream in [key.data for key in self._selector.get_map().values() if isinstance(key.data, Stream)]:
            self._close(stream)
        if self._out.broken:
            self._blame(Ending(128 + signal.SIGPIPE, "reader"))
        return (self._ending, None) if self._nodes is None else self._agree(self._nodes)

    def _agree(self, nodes: Nodes) -> tuple[Ending, int | None]:
        """With the other nodes, which may go on for as long as they like, unless this one has failed."""
        while nodes.outcome is None and not self._hurried:
            nodes.report(self._ending)
            self._step()
        return nodes.outcome or (self._ending, nodes.node.rank)

    def _step(self) -> None:
        self._dispatch(self._patience())
        self._notice_exits()
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._fail(Ending(TIMED_OUT, "limit"))
        if self._out.broken:
            self._fail(Ending(128 + signal.SIGPIPE, "reader"))
        if self._nodes is not None and self._ending.cause:
            self._nodes.report(self._ending)
        self._pass_on()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_all()

    def _dispatch(self, timeout_s: float | None) -> bool:
        """Wait for news and see to it. Whether there was output."""
        ready = [key for key, _ in self._selector.select(timeout_s)]
        for key in ready:
            if isinstance(key.data, Stream):
                self._read(key.data)
            elif isinstance(key.data, Rank):
                self._selector.unregister(key.fd)
                os.close(key.fd)
            else:
                key.data()
        return any(isinstance(key.data, Stream) for key in ready)

    def _patience(self) -> float | None:
        moments = [moment for moment in (self._kill_at, self._deadline if self._stop_with is None else None) if moment]
        patience = max(0.0, min(moments) - time.monotonic()) if moments else None
        if self._all_pidfds:
            return patience
        return 0.05 if patience is None else min(patience, 0.05)

    def _read(self, stream: Stream) -> None:
        data = os.read(stream.pipe.fileno(), _CHUNK)
        if data:
            self._out.feed(stream, data)
            return
        self._close(stream)

    def _close(self, stream: Stream) -> None:
        self._out.finish(stream)
        self._selector.unregister(stream.pipe)
        stream.pipe.close()

    def _notice_exits(self) -> None:
        failed = [Ending(rank.status, "rank", rank.rank) for rank in self._ranks if rank.look() and rank.status]
        if failed:
            self._fail(max(failed, key=lambda ending: ending.likelihood))

    def _end_leftovers(self) -> None:
        """Children that the ranks left behind may finish, are then asked to end, and then made to."""
        for signum, patience_s in (
            (0, min(self._grace_s, 0.5)),
            (signal.SIGTERM, self._grace_s),
            (signal.SIGKILL, 1.0),
        ):
            if signum:
                for rank in self._ranks:
                    rank.kill(signum)
            until = time.monotonic() + patience_s
            while self._has_leftovers() and time.monotonic() < until:
                self._drain(0.02)
        self._drain(0.0)

    def _has_leftovers(self) -> bool:
        return bool(living_groups() & {rank.process.pid for rank in self._ranks})

    def _drain(self, timeout_s: float) -> None:
        """Pass on what is in the pipes, or comes within that time."""
        while self._dispatch(timeout_s):
            timeout_s = 0.0

    # Stopping

    def _blame(self, ending: Ending) -> None:
        """The first cause counts."""
        if not self._ending.cause:
            self._ending = ending

    def _fail(self, ending: Ending, signum: int = signal.SIGTERM) -> None:
        if self._stop_with is not None:
            return
        self._blame(ending)
        self._stop(signum)

    def _stop(self, signum: int) -> None:
        self._stop_with = signum
        self._kill_at = time.monotonic() + self._grace_s
        self._pass_on()

    def _pass_on(self) -> None:
        """Send the stop signal, once, to each rank that has not had it."""
        for rank in self._ranks:
            if self._stop_with is not None and not rank.signalled:
                rank.signalled = True
                rank.kill(self._stop_with)

    def _kill_all(self) -> None:
        self._kill_at = None
        for rank in self._ranks:
            rank.kill(signal.SIGKILL)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self._stop_with is None:
            self._fail(Ending(128 + signum, "signal"), signum)
        else:
            self._hurried = True
            self._kill_all()

    def _on_outcome(self) -> None:
        """Another node failed, or all have ended."""
        if self._nodes is not None and self._nodes.heard() and self._stop_with is None:
            self._stop(signal.SIGTERM)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP (unless it is ignored) for the while; the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard, hears = socket.socketpair()
        for end in (heard, hears):
            end.setblocking(False)
        self._selector.register(heard, selectors.EVENT_READ, lambda: heard.recv(4096))
        taken = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            taken.append(signal.SIGHUP)
        before_fd = signal.set_wakeup_fd(hears.fileno(), warn_on_full_buffer=False)
        before = {signum: signal.signal(signum, self._on_signal) for signum in taken}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(before_fd)
            self._selector.unregister(heard)
            heard.close()
            hears.close()

    @contextmanager
    def hearing_nodes(self) -> Iterator[None]:
        """Heed what the other nodes tell, for the while."""
        if self._nodes is None:
            yield
            return
        self._selector.register(self._nodes, selectors.EVENT_READ, self._on_outcome)
        try:
            yield
        finally:
            self._selector.unregister(self._nodes)

    @contextmanager
    def cleaned_up(self) -> Iterator[None]:
        """Whatever happens, no rank, descriptor or guardian is left."""
        try:
            yield
        finally:
            for rank in self._ranks:
                rank.kill(signal.SIGKILL)
                rank.process.wait()
                if self._guardian is not None:
                    self._guardian.forget(rank.process.pid)
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fileobj)
                if isinstance(key.data, Stream):
                    key.data.pipe.close()
                else:
                    os.close(key.fd)
            self._selector.close()
            if self._guardian is not None:
                self._guardian.close()

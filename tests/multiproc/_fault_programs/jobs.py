"""The test's side: starts obeying ranks, tells them what to do, and hears what becomes of them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 60.0  # for what is not measured: starting up on a busy machine
Fact = dict[str, Any]


class Rank:
    """One process."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.stderr = ""
        self._facts: queue.SimpleQueue[Fact | None] = queue.SimpleQueue()
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_stderr)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._facts.put(json.loads(line))
        self._facts.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        self.stderr = self.process.stderr.read()

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def hear(self, event: str, within_s: float = PATIENCE_S) -> Fact:
        """The next event of that kind."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                fact = self._facts.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event!r} within {within_s} s") from None
            if fact is None:
                self._readers[1].join(5)
                raise AssertionError(f"the rank ended before {event!r}: {self.process.wait()}, {self.stderr}")
            if fact["event"] == event:
                return fact

    def is_blocked(self) -> None:
        """Return once it waits inside of its command."""
        self.hear("blocked")

    def kill(self, signum: int = signal.SIGKILL) -> float:
        """Send a signal; when."""
        at = time.monotonic()
        self.process.send_signal(signum)
        return at

    def finish(self) -> int:
        """End of commands; the exit status."""
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        status = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(5)
        return status

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class Job:
    """Some ranks of one world. `start`: those that exist at all. `style`: "with" or "bare" use of the communicator."""

    def __init__(
        self, directory: Path, size: int, *, start: Iterable[int] | None = None, timeout_s: float = 30,
        style: str = "bare", **env: str,
    ) -> None:  # fmt: skip
        argv = [sys.executable, str(Path(__file__).with_name("rank.py"))]
        common = [str(size), f"file://{directory}/meeting-{time.monotonic_ns()}", str(timeout_s), style]
        environment = {**os.environ, "COMMRT_TRANSPORT": "shm", **env}
        self.ranks = {
            rank: Rank([*argv, str(rank), *common], environment) for rank in (range(size) if start is None else start)
        }

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks.values():
            rank.end()

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def ready(self) -> Job:
        """All have joined."""
        for rank in self.ranks.values():
            rank.hear("ready")
        return self

    def all_but(self, *left_out: int) -> list[Rank]:
        """The others."""
        return [self.ranks[rank] for rank in self.ranks if rank not in left_out]

    def tell(self, ranks: Iterable[int] | None, do: str, **arguments: Any) -> None:
        """Give several a command; None: to all."""
        for rank in self.ranks if ranks is None else ranks:
            self.ranks[rank].tell(do, **arguments)

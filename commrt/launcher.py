"""Starts the ranks of a job on this host and looks after them: `commrt run` as a function.

Every rank is the leader of a session of its own, so that a signal reaches its children too and the terminal's Ctrl-C
reaches the launcher alone. No rank outlives the launcher: the kernel kills the ranks, and a guardian process their
groups, should it be killed.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from commrt._lines import Output, Stream
from commrt.bootstrap.net import Address, listen
from commrt.errors import InvalidArgument

MAX_LOCAL_RANKS = 4096
GRACE_S = 3.0
TIMED_OUT = 124
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1
_PYTHON_SUFFIXES = (".py", ".pyw", ".pyz")


def resolve_argv(program: str, args: Sequence[str], *, module: bool = False) -> list[str]:
    """The command line of a rank: Python files and modules run by this interpreter, anything else as it is."""
    if module:
        return [sys.executable, "-m", program, *args]
    if program.endswith(_PYTHON_SUFFIXES):
        return [sys.executable, program, *args]
    return [program, *args]


def launch(
    argv: Sequence[str],
    n: int,
    *,
    timeout_s: float | None = None,
    prefix: bool = True,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = None,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
    grace_s: float = GRACE_S,
    name: str = "commrt run",
) -> int:
    """Run `n` ranks of `argv` to their end and return the job's exit status.

    0 if all ranks exit with 0; else that of the first rank that failed, 128 + the number for a signal, after the others
    were stopped (SIGTERM to their process groups, SIGKILL after `grace_s`). `TIMED_OUT` if `timeout_s` passed. SIGINT
    and SIGTERM are passed on once, and then the status is 130 or 143; a second one kills. A last line on `stderr` says
    what went wrong.

    Ranks write lines to `stdout` and `stderr` (binary files; those of this process if None), whole, headed by `[rank] `
    if `prefix`. `env` is added to this process's environment. `stdin` is given to rank 0 as `subprocess` takes it;
    None, and the other ranks: nothing. Signals are handled only if this is the main thread; the handlers found are put
    back. Raises `InvalidArgument` for a bad `n`, OSError if `argv[0]` can't be run.
    """
    if not 1 <= n <= MAX_LOCAL_RANKS:
        raise InvalidArgument(f"the number of ranks on one host lies in 1..{MAX_LOCAL_RANKS}, and {n} does not")
    out = Output(stdout or sys.stdout.buffer, stderr or sys.stderr.buffer, prefix)
    job = _Job(out, grace_s, name, None if timeout_s is None else time.monotonic() + timeout_s)
    with ExitStack() as stack:
        stack.enter_context(job.cleaned_up())
        stack.enter_context(job.handling_signals())
        job.start(list(argv), n, dict(env or {}), stdin)
        return job.watch()


@dataclass
class _Rank:
    """A started process. It stays a zombie until the end, so that its number, which is its group's too, is not given
    away.
    """

    rank: int
    process: subprocess.Popen[bytes]
    exited: bool = False
    status: int = 0
    signalled: bool = False

    def kill(self, signum: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    def look(self) -> bool:
        """Whether it has exited just now."""
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if self.exited or found is None:
            return False
        self.exited = True
        self.status = found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
        return True

    @property
    def story(self) -> str:
        if self.status <= 128:
            return f"rank {self.rank} failed with exit status {self.status}"
        with suppress(ValueError):
            return f"rank {self.rank} was killed by {signal.Signals(self.status - 128).name}"
        return f"rank {self.rank} failed with exit status {self.status}"


class _Job:
    """The ranks, from start to end. One thread; signal handlers run in it too."""

    def __init__(self, out: Output, grace_s: float, name: str, deadline: float | None) -> None:
        self._out, self._grace_s, self._name, self._deadline = out, grace_s, name, deadline
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._guardian: subprocess.Popen[str] | None = None
        self._stop_with: int | None = None
        self._kill_at: float | None = None
        self._received: int | None = None
        self._timed_out = False
        self._failed: _Rank | None = None
        self._all_pidfds = True

    # Starting

    def start(self, argv: list[str], n: int, env: dict[str, str], stdin: int | IO[Any] | None) -> None:
        self._guardian = _start_guardian()
        listener = listen([Address(socket.AF_INET, ("127.0.0.1", 0))], time.monotonic())
        secret_fd = _secret_file()
        common = _environment(env, n, listener.getsockname()[1], secret_fd)
        try:
            for rank in range(n):
                if self._stop_with is not None:
                    break
                own = {"COMMRT_RANK": str(rank), "COMMRT_LOCAL_RANK": str(rank)}
                fds = [secret_fd]
                if rank == 0:
                    own["COMMRT_STORE_FD"] = str(listener.fileno())
                    fds.append(listener.fileno())
                self._start_rank(rank, argv, common | own, fds, stdin if rank == 0 else None)
        finally:
            listener.close()
            os.close(secret_fd)

    def _start_rank(
        self, rank: int, argv: list[str], env: dict[str, str], fds: list[int], stdin: int | IO[Any] | None
    ) -> None:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
            preexec_fn=_tie_to(os.getpid()),  # noqa: PLW1509 - calls only what was loaded before the fork
        )
        self._ranks.append(_Rank(rank, process))
        self._tell_guardian(f"+{process.pid}\n")
        for pipe, sink in ((process.stdout, self._out.stdout), (process.stderr, self._out.stderr)):
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ, self._out.stream(rank, pipe, sink))
        try:
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, self._ranks[-1])
        except OSError:
            self._all_pidfds = False

    def _tell_guardian(self, line: str) -> None:
        if self._guardian is not None and self._guardian.stdin is not None:
            with suppress(BrokenPipeError):
                self._guardian.stdin.write(line)
                self._guardian.stdin.flush()

    # Watching

    def watch(self) -> int:
        """Until all ranks and what they left behind have ended; the job's status."""
        while not all(rank.exited for rank in self._ranks):
            self._step()
        self._end_leftovers()
        return self._conclude()

    def _step(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            if isinstance(key.data, Stream):
                self._read(key.data)
            elif isinstance(key.data, _Rank):
                self._selector.unregister(key.fd)
                os.close(key.fd)
            else:
                key.data()
        self._notice_exits()
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and self._stop_with is None:
            self._timed_out = True
            self._stop(signal.SIGTERM)
        if self._out.broken and self._stop_with is None:
            self._stop(signal.SIGTERM)
        self._pass_on()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_all()

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
        failed = [rank for rank in self._ranks if rank.look() and rank.status]
        if failed and self._stop_with is None:
            # Of those seen at once, one killed by a signal is likelier the cause than one that reports an error.
            self._failed = max(failed, key=lambda rank: rank.status > 128)
            self._stop(signal.SIGTERM)

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
        return bool(_living_groups() & {rank.process.pid for rank in self._ranks})

    def _drain(self, timeout_s: float) -> None:
        """Pass on what is in the pipes."""
        while True:
            ready = [key.data for key, _ in self._selector.select(timeout_s) if isinstance(key.data, Stream)]
            if not ready:
                return
            for stream in ready:
                self._read(stream)
            timeout_s = 0.0

    def _conclude(self) -> int:
        for stream in [key.data for key in self._selector.get_map().values() if isinstance(key.data, Stream)]:
            self._close(stream)
        others = "; the other ranks were stopped" if len(self._ranks) > 1 else ""
        if self._received is not None:
            self._out.say(f"{self._name}: stopped by {signal.Signals(self._received).name}")
            return 128 + self._received
        if self._timed_out:
            self._out.say(f"{self._name}: the time limit passed; the ranks that still ran were stopped")
            return TIMED_OUT
        if self._failed is not None:
            self._out.say(f"{self._name}: {self._failed.story}{others}")
            return self._failed.status
        return 128 + signal.SIGPIPE if self._out.broken else 0

    # Stopping

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
        if self._received is None and self._stop_with is None:
            self._received = signum
            self._stop(signum)
        else:
            self._kill_all()

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
    def cleaned_up(self) -> Iterator[None]:
        """Whatever happens, no rank, descriptor or guardian is left."""
        try:
            yield
        finally:
            for rank in self._ranks:
                rank.kill(signal.SIGKILL)
                rank.process.wait()
                self._tell_guardian(f"-{rank.process.pid}\n")
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fileobj)
                if isinstance(key.data, Stream):
                    key.data.pipe.close()
                else:
                    os.close(key.fd)
            self._selector.close()
            if self._guardian is not None and self._guardian.stdin is not None:
                with suppress(BrokenPipeError):
                    self._guardian.stdin.close()
                self._guardian.wait()


def _start_guardian() -> subprocess.Popen[str]:
    script = Path(__file__).with_name("_guardian.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )


def _secret_file() -> int:
    """A fresh secret in a memory file, which has no name that another user could open."""
    fd = os.memfd_create("commrt-secret")
    os.write(fd, secrets.token_bytes(32))
    return fd


def _environment(extra: dict[str, str], n: int, port: int, secret_fd: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COMMRT_STORE_FD"}
    # A pipe makes Python buffer by the block: output would come late, and be lost with a killed rank.
    inherited.setdefault("PYTHONUNBUFFERED", "1")
    return {
        **inherited,
        **extra,
        "COMMRT_LAUNCHER": "commrt run",
        "COMMRT_SIZE": str(n),
        "COMMRT_LOCAL_SIZE": str(n),
        "COMMRT_RENDEZVOUS": f"127.0.0.1:{port}",
        "COMMRT_SECRET_FD": str(secret_fd),
    }


def _tie_to(parent: int) -> Callable[[], None]:
    """What a rank does between fork and exec: die with the launcher, and heed signals that the launcher's own caller
    ignores.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)

    return tie


def _living_groups() -> set[int]:
    """Process groups with a member that is not a zombie."""
    groups = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError), open(f"/proc/{entry.name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    groups.add(int(fields[2]))
    return groups

"""Ranks as processes, each the leader of a session of its own: starting them, and never leaving one behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    """A started process. It stays a zombie until the end, so that its number, which is its group's too, is not given
    away.
    """

    rank: int
    process: subprocess.Popen[bytes]
    exited: bool = False
    status: int = 0
    signalled: bool = False

    @classmethod
    def start(
        cls, rank: int, argv: list[str], env: dict[str, str], fds: Sequence[int], stdin: int | IO[Any] | None
    ) -> Rank:
        """Start it, with pipes as outputs. Raises OSError."""
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
        return cls(rank, process)

    def kill(self, signum: int) -> None:
        """Signal its whole group."""
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


class Guardian:
    """A process that ends the ranks' groups should this one be killed."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("_guardian.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """End that group some day."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """It has ended."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Let it go."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(line)
                self._process.stdin.flush()


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


def living_groups() -> set[int]:
    """Process groups with a member that is not a zombie."""
    groups = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError), open(f"/proc/{entry.name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    groups.add(int(fields[2]))
    return groups

"""What the ranks of a host are handed and told, so that they meet."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from commrt.bootstrap.net import Address, listen

_OWN = ("COMMRT_STORE_FD", "COMMRT_SECRET_FD", "COMMRT_INSECURE")


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a job meet, and which of them are on this host: `local_size`, from `first` on.

    `listener` is the store's socket, where rank 0 is here; whoever made it closes it. An empty secret is none.
    """

    rendezvous: str
    secret: bytes
    listener: socket.socket | None
    first: int
    local_size: int
    size: int
    insecure: bool = False


def meeting_here(n: int) -> Meeting:
    """A job of this host alone: a port that the system picks, and a fresh secret."""
    listener = listen([Address(socket.AF_INET, ("127.0.0.1", 0))], time.monotonic())
    rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"
    return Meeting(rendezvous, secrets.token_bytes(32), listener, 0, n, n)


class Handout:
    """The environment and the descriptors of each rank. Closed once all have started."""

    def __init__(self, meeting: Meeting, extra: Mapping[str, str]) -> None:
        self._meeting = meeting
        self._secret_fd = _secret_file(meeting.secret) if meeting.secret else None
        inherited = {name: value for name, value in os.environ.items() if name not in _OWN}
        # A pipe makes Python buffer by the block: output would come late, and be lost with a killed rank.
        inherited.setdefault("PYTHONUNBUFFERED", "1")
        self._common = {
            **inherited,
            **extra,
            "COMMRT_LAUNCHER": "commrt run",
            "COMMRT_SIZE": str(meeting.size),
            "COMMRT_LOCAL_SIZE": str(meeting.local_size),
            "COMMRT_RENDEZVOUS": meeting.rendezvous,
        }
        if self._secret_fd is not None:
            self._common["COMMRT_SECRET_FD"] = str(self._secret_fd)
        if meeting.insecure:
            self._common["COMMRT_INSECURE"] = "1"

    def of(self, local_rank: int) -> tuple[dict[str, str], list[int]]:
        """Environment and descriptors of one rank."""
        rank = self._meeting.first + local_rank
        env = self._common | {"COMMRT_RANK": str(rank), "COMMRT_LOCAL_RANK": str(local_rank)}
        fds = [] if self._secret_fd is None else [self._secret_fd]
        if rank == 0 and self._meeting.listener is not None:
            env["COMMRT_STORE_FD"] = str(self._meeting.listener.fileno())
            fds.append(self._meeting.listener.fileno())
        return env, fds

    def close(self) -> None:
        """This process needs the descriptors no more."""
        if self._meeting.listener is not None:
            self._meeting.listener.close()
        if self._secret_fd is not None:
            os.close(self._secret_fd)


def _secret_file(secret: bytes) -> int:
    """The secret in a memory file, which has no name that another user could open."""
    fd = os.memfd_create("commrt-secret")
    os.write(fd, secret)
    return fd

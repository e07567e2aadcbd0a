"""The bootstrap's contracts: `Store`, what the runtime needs of it, and `LaunchInfo`, what a launcher told this
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Store(Protocol):
    """What all ranks share during set-up. Methods may be called from any thread; a rank's calls are serialised."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, key: str, value: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Every rank's value, by rank. Collective: all ranks call it with the same key; a rank uses a key again only
        after its exchange returned. The values are dropped from the store once every rank has them.

        Raises `BootstrapTimeout` naming the ranks that did not call (within a second of the timeout; None is the
        store's default), `BootstrapError` as soon as a rank that has not yet called is known to be gone.
        """
        ...

    def barrier(self, key: str, timeout_s: float | None = None) -> None:
        """Return once every rank has called it with that key; errors as `exchange`."""
        ...

    def close(self) -> None:
        """Leave. Idempotent, not collective; other ranks notice only if they wait for this one."""
        ...


@dataclass(frozen=True)
class TcpRendezvous:
    """Rank 0 listens at `host:port`, or on the inherited descriptor `listen_fd` that is bound to it.

    `insecure`: the launcher was told that ranks may meet there without a secret.
    """

    host: str
    port: int
    listen_fd: int | None = None
    secret_fd: int | None = None
    insecure: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class FileRendezvous:
    """Rank 0 listens on a port of `host` that the system picks, and publishes it with a fresh secret in the file
    `path`.

    With `private` the file's directory is made if need be, for this user alone.
    """

    path: str
    host: str = "127.0.0.1"
    private: bool = False

    def __str__(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True)
class TorchRendezvous:
    """The store that torchrun's agent serves at `host:port`; keys start with `prefix`."""

    host: str
    port: int
    prefix: str

    def __str__(self) -> str:
        return f"torchrun's store at {self.host}:{self.port}"


Rendezvous = TcpRendezvous | FileRendezvous | TorchRendezvous


@dataclass(frozen=True)
class LaunchInfo:
    """Who this process is in its job, who said so, and where the ranks meet.

    `rendezvous` is None for a single process, and where neither launcher nor arguments name a place (a store is to be
    handed in then). `local_rank` and `local_size` are those of this host; a launcher that does not tell them is taken
    to have started one host. `variables` holds the environment variables that decided, with their values; `secret_file`
    is COMMRT_SECRET_FILE.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    rendezvous: Rendezvous | None = None
    secret_file: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        used = " ".join(f"{name}={value}" for name, value in self.variables.items())
        where = f", meeting at {self.rendezvous}" if self.rendezvous else ""
        return f"rank {self.rank} of {self.size}, by {self.launcher}{where}" + (f" (from {used})" if used else "")

"""Finding the other ranks: what launched this process, and a small store through which all ranks exchange bytes.

`detect` reads arguments and environment and opens nothing; `join` meets the other ranks and returns a `Store`.
Nothing here needs numpy, and nothing opens a file, a socket or an optional package before `join` is called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from commrt.bootstrap.contract import FileRendezvous, LaunchInfo, Rendezvous, Store, TcpRendezvous, TorchRendezvous

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "FileRendezvous",
    "LaunchInfo",
    "Rendezvous",
    "Store",
    "TcpRendezvous",
    "TorchRendezvous",
    "adapt",
    "detect",
    "join",
]

DEFAULT_TIMEOUT_S = 120.0


def detect(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str | None = None,
) -> LaunchInfo:
    """Who this process is: explicit arguments, COMMRT_*, torchrun, Open MPI, MPICH / Intel MPI, Slurm, else one
    process.

    Reads `environ` (`os.environ` if None), and the names of this process's ancestors where a launcher does not name its
    job; changes nothing. Rank, size and rendezvous all given explicitly: the environment's launchers are ignored. Given
    in part: they must agree with what the environment says.

    Raises `ConfigError` naming the variables and their values where they are malformed, out of range or contradictory.
    """
    from commrt.bootstrap.launchers import detect as detect_launcher

    return detect_launcher(os.environ if environ is None else environ, rank=rank, size=size, rendezvous=rendezvous)


def join(
    info: LaunchInfo, *, secret: bytes | None = None, timeout_s: float = DEFAULT_TIMEOUT_S, insecure: bool = False
) -> Store:
    """Meet the other ranks; returns once all `info.size` of them are there. Collective; the caller owns the store and
    closes it.

    `secret` (at least 16 bytes, the same on every rank) authenticates the connections; None takes the one the launcher
    handed over, or that of COMMRT_SECRET_FILE. Without any, only a loopback address is accepted, unless `insecure` is
    True. `timeout_s` bounds this call and is the default of the store's `exchange`.

    Raises `ConfigError` for settings that can't be used, `BootstrapTimeout` naming the missing ranks,
    `AuthenticationError` if the other side has another secret, `BootstrapError` on every rank if a rank joins twice or
    ranks differ in world size or protocol version.
    """
    from commrt.bootstrap.rendezvous import join as join_world

    return join_world(info, secret=secret, timeout_s=timeout_s, insecure=insecure)


def adapt(
    store: object, rank: int, size: int, *, prefix: str = "commrt", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Store:
    """The same interface over a handed-in store with torch's methods; see `adapter.StoreAdapter`."""
    from commrt.bootstrap.adapter import StoreAdapter

    return StoreAdapter(store, rank, size, prefix=prefix, timeout_s=timeout_s)

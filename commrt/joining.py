"""Joining other libraries over the ranks of a communicator, as it is made: all ranks come to the same set of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from commrt.errors import BootstrapError, Unavailable
from commrt.plugins import Registry
from commrt.provider import Carrier, Joining, JoiningProvider
from commrt.transport import Exchange

_log = logging.getLogger("commrt.init")
_BUSY, _DONE, _FAILED = b"\x02", b"\x01", b"\x00"


@dataclass(frozen=True)
class Joined:
    """A library that all ranks of a communicator have joined."""

    provider: JoiningProvider
    carrier: Carrier


def join_all(wanted: Mapping[str, bool], registry: Registry, joining: Joining) -> dict[str, Joined]:
    """Join the libraries of these names; True for one that must be there. Collective, with equal arguments.

    Raises Unavailable on all ranks, with each rank's reason, for one that must be and isn't; leaves nothing open then.
    """
    joined: dict[str, Joined] = {}
    for name, must in sorted(wanted.items()):
        found, reasons = _join(name, registry, joining)
        if found is not None:
            joined[name] = found
            continue
        if not must:
            _log.info("provider %r is left out: %s", name, reasons)
            continue
        for other in joined.values():
            other.carrier.close()
        raise Unavailable(f"provider {name!r} can't be joined: {reasons}", rank=joining.rank)
    return joined


def _join(name: str, registry: Registry, joining: Joining) -> tuple[Joined | None, str]:
    """The library, or why some rank could not join it."""
    rounds = _Rounds(joining.exchange)
    found: Joined | None = None
    try:
        provider = _provider(name, registry)
        found = Joined(provider, provider.join(replace(joining, exchange=rounds.exchange)))
        replies = rounds.attend(_DONE)
    except Exception as error:  # whatever a library raises must reach the other ranks
        reason = "" if rounds.let_down else str(error) if isinstance(error, Unavailable) else _described(error)
        replies = rounds.attend(_FAILED + reason.encode())
    failed = {rank: reply[1:].decode(errors="replace") for rank, reply in enumerate(replies) if reply[:1] == _FAILED}
    if not failed:
        return found, ""
    if found is not None:
        found.carrier.close()
    return None, _reasons(failed)


def _provider(name: str, registry: Registry) -> JoiningProvider:
    provider = registry.require("providers", name)
    if not isinstance(provider, JoiningProvider):
        raise Unavailable("there is nothing to join")
    probe = provider.probe()
    if not probe.devices:
        raise Unavailable(probe.reason)
    return provider


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _reasons(failed: Mapping[int, str]) -> str:
    """By reason, which ranks have it; ranks that only saw another fail have none."""
    ranks: dict[str, list[int]] = {}
    for rank, reason in failed.items():
        if reason:
            ranks.setdefault(reason, []).append(rank)
    return "; ".join(f"{reason} (rank {', '.join(map(str, those))})" for reason, those in ranks.items())


class _Rounds:
    """Exchanges that a rank may drop out of: it goes on attending, so that nobody waits for it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.let_down = False

    def exchange(self, value: bytes) -> list[bytes]:
        replies = self._exchange(_BUSY + value)
        gone = [rank for rank, reply in enumerate(replies) if reply[:1] != _BUSY]
        if gone:
            self.let_down = True
            raise BootstrapError(f"rank {gone[0]} has stopped joining", peer=gone[0])
        return [reply[1:] for reply in replies]

    def attend(self, last: bytes) -> Sequence[bytes]:
        """Say how it ended here until all ranks say so."""
        while True:
            replies = self._exchange(last)
            if all(reply[:1] != _BUSY for reply in replies):
                return replies

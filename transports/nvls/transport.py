"""NVLink switches: one multicast object over the device memory of all ranks.

Joins no pairs: other transports do that. What it adds is the capability "switch", and the address for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from commrt.backend import LocatedBackend, Memory, MemoryKind, Probe
from commrt.errors import CommrtError, TransportError, Unavailable
from commrt.plugins import default_registry
from commrt.transport import Connection, Context, Exchange, Reach, this_host
from commrt.transports.nvls.team import Team, able_devices, bindings

_BACKEND = "cuda"
_DONE, _FAILED = b"+", b"-"  # a member's step: what it answers, or why it can't
_MOST_SAID = 500  # bytes of a reason
_ESTIMATE = Reach(latency_us=1.0, bandwidth_gbps=100.0)


class Offer(msgspec.Struct, frozen=True):
    """What a member brings: where it is, and how much memory."""

    host: bytes
    location: bytes
    nbytes: int


class NvlsTransport:
    """Implements `commrt.transport.Transport`."""

    name = "nvls"
    backends = (_BACKEND,)
    groups = True
    memory_kinds: tuple[MemoryKind, ...] = ()

    def probe(self) -> Probe:
        """It serves where GPUs support multicast."""
        try:
            found: Probe = default_registry().require("backends", _BACKEND).probe()
            able = able_devices(bindings()) if found.devices else []
        except (Unavailable, ImportError) as error:
            return Probe(reason=str(error))
        devices = tuple(found.devices[device] for device in able)
        reason = "" if devices else found.reason or "no NVIDIA GPU here supports multicast"
        return Probe(devices, reason, found.level, "groups")

    def open(self, context: Context) -> NvlsEndpoint:
        """An endpoint of this process."""
        return NvlsEndpoint(context)


class NvlsEndpoint:
    """Implements `commrt.transport.SwitchEndpoint`."""

    address = b""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._memory: Memory | None = None
        self._undo = contextlib.ExitStack()
        self.multicast = 0

    def reach(self, rank: int, address: bytes) -> Reach | None:
        """Whoever has such an endpoint; `group` finds out the rest, and says why not."""
        return _ESTIMATE

    def register(self, memory: Memory) -> bytes:
        """What `group` joins is the first; held until close."""
        if self._memory is None:
            self._memory = memory.retain()
        return b""

    def connect(self, rank: int, address: bytes, key: bytes) -> Connection:
        """Never."""
        raise TransportError("nvls joins no pairs of ranks")

    def group(self, members: Sequence[int], exchange: Exchange) -> frozenset[str]:
        """A switch for all. Raises Unavailable on all members if one of them can't, and leaves nothing behind."""
        if self._memory is None:
            raise TransportError("nvls joins registered memory: there is none")
        with contextlib.ExitStack() as undo:
            team = Team(self._memory, undo)
            self.multicast = self._join(team, self._memory.nbytes, _Steps(members, exchange))
            self._undo = undo.pop_all()
        return frozenset({"switch"})

    def close(self) -> None:
        """Once no kernel uses the memory any more."""
        self.multicast = 0
        self._undo.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _join(self, team: Team, nbytes: int, steps: _Steps) -> int:
        """The address, once all members have theirs: from then on any may use it."""
        check_offers(steps.agree(lambda: self._begin(team, nbytes)), steps.members)
        first = steps.members[0] == self._context.rank
        made = steps.agree(lambda: team.make(len(steps.members)) if first else None)
        steps.agree(lambda: team.add(None if first else made[0]))
        steps.agree(team.bind)
        steps.agree(team.map)
        return team.multicast

    def _begin(self, team: Team, nbytes: int) -> bytes:
        backend = self._context.backend
        if not isinstance(backend, LocatedBackend):
            raise Unavailable(f"the {backend.name} backend does not say which GPU this is")
        location = backend.location()
        team.begin(location)
        return msgspec.msgpack.encode(Offer(this_host(), location, nbytes))


class _Steps:
    """Steps that all members take together, or none goes on."""

    def __init__(self, members: Sequence[int], exchange: Exchange) -> None:
        self.members, self._exchange = members, exchange

    def agree(self, work: Callable[[], bytes | None]) -> list[bytes]:
        """What each member's `work` answered. Raises Unavailable, on all members, if one of them failed."""
        try:
            mine = _DONE + (work() or b"")
        except (CommrtError, ImportError, OSError, MemoryError) as error:
            mine = _FAILED + str(error).encode()[:_MOST_SAID]
        said = dict(zip(self.members, self._exchange(mine), strict=True))
        failed = {rank: one[1:_MOST_SAID].decode(errors="replace") for rank, one in said.items() if one[:1] != _DONE}
        if failed:
            raise Unavailable("; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items()))
        return [one[1:] for one in said.values()]


def check_offers(offers: Sequence[bytes], members: Sequence[int]) -> None:
    """Whether one multicast object can join them; all members come to the same answer. Raises Unavailable."""
    try:
        known = {rank: msgspec.msgpack.decode(one, type=Offer) for rank, one in zip(members, offers, strict=True)}
    except msgspec.DecodeError as error:
        raise Unavailable(f"a rank's offer is malformed: {error}") from error
    if len(known) < 2:
        raise Unavailable("one rank needs no switch")
    first = known[members[0]]
    at: dict[bytes, int] = {}
    for rank, offer in known.items():
        if offer.host != first.host:
            raise Unavailable(f"ranks {members[0]} and {rank} are not on one host")
        if offer.nbytes != first.nbytes:
            raise Unavailable(f"rank {rank} has {offer.nbytes} bytes of memory, rank {members[0]} {first.nbytes}")
        if (other := at.setdefault(offer.location, rank)) != rank:
            raise Unavailable(f"ranks {other} and {rank} are on one GPU")

"""Which transports to open, and which of them joins which ranks: decided from what all ranks have told each other.

Ranks meet in host memory, and those whose devices can reach each other there too. Some transports join no pairs but
groups, all members at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from commrt.backend import DeviceBackend
from commrt.errors import BootstrapError, ConfigError, TransportError, Unavailable
from commrt.plugins import Registry
from commrt.transport import Context, Endpoint, Transport

_log = logging.getLogger("commrt.init")
HOST = "cpu"  # the backend of host memory
Row = list["tuple[float, float] | None"]  # by rank: latency and bandwidth of the link, or None


@dataclass(frozen=True)
class Linker:
    """One rank's part. `backend`: of its arrays."""

    rank: int
    size: int
    registry: Registry
    backend: str

    def device(self) -> DeviceBackend:
        """The backend of this rank's arrays, where that is a device. Raises ConfigError, Unavailable."""
        backend = self.registry.require("backends", self.backend)
        if not isinstance(backend, DeviceBackend):
            raise ConfigError(f"backend {self.backend!r} does not run plans as kernels", rank=self.rank)
        if not (probe := backend.probe()).devices:
            raise Unavailable(f"backend {self.backend!r} can't serve here: {probe.reason}", rank=self.rank)
        return backend

    def open(self, context: Context, forced: str | None, endpoints: dict[str, Endpoint]) -> dict[str, bytes]:
        """Open what may serve, into `endpoints`; their addresses. `forced`: a transport.

        Any other that fails to open is left out, as one that isn't there.
        """
        if forced is not None and not (probe := self._transport(forced).probe()).devices:
            raise Unavailable(f"transport {forced!r} can't serve here: {probe.reason}", rank=self.rank)
        for name, transport in sorted(self.registry.usable("transports").items()):
            if self._serves(transport, forced):
                own = context if HOST in transport.backends else replace(context, backend=self.device())
                try:
                    endpoints[name] = transport.open(own)
                except TransportError as error:
                    if name == forced:
                        raise
                    _log.warning("transport %s is left out: %s", name, error)
        return {name: endpoint.address for name, endpoint in endpoints.items()}

    def reach(self, endpoints: Mapping[str, Endpoint], addresses: Sequence[Mapping[str, bytes]]) -> dict[str, Row]:
        """Whom each endpoint reaches."""
        found: dict[str, Row] = {}
        for name, endpoint in endpoints.items():
            found[name] = []
            for rank, offer in enumerate(addresses):
                there = name in offer and rank != self.rank
                reach = endpoint.reach(rank, offer[name]) if there else None
                found[name].append((reach.latency_us, reach.bandwidth_gbps) if reach else None)
        return found

    def hosts(self, reaches: Sequence[Mapping[str, Row]]) -> dict[int, str]:
        """The best link of host memory for each peer; both ends come to the same answer. Raises BootstrapError."""
        names = [name for name in self._pairs(reaches) if HOST in self._transport(name).backends]
        links: dict[int, str] = {}
        for peer in self._peers():
            best = self._best(reaches, names, peer)
            if best is None:
                tried = ", ".join(sorted(names)) or "none"
                raise BootstrapError(
                    f"no transport joins ranks {self.rank} and {peer} (tried {tried})", rank=self.rank, peer=peer
                )
            links[peer] = best
        return links

    def devices(self, reaches: Sequence[Mapping[str, Row]], forced: str | None) -> dict[int, str]:
        """The best link between the memory of devices, for each peer that has one. Raises BootstrapError if forced."""
        names = [name for name in self._pairs(reaches) if HOST not in self._transport(name).backends]
        near = {peer: name for peer in self._peers() if (name := self._best(reaches, names, peer))}
        far = next((peer for peer in self._peers() if peer not in near), None)
        if forced in names and far is not None:
            raise BootstrapError(
                f"transport {forced!r} does not join ranks {self.rank} and {far}", rank=self.rank, peer=far
            )
        return near

    def groups(self, reaches: Sequence[Mapping[str, Row]], forced: str | None) -> list[str]:
        """The transports that have something for all ranks at once, and through which all reach each other.

        Raises Unavailable if one that joins nothing else is forced, and is not among them.
        """
        names = [name for name in reaches[self.rank] if self._transport(name).groups and self._whole(name, reaches)]
        if forced is not None and forced not in names and self._transport(forced).probe().joins == "groups":
            raise Unavailable(
                f"transport {forced!r} can't serve: not all ranks have it and links between their devices",
                rank=self.rank,
            )
        return names

    def _whole(self, name: str, reaches: Sequence[Mapping[str, Row]]) -> bool:
        """Whether all reach each other; devices by links of pairs too, to which the group adds."""
        reached = all(self._reaches_all(reach.get(name, []), rank) for rank, reach in enumerate(reaches))
        return reached and (HOST in self._transport(name).backends or self._all_near(reaches))

    def _reaches_all(self, row: Row, rank: int) -> bool:
        return len(row) == self.size and all(row[peer] for peer in range(self.size) if peer != rank)

    def _all_near(self, reaches: Sequence[Mapping[str, Row]]) -> bool:
        pairs = [name for name in self._pairs(reaches) if HOST not in self._transport(name).backends]
        names = [name for name in pairs if all(name in reach for reach in reaches)]
        linkers = [replace(self, rank=rank) for rank in range(self.size)]
        return self.size > 1 and all(one._best(reaches, names, peer) for one in linkers for peer in one._peers())

    def _transport(self, name: str) -> Transport:
        found: Transport = self.registry.require("transports", name)
        return found

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _serves(self, transport: Transport, forced: str | None) -> bool:
        """Whether to open it. One that is forced takes the place of those that join the same memory."""
        if not {HOST, self.backend} & set(transport.backends):
            return False
        rivals = forced is not None and self._displaced(forced) & set(transport.backends)
        if rivals and not transport.groups:
            return transport.name == forced  # without a look at it: what is wrong with others must not matter
        probe = transport.probe()
        if rivals and probe.joins != "groups":
            return transport.name == forced
        return bool(probe.devices) and probe.joins in ("processes", "groups")

    def _displaced(self, forced: str) -> set[str]:
        """Whose memory it joins in the place of other transports: one that joins groups adds to those of pairs."""
        transport = self._transport(forced)
        return set() if transport.probe().joins == "groups" else set(transport.backends)

    def _pairs(self, reaches: Sequence[Mapping[str, Row]]) -> list[str]:
        return [name for name in reaches[self.rank] if self._transport(name).probe().joins != "groups"]

    def _best(self, reaches: Sequence[Mapping[str, Row]], names: Sequence[str], peer: int) -> str | None:
        both: list[tuple[float, str]] = []
        for name in names:
            there = reaches[self.rank][name][peer]
            back = reaches[peer].get(name, [None] * self.size)[self.rank]
            if there and back:
                both.append((max(there[0], back[0]) + 1e3 / min(there[1], back[1]), name))
        return min(both)[1] if both else None

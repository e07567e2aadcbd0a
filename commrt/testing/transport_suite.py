"""Conformance of a transport: that what it says of itself holds, and that its links carry every plain algorithm.

    TransportSuite("socket").run_all()

The ranks are threads of this process and, where the transport joins those, processes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from commrt.backend import Backend, DeviceBackend, Probe
from commrt.communicator import Communicator
from commrt.errors import CommrtError, ConfigError, InvalidArgument, TransportError
from commrt.group import Options
from commrt.plugins import Registry, default_registry
from commrt.testing import matrix
from commrt.testing._conformance import ConformanceError, Suite, expect, expect_raises, run_variants, until
from commrt.testing._links import Joined, Link, fetch, store, threads_over
from commrt.testing.data import REDUCING, ROOTED, Case
from commrt.testing.world import World
from commrt.transport import INLINE_NBYTES, MemoryTransport, Reach, Transport

_SEGMENT = 1 << 20
_SIGNAL_AT = _SEGMENT - 64
_MALFORMED = (b"", b"\0", b"garbage", bytes(range(40)), b"\xff" * 300)
_LINK_ENDS = (OSError, EOFError, ValueError, CommrtError)


class TransportSuite(Suite):
    """Checks of the transport of that name. `options`: what its endpoints are opened with.

    `backend`: whose memory it joins. `processes`: whether it joins processes of this host. `patience_s`: how long
    anything may take to arrive; a rank's end is to be noticed within half of that.
    """

    whole = frozenset({"worlds", "processes"})

    def __init__(
        self,
        name: str,
        *,
        registry: Registry | None = None,
        backend: str = "cpu",
        options: Mapping[str, Any] | None = None,
        processes: bool = True,
        patience_s: float = 10.0,
    ) -> None:
        self.subject = f"transport {name}"
        self._name, self._processes, self._patience_s = name, processes, patience_s
        self._registry = registry or default_registry()
        self._options = dict(options or {})
        self._transport: Transport = self._registry.require("transports", name)
        self._backend: Backend = self._registry.require("backends", backend)

    # --- what it says of itself ---

    def check_probe(self) -> None:
        for _ in range(2):
            found = self._transport.probe()
            expect(isinstance(found, Probe), f"probe answered {found!r}")
            expect(bool(found.devices) != bool(found.reason), "a probe has devices, or a reason why not")
        expect(self._transport.name == self._name, f"it calls itself {self._transport.name!r}")

    def check_memory_kinds(self) -> str | None:
        if not self._transport.memory_kinds:
            return "it adds no memory kinds"
        transport = self._transport
        if not isinstance(transport, MemoryTransport):
            raise ConformanceError("it has memory kinds and does not allocate")
        for kind in transport.memory_kinds:
            memory = transport.allocate(5000, kind.name)
            expect(memory.kind == kind and memory.nbytes >= 5000, f"memory of kind {kind.name} is not")
            expect(ctypes.string_at(memory.address, 5000) == bytes(5000), f"{kind.name} memory is not zeroed")
            memory.close()
            if kind.coherence == "launch":
                options = Options({**self._options, "segment_kind": kind.name})
                expect_raises(ConfigError, lambda: World(2, self._name, options=options, registry=self._registry))  # noqa: B023
        expect_raises(InvalidArgument, lambda: transport.allocate(1, "no such kind"))
        return None

    def check_reach(self) -> None:
        with self._joined(3) as joined:
            for (one, other), reach in joined.reached.items():
                back = joined.reached[other, one]
                expect(bool(reach) == bool(back), f"rank {one} reaches {other}: {reach}; {other} reaches {one}: {back}")
                expect(isinstance(reach, Reach), f"rank {one} can't reach {other}: {reach!r}")
                assert reach is not None
                expect(reach.latency_us > 0 and reach.bandwidth_gbps > 0, f"an estimate of {reach}")

    def check_reach_malformed(self) -> None:
        with self._joined(2) as joined:
            for address in _MALFORMED:
                try:
                    reach = joined.endpoints[0].reach(1, address)
                except TransportError:
                    continue
                expect(reach is None, f"it reaches {address!r}")

    def check_group(self) -> None:
        with self._joined(3) as joined:
            barrier, values = threading.Barrier(3, timeout=10), [b""] * 3
            answers: dict[int, frozenset[str]] = {}

            def exchange(rank: int, value: bytes) -> list[bytes]:
                values[rank] = value
                barrier.wait()
                seen = list(values)
                barrier.wait()
                return seen

            def group(rank: int) -> None:
                answers[rank] = joined.endpoints[rank].group(range(3), lambda value: exchange(rank, value))

            threads_over(3, group)
            expect(len(set(answers.values())) == 1, f"ranks have different answers: {answers}")

    # --- requests ---

    def check_puts_come_before_their_signal(self) -> None:
        sizes = (1, 7, 8, INLINE_NBYTES - 1, INLINE_NBYTES, INLINE_NBYTES + 1, 700)
        with self._joined(2) as joined:
            for source, target in ((0, 1), (1, 0)):
                link, sources, checked = joined.link(source, target), [], 0
                for number in range(300):
                    sources.append(bytearray(os.urandom(sizes[number % len(sizes)])))
                    joined.insist(lambda: link.put(1024 * number, sources[number]))  # noqa: B023
                    joined.insist(lambda: link.signal(_SIGNAL_AT, number + 1))  # noqa: B023
                    if number % 3 == 0:
                        link.poll()
                    checked = _check_arrived(link, sources, checked)
                joined.until(lambda: link.seen(_SIGNAL_AT) == 300, "the last signal")  # noqa: B023
                _check_arrived(link, sources, checked)

    def check_signals_are_absolute(self) -> None:
        with self._joined(2) as joined:
            link = joined.link(0, 1)
            for value in (5, 5, 2, (1 << 64) - 1, 0, 1 << 32):
                joined.insist(lambda: link.signal(_SIGNAL_AT, value))  # noqa: B023
                joined.insist(lambda: link.signal(_SIGNAL_AT + 8, value))  # noqa: B023
                joined.until(lambda: link.seen(_SIGNAL_AT + 8) == value, f"signal {value}")  # noqa: B023
                expect(link.seen(_SIGNAL_AT) == value, f"{link.seen(_SIGNAL_AT)} in place of {value}")

    def check_back_pressure(self) -> None:
        """Nobody polls until a request is refused: nothing may block, nothing may be lost."""
        count, nbytes = 1500, 600
        with self._joined(2) as joined:
            link = joined.link(0, 1)
            sources = [bytearray(os.urandom(nbytes)) for _ in range(count)]
            longest, number = 0.0, 0
            while number < count:
                started = time.monotonic()
                taken = link.put(number * nbytes, sources[number])
                longest = max(longest, time.monotonic() - started)
                number += taken
                if not taken:
                    joined.poll()
            expect(longest < 2.0, f"a request blocked for {longest:.1f} s")
            joined.insist(lambda: link.signal(_SIGNAL_AT, 1))
            joined.until(lambda: link.seen(_SIGNAL_AT) == 1, "the signal behind many puts")
            wrong = [at for at in range(count) if link.arrived(at * nbytes, nbytes) != sources[at]]
            expect(not wrong, f"puts {wrong[:10]} were dropped or spoilt")

    def check_flush_frees_the_source(self) -> None:
        with self._joined(2) as joined:
            link = joined.link(0, 1)
            for nbytes in (1, INLINE_NBYTES, INLINE_NBYTES + 1, 100_000):
                kept = os.urandom(nbytes)
                source = bytearray(kept)
                joined.insist(lambda: link.put(0, source))  # noqa: B023
                if nbytes > INLINE_NBYTES:
                    joined.insist(link.flush)
                source[:] = bytes(nbytes)
                joined.insist(lambda: link.signal(_SIGNAL_AT, nbytes))  # noqa: B023
                joined.until(lambda: link.seen(_SIGNAL_AT) == nbytes, "the signal behind a put")  # noqa: B023
                expect(link.arrived(0, nbytes) == kept, f"a put of {nbytes} bytes saw its source written later")

    def check_large_put(self) -> None:
        nbytes = 8 << 20
        with self._joined(2, nbytes + _SEGMENT) as joined:
            link, source = joined.link(1, 0), bytearray(os.urandom(nbytes))
            joined.insist(lambda: link.put(64, source))
            joined.insist(lambda: link.signal(nbytes + 64, 1))
            joined.until(lambda: link.seen(nbytes + 64) == 1, "the signal behind a large put")
            expect(link.arrived(64, nbytes) == source, "a large put is spoilt")

    def check_empty_put(self) -> None:
        with self._joined(2) as joined:
            link = joined.link(0, 1)
            for offset in (0, _SEGMENT):
                joined.insist(lambda: link.put(offset, bytearray()))  # noqa: B023
            joined.insist(lambda: link.signal(_SIGNAL_AT, 1))
            joined.until(lambda: link.seen(_SIGNAL_AT) == 1, "the signal behind empty puts")

    def check_bounds(self) -> str | None:
        """What lies outside of registered memory is refused where it is asked, or ends the link at the other end."""
        for offset, nbytes in ((_SEGMENT - 4, 8), (_SEGMENT, 1), (1 << 40, 8), (1 << 60, 8), ((1 << 64) - 4, 8)):
            with self._joined(2) as joined:
                link = joined.link(0, 1)
                if link.connection.mapped is not None:
                    return "mapped links are stored to without being asked"
                expect_raises(_LINK_ENDS, lambda: _send_and_poll(joined, link, offset, nbytes))  # noqa: B023
                expect(link.arrived(0, _SEGMENT) == bytes(_SEGMENT), "memory was written")
        return None

    def check_more_memory(self) -> None:
        with self._joined(2) as joined, ExitStack() as held:
            more = self._backend.allocate(5000)
            held.callback(more.close)
            key, connection = joined.endpoints[1].register(more), joined.connections[0, 1]
            if connection.mapped is not None:
                store(self._backend, connection.open(key).address + 4000, bytearray(b"here"))
            else:
                link, base = joined.link(0, 1), connection.locate(key)
                joined.insist(lambda: link.put(base + 4000, bytearray(b"here")))
                joined.insist(lambda: link.signal(_SIGNAL_AT, 1))
                joined.until(lambda: link.seen(_SIGNAL_AT) == 1, "the signal")
            expect(fetch(self._backend, more.address + 4000, 4) == b"here", "memory registered later was not written")

    # --- ends ---

    def check_close_is_idempotent(self) -> None:
        with self._joined(2) as joined:
            for connection in joined.connections.values():
                connection.close()
                connection.close()
            for endpoint in joined.endpoints:
                endpoint.close()
                endpoint.close()

    def check_last_words(self) -> None:
        """What was flushed arrives though its sender leaves at once."""
        with self._joined(2) as joined:
            link, back = joined.link(0, 1), joined.link(1, 0)
            source = bytearray(os.urandom(5000))
            joined.insist(lambda: link.put(0, source))
            joined.insist(lambda: link.signal(_SIGNAL_AT, 1))
            until(link.flush, "a flush", self._patience_s)
            joined.endpoints[0].close()

            def heard() -> bool:
                try:
                    back.poll()
                except _LINK_ENDS:
                    expect(link.seen(_SIGNAL_AT) == 1, "the end of the link came before the last signal")
                return link.seen(_SIGNAL_AT) == 1

            until(heard, "the last signal", self._patience_s)
            expect(link.arrived(0, 5000) == source, "the last put is spoilt")

    def check_peer_gone(self) -> str | None:
        with self._joined(2) as joined:
            link = joined.link(0, 1)
            if link.connection.mapped is not None or not self._processes:
                return "its links have no end of their own"
            joined.endpoints[1].close()
            expect_raises(_LINK_ENDS, lambda: self._poll_until_gone(link))
        return None

    def _poll_until_gone(self, link: Link) -> None:
        until(lambda: link.poll() and False, "no error", self._patience_s)

    # --- whole collectives ---

    def check_worlds(self) -> None:
        """Every algorithm that these links can carry, exact, among threads."""
        for size in (2, 3, 4):
            with World(
                size, self._name, options=Options(self._options), registry=self._registry, timeout_s=30,
                backend=self._backend.name,
            ) as world:  # fmt: skip
                whole = list(plain_variants(self._registry, world.communicators[0]))
                expect(whole, "no algorithm runs on these links")
                run_variants(world, whole)

    def check_processes(self) -> str | None:
        """The same among processes, one of which leaves without a word in the end."""
        if not self._processes or self._options:
            return "it joins no processes, or only with options"
        from commrt.launcher import launch

        argv = [sys.executable, "-m", "commrt.testing._conformance_rank", self._name, str(self._patience_s / 2)]
        with open(os.devnull, "wb") as nowhere:
            env = {**os.environ, "COMMRT_BACKEND": self._backend.name}
            status = launch(argv, 3, timeout_s=120, env=env, stdout=nowhere, stderr=sys.stderr.buffer)
        expect(status == 0, f"a job of 3 processes ended with status {status}")
        return None

    @contextmanager
    def _joined(self, size: int, nbytes: int = _SEGMENT) -> Iterator[Joined]:
        joined = Joined(self._transport, self._backend, self._options, size, nbytes, self._patience_s)
        try:
            yield joined
        finally:
            joined.close()


def plain_variants(registry: Registry, comm: Communicator) -> Iterator[matrix.Variant]:
    """Calls of every algorithm that needs no more than the links offer, of sizes around what matters."""
    size, offered = comm.size, comm.capabilities
    for algorithm in registry.usable("algorithms").values():
        pair = algorithm.collective == "send"
        if pair and isinstance(comm.backend, DeviceBackend):
            continue  # devices send to no single peer yet
        ranks = 2 if pair else size
        if set(algorithm.requires) <= offered and algorithm.least_ranks <= ranks <= algorithm.most_ranks:
            collective = "sendrecv" if pair else algorithm.collective
            for count in (0,) if collective == "barrier" else (0, 1, size + 1, 1021, 65539):
                root = count % size if collective in ROOTED else 0
                case = Case(collective, size, count, "int32" if collective in REDUCING else "uint8", "sum", root)
                yield matrix.Variant(case, algorithm.name)


def _check_arrived(link: Link, sources: list[bytearray], checked: int) -> int:
    """All puts before the signal that is seen have arrived. How many those are."""
    seen = link.seen(_SIGNAL_AT)
    for number in range(checked, seen):
        source = sources[number]
        expect(link.arrived(1024 * number, len(source)) == source, f"signal {seen} came before put {number}")
    return seen


def _send_and_poll(joined: Joined, link: Link, offset: int, nbytes: int) -> None:
    source = bytearray(b"\xff" * nbytes)
    joined.insist(lambda: link.put(offset, source))
    joined.until(lambda: False, "no error")

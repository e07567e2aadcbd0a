"""From selection to native code: which program serves which sizes, built and lowered when first needed."""

from __future__ import annotations

import threading
import zlib
from typing import Any

from commrt.algorithm import Algorithm
from commrt.carried import Carried, Element
from commrt.collectives import ROOTED, Call
from commrt.dtypes import by_code, op_by_code
from commrt.errors import InvalidArgument, Unavailable
from commrt.group import Group, half
from commrt.lowering import with_syncs
from commrt.native import COLLECTIVE_CODES, as_native, ffi, lib
from commrt.plan import COLLECTIVES, Plan
from commrt.plugins import Registry
from commrt.selection import NATIVE, Explanation, Selection, default_table

_PAIR = 2  # ranks of a point-to-point lane: the sender is 0, the receiver 1


def identifier(name: str) -> int:
    """A plan's number in fingerprints: of its name alone, so that it is the same on all ranks."""
    return zlib.crc32(name.encode())


class Router:
    """One communicator's programs. Callable from any thread. Caches are bounded by algorithms times roots."""

    def __init__(self, group: Group, registry: Registry) -> None:
        self._group, self._registry = group, registry
        self._lock = threading.RLock()
        self._programs: dict[tuple[Any, str, int], Any] = {}
        self._selection: Selection | None = None
        self._custom: dict[int, str] = {}
        self._carried: dict[Any, str] = {}  # by program, the library that carries its launches
        self._routed: set[tuple[str, int]] = set()
        self._lane = lib.cr_comm_collectives(group.native)

    @property
    def selection(self) -> Selection:
        """This job's, made when first asked for: finding the algorithms imports them all."""
        with self._lock:
            if self._selection is None:
                settings = self._group.settings
                self._selection = Selection(
                    self._registry.usable("algorithms"), self._group.table or default_table(),
                    packets_half=half(self._group.size, settings.packet_bytes),
                    pair_packets_half=self._group.pair_packets_half, forced=settings.algorithm,
                    providers={name: one.provider for name, one in self._group.joined.items()}, absent=self._absent(),
                )  # fmt: skip
            return self._selection

    def names(self) -> dict[int, str]:
        """Algorithms by their number in fingerprints."""
        carried = (f"{collective}/{name}" for name in self._group.joined for collective in COLLECTIVES)
        return {identifier(name): name for name in (*carried, *self.selection.algorithms)} | self._custom

    def install(self, call: Any, lane: Any = None) -> None:
        """Make the native routes that a call lacks, for ordinary and for symmetric memory."""
        lane = self._lane if lane is None else lane
        collective = COLLECTIVES[call.collective]
        root = int(call.root) if collective in ROOTED else 0
        with self._lock:
            self._install_both(lane, collective, root)

    def provider(self, call: Any) -> str | None:
        """The library that carries a call whose program was chosen; None for native."""
        return self._carried.get(call.program) if self._carried else None

    def chosen(
        self, collective: str, call: Call, root: int, algorithm: str | None, precise: bool, symmetric: bool
    ) -> Any:
        """The program for one call: that names its algorithm, wants to round once, or may be another library's."""
        element = Element(by_code(call.dtype), op_by_code(call.reduction))
        choice = self.selection.choose(
            collective, call.nbytes, self._group.size, symmetric, self._group.capabilities, algorithm, precise, element
        )
        root = root if collective in ROOTED else 0
        with self._lock:
            if (collective, root) not in self._routed:  # for the short way, which goes by routes alone
                self._routed.add((collective, root))
                self._install_both(self._lane, collective, root)
            return self._program(self._lane, choice.algorithm, root)

    def forced_pair(self, lane: Any, nbytes: int, send: bool, algorithm: str, symmetric: bool) -> Any:
        """As `forced`, for a point-to-point lane."""
        choice = self.selection.choose("send", nbytes, _PAIR, symmetric, self._group.capabilities, algorithm)
        with self._lock:
            return self._program(lane, choice.algorithm, 0, 0 if send else 1)

    def custom(self, plan: Plan, symmetric: bool) -> Any:
        """The program of a plan that the caller brings. Raises InvalidArgument if it does not fit this communicator."""
        if plan.collective == "send":
            raise InvalidArgument("a plan for send runs between two ranks alone", rank=self._group.rank)
        if plan.ranks != self._group.size:
            raise InvalidArgument(
                f"plan {plan.name!r} is for {plan.ranks} ranks, not {self._group.size}", rank=self._group.rank
            )
        offered = self._group.capabilities
        shared = {"symmetric", "direct"} if symmetric and "mapped" in offered else set()
        if missing := sorted(set(plan.requires) - offered - shared):
            raise InvalidArgument(
                f"plan {plan.name!r} needs {', '.join(missing)}, which is not offered here", rank=self._group.rank
            )
        digest = plan.digest
        number, name = int(digest[:8], 16), f"{plan.collective}/{plan.name.rpartition('/')[2]} #{digest[:8]}"
        with self._lock:
            self._custom[number] = name
            return self._lowered((self._lane, digest, 0), self._lane, plan, self._group.rank, number)

    def explain(
        self, collective: str, nbytes: int, symmetric: bool, algorithm: str | None, precise: bool, element: Element
    ) -> Explanation:
        """What would run and why."""
        ranks = _PAIR if collective == "send" else self._group.size
        return self.selection.explain(
            collective, nbytes, ranks, symmetric, self._group.capabilities, algorithm, precise, element
        )

    def _absent(self) -> dict[str, str]:
        """Why the libraries that were not joined were not."""
        names = set(self._registry.names("providers")) - {NATIVE, *self._group.joined}
        return {name: self._why_absent(name) for name in names}

    def _why_absent(self, name: str) -> str:
        try:
            reason: str = self._registry.require("providers", name).probe().reason
        except Unavailable as error:
            reason = str(error)
        return reason or "it was not joined (providers of commrt.init, COMMRT_PROVIDERS)"

    def _install_both(self, lane: Any, collective: str, root: int) -> None:
        for symmetric in (False, True):
            self._install(lane, collective, symmetric, root)

    def _install(self, lane: Any, collective: str, symmetric: bool, root: int) -> None:
        pair = collective == "send"
        role = int(lib.cr_lane_rank(lane)) if pair else None
        ranks = _PAIR if pair else self._group.size
        steps = self.selection.thresholds(collective, ranks, symmetric, self._group.capabilities)
        programs = [self._program(lane, self.selection.candidate(collective, name), root, role) for _, name in steps]
        bounds = ffi.new("unsigned long long[]", [most for most, _ in steps])
        table = ffi.new("cr_program*[]", programs)
        lib.cr_lane_route(lane, COLLECTIVE_CODES[collective], symmetric, root, bounds, table, len(steps))

    def _program(self, lane: Any, algorithm: Algorithm | Carried, root: int, role: int | None = None) -> Any:
        if isinstance(algorithm, Carried):
            return self._agreement(algorithm)
        name = f"{algorithm.collective}/{algorithm.name}"
        found = self._programs.get((lane, name, root))
        if found is not None:
            return found
        rank = self._group.rank if role is None else role
        ranks = self._group.size if role is None else _PAIR
        plan = algorithm.plan(ranks, only=None if self._far() else [rank], root=root)
        return self._lowered((lane, name, root), lane, plan, rank)

    def _agreement(self, carried: Carried) -> Any:
        """By a barrier's plan the ranks settle that all of them call the same, before a library carries it."""
        name, rank = f"{carried.collective}/{carried.name}", self._group.rank
        choice = self.selection.choose("barrier", 0, self._group.size, False, self._group.capabilities, NATIVE)
        plan = self.selection.algorithms[f"barrier/{choice.name}"].plan(self._group.size, only=[rank])
        program = self._lowered((self._lane, name, 0), self._lane, plan, rank, identifier(name), carried=True)
        self._carried[program] = carried.name
        return program

    def _lowered(
        self, key: tuple[Any, str, int], lane: Any, plan: Plan, rank: int, number: int | None = None,
        carried: bool = False,
    ) -> Any:  # fmt: skip
        found = self._programs.get(key)
        if found is None:
            number = identifier(plan.name) if number is None else number
            side = self._group.device
            program = plan.program(rank) if side is None else with_syncs(plan.program(rank))
            native, keep = as_native(program, plan, number, self._host_slots(plan, rank), carried)
            out = ffi.new("cr_program**")
            memory = 0 if side is None else side.share(lib.cr_program_bytes(native, plan.ranks)).address
            code = lib.cr_program_new(lane, native, ffi.cast("void*", memory), out)
            del keep
            if code == lib.CR_NO_MEMORY:
                raise MemoryError(f"no memory for plan {plan.name!r}")
            if code:
                raise InvalidArgument(f"plan {plan.name!r} does not fit into this communicator's scratch", rank=rank)
            found = self._programs[key] = out[0]
        return found

    def _far(self) -> frozenset[int]:
        """Peers that reach this rank's host memory alone, where others reach its device's."""
        side = self._group.device
        if side is None or not side.near:
            return frozenset()
        return frozenset(self._group.links) - side.near

    def _host_slots(self, plan: Plan, rank: int) -> frozenset[int]:
        """Slots of this rank's scratch that such peers write, and so find in host memory. Raises InvalidArgument."""
        far = self._far()
        writers: dict[int, set[int]] = {}
        for program in plan.programs if far else ():
            for op in (op for block in program.blocks for op in block):
                for ref in op.dst:
                    if ref.buffer == "scratch" and ref.rank == rank:
                        writers.setdefault(ref.index, set()).add(program.rank)
        if torn := [slot for slot, ranks in writers.items() if ranks & far and ranks - far]:
            raise InvalidArgument(
                f"plan {plan.name!r}: slots {torn} are written by ranks that meet in different memory"
            )
        return frozenset(slot for slot, ranks in writers.items() if ranks & far)

"""The algorithm contract and the builder that plans are written with.

An algorithm is one module that exports `PLUGIN_API = 1` and `plugin = Algorithm(...)`. Its `build` writes the program
of one rank; a whole plan is the programs of all ranks. It imports this contract alone, no transport and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from commrt.plan import (
    MAX_REFS,
    SELF,
    Collective,
    LaunchClass,
    Operation,
    OperationName,
    Plan,
    RankProgram,
    Ref,
    Requirement,
    Size,
    validate,
)


def mine(index: int = 0, part: int = 0, rank: int = SELF) -> Ref:
    """A chunk of the input, here or (plans that require "symmetric" or "direct") on `rank`."""
    return Ref("input", index, part, rank)


def out(index: int = 0, part: int = 0, rank: int = SELF) -> Ref:
    """A chunk of the output, here or (plans that require "symmetric") on `rank`."""
    return Ref("output", index, part, rank)


def scratch(slot: int, rank: int = SELF) -> Ref:
    """A scratch slot, here or on `rank`."""
    return Ref("scratch", slot, 0, rank)


def packets(slot: int, rank: int = SELF) -> Ref:
    """A packet slot, here or on `rank`."""
    return Ref("packets", slot, 0, rank)


class Block:
    """The operations of one thread block, in order. Each method appends one operation (see `commrt.plan.Operation`)."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._sliced = False

    def _add(
        self,
        name: OperationName,
        dst: Sequence[Ref] = (),
        src: Sequence[Ref] = (),
        size: Ref | None = None,
        **rest: Any,
    ) -> None:
        length = (
            Size() if size is None else Size("output" if size.buffer == "output" else "input", size.index, size.part)
        )
        sliced = self._sliced and bool(dst)
        self.operations.append(Operation(name, tuple(dst), tuple(src), length, sliced=sliced, **rest))

    def copy(self, dst: Ref, src: Ref, size: Ref) -> None:
        """dst = src."""
        self._add("copy", [dst], [src], size)

    def put(self, dst: Ref, src: Ref, size: Ref) -> None:
        """dst on a peer = src."""
        self._add("put", [dst], [src], size)

    def get(self, dst: Ref, src: Ref, size: Ref) -> None:
        """dst = src in a peer's user buffer."""
        self._add("get", [dst], [src], size)

    def reduce(self, dst: Sequence[Ref], src: Sequence[Ref], size: Ref, final: bool = False) -> None:
        """Every dst = the sources folded in order."""
        self._add("reduce", dst, src, size, final=final)

    def signal(self, channel: int, peers: Sequence[int], publish: bool = False) -> None:
        """Tell each peer that everything before is visible to it."""
        self._add("signal", channel=channel, peers=tuple(peers), publish=publish)

    def wait(self, channel: int, peers: Sequence[int], publish: bool = False) -> None:
        """Wait for each peer's next signal on the channel."""
        self._add("wait", channel=channel, peers=tuple(peers), publish=publish)

    def put_packets(self, dst: Sequence[Ref], src: Ref, size: Ref) -> None:
        """Every dst (packets) = src."""
        self._add("put_packets", dst, [src], size)

    def unpack_packets(self, dst: Ref, src: Ref, size: Ref) -> None:
        """dst = src (packets), once they are there."""
        self._add("unpack_packets", [dst], [src], size)

    def reduce_packets(self, dst: Sequence[Ref], src: Sequence[Ref], size: Ref, final: bool = False) -> None:
        """As `reduce`, for sources and destinations of both kinds."""
        self._add("reduce_packets", dst, src, size, final=final)

    def switch_reduce(self, dst: Ref, src: Ref, size: Ref, final: bool = False) -> None:
        """dst = the sum of every rank's src, made by the switch."""
        self._add("switch_reduce", [dst], [src], size, final=final)

    def switch_broadcast(self, dst: Ref, src: Ref, size: Ref) -> None:
        """dst on every rank = src."""
        self._add("switch_broadcast", [dst], [src], size)

    def barrier(self) -> None:
        """Wait for all blocks of this rank."""
        self._add("barrier")

    def loop(self, body: Callable[[], None], size: Ref) -> None:
        """Run `body` once for each slice of the chunk `size`, at least once; its operations act on that slice.

        Parts of a window are clipped, so ranks that signal each other must loop over the same chunk: part 0 is the
        longest. A slice behind the end of a shorter chunk is empty.
        """
        target = len(self.operations)
        self._sliced = True
        body()
        self._sliced = False
        self._add("loop", size=size, target=target)


@dataclass
class Program:
    """What `build` fills: the blocks of one rank."""

    rank: int
    ranks: int
    root: int = 0
    blocks: list[Block] = field(default_factory=list)

    def block(self) -> Block:
        """A new thread block."""
        self.blocks.append(Block())
        return self.blocks[-1]

    @property
    def peers(self) -> list[int]:
        """All other ranks, each rank's list starting behind itself so that not all visit the same peer at once."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective.

    build(program) appends the blocks of `program.rank`. The counts may depend on the number of ranks:
    parts, scratch_slots, packet_slots and rounds are functions of it. `least_ranks`, `most_ranks`: where it is offered.
    `unit`: bytes of a slice, for plans with loops. A rooted collective's `build` reads `program.root`.
    """

    collective: Collective
    name: str
    build: Callable[[Program], None]
    parts: Callable[[int], int] = lambda ranks: 1
    scratch_slots: Callable[[int], int] = lambda ranks: 0
    packet_slots: Callable[[int], int] = lambda ranks: 0
    channels: int = 0
    unit: int = 0
    launch_class: LaunchClass = "synchronising"
    requires: tuple[Requirement, ...] = ()
    rounds: Callable[[int], int] = lambda ranks: 0
    least_ranks: int = 2
    most_ranks: int = MAX_REFS

    def plan(self, ranks: int, only: Iterable[int] | None = None, root: int = 0) -> Plan:
        """The plan for a world size: all ranks, or the slices of `only`. Raises PlanError if it is out of bounds."""
        programs = tuple(self._program(rank, ranks, root) for rank in (range(ranks) if only is None else only))
        plan = Plan(
            name=f"{self.collective}/{self.name}", collective=self.collective, ranks=ranks, parts=self.parts(ranks),
            scratch_slots=self.scratch_slots(ranks), packet_slots=self.packet_slots(ranks), channels=self.channels,
            unit=self.unit, launch_class=self.launch_class, requires=self.requires, rounds=self.rounds(ranks),
            programs=programs,
        )  # fmt: skip
        validate(plan)
        return plan

    def _program(self, rank: int, ranks: int, root: int) -> RankProgram:
        program = Program(rank, ranks, root)
        self.build(program)
        return RankProgram(rank, tuple(tuple(block.operations) for block in program.blocks))

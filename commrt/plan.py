"""Plans: algorithms as data.

A plan lists, per rank and per thread block, operations on chunks of named buffers. It is size-parametric: bytes,
counts, dtype, reduction and addresses are launch arguments, so one plan serves every size.

Geometry. A buffer of the user is made of *groups* (one per rank where the collective says so, else one) of `count`
elements. A launch walks the groups window by window (as much as scratch holds; each window is one epoch), and cuts each
window into `parts` equal chunks, the last ones clipped (`part_of`). `Ref(buffer, index, part)` names part `part` of
group `index`. In scratch and packets, `index` is a slot that holds one chunk; its stride follows from the window.

A plan is untrusted data: `load` validates, bounds and decodes; nothing else may reach the native executor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import msgspec

from commrt.errors import PlanError

VERSION = 1
MAX_RANKS = 1 << 16
MAX_BLOCKS = 16
MAX_OPERATIONS = 1 << 16  # of one rank
MAX_REFS = 256  # destinations, or sources, of one operation
MAX_PACKET_SOURCES = 64  # of one operation
MAX_PARTS = 1 << 16
MAX_SLOTS = 1 << 16
MAX_CHANNELS = 8
MAX_BYTES = 1 << 26  # of one serialised plan

SELF = -1

BufferName = Literal["input", "output", "scratch", "packets"]
Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "send",
]  # fmt: skip
OperationName = Literal[
    "copy", "put", "get", "reduce", "signal", "wait", "put_packets", "unpack_packets", "reduce_packets",
    "switch_reduce", "switch_broadcast", "barrier", "sync", "loop",
]  # fmt: skip
LaunchClass = Literal["synchronising", "one_way"]
Requirement = Literal["mapped", "symmetric", "direct", "switch"]

COLLECTIVES: tuple[str, ...] = Collective.__args__  # type: ignore[attr-defined]
OPERATIONS: tuple[str, ...] = OperationName.__args__  # type: ignore[attr-defined]
BUFFERS: tuple[str, ...] = BufferName.__args__  # type: ignore[attr-defined]


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One chunk: part `part` of group (or slot) `index` of `buffer`, on this rank (SELF) or on `rank`."""

    buffer: BufferName
    index: int = 0
    part: int = 0
    rank: int = SELF


class Size(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long an operation is: as long as this chunk of the user's input or output."""

    buffer: Literal["input", "output"] = "input"
    index: int = 0
    part: int = 0


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step of a block.

    copy            dst[0] = src[0], both on this rank, or a mapped peer's
    put             dst[0] on a peer = src[0] on this rank; asynchronous on port channels: a later signal follows it,
                    and a launch ends only once the sources of all its puts may be reused
    get             dst[0] on this rank = src[0] in a peer's user buffer, whose address a wait has learnt
    reduce          every dst = src[0] + src[1] + ... in this order, rounded once; `final` divides for avg
    signal, wait    on channel `channel`, with each rank of `peers`; `publish` on both hands over user addresses
    put_packets     every dst (packets) = src[0], as packets
    unpack_packets  dst[0] = src[0] (packets); waits for them
    reduce_packets  as reduce; sources in "packets" are waited for, destinations in "packets" become packets
    switch_reduce   dst[0] = sum over all ranks of src[0], done by the switch
    switch_broadcast  dst[0] on all ranks = src[0], done by the switch
    barrier         waits for all blocks of this rank
    sync            orders the threads of this block
    loop            repeats from operation `target` until every slice of `unit` bytes of the chunk is done; the `sliced`
                    operations between act on one slice each time (empty behind the end of their own chunk)

    A wait orders all that the peer did before the signal it took. The k-th wait of an ordered pair of ranks on a
    channel takes the k-th signal; a window leaves none over. A packet slot is written at most once in a window, as a
    whole and thus outside of loops; it is waited for even if the chunk is empty: its first packet says who wrote what.
    """

    name: OperationName
    dst: tuple[Ref, ...] = ()
    src: tuple[Ref, ...] = ()
    size: Size = Size()
    channel: int = 0
    peers: tuple[int, ...] = ()
    publish: bool = False
    final: bool = False
    target: int = 0
    sliced: bool = False


class RankProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank does: a list of operations for each of its thread blocks."""

    rank: int
    blocks: tuple[tuple[Operation, ...], ...]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """An algorithm for one collective and one number of ranks; `programs` may hold a slice of the ranks.

    launch_class: "synchronising" if a rank completes only once every rank has entered the launch; else "one_way".
    requires: what the links must offer ("mapped": peers' scratch can be loaded and stored; "symmetric"/"direct": peers'
    user buffers can be too / can be read by `get`; "switch": links that reduce).
    rounds: how often a value is rounded on its way to the output. unit: bytes of a slice of `sliced` operations.
    """

    version: int = VERSION
    name: str
    collective: Collective
    ranks: int
    parts: int = 1
    scratch_slots: int = 0
    packet_slots: int = 0
    channels: int = 0
    unit: int = 0
    launch_class: LaunchClass = "synchronising"
    requires: tuple[Requirement, ...] = ()
    rounds: int = 0
    programs: tuple[RankProgram, ...]

    def program(self, rank: int) -> RankProgram:
        """The slice of `rank`. Raises PlanError if this plan does not hold it."""
        for program in self.programs:
            if program.rank == rank:
                return program
        raise PlanError(f"plan {self.name!r} holds no program for rank {rank}", rank=rank)

    def to_json(self) -> bytes:
        """Canonical JSON: the same plan gives the same bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json()).hexdigest()


def part_of(window: int, parts: int, itemsize: int, part: int) -> tuple[int, int]:
    """(offset, length) in elements of a part of a window: equal whole lines of 64 bytes, the last parts clipped."""
    line = max(1, 64 // itemsize)
    per = -(-window // (parts * line)) * line
    offset = min(part * per, window)
    return offset, min(per, window - offset)


def groups(collective: str, ranks: int) -> tuple[int, int]:
    """How many groups the input and the output of a collective have.

    "send" is the point-to-point lane of an ordered pair: rank 0 of its two ranks has the input, rank 1 the output.
    """
    gathered = {"all_gather": (1, ranks), "gather": (1, ranks), "reduce_scatter": (ranks, 1), "scatter": (ranks, 1)}
    return gathered.get(collective, (ranks, ranks) if collective == "all_to_all" else (1, 1))


def schema() -> dict[str, Any]:
    """JSON schema of a plan file."""
    return msgspec.json.schema(Plan)


def load(data: bytes | str) -> Plan:
    """Decode and validate a plan. Raises PlanError on anything malformed, huge, deeply nested or out of bounds."""
    raw = data.encode() if isinstance(data, str) else data
    if len(raw) > MAX_BYTES:
        raise PlanError(f"plan of {len(raw)} bytes exceeds {MAX_BYTES}", nbytes=len(raw))
    try:
        plan = msgspec.json.decode(raw, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"malformed plan: {error}") from error
    validate(plan)
    return plan


def validate(plan: Plan) -> None:
    """Check every bound of a plan. Raises PlanError naming rank, block and operation."""
    _header(plan)
    seen: set[int] = set()
    for program in plan.programs:
        _in_range("rank", program.rank, plan.ranks, plan.name)
        if program.rank in seen:
            raise PlanError(f"plan {plan.name!r}: rank {program.rank} has two programs", rank=program.rank)
        seen.add(program.rank)
        _program(plan, program)


def _header(plan: Plan) -> None:
    limits = {
        "version": (VERSION, VERSION), "ranks": (1, MAX_RANKS), "parts": (1, MAX_PARTS), "rounds": (0, MAX_RANKS),
        "scratch_slots": (0, MAX_SLOTS), "packet_slots": (0, MAX_SLOTS), "channels": (0, MAX_CHANNELS),
        "unit": (0, 1 << 30),
    }  # fmt: skip
    for field, (low, high) in limits.items():
        value = getattr(plan, field)
        if not low <= value <= high:
            raise PlanError(f"plan {plan.name!r}: {field} {value} is not in {low}..{high}")
    if plan.unit % 64:
        raise PlanError(f"plan {plan.name!r}: unit {plan.unit} is not a multiple of 64 bytes")


def _program(plan: Plan, program: RankProgram) -> None:
    if not 1 <= len(program.blocks) <= MAX_BLOCKS:
        raise PlanError(f"rank {program.rank}: {len(program.blocks)} blocks, not 1..{MAX_BLOCKS}", rank=program.rank)
    total = sum(len(block) for block in program.blocks)
    if total > MAX_OPERATIONS:
        raise PlanError(f"rank {program.rank}: {total} operations exceed {MAX_OPERATIONS}", rank=program.rank)
    for number, block in enumerate(program.blocks):
        for position, operation in enumerate(block):
            where = f"plan {plan.name!r}, rank {program.rank}, block {number}, operation {position} ({operation.name})"
            _operation(plan, program.rank, operation, position, where)
        _control(program.rank, number, block)
    barriers = [sum(operation.name == "barrier" for operation in block) for block in program.blocks]
    if len(set(barriers)) > 1:
        raise PlanError(f"rank {program.rank}: its blocks reach unequally many barriers, {barriers}", rank=program.rank)


def _control(rank: int, number: int, block: tuple[Operation, ...]) -> None:
    """Loops neither nest nor overlap nor hold barriers or packets; operations are sliced inside of loops alone."""
    bodies = [(op.target, position) for position, op in enumerate(block) if op.name == "loop"]
    for (_, end), (begin, _) in pairwise(bodies):
        if begin <= end:
            raise PlanError(f"rank {rank}, block {number}: loops at operations {end} and behind it overlap", rank=rank)
    inside = {position for begin, end in bodies for position in range(begin, end)}
    for position, operation in enumerate(block):
        if operation.sliced and position not in inside:
            raise PlanError(f"rank {rank}, block {number}, operation {position}: sliced outside of a loop", rank=rank)
        if position in inside and (operation.name == "barrier" or operation.name.endswith("_packets")):
            raise PlanError(f"rank {rank}, block {number}, operation {position}: {operation.name} in a loop", rank=rank)


# name: (least, most) destinations, (least, most) sources
_ARITY: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "copy": ((1, 1), (1, 1)), "put": ((1, 1), (1, 1)), "get": ((1, 1), (1, 1)),
    "reduce": ((1, MAX_REFS), (1, MAX_REFS)), "put_packets": ((1, MAX_REFS), (1, 1)),
    "unpack_packets": ((1, 1), (1, 1)), "reduce_packets": ((1, MAX_REFS), (1, MAX_REFS)),
    "switch_reduce": ((1, 1), (1, 1)), "switch_broadcast": ((1, 1), (1, 1)),
}  # fmt: skip


def _operation(plan: Plan, rank: int, operation: Operation, position: int, where: str) -> None:
    for kind, refs, (low, high) in zip(
        ("destinations", "sources"), (operation.dst, operation.src), _arity(operation), strict=True
    ):
        if not low <= len(refs) <= high:
            raise PlanError(f"{where}: {len(refs)} {kind}, not {low}..{high}", rank=rank)
    if sum(ref.buffer == "packets" for ref in operation.src) > MAX_PACKET_SOURCES:
        raise PlanError(f"{where}: more than {MAX_PACKET_SOURCES} sources are packets", rank=rank)
    counts = dict(zip(("input", "output"), groups(plan.collective, plan.ranks), strict=True))
    _in_range("size index", operation.size.index, counts[operation.size.buffer], where)
    _in_range("size part", operation.size.part, plan.parts, where)
    for ref in (*operation.dst, *operation.src):
        _ref(plan, rank, operation, ref, where)
    if operation.name not in ("signal", "wait") and (operation.channel or operation.peers):
        raise PlanError(f"{where}: only signal and wait have a channel and peers", rank=rank)
    if operation.name in ("signal", "wait"):
        _in_range("channel", operation.channel, plan.channels, where)
        for peer in operation.peers:
            _in_range("peer", peer, plan.ranks, where)
        if rank in operation.peers or len(set(operation.peers)) != len(operation.peers):
            raise PlanError(f"{where}: peers {operation.peers} repeat a rank or name this one", rank=rank)
    if operation.name == "loop" and not (plan.unit and 0 <= operation.target < position):
        raise PlanError(f"{where}: target {operation.target} is not before it, or the plan has no unit", rank=rank)
    if operation.name in ("switch_reduce", "switch_broadcast") and "switch" not in plan.requires:
        raise PlanError(f"{where}: the plan doesn't require switch", rank=rank)
    _families(operation, rank, where)


def _arity(operation: Operation) -> tuple[tuple[int, int], tuple[int, int]]:
    return _ARITY.get(operation.name, ((0, 0), (0, 0)))


def _ref(plan: Plan, rank: int, operation: Operation, ref: Ref, where: str) -> None:
    groups_in, groups_out = groups(plan.collective, plan.ranks)
    slots = {"input": groups_in, "output": groups_out, "scratch": plan.scratch_slots, "packets": plan.packet_slots}
    _in_range(f"{ref.buffer} index", ref.index, slots[ref.buffer], where)
    _in_range("part", ref.part, plan.parts, where)
    if ref.buffer in ("input", "output") and ref.part != operation.size.part:
        # parts differ in length: another one's would reach past this one's end
        raise PlanError(f"{where}: as long as part {operation.size.part}, but acts on part {ref.part}", rank=rank)
    if ref.rank != SELF:
        _in_range("rank", ref.rank, plan.ranks, where)
        _required(plan, rank, operation, ref, where)
    if ref.rank == rank:
        raise PlanError(f"{where}: names its own rank {rank}; use {SELF}", rank=rank)


def _required(plan: Plan, rank: int, operation: Operation, ref: Ref, where: str) -> None:
    """A plan says what its links must offer to reach a peer's scratch, packets or user buffers."""
    if ref.buffer in ("input", "output"):
        accepted = {"symmetric", "direct"} if operation.name == "get" else {"symmetric"}
    else:
        accepted = set() if operation.name == "put" else {"mapped", "symmetric"}
    if accepted and accepted.isdisjoint(plan.requires):
        need = " or ".join(sorted(accepted))
        raise PlanError(
            f"{where}: touches {ref.buffer} of rank {ref.rank}, but the plan doesn't require {need}", rank=rank
        )


def _families(operation: Operation, rank: int, where: str) -> None:
    """Packet regions hold packets alone, peers' user buffers are written by direct plans alone."""
    packets_dst = [ref.buffer == "packets" for ref in operation.dst]
    packets_src = [ref.buffer == "packets" for ref in operation.src]
    legal = {
        "put_packets": all(packets_dst) and not any(packets_src),
        "unpack_packets": not any(packets_dst) and all(packets_src),
        "reduce_packets": all(ref.rank == SELF for ref in operation.src),
        "put": all(ref.rank != SELF for ref in operation.dst) and all(ref.rank == SELF for ref in operation.src),
        "get": all(ref.rank == SELF for ref in operation.dst)
        and all(ref.rank != SELF and ref.buffer in ("input", "output") for ref in operation.src),
    }
    plain = not any(packets_dst) and not any(packets_src)
    if not legal.get(operation.name, plain) or (operation.name in ("put", "get") and not plain):
        raise PlanError(f"{where}: a buffer of the wrong kind, or of the wrong rank", rank=rank)


def _in_range(what: str, value: int, end: int, where: str) -> None:
    if not 0 <= value < end:
        raise PlanError(f"{where}: {what} {value} is not in 0..{end - 1}")


def operations(program: RankProgram) -> Iterator[tuple[int, int, Operation]]:
    """Every operation of a program with its block and position."""
    for number, block in enumerate(program.blocks):
        for position, operation in enumerate(block):
            yield number, position, operation

"""The native core, as Python sees it: library, error translation, plans lowered to native programs, Python ports."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commrt import errors
from commrt._native import _core
from commrt.dtypes import by_code, op_by_code
from commrt.plan import BUFFERS, COLLECTIVES, OPERATIONS, RankProgram

ffi: Any = _core.ffi
lib: Any = _core.lib

_log = logging.getLogger("commrt.net")
_UNKNOWN = 0xFFFFFFFF

COLLECTIVE_CODES = {name: code for code, name in enumerate(COLLECTIVES)}
_FLAGS = {"final": 1, "publish": 2, "sliced": 4}


def as_native(program: RankProgram, plan: Any, identifier: int) -> tuple[Any, list[Any]]:
    """A `cr_plan` for one rank's program, and what must stay alive while it is read."""
    ops: list[tuple[int, ...]] = []
    refs: list[tuple[int, ...]] = []
    peers: list[int] = []
    begin = [0]
    for block in program.blocks:
        for op in block:
            flags = sum(bit for name, bit in _FLAGS.items() if getattr(op, name))
            size = (op.size.index, op.size.part)
            codes = (OPERATIONS.index(op.name), flags, op.channel, BUFFERS.index(op.size.buffer))
            lists = (len(op.dst), len(op.src), len(refs), len(peers), len(op.peers))
            ops.append((*codes, *lists, *size, op.target))
            refs += [(BUFFERS.index(ref.buffer), ref.rank, ref.index, ref.part) for ref in (*op.dst, *op.src)]
            peers += op.peers
        begin.append(len(ops))
    keep = [
        ffi.new("cr_op[]", ops),
        ffi.new("cr_ref[]", refs),
        ffi.new("unsigned[]", peers),
        ffi.new("unsigned[]", begin),
    ]
    native = ffi.new(
        "cr_plan*",
        {
            "ops": keep[0], "nops": len(ops), "refs": keep[1], "nrefs": len(refs), "peers": keep[2],
            "npeers": len(peers), "begin": keep[3], "nblocks": len(program.blocks), "parts": plan.parts,
            "scratch_slots": plan.scratch_slots, "packet_slots": plan.packet_slots,
            "synchronising": plan.launch_class == "synchronising", "id": identifier, "unit": plan.unit,
        },
    )  # fmt: skip
    return native, keep


_ERRORS: dict[int, type[errors.OperationError]] = {
    lib.CR_MISMATCH: errors.Mismatch,
    lib.CR_PEER_LOST: errors.PeerLost,
    lib.CR_TIMEOUT: errors.OperationTimeout,
    lib.CR_ABORTED: errors.Aborted,
    lib.CR_DEADLOCK: errors.Deadlock,
    lib.CR_TRANSPORT: errors.TransportError,
    lib.CR_BOUNDS: errors.TransportError,
}


def to_error(rank: int, failure: Any, algorithms: Mapping[int, str], stuck: Sequence[Any]) -> errors.OperationError:
    """The exception for a native failure record. `stuck`: where each rank stood, if none could move."""
    kind = _ERRORS.get(failure.code, errors.OperationError)
    peer = None if failure.peer == _UNKNOWN else int(failure.peer)
    message = _Message(rank, failure, peer, algorithms)
    text = message.deadlock(stuck) if failure.code == lib.CR_DEADLOCK and stuck else message.text()
    code = failure.mine[1] & 0xFF
    known = bool(failure.sequence) and code < len(COLLECTIVES)
    return kind(
        text,
        rank=rank,
        peer=peer,
        operation=COLLECTIVES[code] if known else None,
        sequence=int(failure.sequence) or None,
        nbytes=int(failure.nbytes) if known else None,
    )


@dataclass(frozen=True)
class _Message:
    rank: int
    failure: Any
    peer: int | None
    algorithms: Mapping[int, str]

    def text(self) -> str:
        f, mine = self.failure, self._call(self.failure.mine, self.failure.sequence)
        where = f", {place}" if (place := position(f)) else ""
        texts: dict[int, str] = {
            lib.CR_MISMATCH: f"ranks disagree: rank {self.rank} called {mine}, {self._theirs()}",
            lib.CR_PEER_LOST: f"rank {self.peer} is gone before its part of {mine} was done{where}",
            lib.CR_TIMEOUT: f"{mine} did not end in time{where}",
            lib.CR_ABORTED: "the communicator was aborted" + (f" by rank {self.peer}" if self.peer is not None else ""),
            lib.CR_DEADLOCK: f"no block of any rank can move{where}",
            lib.CR_BOUNDS: f"rank {self.peer} published a buffer that does not lie in its symmetric memory",
        }
        return texts.get(f.code, f"the link to rank {self.peer} failed{where}")

    def deadlock(self, stuck: Sequence[Any]) -> str:
        places = (f"rank {rank}: {position(place) or 'at its end'}" for rank, place in enumerate(stuck))
        return "no block of any rank can move: " + "; ".join(places)

    def _theirs(self) -> str:
        if self.peer is None:
            return "a peer something else"
        return f"rank {self.peer} called {self._call(self.failure.theirs, self.failure.peer_sequence)}"

    def _call(self, words: Any, sequence: int) -> str:
        what, count, root = int(words[1]), int(words[2]), int(words[3])
        if not sequence:
            return "nothing yet"
        collective, dtype, op = what & 0xFF, what >> 8 & 0xFF, what >> 16 & 0xFF
        name = COLLECTIVES[collective] if collective < len(COLLECTIVES) else f"collective {collective}"
        memory = "symmetric" if what >> 24 & 0xFF else "ordinary"
        algorithm = self.algorithms.get(what >> 32, f"#{what >> 32:x}").partition("/")[2] or "?"
        return (
            f"{name}(count {count}, dtype {by_code(dtype).name}, op {op_by_code(op).name}, root {root}, "
            f"{memory} memory, algorithm {algorithm}) as operation {sequence}"
        )


def position(failure: Any) -> str:
    """Where a launch stands: block, plan operation, what it waits for."""
    if failure.op_code == _UNKNOWN:
        return "" if failure.waits_for == _UNKNOWN else f"waiting for rank {failure.waits_for} to enter the operation"
    text = f"block {failure.block}, operation {failure.operation} ({OPERATIONS[failure.op_code]})"
    if failure.waits_for != _UNKNOWN:
        text += f" on channel {failure.channel} for rank {failure.waits_for}"
    return text


class PythonPort:
    """A Python `Port` behind the native function table. `struct` is the `cr_port*`; keep this object alive with it."""

    def __init__(self, port: Any) -> None:
        self.port = port
        self._handle = ffi.new_handle(self)
        self.struct = ffi.new(
            "cr_port*", [self._handle, lib.cr_py_put, lib.cr_py_signal, lib.cr_py_get, lib.cr_py_flush, lib.cr_py_poll]
        )


def _refused(exception: Any, value: Any, traceback: Any) -> int:
    level = logging.INFO if isinstance(value, EOFError) else logging.WARNING
    _log.log(level, "a port ended: %s: %s", getattr(exception, "__name__", exception), value)
    return -1


@ffi.def_extern(onerror=_refused)  # type: ignore[untyped-decorator]
def cr_py_put(context: Any, offset: int, source: Any, nbytes: int) -> int:
    return int(ffi.from_handle(context).port.put(offset, memoryview(ffi.buffer(source, nbytes))))


@ffi.def_extern(onerror=_refused)  # type: ignore[untyped-decorator]
def cr_py_signal(context: Any, offset: int, value: int) -> int:
    return int(ffi.from_handle(context).port.signal(offset, value))


@ffi.def_extern(onerror=_refused)  # type: ignore[untyped-decorator]
def cr_py_get(context: Any, destination: Any, address: int, nbytes: int) -> int:
    return -1


@ffi.def_extern(onerror=_refused)  # type: ignore[untyped-decorator]
def cr_py_flush(context: Any) -> int:
    return int(ffi.from_handle(context).port.flush())


@ffi.def_extern(onerror=_refused)  # type: ignore[untyped-decorator]
def cr_py_poll(context: Any) -> int:
    return int(ffi.from_handle(context).port.poll())

"""The native core, as Python sees it: library, error translation, plans lowered to native programs, Python ports."""

from __future__ import annotations

import logging
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
    ops, refs, peers, begin = [], [], [], [0]
    for block in program.blocks:
        for op in block:
            flags = sum(bit for name, bit in _FLAGS.items() if getattr(op, name))
            ops.append(
                (
                    OPERATIONS.index(op.name), flags, op.channel, BUFFERS.index(op.size.buffer), len(op.dst), len(op.src),
                    len(refs), len(peers), len(op.peers), op.size.index, op.size.part, op.target,
                )  # fmt: skip
            )
            refs += [(BUFFERS.index(ref.buffer), ref.rank, ref.index, ref.part) for ref in (*op.dst, *op.src)]
            peers += op.peers
        begin.append(len(ops))
    keep = [ffi.new("cr_op[]", ops), ffi.new("cr_ref[]", refs), ffi.new("unsigned[]", peers), ffi.new("unsigned[]", begin)]
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


def to_error(rank: int, failure: Any) -> errors.OperationError:
    """The exception for a native failure record."""
    kind = _ERRORS.get(failure.code, errors.OperationError)
    peer = None if failure.peer == _UNKNOWN else int(failure.peer)
    name = COLLECTIVES[failure.mine[1] & 0xFF] if (failure.mine[1] & 0xFF) < len(COLLECTIVES) else "?"
    return kind(
        _headline(rank, failure, peer), rank=rank, peer=peer, operation=name, sequence=int(failure.sequence),
        nbytes=int(failure.nbytes),
    )  # fmt: skip


def _headline(rank: int, failure: Any, peer: int | None) -> str:
    where = f", {position}" if (position := _position(failure)) else ""
    if failure.code == lib.CR_MISMATCH:
        theirs = _call(failure.theirs, failure.peer_sequence)
        return f"ranks disagree: rank {rank} called {_call(failure.mine, failure.sequence)}, rank {peer} called {theirs}"
    if failure.code == lib.CR_PEER_LOST:
        return f"rank {peer} is gone before it had done its part of {_call(failure.mine, failure.sequence)}{where}"
    if failure.code == lib.CR_TIMEOUT:
        never = f"; rank {peer} is at operation {failure.peer_sequence}" if failure.peer_sequence else ""
        return f"{_call(failure.mine, failure.sequence)} did not end in time{where}{never}"
    if failure.code == lib.CR_ABORTED:
        return "the communicator was aborted" + (f" by rank {peer}" if peer is not None else "")
    if failure.code == lib.CR_DEADLOCK:
        return f"no block of any rank can move: rank {rank} stands at {_position(failure) or 'the end of its program'}"
    if failure.code == lib.CR_BOUNDS:
        return f"rank {peer} published a buffer that does not lie in its symmetric memory"
    return f"the link to rank {peer} failed{where}"


def _position(failure: Any) -> str:
    if failure.op_code == _UNKNOWN:
        return "" if failure.waits_for == _UNKNOWN else f"waiting for rank {failure.waits_for} to enter the operation"
    text = f"block {failure.block}, plan operation {failure.operation} ({OPERATIONS[failure.op_code]})"
    if failure.waits_for != _UNKNOWN:
        text += f" on channel {failure.channel} for rank {failure.waits_for}"
    return text


def _call(words: Any, sequence: int) -> str:
    what, count, root = int(words[1]), int(words[2]), int(words[3])
    if not sequence:
        return "nothing yet"
    collective, dtype, op = what & 0xFF, what >> 8 & 0xFF, what >> 16 & 0xFF
    name = COLLECTIVES[collective] if collective < len(COLLECTIVES) else "?"
    memory = "symmetric" if what >> 24 & 0xFF else "ordinary"
    return (
        f"{name}(count {count}, dtype {by_code(dtype).name}, op {op_by_code(op).name}, root {root}, {memory} memory, "
        f"algorithm #{what >> 32}) as operation {sequence}"
    )


class PythonPort:
    """A Python `Port` behind the native function table. `struct` is the `cr_port*`; keep this object alive with it."""

    def __init__(self, port: Any) -> None:
        self.port = port
        self._handle = ffi.new_handle(self)
        self.struct = ffi.new("cr_port*", [self._handle, lib.cr_py_put, lib.cr_py_signal, lib.cr_py_get, lib.cr_py_flush, lib.cr_py_poll])


def _refused(exception: Any, value: Any, traceback: Any) -> int:
    _log.warning("a port failed: %s: %s", getattr(exception, "__name__", exception), value)
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

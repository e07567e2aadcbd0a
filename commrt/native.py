"""The native core, as Python sees it: library, plans lowered to native programs, Python ports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import util
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from typing import TYPE_CHECKING, Any

from commrt._native import _core
from commrt.plan import BUFFERS, COLLECTIVES, OPERATIONS, SELF, RankProgram, Ref

if TYPE_CHECKING:
    from commrt._native._calls import ShortWay

ffi: Any = _core.ffi
lib: Any = _core.lib

_log = logging.getLogger("commrt.net")

COLLECTIVE_CODES = {name: code for code, name in enumerate(COLLECTIVES)}
_HOST = len(BUFFERS)  # own scratch in host memory
_FLAGS = {"final": 1, "publish": 2, "sliced": 4}


def _short_way_class() -> type[ShortWay]:
    """From the library that holds `_core`: both must see one engine."""
    loader = ExtensionFileLoader("commrt._native._calls", _core.__file__)
    module = util.module_from_spec(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(module)
    return module.ShortWay  # type: ignore[no-any-return]


_ShortWay = _short_way_class()


def short_way(lane: Any, otherwise: Callable[[int, Any, Any], bool]) -> ShortWay:
    """Blocking calls on numpy arrays in a lane, closed at first. See `commrt/_native/_calls.pyi`."""
    return _ShortWay(int(ffi.cast("uintptr_t", lane)), otherwise)


def _place(ref: Ref, host_slots: frozenset[int]) -> int:
    if ref.buffer == "scratch" and ref.rank == SELF and ref.index in host_slots:
        return _HOST
    return BUFFERS.index(ref.buffer)


def as_native(
    program: RankProgram, plan: Any, identifier: int, host_slots: frozenset[int] = frozenset(), carried: bool = False
) -> tuple[Any, list[Any]]:
    """A `cr_plan` for one rank's program, and what must stay alive while it is read.

    host_slots: of this rank's own scratch, those that lie in host memory where the others are on a device.
    carried: the plan only settles that all ranks call the same; another library moves the data.
    """
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
            refs += [(_place(ref, host_slots), ref.rank, ref.index, ref.part) for ref in (*op.dst, *op.src)]
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
            "carried": carried,
        },
    )  # fmt: skip
    return native, keep


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

"""One process of `commrt doctor`: `python -m commrt._doctor_child probe|try KIND NAME`.

The result of a probe is a line on stdout, the reason of a failure one on stderr.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import msgspec
import numpy as np

import commrt
from commrt.arrays import on_device
from commrt.backend import Probe
from commrt.doctor import FOUND, REASON, UNUSABLE, Facts
from commrt.errors import Unavailable
from commrt.plugins import default_registry
from commrt.testing.world import World

_COUNTS = (1, 1000, 200_000)


def probe(plugin: Any, kind: str, name: str) -> None:
    """Tell what it finds."""
    found = plugin.probe()
    if not isinstance(found, Probe):
        raise TypeError(f"its probe answered {type(found).__name__}, no Probe")
    backends = (name,) if kind == "backends" else getattr(plugin, "backends", ("cpu",))
    backend = "cpu" if "cpu" in backends else backends[0]
    tell(Facts(found.devices, found.reason, found.level, found.joins, backend))


def attempt(plugin: Any, kind: str, name: str) -> None:
    """An all_reduce of few, some and many elements by way of it, checked."""
    joins = plugin.probe().joins
    if joins == "threads":
        with World(2, transport=name) as world:
            check_all(world)
    else:
        with commrt.init() as comm:
            for algorithm in _by_switch(comm) if joins == "groups" else (None,):
                check(comm, algorithm)
    tell(None)


def _by_switch(comm: Any) -> list[str]:
    """The algorithms that use what joins a group."""
    if "switch" not in comm.capabilities:
        raise Unavailable("it joins no group of these ranks")
    algorithms = comm.setup.registry.usable("algorithms").values()
    return [one.name for one in algorithms if one.collective == "all_reduce" and "switch" in one.requires]


def tell(found: Facts | None) -> None:
    """Hand the result to the doctor."""
    print(FOUND + msgspec.json.encode(found).decode(), flush=True)


def check_all(world: World) -> None:
    """Among threads. Of several errors, raises the one that was the others' cause."""
    errors = [outcome for outcome in world.outcomes(check) if isinstance(outcome, Exception)]
    for error in sorted(errors, key=lambda one: not isinstance(one, ArithmeticError)):
        raise error


def check(comm: Any, algorithm: str | None = None) -> None:
    """Raises, and ends the other ranks, unless every element is right."""
    backend = comm.backend
    for count in _COUNTS:
        base = np.arange(count, dtype=np.float32) % 7
        x, expected = base + (comm.rank + 1), base * comm.size + sum(range(1, comm.size + 1))
        memory = backend.allocate(x.nbytes)
        backend.copy(memory.address, _address(x), x.nbytes)
        comm.all_reduce(on_device(backend, memory, count, "float32"), algorithm=algorithm)
        backend.copy(_address(x), memory.address, x.nbytes)
        memory.close()
        wrong = int(np.count_nonzero(x != expected))
        if wrong:
            comm.abort()
            raise ArithmeticError(f"{wrong} of the {count} elements of an all_reduce are wrong")


def _address(array: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


def main(what: str, kind: Any, name: str) -> None:
    """Exits with UNUSABLE for a plugin that can't be loaded, with 1 if anything else goes wrong."""
    status = UNUSABLE
    try:
        plugin = default_registry().require(kind, name)
        status = 1
        {"probe": probe, "try": attempt}[what](plugin, kind, name)
    except Exception as error:
        print(f"{REASON}{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The native provider: plans, run by this package's own executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commrt.backend import Probe
from commrt.collectives import REDUCING
from commrt.dtypes import as_dtype, as_op, supported_ops
from commrt.errors import InvalidArgument
from commrt.plan import COLLECTIVES

if TYPE_CHECKING:
    from commrt.communicator import Communicator

PLUGIN_API = 1


class NativeCarrier:
    """Runs collectives on the communicator's own lane."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def run(self, collective: str, x: Any, out: Any, op: str, root: int) -> None:
        """Carry one operation to its end."""
        self._communicator.prepare(collective, x, out, op=op, root=root).run()

    def close(self) -> None:
        """The lane is the communicator's: nothing to leave."""


class NativeProvider:
    """Implements `commrt.provider.Provider`."""

    name = "native"

    def probe(self) -> Probe:
        """Always there."""
        return Probe(devices=("plans",))

    def supports(self, collective: str, dtype: str, op: str) -> bool:
        """Every dtype is moved; those that supported_ops names are reduced."""
        if collective not in COLLECTIVES:
            return False
        return collective not in REDUCING or as_op(op) in supported_ops(as_dtype(dtype))

    def join(self, communicator: Any) -> NativeCarrier:
        """Nothing to join: the communicator is."""
        if not hasattr(communicator, "prepare"):
            raise InvalidArgument(f"{type(communicator).__name__} is no communicator")
        return NativeCarrier(communicator)


plugin = NativeProvider()

"""The native provider: plans, run by this package's own executor."""

from __future__ import annotations

from commrt.backend import Probe
from commrt.collectives import REDUCING
from commrt.dtypes import as_op, by_name, supported_ops
from commrt.plan import COLLECTIVES

PLUGIN_API = 1


class NativeProvider:
    """Implements `commrt.provider.Provider`. There is nothing to join: a communicator is made of it."""

    name = "native"

    def probe(self) -> Probe:
        """Always there."""
        return Probe(devices=("plans",))

    def supports(self, collective: str, dtype: str, op: str) -> bool:
        """Every dtype is moved; those that supported_ops names are reduced."""
        if collective not in COLLECTIVES:
            return False
        return collective not in REDUCING or as_op(op) in supported_ops(by_name(dtype))


plugin = NativeProvider()

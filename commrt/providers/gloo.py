"""Gloo, as torch brings it: carries collectives on the CPU's memory over TCP.

What only moves is moved as bytes, whatever its dtype; what is reduced is of the dtypes and ops below. Connections are
neither authenticated nor encrypted; where all ranks are on one host it listens on the loopback address alone.
"""

from __future__ import annotations

from importlib.util import find_spec

from commrt.backend import Probe
from commrt.collectives import REDUCING
from commrt.errors import Unavailable
from commrt.provider import Carrier, Joining

PLUGIN_API = 1

# What torch's Gloo reduces as commrt promises: it has no avg, and rounds half precision at each step.
_DTYPES = frozenset({"int8", "uint8", "int32", "int64", "float32", "float64"})
_OPS = frozenset({"sum", "prod", "min", "max"})
_COLLECTIVES = REDUCING | {"all_gather", "broadcast", "gather", "scatter", "all_to_all", "barrier"}


class GlooProvider:
    """Implements `commrt.provider.JoiningProvider`."""

    name = "gloo"

    def probe(self) -> Probe:
        """Whether torch is installed."""
        if find_spec("torch") is None:
            return Probe(reason="torch is not installed")
        return Probe(devices=("cpu",), level="CPU")

    def supports(self, collective: str, dtype: str, op: str) -> bool:
        """Everything is moved; what it reduces is a part of what commrt does."""
        return collective in _COLLECTIVES and (collective not in REDUCING or (dtype in _DTYPES and op in _OPS))

    def join(self, joining: Joining) -> Carrier:
        """Connect every pair of ranks."""
        if joining.backend != "cpu":
            raise Unavailable(f"gloo carries the CPU's memory, not that of {joining.backend}")
        from commrt.providers._gloo import GlooCarrier

        return GlooCarrier(joining)


plugin = GlooProvider()

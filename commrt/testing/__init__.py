"""For tests of programs and of plugins: worlds in one process, and conformance suites. Needs no test framework."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commrt.testing._conformance import ConformanceError as ConformanceError
    from commrt.testing.algorithm_suite import AlgorithmSuite as AlgorithmSuite
    from commrt.testing.backend_suite import BackendSuite as BackendSuite
    from commrt.testing.provider_suite import ProviderSuite as ProviderSuite
    from commrt.testing.transport_suite import TransportSuite as TransportSuite
    from commrt.testing.world import World as World

_LAZY = {
    "AlgorithmSuite": "commrt.testing.algorithm_suite",
    "BackendSuite": "commrt.testing.backend_suite",
    "ConformanceError": "commrt.testing._conformance",
    "ProviderSuite": "commrt.testing.provider_suite",
    "TransportSuite": "commrt.testing.transport_suite",
    "World": "commrt.testing.world",
}

__all__ = ["AlgorithmSuite", "BackendSuite", "ConformanceError", "ProviderSuite", "TransportSuite", "World"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'commrt.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

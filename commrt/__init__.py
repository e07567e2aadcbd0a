"""commrt: a hardware-agnostic communication runtime with pluggable transports.

Importing this package probes nothing, opens nothing and loads neither numpy nor any optional dependency; the names
below are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commrt.communicator import Communicator as Communicator
    from commrt.communicator import init as init
    from commrt.work import Work as Work

__version__ = "0.1.0"

_LAZY = {"init": "commrt.communicator", "Communicator": "commrt.communicator", "Work": "commrt.work"}

__all__ = ["Communicator", "Work", "__version__", "init"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'commrt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

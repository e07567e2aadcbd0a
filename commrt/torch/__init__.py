"""The torch.distributed backend "commrt".

Importing this module registers it; where torch loads its extensions, `import torch` alone does. What it takes to
communicate is imported with the first process group. See docs/torch.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from datetime import timedelta

    from commrt.torch.process_group import ProcessGroup

BACKEND = "commrt"

__all__ = ["BACKEND", "register"]


def register() -> None:
    """Make "commrt" known to torch.distributed. Idempotent. Raises ImportError if torch was built without it."""
    if not dist.is_available():
        raise ImportError("this torch was built without torch.distributed")
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    from commrt.torch.process_group import ProcessGroup

    return ProcessGroup(store, rank, size, timeout)


register()

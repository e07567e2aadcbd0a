"""How a job ends, and the words for it."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import Annotated, Literal

import msgspec

TIMED_OUT = 124
LOST = 1


class Ending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a node's part of a job ended; all well if `status` is 0.

    cause: `rank` failed (128 + the number of a signal that killed it), a "signal" stopped the launcher, the time
    "limit" passed, the "reader" of its output went away, its "launcher" failed, or it was "lost": nothing was heard.
    at: when that was seen, by this host's clock.
    """

    status: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    cause: Literal["", "rank", "signal", "limit", "reader", "launcher", "lost"] = ""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    at: float = msgspec.field(default_factory=time.time)

    @property
    def likelihood(self) -> tuple[bool, float]:
        """Of being the cause of others seen at once: a rank killed by a signal first, then what was seen first."""
        return self.cause == "rank" and self.status > 128, -self.at

    def story(self, where: str = "", several: bool = True) -> str:
        """What to say of it, in a line; empty if nothing is to be said. `where`: the node, in words."""
        others = "; the other ranks were stopped" if several else ""
        on = f" on {where}" if where else ""
        return {
            "rank": f"rank {self.rank}{on} {_how(self.status)}{others}",
            "signal": f"{where + ' was ' if where else ''}stopped by {_signal(self.status)}",
            "limit": f"the time limit passed{on}; the ranks that still ran were stopped",
            "reader": f"the reader of the output{on} went away{others}" if where else "",
            "launcher": f"{where or 'the launcher'} could not start its ranks{others}",
            "lost": f"{where or 'another node'} is gone: its launcher ended or can't be reached{others}",
        }.get(self.cause, "")


def _how(status: int) -> str:
    with suppress(ValueError):
        if status > 128:
            return f"was killed by {signal.Signals(status - 128).name}"
    return f"failed with exit status {status}"


def _signal(status: int) -> str:
    with suppress(ValueError):
        return signal.Signals(status - 128).name
    return f"signal {status - 128}"

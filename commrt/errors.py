"""The exception tree. An operation's error names rank, peer, operation, sequence number and bytes where they are known.

Recoverable by the caller: `InvalidArgument` and its children leave the communicator as it was.
All `OperationError`s break the communicator they are raised on: later calls on it raise `CommunicatorBroken` at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """Where an error happened. Fields that are not known are None."""

    rank: int | None = None
    peer: int | None = None
    operation: str | None = None
    sequence: int | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in known.items())


class CommrtError(Exception):
    """Base of every error raised by commrt. `context` says where; the message repeats it."""

    def __init__(self, message: str, **context: Any) -> None:
        self.context = Context(**context)
        where = str(self.context)
        super().__init__(f"{message} [{where}]" if where else message)


class InvalidArgument(CommrtError, ValueError):
    """The caller's arguments can't be served; nothing was started and the communicator is unharmed."""


class UnsupportedType(InvalidArgument):
    """No such (dtype, reduction op) pair, or no such dtype."""


class UnknownName(InvalidArgument):
    """A transport, backend, algorithm, provider or collective of that name does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str], **context: Any) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}{hint} (known: {', '.join(names) or 'none'})", **context)


class Unavailable(CommrtError):
    """A plugin that was asked for by name can't serve here; the message says why."""


class PlanError(InvalidArgument):
    """A plan is malformed, out of bounds or too large."""


class ConfigError(InvalidArgument):
    """Settings or launcher variables are contradictory or malformed."""


class BootstrapError(CommrtError):
    """Ranks could not be joined into a world."""


class BootstrapTimeout(BootstrapError, TimeoutError):
    """Not every rank arrived in time; `missing` lists those that did not."""

    def __init__(self, message: str, missing: Iterable[int] = (), **context: Any) -> None:
        self.missing = sorted(missing)
        super().__init__(message, **context)


class AuthenticationError(BootstrapError):
    """A connection did not prove that it knows the job's secret."""


class CommunicatorClosed(CommrtError):
    """The communicator was closed, or belongs to the process that this one was forked from."""


class OperationError(CommrtError):
    """An operation failed on this rank; the communicator is broken from here on."""


class PeerLost(OperationError):
    """A peer died, closed or left before its part of the operation was done. `context.peer` is its rank."""


class Mismatch(OperationError):
    """Ranks called different operations, or the same one with different arguments; the message shows both sides."""


class OperationTimeout(OperationError, TimeoutError):
    """The deadline passed; the message says who waits for whom, and at which plan operation."""


class Aborted(OperationError):
    """`abort()` was called on this communicator, here or on a peer."""


class Deadlock(OperationError):
    """No block of any rank can move; the message shows each one's rank, block and operation."""


class TransportError(OperationError):
    """A link failed."""


class ProviderError(OperationError):
    """Another library failed to carry an operation; where it did, the message says what it said."""


class CommunicatorBroken(CommrtError):
    """An earlier operation failed; the message repeats its cause."""

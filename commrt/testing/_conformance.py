"""What the conformance suites share: named checks, and waiting for things with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from commrt.testing.matrix import Variant
    from commrt.testing.world import World

_Result = TypeVar("_Result")


class ConformanceError(AssertionError):
    """A plugin breaks its contract. The message names the plugin, the check and what was wrong."""


class Suite:
    """Checks of one plugin: the methods whose names begin with `check_`. Needs no test framework.

    A check returns None, or why it does not apply; it raises where the contract is broken. `whole`: those by whole
    jobs, which take long to fail where something simpler is wrong.
    """

    subject = ""
    whole: frozenset[str] = frozenset()

    @classmethod
    def checks(cls) -> list[str]:
        """The names of all checks, in the order in which they are best run."""
        names = [name.removeprefix("check_") for name in dir(cls) if name.startswith("check_")]
        return sorted(names, key=lambda name: name in cls.whole)

    def run(self, check: str) -> str | None:
        """Run one. None if it passed, else why it does not apply. Raises ConformanceError."""
        try:
            reason: str | None = getattr(self, f"check_{check}")()
        except Exception as error:
            raise ConformanceError(f"{self.subject}: {check}: {type(error).__name__}: {error}") from error
        return reason

    def run_all(self) -> dict[str, str | None]:
        """Run all, those by whole jobs only if nothing else has failed. By check, why it does not apply, if so.

        Raises one ConformanceError that lists all that failed.
        """
        reasons: dict[str, str | None] = {}
        failures: list[str] = []
        for check in self.checks():
            if failures and check in self.whole:
                break
            try:
                reasons[check] = self.run(check)
            except ConformanceError as error:
                failures.append(str(error))
        if failures:
            raise ConformanceError("\n".join(failures))
        return reasons


def expect(condition: object, message: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


def expect_raises(kinds: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], object]) -> None:
    """Raise unless the call raises one of these."""
    try:
        call()
    except kinds:
        return
    names = kinds.__name__ if isinstance(kinds, type) else " or ".join(kind.__name__ for kind in kinds)
    raise ConformanceError(f"did not raise {names}")


def until(attempt: Callable[[], _Result], what: str, timeout_s: float) -> _Result:
    """Attempt again and again until the answer is true; that answer. Raises when the time has passed."""
    deadline = time.monotonic() + timeout_s
    while not (answer := attempt()):
        if time.monotonic() > deadline:
            raise ConformanceError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0)
    return answer


def run_variants(world: World, whole: Sequence[Variant]) -> None:
    """Run and check these calls on every rank. Raises where one is wrong, and ends the others at once."""
    from commrt.testing import matrix

    def carry(comm: Any) -> None:
        try:
            matrix.run(comm, whole)
        except AssertionError:
            comm.abort()
            raise

    failures = [outcome for outcome in world.outcomes(carry) if isinstance(outcome, BaseException)]
    for failure in sorted(failures, key=lambda one: not isinstance(one, AssertionError)):
        raise failure

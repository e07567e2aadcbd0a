"""Outlives the launcher by a moment: when the launcher is gone without saying so, ends the process groups it had
started.

Run as a script by `commrt.launching.ranks`, which writes lines to its standard input: `+PGID` for a group that was
started, `-PGID` for one that is no more. End of input with groups left means that the launcher died, since it takes
back every group before it exits.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def remaining(lines: Iterable[str]) -> set[int]:
    """The groups that were started and not taken back, once the lines end."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))
    return groups


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for group in remaining(sys.stdin):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Starts the ranks of a job on this host and looks after them: `commrt run` as a function.

Every rank is the leader of a session of its own, so that a signal reaches its children too and the terminal's Ctrl-C
reaches the launcher alone. No rank outlives the launcher: the kernel kills the ranks, and a guardian process their
groups, should it be killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any, BinaryIO

from commrt.errors import InvalidArgument
from commrt.launching.ending import TIMED_OUT
from commrt.launching.job import Job
from commrt.launching.meeting import meeting_here
from commrt.launching.nodes import Node, Nodes
from commrt.launching.output import Output

__all__ = ["GRACE_S", "MAX_LOCAL_RANKS", "TIMED_OUT", "Node", "launch", "resolve_argv"]

MAX_LOCAL_RANKS = 4096
GRACE_S = 3.0
_PYTHON_SUFFIXES = (".py", ".pyw", ".pyz")


def resolve_argv(program: str, args: Sequence[str], *, module: bool = False) -> list[str]:
    """The command line of a rank: Python files and modules run by this interpreter, anything else as it is."""
    if module:
        return [sys.executable, "-m", program, *args]
    if program.endswith(_PYTHON_SUFFIXES):
        return [sys.executable, program, *args]
    return [program, *args]


def launch(
    argv: Sequence[str],
    n: int,
    *,
    node: Node | None = None,
    timeout_s: float | None = None,
    prefix: bool = True,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = None,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
    grace_s: float = GRACE_S,
    name: str = "commrt run",
) -> int:
    """Run `n` ranks of `argv` to their end and return the job's exit status.

    0 if all ranks exit with 0; else that of the first rank that failed, 128 + the number for a signal, after the others
    were stopped (SIGTERM to their process groups, SIGKILL after `grace_s`). `TIMED_OUT` if `timeout_s` passed. SIGINT
    and SIGTERM are passed on once, and then the status is 130 or 143; a second one kills. A last line on `stderr` says
    what went wrong.

    With `node`, the job has as many ranks on each other node, and ends on all of them with the same status; the secret
    comes from COMMRT_SECRET_FILE.

    Ranks write lines to `stdout` and `stderr` (binary files; those of this process if None), whole, headed by `[rank] `
    if `prefix`. `env` is added to this process's environment. `stdin` is given to rank 0 as `subprocess` takes it;
    None, and the other ranks: nothing. Signals are handled only if this is the main thread; the handlers found are put
    back. Raises `InvalidArgument` for a bad `n`, OSError if `argv[0]` can't be run, `BootstrapError` if the nodes
    don't meet.
    """
    if not 1 <= n <= MAX_LOCAL_RANKS:
        raise InvalidArgument(f"the number of ranks on one host lies in 1..{MAX_LOCAL_RANKS}, and {n} does not")
    out = Output(stdout or sys.stdout.buffer, stderr or sys.stderr.buffer, prefix)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with ExitStack() as stack:
        nodes = None
        if node is not None:
            try:
                nodes = stack.enter_context(Nodes.meet(node, n, {**os.environ, **(env or {})}))
            except KeyboardInterrupt:
                out.say(f"{name}: stopped by SIGINT")
                return 128 + signal.SIGINT
        meeting = meeting_here(n) if nodes is None else nodes.meeting
        job = Job(out, grace_s, deadline, nodes)
        stack.enter_context(job.cleaned_up())
        stack.enter_context(job.handling_signals())
        stack.enter_context(job.hearing_nodes())
        job.start(list(argv), meeting, env or {}, stdin)
        ending, culprit = job.watch()
    where = "" if nodes is None else nodes.words(culprit)
    if story := ending.story(where, several=meeting.size > 1):
        out.say(f"{name}: {story}")
    return ending.status

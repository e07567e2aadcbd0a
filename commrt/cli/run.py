"""`commrt run`: start a program as the ranks of a job, on this host or as one of several nodes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from commrt.cli._groups import grouped
from commrt.cli._nodes import NodeFlags
from commrt.errors import CommrtError
from commrt.launcher import launch, resolve_argv

# Everything after the program is the program's, options included.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}

NOT_EXECUTABLE = 126
NOT_FOUND = 127


@grouped
def run(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="A Python file, a module with -m, or any program.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the program as they are.")] = None,
    *,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks, on each node.")] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Stop the job after so many seconds; status 124.")
    ] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Don't put the rank before each line.")] = False,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a Python module.")] = False,
    place: NodeFlags,
) -> None:
    """Run PROGRAM as N ranks on this host, or on each of several nodes.

    Exits with the status of the first rank that fails, after stopping the others; rank 0 reads the standard input.
    """
    argv = resolve_argv(program, args or [], module=module)
    try:
        status = launch(
            argv, ranks, node=place.node(), timeout_s=timeout, prefix=not no_prefix, stdin=_standard_input()
        )
    except CommrtError:  # some of which are OSErrors too
        raise
    except OSError as error:
        typer.echo(f"commrt run: can't start {program}: {error.strerror}", err=True)
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    raise typer.Exit(status)


def _standard_input() -> int | None:
    try:
        return sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None

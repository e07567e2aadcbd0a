"""broadcast of one rank: a copy."""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """One copy; nothing if the output is the input."""
    program.block().copy(out(), mine(), mine())


plugin = Algorithm("broadcast", "local", build, least_ranks=1, most_ranks=1)

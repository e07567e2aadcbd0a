"""barrier of one rank: nothing to wait for."""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program

PLUGIN_API = 1


def build(program: Program) -> None:
    """An empty block."""
    program.block()


plugin = Algorithm("barrier", "local", build, least_ranks=1, most_ranks=1)

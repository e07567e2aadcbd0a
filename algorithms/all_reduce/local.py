"""all_reduce of one rank: a reduction of one source."""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program, mine, out

PLUGIN_API = 1


def build(program: Program) -> None:
    """A sum of one; `final` makes it an average of one."""
    program.block().reduce([out()], [mine()], mine(), final=True)


plugin = Algorithm("all_reduce", "local", build, least_ranks=1, most_ranks=1)

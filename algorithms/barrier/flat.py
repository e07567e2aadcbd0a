"""Barrier in one step: every rank signals every other and waits for all of them.

Steps: 1; signals sent per rank: N - 1. Wins for a few ranks.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm, Program

PLUGIN_API = 1


def build(program: Program) -> None:
    """All signals first, then all waits."""
    block = program.block()
    block.signal(0, program.peers)
    block.wait(0, program.peers)


plugin = Algorithm("barrier", "flat", build, channels=1)

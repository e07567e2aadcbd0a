"""Rank arithmetic that algorithms share. Pure functions of ranks; nothing here knows a buffer."""

from __future__ import annotations

from collections.abc import Iterator


def ring_neighbours(rank: int, ranks: int) -> tuple[int, int]:
    """(previous, next) of a rank on the ring 0 -> 1 -> ... -> 0."""
    return (rank - 1) % ranks, (rank + 1) % ranks


def ring_block(rank: int, ranks: int, step: int, start: int) -> tuple[int, int]:
    """(sent, received) block of `rank` in `step` of a ring in which rank r begins by sending block r + `start`.

    What a rank receives in one step it sends in the next.
    """
    return (rank + start - step) % ranks, (rank + start - step - 1) % ranks


def distances(ranks: int) -> list[int]:
    """The powers of two below `ranks`: who a rank signals in each round of a dissemination barrier."""
    return [1 << bit for bit in range((ranks - 1).bit_length())]


def binomial_parent(virtual: int) -> int:
    """The parent of a rank in the binomial tree whose root is virtual rank 0: its highest bit cleared."""
    return virtual - (1 << (virtual.bit_length() - 1))


def binomial_children(virtual: int, ranks: int) -> Iterator[int]:
    """The children of a rank in that tree, the one with the largest subtree first."""
    for bit in range(virtual.bit_length(), (ranks - 1).bit_length()):
        if virtual + (1 << bit) < ranks:
            yield virtual + (1 << bit)

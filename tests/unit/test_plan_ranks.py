"""Rank arithmetic that algorithms share: rings, binomial trees, dissemination."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from commrt.algorithms._ranks import binomial_children, binomial_parent, distances, ring_block, ring_neighbours

RANKS = st.integers(1, 300)


@given(RANKS)
def test_a_ring_visits_everyone(ranks: int) -> None:
    rank, seen = 0, []
    for _ in range(ranks):
        seen.append(rank)
        before, behind = ring_neighbours(rank, ranks)
        assert ring_neighbours(behind, ranks)[0] == rank
        assert ring_neighbours(before, ranks)[1] == rank
        rank = behind
    assert rank == 0
    assert seen == list(range(ranks))


@given(st.integers(2, 100), st.integers(-1, 1), st.data())
def test_a_ring_passes_every_block_on(ranks: int, start: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    _, behind = ring_neighbours(rank, ranks)
    sent = []
    for step in range(ranks - 1):
        out, received = ring_block(rank, ranks, step, start)
        assert ring_block(behind, ranks, step, start)[1] == out
        assert ring_block(rank, ranks, step + 1, start)[0] == received
        sent.append(out)
    assert len(set(sent)) == ranks - 1
    assert sent[0] == (rank + start) % ranks


@given(RANKS)
def test_a_binomial_tree_reaches_everyone_once(ranks: int) -> None:
    reached, frontier, steps = {0}, [0], {0: 0}
    while frontier:
        parent = frontier.pop()
        for order, child in enumerate(binomial_children(parent, ranks), 1):
            assert child not in reached
            assert binomial_parent(child) == parent
            steps[child] = steps[parent] + order
            reached.add(child)
            frontier.append(child)
    assert reached == set(range(ranks))
    assert max(steps.values()) <= (ranks - 1).bit_length()


@given(RANKS)
def test_dissemination_tells_everyone_of_everyone(ranks: int) -> None:
    known = [{rank} for rank in range(ranks)]
    rounds = distances(ranks)
    assert len(rounds) == (ranks - 1).bit_length()
    assert len({distance % ranks for distance in rounds}) == len(rounds)
    for distance in rounds:
        known = [known[rank] | known[(rank - distance) % ranks] for rank in range(ranks)]
    assert all(len(heard) == ranks for heard in known)

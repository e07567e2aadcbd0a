"""The ib transport on real verbs: soft-RoCE devices of guests."""

from __future__ import annotations

import re
import sys

import pytest

from .conftest import Guests

pytestmark = pytest.mark.timeout(900)  # the first one may have to install what boots guests


def test_one_guest_keeps_the_contract(guests: Guests) -> None:
    """Also between processes, of which one leaves without a word."""
    assert "conformance: all passed" in guests(1, "conformance", timeout_s=200)


def test_each_pair_has_its_best_link(guests: Guests) -> None:
    """Two ranks in each of two guests, no transport forced."""
    assert guests(2, "ranks", "2", "collectives", "").count("links ['ib', 'shm']: exact") == 4


def test_two_ranks_in_one_guest_of_which_one_is_killed(guests: Guests) -> None:
    """Exact while both live; the end is noticed within the timeout."""
    printed = guests(1, "ranks", "2", "killed", "ib")
    assert printed.count("links ['ib']: exact") == 2, printed
    assert re.search(r"rank 0: PeerLost naming 1 .*transport retry counter exceeded", printed), printed


def test_two_guests_whose_queue_pairs_get_into_error(guests: Guests) -> None:
    """Exact before; both ends notice, and say what their adapter says."""
    printed = guests(2, "ranks", "1", "broken", "ib")
    assert printed.count("links ['ib']: exact") == 2, printed
    assert re.search(r"rank 0: (PeerLost|TransportError) naming 1 .*remote access error", printed), printed
    assert re.search(r"rank 1: (PeerLost|TransportError) naming 0 .*failed: ", printed), printed


def test_bench_on_two_nodes_is_right(guests: Guests) -> None:
    printed = guests(2, "bench")
    assert "ranks: 4" in printed, printed
    rows = re.findall(r"^\[0\] +\d+ +\d+ +float32 .*$", printed, re.MULTILINE)
    assert len(rows) >= 5 and "# Out of bounds values : 0 OK" in printed, printed
    assert "real verbs, soft-RoCE" in printed and "links: ib" in printed, printed


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="Debian's pyverbs is for Python 3.11")
def test_an_independent_peer_agrees_about_the_wire(guests: Guests) -> None:
    assert "pyverbs: agreed" in guests(1, "independent")

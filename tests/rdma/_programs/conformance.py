"""The transport's conformance suite, and what is this one's own."""

from __future__ import annotations

import ctypes
import os
import time

from commrt.plugins import default_registry
from commrt.testing import TransportSuite
from commrt.testing._links import Joined
from commrt.transports.ib import plugin

WORD = 64  # of signals
PATIENCE_S = 40.0  # a guest may get little of a busy host; when idle, a rank's end is noticed after 2 s
LARGE = 17 << 20  # more than one write can carry on soft-RoCE


def joined(nbytes: int) -> Joined:
    return Joined(plugin, default_registry().require("backends", "cpu"), {}, 2, nbytes, PATIENCE_S)


def unheard_signals_wait_for_their_receiver() -> None:
    """More than it has receives posted. While it does nothing, its word stays; then all come, in order."""
    both = joined(1 << 16)
    link, number, stuck_at = both.link(0, 1), 1, time.monotonic()
    while number < 3000 and time.monotonic() - stuck_at < 0.5:
        if link.put(128, bytearray(number.to_bytes(8, "little"))) and link.signal(WORD, number):
            number, stuck_at = number + 1, time.monotonic()
        link.poll()
    assert 500 < number < 3000 and link.seen(WORD) == 0, (number, link.seen(WORD))
    last = 0
    while last < number - 1:
        both.poll()
        seen = link.seen(WORD)
        assert seen >= last and int.from_bytes(link.arrived(128, 8), "little") >= seen, (last, seen)
        last = seen
    both.close()


def registered_memory_is_sent_from_where_it_is() -> None:
    """Also by more than one write."""
    both = joined(LARGE + 4096)
    link, own = both.link(0, 1), both.memory[0].address
    source = (ctypes.c_char * LARGE).from_address(own)
    source[:] = os.urandom(LARGE)
    both.insist(lambda: link.put(4096, source))
    both.insist(lambda: link.signal(WORD, 1))
    both.until(lambda: link.seen(WORD) == 1, "the signal behind a large put")
    assert link.arrived(4096, LARGE) == source[:], "a large put from registered memory"
    both.close()


if __name__ == "__main__":
    reasons = TransportSuite("ib", patience_s=PATIENCE_S).run_all()
    assert [check for check, why in reasons.items() if why] == ["memory_kinds"], reasons
    unheard_signals_wait_for_their_receiver()
    registered_memory_is_sent_from_where_it_is()
    print("conformance: all passed", flush=True)

"""What members of a multicast group tell each other: all come to one answer, and no peer is trusted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from commrt.errors import TransportError, Unavailable
from commrt.transports.nvls.transport import Offer, _Steps, check_offers


def offer(host: bytes = b"a", location: bytes = b"0", nbytes: int = 4096) -> bytes:
    return msgspec.msgpack.encode(Offer(host, location, nbytes))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (offer(b"b", b"1"), "ranks 0 and 1 are not on one host"),
        (offer(b"a", b"0"), "ranks 0 and 1 are on one GPU"),
        (offer(b"a", b"1", 8192), "rank 1 has 8192 bytes of memory, rank 0 4096"),
        (b"", "malformed"),
        (b"\xc1 nonsense", "malformed"),
    ],
)
def test_offers_that_do_not_fit(other: bytes, reason: str) -> None:
    with pytest.raises(Unavailable, match=reason):
        check_offers([offer(), other], [0, 1])


def test_offers_that_fit() -> None:
    check_offers([offer(), offer(location=b"1"), offer(location=b"2")], [0, 1, 2])
    with pytest.raises(Unavailable, match="one rank"):
        check_offers([offer()], [0])


def agree(*works: Callable[[], bytes | None]) -> list[Any]:
    """What each member's step comes to."""
    barrier, said = threading.Barrier(len(works)), [b""] * len(works)

    def member(rank: int) -> Any:
        def exchange(mine: bytes) -> list[bytes]:
            said[rank] = mine
            barrier.wait(10)
            return said

        try:
            return _Steps(range(len(works)), exchange).agree(works[rank])
        except Unavailable as error:
            return str(error)

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(member, range(len(works))))


def fails() -> None:
    raise TransportError("x" * 10_000)


def test_a_step_that_all_can_take() -> None:
    assert agree(lambda: b"object", lambda: None) == [[b"object", b""]] * 2


def test_a_step_that_one_can_not_take_fails_on_all_with_its_reason() -> None:
    found = agree(lambda: None, fails, lambda: None)
    assert len(set(found)) == 1
    assert found[0].startswith("rank 1: xxx") and len(found[0]) < 600


@pytest.mark.parametrize("said", [b"", b"nonsense", b"-" + b"\xff" * 100_000])
def test_what_is_no_answer_counts_as_a_failure(said: bytes) -> None:
    with pytest.raises(Unavailable, match=r"^rank 1: .{0,600}$"):
        _Steps([0, 1], lambda mine: [mine, said]).agree(lambda: None)

"""The native port over a stream socket: against hostile peers, in pieces of any size, and full in both directions."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.native import ffi, lib

NBYTES = 4096  # of each of the two registered regions
SECOND = 1 << 48  # offset of the second one
GUARD = 256
PUT, SIGNAL = 1, 2
HEADER = struct.Struct("<QQQ")
U64 = (1 << 64) - 1
PATIENCE_S = 20.0


def put(offset: int, data: bytes) -> bytes:
    return HEADER.pack(PUT, offset, len(data)) + data


def signal(offset: int, value: int) -> bytes:
    return HEADER.pack(SIGNAL, offset, value)


class End:
    """A port, and the memory that its peer writes to, with guards around it."""

    def __init__(self, link: socket.socket, nbytes: int = NBYTES) -> None:
        link.setblocking(False)
        self.link, self.nbytes = link, nbytes
        self._regions = ffi.gc(lib.cr_regions_new(), lib.cr_regions_free)
        self._memory = [ffi.new("unsigned long long[]", (nbytes + 2 * GUARD) // 8) for _ in range(2)]
        for memory in self._memory:
            ffi.memmove(memory, b"\xee" * (nbytes + 2 * GUARD), nbytes + 2 * GUARD)
            ffi.memmove(ffi.cast("char*", memory) + GUARD, bytes(nbytes), nbytes)
            assert not lib.cr_regions_add(self._regions, ffi.cast("char*", memory) + GUARD, nbytes)
        self.port = ffi.gc(lib.cr_stream_new(link.fileno(), self._regions), lib.cr_stream_free)

    def poll(self) -> int:
        return int(self.port.poll(self.port.context))

    def put(self, offset: int, source: Any) -> int:
        return int(self.port.put(self.port.context, offset, ffi.from_buffer(source), len(source)))

    def signal(self, offset: int, value: int) -> int:
        return int(self.port.signal(self.port.context, offset, value))

    def flush(self) -> int:
        return int(self.port.flush(self.port.context))

    @property
    def trouble(self) -> str:
        return bytes(ffi.string(lib.cr_stream_fault(self.port))).decode()

    def region(self, number: int = 0) -> bytes:
        """What is there now. The guards must be whole."""
        whole = bytes(ffi.buffer(self._memory[number]))
        assert whole[:GUARD] == whole[-GUARD:] == b"\xee" * GUARD, "memory beside the registered one was written"
        return whole[GUARD:-GUARD]

    def word(self, offset: int) -> int:
        return int.from_bytes(self.region()[offset : offset + 8], "little")


@dataclass
class Pair:
    """Two ends, or one and its raw peer."""

    one: End
    other: End
    raw: socket.socket


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pair(End(ours), End(theirs), theirs)


def until(condition: Callable[[], object], *ends: End) -> None:
    """All polling meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        for end in ends:
            assert end.poll() >= 0


def drained(end: End) -> None:
    """Poll until the port has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while end.poll() >= 0:
        assert time.monotonic() < deadline


HOSTILE = {
    "garbage": (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "kind 0x"),
    "no kind": (HEADER.pack(0, 0, 0), "kind 0"),
    "a kind to come": (HEADER.pack(3, 0, 8), "kind 0x3"),
    "a huge put": (HEADER.pack(PUT, 0, U64), f"{U64} bytes to offset 0, outside"),
    "one byte too many": (HEADER.pack(PUT, 0, NBYTES + 1), f"{NBYTES + 1} bytes to offset 0, outside"),
    "over the end": (HEADER.pack(PUT, NBYTES - 4, 8), "8 bytes to offset 0xffc, outside"),
    "behind the end": (HEADER.pack(PUT, NBYTES + 8, 1), "outside"),
    "far behind": (HEADER.pack(PUT, 1 << 40, 1), "outside"),
    "no such region": (HEADER.pack(PUT, 2 << 48, 1), "1 bytes to offset 0x2000000000000, outside"),
    "a region that wraps": (HEADER.pack(PUT, U64 - 3, 8), "outside"),
    "a sum that wraps": (HEADER.pack(PUT, 16, U64 - 15), "outside"),
    "an empty put outside": (HEADER.pack(PUT, NBYTES + 1, 0), "outside"),
    "a signal outside": (signal(NBYTES, 1), "8 bytes to offset 0x1000, outside"),
    "a signal half outside": (signal(NBYTES - 4, 1), "outside"),
    "a crooked signal": (signal(12, 1), "offset 0xc, which is not aligned"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_messages_end_the_link(pair: Pair, what: str) -> None:
    """What came before is good; what is behind is not looked at; the error says what was wrong."""
    message, reason = HOSTILE[what]
    pair.raw.sendall(put(64, b"good") + signal(128, 7) + message + put(0, b"bad") + signal(136, 1))
    drained(pair.one)
    assert reason in pair.one.trouble
    assert pair.one.trouble.startswith("it sent ")
    assert pair.one.region()[64:68] == b"good"
    assert pair.one.word(128) == 7
    assert pair.one.region()[:64] == bytes(64)
    assert pair.one.word(136) == 0
    assert pair.one.region(1) == bytes(NBYTES)
    assert pair.one.poll() < 0


@pytest.mark.parametrize("cut", [1, 23, 24, 25, 200])
def test_an_end_within_a_message_is_an_end(pair: Pair, cut: int) -> None:
    pair.raw.sendall(signal(0, 3) + put(8, bytes(1000))[:cut])
    pair.raw.close()
    drained(pair.one)
    assert pair.one.trouble == ""
    assert pair.one.word(0) == 3
    assert lib.cr_stream_end(pair.one.port)


def test_what_is_sent_to_a_peer_that_is_gone_is_dropped(pair: Pair) -> None:
    """Nobody waits for it: poll says that the peer is gone, once all is applied that it had sent."""
    pair.raw.sendall(signal(0, 3))
    pair.raw.shutdown(socket.SHUT_RDWR)
    pair.raw.close()
    for value in range(1000):
        assert pair.one.put(0, bytearray(1000)) == 1
        assert pair.one.signal(8, value) == 1
        if value < 300:
            pair.one.flush()
    assert pair.one.flush() == 1
    drained(pair.one)
    assert pair.one.word(0) == 3
    assert pair.one.put(0, bytearray(10)) == pair.one.signal(0, 1) == pair.one.flush() == 1


def test_an_ended_port_touches_nothing(pair: Pair) -> None:
    pair.raw.sendall(signal(0, 3))
    assert pair.one.signal(0, 1) == 1
    assert not lib.cr_stream_end(pair.one.port)
    assert lib.cr_stream_end(pair.one.port)
    assert pair.one.poll() < 0
    assert pair.one.flush() == pair.one.signal(0, 1) == 1
    assert pair.one.word(0) == 0
    assert pair.one.trouble == ""
    pair.raw.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.raw.recv(1)


def test_too_many_regions() -> None:
    regions = ffi.gc(lib.cr_regions_new(), lib.cr_regions_free)
    for _ in range(1024):
        assert lib.cr_regions_add(regions, ffi.NULL, 0) == lib.CR_OK
    assert lib.cr_regions_add(regions, ffi.NULL, 0) == lib.CR_INVALID
    fresh = ffi.gc(lib.cr_regions_new(), lib.cr_regions_free)
    assert lib.cr_regions_add(fresh, ffi.NULL, 1 << 48) == lib.CR_INVALID


# --- whatever comes, however it is cut ---


@dataclass(frozen=True)
class Frame:
    kind: int
    offset: int
    word: int
    data: bytes

    @property
    def raw(self) -> bytes:
        return HEADER.pack(self.kind, self.offset, self.word) + self.data


def puts(offset: int, data: bytes) -> Frame:
    return Frame(PUT, offset, len(data), data)


OFFSETS = st.one_of(
    st.integers(0, NBYTES + 8), st.integers(SECOND - 8, SECOND + NBYTES + 8), st.integers(0, U64),
    st.integers(0, NBYTES // 8).map(lambda n: n * 8),
)  # fmt: skip
INSIDE = st.integers(0, NBYTES - 700)
DATA = st.integers(0, 700).map(lambda n: os.urandom(n) if n else b"")
FRAMES = st.one_of(
    st.builds(puts, INSIDE, DATA),
    st.builds(puts, INSIDE.map(lambda n: n // 8 * 8), st.integers(0, 64).map(lambda n: bytes([n]) * 8 * n)),
    st.builds(puts, INSIDE.map(lambda n: SECOND + n), DATA),
    st.builds(Frame, st.just(SIGNAL), st.integers(0, NBYTES // 8 - 1).map(lambda n: n * 8), st.integers(0, U64),
              st.just(b"")),
    st.builds(Frame, st.sampled_from([0, 1, 2, 3, U64]), OFFSETS, st.integers(0, U64), st.just(b"")),
    st.builds(puts, OFFSETS, DATA),
)  # fmt: skip


def expected(stream: bytes) -> tuple[list[bytearray], bool]:
    """What the memory holds in the end, and whether the stream broke the rules."""
    regions = [bytearray(NBYTES), bytearray(NBYTES)]
    at = 0
    while len(stream) - at >= HEADER.size:
        kind, offset, word = HEADER.unpack_from(stream, at)
        at += HEADER.size
        nbytes = word if kind == PUT else 8
        number, within = offset >> 48, offset & (SECOND - 1)
        if kind not in (PUT, SIGNAL) or number > 1 or within + nbytes > NBYTES or (kind == SIGNAL and within % 8):
            return regions, True
        data = stream[at : at + nbytes] if kind == PUT else word.to_bytes(8, "little")
        at += len(data) if kind == PUT else 0
        if len(data) == nbytes or nbytes > 256:  # a short put is applied once it is whole
            regions[number][within : within + len(data)] = data
    return regions, False


def feed(stream: bytes, cuts: Sequence[int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = End(ours)
        regions, broken = expected(stream)
        edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
        for start, stop in itertools.pairwise(edges):
            theirs.sendall(stream[start:stop])
            end.poll()
        theirs.close()
        drained(end)
        assert bool(end.trouble) == broken
        assert [end.region(0), end.region(1)] == regions


@settings(max_examples=400, deadline=None)
@given(st.lists(FRAMES, max_size=30), st.lists(st.integers(0, 1 << 16), max_size=12), st.binary(max_size=40))
def test_frames_in_any_pieces(frames: list[Frame], cuts: list[int], rest: bytes) -> None:
    feed(b"".join(frame.raw for frame in frames) + rest, cuts)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4096), st.lists(st.integers(0, 4096), max_size=6))
def test_any_bytes(stream: bytes, cuts: list[int]) -> None:
    feed(stream, cuts)


def test_one_byte_at_a_time(pair: Pair) -> None:
    stream = put(8, b"abcdefgh" * 4) + put(1000, b"x" * 700) + signal(0, 9)
    for at in range(len(stream)):
        assert pair.one.word(0) == 0
        pair.raw.sendall(stream[at : at + 1])
        assert pair.one.poll() == 1
    assert pair.one.poll() == 0
    assert pair.one.word(0) == 9
    assert pair.one.region()[8:40] == b"abcdefgh" * 4
    assert pair.one.region()[1000:1700] == b"x" * 700


# --- full ---

SIZES = (1, 8, 127, 128, 129, 256, 257, 5000, 100, 70_000, 24, 16_384, 3)


def small_buffers(link: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, 4096)


@pytest.mark.parametrize("buffers", [lambda link: None, small_buffers], ids=["as they are", "small"])
def test_both_flood_each_other(buffers: Callable[[socket.socket], None]) -> None:
    """Each takes what it can and only then polls: nothing is lost, nothing overtakes, nothing stands still."""
    nbytes = sum(SIZES) + 8 * len(SIZES)
    links = socket.socketpair()
    for link in links:
        buffers(link)
    with links[0], links[1]:
        ends = [End(link, 8 * (nbytes // 8) + 64) for link in links]
        plans = [flood(end, turns=12) for end in ends]
        left = set(plans)
        deadline = time.monotonic() + PATIENCE_S
        while left or any(end.word(0) < 12 for end in ends):
            assert time.monotonic() < deadline
            for plan in list(left):
                if next(plan, None) is None:
                    left.discard(plan)
            for end, from_other in zip(ends, reversed(ends), strict=True):
                assert end.poll() >= 0
                check_turn(end)
                assert from_other.trouble == ""


def flood(end: End, turns: int) -> Iterator[bool]:
    """Puts of all sizes, then a signal that says which turn it was; over and over. Stops where the port is full."""
    for turn in range(1, turns + 1):
        kept = [bytearray(bytes([turn]) * size) for size in SIZES]
        at = 64
        for data in kept:
            while not end.put(at, data):
                yield True
            at += len(data)
        while not end.signal(0, turn):
            yield True
        while not end.flush():
            yield True


def check_turn(end: End) -> None:
    """All puts of a turn are there once its signal is; those of the next one may be coming in."""
    turn = end.word(0)
    seen = set(end.region()[64 : 64 + sum(SIZES)])
    assert seen <= {turn, turn + 1}, (turn, seen)


def test_a_full_queue_pushes_back_and_polling_drains_it(pair: Pair) -> None:
    """Nobody reads: the queue takes a bounded number, and not one more until the peer has read."""
    source = bytearray(1000)
    taken = 0
    while pair.one.put(0, source):
        taken += 1
        assert taken < 100_000
    for _ in range(100):
        assert pair.one.put(0, source) == pair.one.signal(0, 1) == pair.one.flush() == 0
    until(pair.one.flush, pair.one, pair.other)
    assert pair.one.put(0, source) == 1


def test_small_puts_are_copied_and_large_ones_are_not(pair: Pair) -> None:
    small, large = bytearray(b"a" * 128), bytearray(b"b" * 129)
    assert pair.one.put(0, small) == pair.one.put(1024, large) == 1
    small[:], large[:] = b"x" * 128, b"y" * 129
    assert pair.one.signal(2048, 1) == 1
    until(lambda: pair.other.word(2048), pair.one, pair.other)
    assert pair.other.region()[:128] == b"a" * 128
    assert pair.other.region()[1024 : 1024 + 129] == b"y" * 129

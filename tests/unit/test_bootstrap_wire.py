"""Frames: whatever the bytes, the decoder answers with whole frames or `FrameError`, and holds no more than has
arrived.
"""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.bootstrap import wire
from commrt.bootstrap.wire import FrameDecoder, FrameError, Part, Put, Refused, Welcome

messages = st.one_of(
    st.builds(Put, st.text(max_size=40), st.binary(max_size=300)),
    st.builds(wire.GiveUp, st.text(max_size=40)),
    st.just(wire.Bye()),
)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return [*pieces, data[start:]]


@given(st.lists(messages, max_size=6), st.lists(st.integers(0, 60), max_size=20))
def test_frames_survive_any_cutting(sent: list[wire.FromClient], sizes: list[int]) -> None:
    decoder = FrameDecoder()
    stream = b"".join(map(wire.encode, sent))
    bodies = [body for piece in cut(stream, sizes) for body in decoder.feed(piece)]
    assert [wire.decode_from_client(body) for body in bodies] == sent
    assert decoder.nbytes == 0


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_garbage_is_refused_or_waited_on(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(max_frame=256)
    fed = 0
    try:
        for piece in pieces:
            fed += len(piece)
            for body in decoder.feed(piece):
                assert len(body) <= 256
                wire.decode_from_client(body)
            assert decoder.nbytes <= min(fed, 256 + 8)
    except FrameError:
        pass


@given(st.binary(max_size=400))
def test_garbage_bodies_are_frame_errors(body: bytes) -> None:
    for decode in (wire.decode_from_client, wire.decode_from_server):
        try:
            message = decode(body)
        except FrameError:
            continue
        assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize("length", [wire.MAX_FRAME + 1, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_huge_length_is_refused_before_anything_is_allocated(length: int) -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=str(length)):
            decoder.feed(struct.pack("!Q", length) + b"x" * 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_an_announced_frame_costs_only_what_has_arrived() -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        assert decoder.feed(struct.pack("!Q", wire.MAX_FRAME) + b"x" * 1000) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 1_000_000,
        b"\x93\x01\xa1k" + b"\x91" * 1_000_000,
        b"\x81" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x93\x01\xa1k\xc6\xff\xff\xff\xff",
        b"\x92\x02\xda\x04\x00" + b"k" * 1024,
        b"\x94\x01\xa1k\xc4\x00\x01",
        b"\x91\x63",
        b"",
    ],
    ids=[
        "arrays",
        "arrays in value",
        "maps",
        "long array",
        "long value",
        "long key",
        "extra field",
        "unknown",
        "empty",
    ],
)
def test_hostile_bodies(body: bytes) -> None:
    with pytest.raises(FrameError):
        wire.decode_from_client(body)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=50), st.integers(60, 400))
def test_parts_carry_all_values_in_order(values: list[bytes], bound: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_VALUE", bound)
        frames = wire.part_frames("key", values)
    bodies = [body for frame in frames for body in FrameDecoder(bound + 64).feed(frame)]
    parts = [part for part in map(wire.decode_from_server, bodies) if isinstance(part, Part)]
    assert len(parts) == len(bodies)
    assert [value for part in parts for value in part.values] == values
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_the_largest_value_fits_a_frame() -> None:
    frame = wire.encode(Put("\U0001f600" * wire.MAX_KEY, bytes(wire.MAX_VALUE)))
    assert len(FrameDecoder().feed(frame)) == 1
    assert len(FrameDecoder().feed(wire.part_frames("\U0001f600" * wire.MAX_KEY, [bytes(wire.MAX_VALUE)])[0])) == 1


def test_server_messages_round_trip() -> None:
    for message in (Welcome(), Refused("k", "timeout", "why", [1, 2]), Part("k", [b"", b"x"], True)):
        (body,) = FrameDecoder().feed(wire.encode(message))
        assert wire.decode_from_server(body) == message

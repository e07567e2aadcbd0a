"""The store's wire format: frames of an 8-byte big-endian length and one msgpack message of a fixed set of types.

Nothing here trusts the other side. A length is compared with the bound before anything is kept for it, a buffer grows
only with bytes that have arrived, and messages are decoded against their types, so that nesting, surplus fields and
wrong types end in `FrameError`.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec

from commrt.errors import BootstrapError

PROTOCOL_VERSION = 1
MAX_FRAME = 16 << 20
MAX_VALUE = MAX_FRAME - 4096
MAX_TOTAL = 64 << 20
MAX_KEY = 256
MAX_WORLD = 1 << 16

_LENGTH = struct.Struct("!Q")

Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]
Ranks = Annotated[list[int], msgspec.Meta(max_length=MAX_WORLD)]
Values = Annotated[list[bytes], msgspec.Meta(max_length=MAX_WORLD)]


class FrameError(BootstrapError):
    """The other side sent something that is no frame of this protocol."""


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    pass


class Put(_Message, frozen=True, tag=1):
    """Client: my value for `key`."""

    key: Key
    value: bytes


class GiveUp(_Message, frozen=True, tag=2):
    """Client: my time for `key` is over; who is missing?"""

    key: Key


class Bye(_Message, frozen=True, tag=3):
    """Client: I leave in good order."""


class Welcome(_Message, frozen=True, tag=16):
    """Server: you are a rank of this world."""


class Part(_Message, frozen=True, tag=17):
    """Server: the next values of `key`, in the order of ranks; `last` ends them."""

    key: Key
    values: Values
    last: bool


class Refused(_Message, frozen=True, tag=18):
    """Server: `key` has failed, or the whole world where `key` is empty. `ranks` are those to blame."""

    key: Key
    kind: Literal["error", "timeout"]
    message: str
    ranks: Ranks


FromClient = Put | GiveUp | Bye
FromServer = Welcome | Part | Refused

_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(FromClient)
_from_server = msgspec.msgpack.Decoder(FromServer)


def encode(message: FromClient | FromServer) -> bytes:
    """One whole frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_from_client(body: bytes) -> FromClient:
    """Raises `FrameError` for anything but a client's message."""
    try:
        return _from_client.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"malformed message: {error}") from None


def decode_from_server(body: bytes) -> FromServer:
    """Raises `FrameError` for anything but a server's message."""
    try:
        return _from_server.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"malformed message: {error}") from None


def part_frames(key: str, values: list[bytes]) -> list[bytes]:
    """The frames that carry `values`, each within the bound."""
    frames, start, room = [], 0, MAX_VALUE
    for at, value in enumerate(values):
        cost = len(value) + 5
        if cost > room and at > start:
            frames.append(encode(Part(key, values[start:at], False)))
            start, room = at, MAX_VALUE
        room -= cost
    frames.append(encode(Part(key, values[start:], True)))
    return frames


class FrameDecoder:
    """Cuts a stream of bytes into frame bodies. Holds at most one frame and what arrived after it."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._buffer = bytearray()

    @property
    def nbytes(self) -> int:
        """Bytes held for a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies completed by `data`. Raises `FrameError` on a length over the bound; the stream can't be used
        after that.
        """
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self._max_frame:
                buffer.clear()
                raise FrameError(f"frame of {length} bytes announced, the bound is {self._max_frame}")
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            bodies.append(bytes(memoryview(buffer)[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies

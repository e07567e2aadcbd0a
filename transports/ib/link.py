"""One end of a link to a peer: what `commrt/_native/ib_link.cpp` does, and what the two ends tell each other."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from commrt.errors import TransportError
from commrt.native import ffi, lib
from commrt.transports.ib.devices import checked

NUMBER_SHIFT = 48  # of memory, in the offsets of ports
_LEAVE_S = 1.0  # for the last words to arrive
_PSN_BITS = 24

_U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_U24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_U64 = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class End(msgspec.Struct, frozen=True):
    """A queue pair, the ring to which signals for it go, and the port that it is at."""

    qpn: _U24
    psn: _U24
    ring: _U64
    ring_key: _U32
    link_layer: _U16
    lid: _U16
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    gid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Key(msgspec.Struct, frozen=True):
    """Registered memory: its number among those of its rank, where it is, and what opens it."""

    number: _U16
    address: _U64
    nbytes: _U64
    key: _U32


def to_u64(value: int) -> bytes:
    """As `End` and `Key` hold it."""
    return value.to_bytes(8, "little")


def from_u64(value: bytes) -> int:
    """The other way."""
    return int.from_bytes(value, "little")


class Link:
    """Owns a native link, up to `close`. `port`: its `cr_port*`."""

    def __init__(self, device: Any, port_number: int, gid_index: int) -> None:
        why, out = ffi.new("cr_ib_why*"), ffi.new("cr_ib_link**")
        psn = secrets.randbits(_PSN_BITS)
        checked(lib.cr_ib_link_new(device, port_number, gid_index, psn, out, why), why)
        self._native: Any = out[0]
        self._trouble = ""
        self.port = ffi.new("cr_port*")
        lib.cr_ib_link_port(self._native, self.port)

    def end(self) -> End:
        """What the peer needs to know."""
        e = ffi.new("cr_ib_end*")
        lib.cr_ib_link_end(self._native, e)
        return End(e.qpn, e.psn, to_u64(e.ring), e.ring_key, e.link_layer, e.lid, e.mtu, bytes(e.gid))

    def join(self, peer: End) -> None:
        """Let both queue pairs talk. Raises TransportError."""
        why = ffi.new("cr_ib_why*")
        end = ffi.new(
            "cr_ib_end*",
            {
                "qpn": peer.qpn, "psn": peer.psn, "ring": from_u64(peer.ring), "ring_key": peer.ring_key,
                "link_layer": peer.link_layer, "lid": peer.lid, "mtu": peer.mtu, "gid": peer.gid,
            },
        )  # fmt: skip
        checked(lib.cr_ib_link_join(self._native, end, why), why)

    def know(self, key: Key) -> int:
        """Where the peer's registered memory begins in the offsets of the port. Raises TransportError."""
        if lib.cr_ib_link_memory(self._native, key.number, from_u64(key.address), from_u64(key.nbytes), key.key):
            raise TransportError(f"a peer's key is of no memory, or of its number {key.number} once more")
        return key.number << NUMBER_SHIFT

    def trouble(self) -> str:
        """What ended it, or ""."""
        if self._native is None:
            return self._trouble
        return str(ffi.string(lib.cr_ib_link_trouble(self._native)).decode(errors="replace"))

    def close(self) -> None:
        """Say goodbye, and free. Idempotent."""
        close_all([self])

    def give_up(self) -> Any:
        """The native link, which is the caller's now; None if it was given up before."""
        if self._native is not None:
            self._trouble = self.trouble()
        native, self._native = self._native, None
        return native


def close_all(links: Iterable[Link]) -> None:
    """Close them at once: those whose peers don't answer are waited for together."""
    natives = [native for link in links if (native := link.give_up()) is not None]
    lib.cr_ib_links_leave(ffi.new("cr_ib_link*[]", natives), len(natives), _LEAVE_S)

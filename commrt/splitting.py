"""Making a communicator out of part of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from commrt.errors import InvalidArgument
from commrt.native import ffi

if TYPE_CHECKING:
    from commrt.group import Setup
    from commrt.settings import Settings

_Made = TypeVar("_Made")


_BUSY, _DONE = b"\x01", b"\x00"


class _Wish(msgspec.Struct, frozen=True):
    color: int | None
    key: int


class Parent(Protocol):
    """What it takes to be split: a communicator."""

    rank: int
    setup: Setup

    @property
    def settings(self) -> Settings: ...

    def exchange(self, value: bytes) -> list[bytes]: ...


def split(parent: Parent, make: Callable[[Setup], _Made], color: int | None, key: int) -> _Made | None:
    """See `Communicator.split`. Set-up goes through the parent, so every rank takes part in every step of it."""
    for name, value in (("color", color), ("key", key)):
        fits = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
        if not fits and (name, value) != ("color", None):
            raise InvalidArgument(f"{name} is an integer of 64 bits, not {value!r}", rank=parent.rank)
    wishes = [_decode(wish) for wish in parent.exchange(msgspec.msgpack.encode(_Wish(color, key)))]
    if color is None:
        _attend(parent)
        return None
    members = sorted(
        (rank for rank, wish in enumerate(wishes) if wish.color == color), key=lambda rank: (wishes[rank].key, rank)
    )

    def exchange(value: bytes) -> list[bytes]:
        replies = parent.exchange(_BUSY + value)
        return [replies[rank][1:] for rank in members]

    try:
        return make(
            replace(
                parent.setup, rank=members.index(parent.rank), size=len(members), exchange=exchange,
                settings=parent.settings, native_group=ffi.NULL,
            )
        )  # fmt: skip
    finally:
        _attend(parent)


def _attend(parent: Parent) -> None:
    """Take part in the steps of those who still set up: groups may need different numbers of them."""
    while any(reply != _DONE for reply in parent.exchange(_DONE)):
        pass


def _decode(wish: bytes) -> _Wish:
    return msgspec.msgpack.decode(wish, type=_Wish)

"""The store's state machine, without sockets."""

from __future__ import annotations

from commrt.bootstrap import wire
from commrt.bootstrap.auth import Hello
from commrt.bootstrap.wire import FrameDecoder, Part, Refused, Welcome
from commrt.bootstrap.world import World, name_ranks


class Recorder:
    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def take(self) -> list[wire.FromServer]:
        frames, self.frames = self.frames, []
        return [wire.decode_from_server(body) for frame in frames for body in FrameDecoder().feed(frame)]

    def refusal(self) -> Refused:
        (message,) = self.take()
        assert isinstance(message, Refused)
        return message


def joined(size: int, present: int | None = None) -> tuple[World, list[Recorder]]:
    world, members = World(size), [Recorder() for _ in range(size if present is None else present)]
    for rank, member in enumerate(members):
        assert world.join(Hello(wire.PROTOCOL_VERSION, size, rank, 0), member)
        assert member.take() == [Welcome()]
    return world, members


def test_an_exchange_answers_all_and_is_forgotten() -> None:
    world, members = joined(3)
    for rank in (2, 0):
        world.put(rank, "k", b"v%d" % rank)
    assert not any(member.frames for member in members)
    world.put(1, "k", b"v1")
    assert [member.take() for member in members] == [[Part("k", [b"v0", b"v1", b"v2"], True)]] * 3
    assert world.pending == 0


def test_a_key_can_be_used_again_after_its_end() -> None:
    world, members = joined(2)
    for value in (b"a", b"b"):
        for rank in range(2):
            world.put(rank, "k", value)
        assert [member.take() for member in members] == [[Part("k", [value, value], True)]] * 2


def test_giving_up_tells_all_who_is_missing_and_late_comers_too() -> None:
    world, members = joined(4)
    world.put(0, "k", b"")
    world.put(2, "k", b"")
    world.give_up("k")
    for rank in (0, 2):
        refusal = members[rank].refusal()
        assert (refusal.kind, refusal.ranks) == ("timeout", [1, 3])
        assert "1, 3 of 4" in refusal.message
    for rank in (1, 3):
        assert not members[rank].frames
        world.put(rank, "k", b"")
        assert members[rank].refusal().ranks == [1, 3]
    assert world.pending == 0


def test_giving_up_a_finished_exchange_does_nothing() -> None:
    world, members = joined(2)
    for rank in range(2):
        world.put(rank, "k", b"")
    for member in members:
        member.take()
    world.give_up("k")
    assert not any(member.frames for member in members)


def test_a_lost_rank_fails_what_still_needs_it_at_once() -> None:
    world, members = joined(3)
    world.put(1, "given", b"")
    world.put(0, "needed", b"")
    world.leave(1, "disconnected")
    assert members[0].refusal().ranks == [1]
    for rank in (0, 2):
        world.put(rank, "given", b"")
    for rank in (0, 2):
        assert members[rank].take() == [Part("given", [b"", b"", b""], True)]
    world.put(2, "later", b"")
    assert "rank 1 disconnected" in members[2].refusal().message


def check_fault(hello: Hello, *words: str) -> None:
    world, members = joined(3, present=2)
    newcomer = Recorder()
    assert not world.join(hello, newcomer)
    for told in (*members, newcomer):
        refusal = told.refusal()
        assert refusal.key == ""
        assert all(word in refusal.message for word in words)
    late = Recorder()
    assert not world.join(Hello(wire.PROTOCOL_VERSION, 3, 2, 0), late)
    assert late.refusal().key == ""
    assert world.everyone_told


def test_wrong_size() -> None:
    check_fault(Hello(wire.PROTOCOL_VERSION, 5, 2, 0), "world size 5", "world size 3")


def test_wrong_version() -> None:
    check_fault(Hello(77, 3, 2, 0), "version 77", f"speaks {wire.PROTOCOL_VERSION}")


def test_same_rank_twice() -> None:
    check_fault(Hello(wire.PROTOCOL_VERSION, 3, 1, 0), "rank 1 joined twice")


def test_rank_out_of_range() -> None:
    check_fault(Hello(wire.PROTOCOL_VERSION, 3, 3, 0), "rank 3 is out of range")


def test_a_key_used_twice_by_one_rank() -> None:
    world, members = joined(2)
    world.put(0, "k", b"")
    world.put(0, "k", b"")
    assert "twice" in members[0].refusal().message
    world.put(1, "k", b"")
    assert members[1].refusal().ranks == [0]


def test_the_total_of_one_key_is_bounded() -> None:
    world, members = joined(8)
    value = bytes(wire.MAX_VALUE)
    for rank in range(5):
        world.put(rank, "k", value)
    assert str(wire.MAX_TOTAL) in members[0].refusal().message


def test_closing_tells_those_who_wait() -> None:
    world, members = joined(2)
    world.put(1, "k", b"")
    world.close()
    assert "closed" in members[1].refusal().message


def test_who_has_yet_to_hear_of_a_failed_exchange() -> None:
    world, members = joined(3)
    world.put(0, "k", b"")
    assert world.everyone_told
    world.leave(1, "disconnected")
    assert not world.everyone_told
    world.close()
    assert not world.everyone_told
    world.put(2, "k", b"")
    assert members[2].refusal().ranks == [1]
    assert world.everyone_told


def test_long_lists_of_ranks_are_cut() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks(range(30)).endswith("19 and 10 more")

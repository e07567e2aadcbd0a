"""The plan format: what is refused, and that nothing else is needed to refuse it."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from commrt import plan as plans
from commrt.errors import PlanError
from commrt.plan import Operation, Plan, RankProgram, Ref, Size, load, part_of, schema, validate


def program(*operations: Operation, rank: int = 0) -> RankProgram:
    return RankProgram(rank, (operations,))


def make(*operations: Operation, **facts: Any) -> Plan:
    given_facts = {
        "name": "t", "collective": "all_reduce", "ranks": 2, "parts": 2, "scratch_slots": 2, "packet_slots": 2,
        "channels": 1, "requires": ("mapped", "symmetric"), "programs": (program(*operations),), **facts,
    }  # fmt: skip
    return Plan(**given_facts)


IN, OUT, SLOT, PACKET = Ref("input"), Ref("output"), Ref("scratch"), Ref("packets")
COPY = Operation("copy", (OUT,), (IN,))

REFUSED: dict[str, tuple[Plan, str]] = {
    "version": (make(COPY, version=2), "version 2"),
    "no ranks": (make(COPY, ranks=0), "ranks 0"),
    "too many ranks": (make(COPY, ranks=1 << 17), "ranks"),
    "parts": (make(COPY, parts=0), "parts 0"),
    "unit": (make(COPY, unit=100), "multiple of 64"),
    "channels": (make(COPY, channels=9), "channels 9"),
    "foreign rank": (make(programs=(program(COPY, rank=2),)), "rank 2"),
    "rank twice": (make(programs=(program(COPY), program(COPY))), "two programs"),
    "no block": (make(programs=(RankProgram(0, ()),)), "0 blocks"),
    "too many blocks": (make(programs=(RankProgram(0, ((),) * 17),)), "17 blocks"),
    "too many operations": (make(*[Operation("sync")] * (plans.MAX_OPERATIONS + 1)), "operations exceed"),
    "group": (make(Operation("copy", (Ref("output", 1),), (IN,))), "output index 1"),
    "negative group": (make(Operation("copy", (Ref("output", -1),), (IN,))), "output index -1"),
    "part": (make(Operation("copy", (OUT,), (Ref("input", 0, 2),))), "part 2"),
    "slot": (make(Operation("copy", (Ref("scratch", 2),), (IN,))), "scratch index 2"),
    "peer buffer": (make(Operation("put", (Ref("scratch", 0, 0, 2),), (IN,))), "rank 2"),
    "own rank by number": (make(Operation("put", (Ref("scratch", 0, 0, 0),), (IN,))), "its own rank"),
    "size group": (make(Operation("copy", (OUT,), (IN,), Size("input", 1))), "size index 1"),
    "size part": (make(Operation("copy", (OUT,), (IN,), Size("input", 0, 2))), "size part 2"),
    "no source": (make(Operation("copy", (OUT,), ())), "0 sources"),
    "two sources": (make(Operation("copy", (OUT,), (IN, SLOT))), "2 sources"),
    "operands of a signal": (make(Operation("signal", (OUT,), peers=(1,))), "1 destinations"),
    "channel": (make(Operation("signal", peers=(1,), channel=1)), "channel 1"),
    "signal to nobody known": (make(Operation("signal", peers=(2,))), "peer 2"),
    "signal to itself": (make(Operation("wait", peers=(0,))), "name this one"),
    "peer twice": (make(Operation("wait", peers=(1, 1))), "repeat a rank"),
    "packets as plain data": (make(Operation("copy", (OUT,), (PACKET,))), "wrong kind"),
    "plain data as packets": (make(Operation("unpack_packets", (OUT,), (IN,))), "wrong kind"),
    "put packets into scratch": (make(Operation("put_packets", (SLOT,), (IN,))), "wrong kind"),
    "put to itself": (make(Operation("put", (SLOT,), (IN,))), "wrong"),
    "get from scratch": (make(Operation("get", (OUT,), (Ref("scratch", 0, 0, 1),))), "wrong"),
    "peers' packets read": (make(Operation("reduce_packets", (OUT,), (Ref("packets", 0, 0, 1),))), "wrong"),
    "unmapped load": (make(Operation("copy", (OUT,), (Ref("scratch", 0, 0, 1),)), requires=()), "require mapped"),
    "user load": (make(Operation("copy", (OUT,), (Ref("input", 0, 0, 1),)), requires=("mapped",)), "require symmetric"),
    "get": (make(Operation("get", (OUT,), (Ref("input", 0, 0, 1),)), requires=()), "require direct or symmetric"),
    "switch": (make(Operation("switch_reduce", (SLOT,), (SLOT,))), "require switch"),
    "loop without a unit": (make(COPY, Operation("loop", target=0)), "no unit"),
    "loop to itself": (make(COPY, Operation("loop", target=1), unit=64), "target 1"),
    "loops overlap": (make(COPY, Operation("loop"), COPY, Operation("loop"), unit=64), "overlap"),
    "sliced without a loop": (make(Operation("copy", (OUT,), (IN,), sliced=True), unit=64), "sliced outside"),
    "barrier in a loop": (make(Operation("barrier"), Operation("loop"), unit=64), "barrier in a loop"),
    "packets in a loop": (
        make(Operation("put_packets", (Ref("packets", 0, 0, 1),), (IN,)), Operation("loop"), unit=64),
        "put_packets in a loop",
    ),
    "too many packet sources": (
        make(Operation("reduce_packets", (OUT,), (PACKET,) * 65)),
        "more than 64 sources",
    ),
    "unequal barriers": (make(programs=(RankProgram(0, ((Operation("barrier"),), ())),)), "unequally many"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    plan, words = REFUSED[name]
    with pytest.raises(PlanError, match=words):
        validate(plan)
    with pytest.raises(PlanError, match=words):
        load(plan.to_json())


def test_the_base_of_the_refused_is_accepted() -> None:
    validate(make(COPY))
    validate(make(Operation("copy", (OUT,), (IN,), sliced=True), Operation("loop"), unit=64))


def test_refusals_name_rank_block_and_operation() -> None:
    plan = make(programs=(program(COPY), RankProgram(1, ((), (COPY, Operation("signal", peers=(1,)))))))
    with pytest.raises(PlanError, match=r"rank 1, block 1, operation 1 \(signal\)"):
        validate(plan)


def text(**changes: Any) -> bytes:
    return json.dumps({**json.loads(make(COPY).to_json()), **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, text(extra=1), text(ranks=2.5),
        text(ranks="2"), text(ranks=1 << 70), text(collective="all_reducer"), text(requires=["telepathy"]),
        text(programs=[{"rank": 0, "blocks": [[{"name": "run"}]]}]), text(programs=None),
        text(programs=[{"rank": 0, "blocks": [[{"name": "copy", "dst": [{"buffer": "output", "address": 1}]}]]}]),
    ],
)  # fmt: skip
def test_malformed_files(data: bytes) -> None:
    with pytest.raises(PlanError):
        load(data)


def test_a_huge_file_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_BYTES", 100)
    with pytest.raises(PlanError, match="exceeds 100"):
        load(b"x" * 101)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_noise_is_refused_as_a_plan_error(data: bytes | str) -> None:
    with pytest.raises(PlanError):
        load(data)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(json.loads(make(COPY, unit=64).to_json()))), JSON_VALUES)
def test_any_field_may_be_wrong(field: str, value: Any) -> None:
    """A plan that loads is valid; all else is a PlanError."""
    try:
        plan = load(text(**{field: value}))
    except PlanError:
        return
    validate(plan)


def test_the_schema_accepts_what_load_does() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(make(COPY).to_json()), schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text(extra=1)), schema())


def test_json_is_canonical() -> None:
    plan = make(COPY)
    assert plan.to_json() == load(json.dumps(json.loads(plan.to_json()), indent=2)).to_json()
    assert plan.digest != msgspec.structs.replace(plan, parts=1).digest


def test_a_missing_slice_is_named() -> None:
    assert make(COPY).program(0).blocks == ((COPY,),)
    with pytest.raises(PlanError, match="no program for rank 1"):
        make(COPY).program(1)


@given(st.integers(0, 1 << 40), st.integers(1, 300), st.sampled_from([1, 2, 4, 8, 16]))
def test_parts_cover_a_window_once(window: int, parts: int, itemsize: int) -> None:
    spans = [part_of(window, parts, itemsize, part) for part in range(parts)]
    end = 0
    for offset, length in spans:
        assert offset == end
        assert 0 <= length <= spans[0][1]
        end = offset + length
        assert (offset * itemsize) % 64 == 0 or offset == window
    assert end == window

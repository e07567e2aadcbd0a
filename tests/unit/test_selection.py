"""Choosing algorithms: the table, what can't run, forcing, and what explain says."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from commrt.algorithm import Algorithm
from commrt.errors import ConfigError, InvalidArgument, UnknownName
from commrt.plan import COLLECTIVES, groups
from commrt.plugins import default_registry
from commrt.selection import MAX_NBYTES, Selection, Table, default_table, format_nbytes, load_table

ALGORITHMS: dict[str, Algorithm] = default_registry().usable("algorithms")
SELECTION = Selection(ALGORITHMS)
LINKS = [(), ("mapped",), ("mapped", "direct"), ("direct",), ("mapped", "direct", "switch")]

jobs = st.tuples(
    st.sampled_from(COLLECTIVES), st.integers(1, 300), st.booleans(), st.sampled_from(LINKS), st.booleans()
).filter(lambda job: (job[0] == "send") <= (job[1] == 2) and (job[0] != "reduce" or job[1] <= 256))


def table(rows: str, fallback: str = "{}") -> Table:
    return load_table(f"version: 1\nrows: {{all_reduce: [{rows}]}}\nfallback: {fallback}")


def test_the_default_table_names_what_exists() -> None:
    shipped = default_table()
    assert set(shipped.rows) == set(shipped.fallback) == set(COLLECTIVES)
    for collective, rows in shipped.rows.items():
        named = {name for row in rows for _, names in row.lines() for name in names}
        for name in named | set(shipped.fallback[collective]):
            assert f"{collective}/{name}" in ALGORITHMS


@given(jobs, st.integers(0, MAX_NBYTES))
def test_thresholds_and_choices_agree(job: tuple[str, int, bool, tuple[str, ...], bool], nbytes: int) -> None:
    collective, ranks, symmetric, links, precise = job
    steps = SELECTION.thresholds(collective, ranks, symmetric, links, precise=precise)
    bounds = [bound for bound, _ in steps]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == MAX_NBYTES
    expected = next(name for bound, name in steps if nbytes <= bound)
    assert SELECTION.choose(collective, nbytes, ranks, symmetric, links, precise=precise).name == expected


@given(jobs, st.integers(0, 1 << 40))
def test_what_is_chosen_can_run(job: tuple[str, int, bool, tuple[str, ...], bool], nbytes: int) -> None:
    collective, ranks, symmetric, links, precise = job
    chosen = SELECTION.choose(collective, nbytes, ranks, symmetric, links, precise=precise).algorithm
    assert chosen.collective == collective
    assert chosen.least_ranks <= ranks <= chosen.most_ranks
    offered = set(links) | ({"symmetric", "direct"} if symmetric and "mapped" in links else set())
    assert set(chosen.requires) <= offered
    if precise:
        assert chosen.rounds(ranks) <= 1 or ranks > 256
    if chosen.packet_slots(ranks):
        half = SELECTION.pair_packets_half if collective == "send" else SELECTION.packets_half
        held = half // 2 // chosen.packet_slots(ranks) * chosen.parts(ranks)
        assert nbytes <= held * max(groups(collective, ranks))


def test_one_rank_copies() -> None:
    for collective in set(COLLECTIVES) - {"send"}:
        assert SELECTION.choose(collective, 1 << 20, 1, True, ("mapped",)).name == "local"


def test_rows_by_ranks_and_memory_the_first_fits() -> None:
    rows = "{ranks: [2, 2], use: [[1K, oneshot], [max, staged]]}, {memory: symmetric, use: [[max, direct]]}, "
    selection = Selection(ALGORITHMS, table(rows + "{use: [[max, ring]]}"))
    chosen = [
        selection.choose("all_reduce", nbytes, ranks, symmetric, ("mapped",)).name
        for nbytes, ranks, symmetric in ((1024, 2, True), (1025, 2, True), (8, 3, True), (8, 3, False))
    ]
    assert chosen == ["oneshot", "staged", "direct", "ring"]


def test_what_cannot_run_is_passed_over_in_order() -> None:
    selection = Selection(ALGORITHMS, table("{use: [[max, direct, staged, ring]]}", "{all_reduce: [pairs]}"))
    assert selection.choose("all_reduce", 8, 4, True, ("mapped",)).name == "direct"
    assert selection.choose("all_reduce", 8, 4, False, ("mapped",)).name == "staged"
    ring = selection.choose("all_reduce", 8, 4)
    assert ring.name == "ring"
    assert "after direct, staged, which can't run here" in ring.reason
    assert Selection(ALGORITHMS, table("{use: [[max, direct]]}", "{all_reduce: [pairs]}")).choose(
        "all_reduce", 8, 4
    ).name == "pairs"  # fmt: skip


def test_packets_only_where_they_fit() -> None:
    selection = Selection(ALGORITHMS, table("{use: [[max, oneshot, ring]]}"), packets_half=1 << 15)
    steps = selection.thresholds("all_reduce", 4, capabilities=("mapped",))
    assert steps == [(4096 - 64, "oneshot"), (MAX_NBYTES, "ring")]


def test_precise_prefers_one_rounding() -> None:
    selection = Selection(ALGORITHMS, table("{use: [[max, ring, pairs]]}"))
    assert selection.choose("all_reduce", 8, 4).name == "ring"
    assert selection.choose("all_reduce", 8, 4, precise=True).name == "pairs"
    assert selection.choose("all_reduce", 8, 2, precise=True).name == "ring"


def test_forcing_is_strict() -> None:
    choose = SELECTION.choose
    assert choose("all_reduce", 1 << 30, 4, capabilities=("mapped",), algorithm="oneshot").name == "oneshot"
    assert choose("all_reduce", 8, 4, algorithm="all_reduce/ring").name == "ring"
    with pytest.raises(UnknownName, match="did you mean 'oneshot'"):
        choose("all_reduce", 8, 4, algorithm="oneshoot")
    with pytest.raises(UnknownName):
        choose("all_reduce", 8, 4, algorithm="all_gather/ring")
    with pytest.raises(InvalidArgument, match="needs links over which"):
        choose("all_reduce", 8, 4, algorithm="oneshot")
    with pytest.raises(InvalidArgument, match=r"needs 1\.\.1 ranks, and there are 4"):
        choose("all_reduce", 8, 4, algorithm="local")
    with pytest.raises(InvalidArgument, match="needs symmetric memory"):
        choose("all_reduce", 8, 4, False, ("mapped", "direct"), "direct")


def test_a_forced_name_for_all_or_for_one_collective() -> None:
    ring = Selection(ALGORITHMS, forced="ring")
    assert ring.choose("all_gather", 8, 4).name == "ring"
    with pytest.raises(UnknownName):
        ring.choose("broadcast", 8, 4)
    one = Selection(ALGORITHMS, forced="all_reduce/ring")
    assert one.choose("all_reduce", 8, 4).name == "ring"
    assert one.choose("broadcast", 8, 4).name == "tree"
    assert one.thresholds("all_reduce", 4) == [(MAX_NBYTES, "ring")]


def test_unknown_collective_and_no_algorithm() -> None:
    with pytest.raises(UnknownName, match="did you mean 'all_reduce'"):
        SELECTION.choose("allreduce", 8, 4)
    with pytest.raises(InvalidArgument, match="no algorithm carries send here: direct needs"):
        SELECTION.choose("send", 8, 3)
    with pytest.raises(InvalidArgument, match="there is none"):
        Selection({}).choose("send", 8, 2)


def test_explain_says_what_else_and_why_not() -> None:
    told = SELECTION.explain("all_reduce", 4 << 20, 8, False, ("mapped", "direct"))
    assert set(told.others) | {told.choice.name} == {n.split("/")[1] for n in ALGORITHMS if n.startswith("all_reduce/")}
    assert "symmetric memory" in told.others["direct"]
    assert "would cut the message" in told.others["oneshot"]
    assert told.others["ring"] == "the table prefers the other here"
    assert told.thresholds[-1] == (MAX_NBYTES, told.choice.name)
    assert f"runs native all_reduce/{told.choice.name}" in str(told)
    forced = SELECTION.explain("all_reduce", 8, 8, algorithm="ring")
    assert forced.choice.reason == "it was forced"
    assert forced.others["pairs"] == "one was forced"


def test_tables_travel_as_json() -> None:
    assert load_table(default_table().to_json()) == default_table()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "version: 2\nrows: {}\nfallback: {}", "version: 1\nrows: {}", "{", "!!python/object:os.system {}",
        "version: 1\nrows: {all_reducer: []}\nfallback: {}",
        "version: 1\nrows: {send: [{use: []}]}\nfallback: {}",
        "version: 1\nrows: {send: [{use: [[8, put]]}]}\nfallback: {}",
        "version: 1\nrows: {send: [{use: [[8, put], [4, put], [max, put]]}]}\nfallback: {}",
        "version: 1\nrows: {send: [{use: [[max]]}]}\nfallback: {}",
        "version: 1\nrows: {send: [{use: [[max, 8]]}]}\nfallback: {}",
        "version: 1\nrows: {send: [{use: [[huge, put]]}]}\nfallback: {}",
        "version: 1\nrows: {send: [{use: [[max, put]], colour: red}]}\nfallback: {}",
        "x" * (1 << 21),
    ],
)  # fmt: skip
def test_malformed_tables(text: str) -> None:
    with pytest.raises(ConfigError):
        load_table(text)


def test_sizes_as_text() -> None:
    assert [format_nbytes(n) for n in (0, 8, 1000, 2048, 3 << 20, 1 << 30, MAX_NBYTES)] == [
        "0 B", "8 B", "1000 B", "2 KiB", "3 MiB", "1 GiB", "any size",
    ]  # fmt: skip

"""What `commrt bench` measures for what it was asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from commrt.bench.options import DEFAULT_RANKS, Options, bus_factor, cells, make, sizes
from commrt.cli.bench import bench
from commrt.errors import InvalidArgument, UnknownName
from commrt.settings import parse_nbytes
from commrt.testing.data import COLLECTIVES


def test_sizes_multiply_or_add_and_end_at_the_largest() -> None:
    assert list(sizes(make("all_reduce", min_bytes="8", max_bytes="1K", step_factor=4))) == [8, 32, 128, 512]
    assert list(sizes(make("all_reduce", min_bytes="64", max_bytes="256", step_bytes="64"))) == [64, 128, 192, 256]
    assert list(sizes(make("broadcast", min_bytes="128M"))) == [128 << 20]
    assert list(sizes(make("barrier", min_bytes="8", max_bytes="1K"))) == [0]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_row_moves_what_it_says(collective: str) -> None:
    """As in nccl-tests: the size is that of all parts, the count that of a rank's smaller buffer."""
    if collective == "barrier":
        return
    (cell,) = cells(make(collective, min_bytes="1000", max_bytes="1000"), 3)
    whole = collective in ("all_reduce", "broadcast", "reduce", "sendrecv")
    assert (cell.count, cell.nbytes) == ((250, 1000) if whole else (83, 83 * 3 * 4))
    assert cell.root == (0 if collective in ("broadcast", "reduce", "gather", "scatter") else -1)
    assert cell.op == ("sum" if collective in ("all_reduce", "reduce", "reduce_scatter") else "none")


def test_bus_bandwidth_is_what_a_link_carries() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("scatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("sendrecv", 4) == 1
    assert bus_factor("all_reduce", 1) == 0


def test_all_means_all_that_the_collective_can() -> None:
    pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 without it")
    reducing = make("all_reduce", dtype="all", op="all", min_bytes="8", max_bytes="8")
    assert len(reducing.dtypes) == 12
    assert set(reducing.ops) == {"sum", "prod", "min", "max", "avg"}
    assert len(list(cells(reducing, 2))) == 60
    moving = make("all_gather", dtype="all", op="all")
    assert {"bool", "complex128", "float8_e5m2"} <= set(moving.dtypes)
    assert moving.ops == ("none",)


def test_what_numpy_lacks_is_left_out_of_all_and_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpy.dtype", _numpy_alone)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    options = make("all_reduce", dtype="all")
    assert options.skipped == ("bfloat16",)
    assert len(options.dtypes) == 11
    with pytest.raises(InvalidArgument, match="install the package ml_dtypes"):
        make("all_reduce", dtype="bf16")


def _numpy_alone(name: str) -> str:
    if "bfloat" in name or "float8" in name:
        raise TypeError(name)
    return name


def test_every_rank_in_turn_is_the_root() -> None:
    options = make("broadcast", root=-1, min_bytes="8", max_bytes="8", cycles=2)
    assert [cell.root for cell in cells(options, 3)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("name", ["float", "half", "bf16", "double"])
def test_the_names_of_nccl_tests_are_understood(name: str) -> None:
    pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 without it")
    assert make("all_reduce", dtype=name).dtypes[0].startswith(("float", "bfloat"))


def test_ranks_get_the_same_options() -> None:
    options = make(
        "reduce", op="max", dtype="int32", max_bytes="1M", timeout_s=2.5, algorithm="ring", per_iteration=True
    )
    assert msgspec.json.decode(msgspec.json.encode(options), type=Options) == options


@pytest.mark.parametrize(
    ("collective", "arguments", "message"),
    [
        ("all_reduce", {"min_bytes": "8X"}, "-b is '8X'"),
        ("all_reduce", {"min_bytes": "1K", "max_bytes": "8"}, "less than -b"),
        ("all_reduce", {"step_bytes": "-1"}, "-i is '-1'"),
        ("all_reduce", {"step_factor": 1}, "-f is 1"),
        ("all_reduce", {"iters": 0}, "--iters is 0"),
        ("all_reduce", {"average": 4}, "-a is 4, and must lie within 0..3"),
        ("all_reduce", {"aggregate": 0}, "-m is 0"),
        ("all_reduce", {"timeout_s": float("nan")}, "-T is nan"),
        ("all_reduce", {"json": "/no/such/folder/out.json"}, "no folder"),
        ("broadcast", {"root": -2}, "-r is -2"),
    ],
)
def test_bad_arguments_are_named(collective: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        make(collective, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        ({"collective": "allreduce"}, "all_reduce"),
        ({"collective": "all_reduce", "dtype": "flaot32"}, "float32"),
        ({"collective": "all_reduce", "op": "summ"}, "sum"),
    ],
)
def test_a_misspelt_name_gets_a_near_one(arguments: dict[str, str], near: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{near}'"):
        make(**arguments)


def test_reductions_are_of_numbers(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown dtype 'bool'"):
        make("all_reduce", dtype="bool", json=str(tmp_path / "out.json"))


def test_the_defaults_that_help_shows_are_those_in_force() -> None:
    options, hints = make("all_reduce"), get_type_hints(bench, include_extras=True)
    shown = {name: hint.__metadata__[0].show_default for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    renamed = {"minbytes": "min_bytes", "maxbytes": "max_bytes", "stepfactor": "step_factor"}
    stated = {
        renamed.get(name, name): parse_nbytes(text) for name, text in shown.items() if str(text)[:1] in "123456789"
    }
    assert stated.pop("ranks") == DEFAULT_RANKS
    assert len(stated) == 9
    assert stated == {name: getattr(options, name) for name in stated}

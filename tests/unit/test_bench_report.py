"""The table and the JSON of `commrt bench`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from commrt.bench.measure import Measured, Row, Spread
from commrt.bench.options import Cell, make
from commrt.bench.report import (
    Place,
    average_bus_bandwidth,
    document,
    footer,
    header,
    line,
    write_json,
    wrong_elements,
)

PLACES = [Place(0, 100, "host", "cpu", ("CPU",)), Place(1, 101, "host", "cpu", ("CPU", "fake driver"))]


def measured(bus_bw: float = 1.5, nwrong: int | None = 0, iterations: Spread | None = None) -> Measured:
    return Measured(time=12.34, alg_bw=bus_bw, bus_bw=bus_bw, nwrong=nwrong, iterations=iterations)


def row(**forms: Any) -> Row:
    cell = Cell(1024, 256, "float32", "sum", -1)
    return Row(cell, forms.get("out_of_place", measured()), forms.get("in_place", measured(2.5)), 0.0)


def test_a_row_has_the_columns_of_nccl_tests() -> None:
    cells = line(row(), make("all_reduce")).split()
    assert cells == ["1024", "256", "float32", "sum", "-1", "12.34", "1.50", "1.50", "0", "12.34", "2.50", "2.50", "0"]


def test_headings_stand_over_their_columns() -> None:
    options = make("all_reduce", per_iteration=True, timestamps=True)
    spread = Spread(1.0, 20000.0, 300.0, 4.5)
    text = line(row(out_of_place=measured(iterations=spread), in_place=measured(iterations=spread)), options)
    headings = header(options, PLACES, ["shm"])[-2]
    assert headings.startswith("#")
    for title, value in (("count", "256"), ("redop", "sum"), ("#wrong", "0"), ("max", "20000"), ("p99", "300.0")):
        end = headings.index(title) + len(title)
        assert text[:end].endswith(" " + value), title
    assert text.endswith("1970-01-01T00:00:00Z")
    assert len(headings.split()) == len(text.split()) + 1  # the leading "#"


def test_comments_say_where_the_ranks_are() -> None:
    lines = header(make("all_reduce", algorithm="ring"), PLACES, ["shm", "shm"])
    assert all(one.startswith("#") for one in lines)
    assert "#  Rank  1 Pid    101 on host device cpu" in lines
    assert "# links: shm algorithm: ring" in lines


def test_the_header_says_what_the_results_were_obtained_on() -> None:
    assert "# level: CPU, fake driver" in header(make("all_reduce"), PLACES, ["shm"])
    assert "# level: not told" in header(make("all_reduce"), [Place(0, 100, "host", "toy")], [])


def test_what_is_not_measured_or_not_checked_is_not_available() -> None:
    cells = line(row(out_of_place=measured(nwrong=None), in_place=None), make("sendrecv")).split()
    assert cells[8:] == ["N/A"] * 5


def test_wrong_elements_fail_the_footer() -> None:
    good, bad = row(), row(in_place=measured(nwrong=3))
    assert footer([good])[0] == "# Out of bounds values : 0 OK"
    assert footer([good])[1] == "# Avg bus bandwidth    : 2"
    assert footer([good, bad])[0] == "# Out of bounds values : 3 FAILED"
    assert wrong_elements([good, bad]) == 3
    assert average_bus_bandwidth([row(in_place=None)]) == 1.5


def test_the_json_has_the_keys_of_nccl_tests_and_no_secret(tmp_path: Path) -> None:
    environ = {"COMMRT_TIMEOUT_S": "5", "COMMRT_SECRET_FILE": "/secret", "COMMRT_SECRET_FD": "3", "PASSWORD": "x"}
    path = tmp_path / "out.json"
    write_json(str(path), document(make("all_reduce"), PLACES, [row(), row(in_place=None)], 0.0, environ))
    found = json.loads(path.read_text())
    assert set(found) >= {"version", "times", "args", "env", "devices", "results"}
    assert found["env"] == {"COMMRT_TIMEOUT_S": "5"}
    assert found["args"]["ranks"] == 2
    first, second = found["results"]
    assert (first["size"], first["count"], first["type"], first["redop"], first["root"]) == (
        1024,
        256,
        "float32",
        "sum",
        -1,
    )
    assert first["in_place"] == {"time": 12.34, "alg_bw": 2.5, "bus_bw": 2.5, "nwrong": 0, "iterations": None}
    assert second["in_place"] is None
    assert found["out_of_bounds"] == {"count": 0, "okay": True}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_json(str(path), {"results": object()})
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.json"]
    write_json(str(path), {"results": []})
    assert os.listdir(tmp_path) == ["out.json"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

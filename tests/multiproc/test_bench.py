"""`commrt bench` as its users run it: real processes, threads, under a launcher, and with data that is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from commrt.testing.data import COLLECTIVES

COMMAND = [sys.executable, "-m", "commrt"]
QUICK = ["-e", "4K", "-f", "16", "--iters", "3", "-w", "1"]

# What a rank of `commrt bench` does, with a rank 1 that flips a bit of each result, or comes late to every call.
FAULTY = """
import sys, time
import numpy
from commrt.bench.options import make
from commrt.bench.run import run
from commrt.communicator import Communicator

right = Communicator.all_reduce

def wrong(self, x, out=None, *args, **keywords):
    right(self, x, out, *args, **keywords)
    if self.rank == 1:
        (x if out is None else out).view(numpy.uint8)[-1] ^= 1

def late(self, *args, **keywords):
    if self.rank == 1:
        time.sleep(2)
    right(self, *args, **keywords)

Communicator.all_reduce = {"wrong": wrong, "late": late}[sys.argv[1]]
sys.exit(run(make("all_reduce", max_bytes="64", iters=2, timeout_s=0.5), None))
"""


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMMRT_")}
    command = [*COMMAND, *arguments]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("transport", [(), ("--transport", "loopback")], ids=["processes", "threads"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_measured_and_right(collective: str, transport: tuple[str, ...]) -> None:
    done = run("bench", collective, "-n", "3", "-r", "1", *QUICK, *transport)
    table = rows(done)
    assert len(table) == (1 if collective == "barrier" else 3)
    assert all(cells[8] == "0" and cells[12] in ("0", "N/A") for cells in table)
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert done.stdout.count("#  Rank") == 3
    assert f"\n# level: CPU{', threads of one process' if transport else ''}\n" in done.stdout


def test_the_run_is_written_as_json(tmp_path: Path) -> None:
    done = run("bench", "all_reduce", "-n", "4", *QUICK, "-o", "max", "-I", "-J", "out.json", cwd=tmp_path)
    table = rows(done)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [str(result["size"]) for result in results] == [cells[0] for cells in table]
    for result in results:
        assert result["redop"] == "max"
        for form in (result["out_of_place"], result["in_place"]):
            assert form["nwrong"] == 0
            assert form["iterations"]["min"] <= form["time"] <= form["iterations"]["max"]
            assert form["bus_bw"] == pytest.approx(1.5 * form["alg_bw"])
            assert form["alg_bw"] == pytest.approx(result["size"] / form["time"] / 1e3)


@pytest.mark.parametrize("more", [("-m", "4"), ("-u", "3"), ("-a", "3"), ("--algo", "ring"), ("-c", "0")])
def test_variants_are_right(more: tuple[str, ...]) -> None:
    table = rows(run("bench", "all_reduce", "-n", "2", *QUICK, "-d", "float16", *more))
    assert {cells[8] for cells in table} == ({"N/A"} if more == ("-c", "0") else {"0"})


def test_wrong_data_is_counted_and_fails_the_run(tmp_path: Path) -> None:
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY)
    done = run("run", "-n", "2", "--no-prefix", str(program), "wrong")
    assert done.returncode == 1
    assert "# Out of bounds values : " in done.stdout
    assert "FAILED" in done.stdout
    table = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert table
    assert all(cells[8] == cells[12] == "1" for cells in table)


def test_under_a_launcher_it_is_one_of_the_ranks() -> None:
    done = run("run", "-n", "2", "--no-prefix", "-m", "commrt", "bench", "all_gather", *QUICK)
    assert len(rows(done)) == 3
    contradicted = run("run", "-n", "2", "--no-prefix", "-m", "commrt", "bench", "all_gather", "-n", "3")
    assert contradicted.returncode == 2
    assert "-n is 3, but COMMRT_* started 2 ranks" in contradicted.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce"], "did you mean 'all_reduce'"),
        (["all_reduce", "--algo", "rign"], "did you mean 'ring'"),
        (["all_reduce", "--transport", "shmm"], "did you mean 'shm'"),
        (["all_reduce", "-n", "0"], "-n is 0"),
        (["broadcast", "-r", "2"], "-r is 2"),
        (["all_reduce", "-T", "0"], "-T is 0"),
        (["all_reduce", "-b", "x"], "-b is 'x'"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments: list[str], message: str) -> None:
    done = run("bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_flag_that_does_not_exist_is_status_2() -> None:
    assert run("bench", "all_reduce", "--no-such-flag").returncode == 2
    assert run("no-such-command").returncode == 2
    assert run("--version").stdout.startswith("commrt ")


def test_a_rank_that_fails_is_named_without_a_traceback(tmp_path: Path) -> None:
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY)
    done = run("run", "-n", "2", "--no-prefix", str(program), "late")
    assert done.returncode == 1
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("commrt bench: rank 0: OperationTimeout: ")]
    assert "all_reduce" in line
    assert "Traceback" not in done.stderr


def in_terminal(arguments: list[str], stdout_too: bool) -> tuple[str, str]:
    """What a run wrote to a pipe as stdout (nothing, if that is the terminal too) and to a terminal as stderr."""
    ours, theirs = os.openpty()
    stdout = theirs if stdout_too else subprocess.PIPE
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen([*COMMAND, *arguments], stdout=stdout, stderr=theirs, env=environ) as process:
        os.close(theirs)
        table = b"" if process.stdout is None else process.stdout.read()
        shown = b""
        with suppress(OSError):  # how the end of a terminal shows
            while data := os.read(ours, 1 << 16):
                shown += data
        os.close(ours)
        assert process.wait(timeout=60) == 0
    return table.decode(), shown.decode()


def test_progress_is_shown_on_a_terminal_beside_a_clean_table() -> None:
    table, shown = in_terminal(["bench", "all_reduce", "-n", "2", *QUICK], stdout_too=False)
    assert "\x1b" not in table
    assert len([line for line in table.splitlines() if not line.startswith("#")]) == 3
    assert "3/3" in shown
    assert "float32" not in shown
    _, shown = in_terminal(["bench", "all_reduce", "-n", "2", *QUICK], stdout_too=True)
    assert "3/3" in shown
    assert shown.count("float32") == 3


def test_an_interrupt_ends_all_ranks() -> None:
    command = [*COMMAND, "bench", "all_reduce", "-n", "2", "--iters", "1000000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = []
        for line in process.stdout:
            if line.startswith("#  Rank"):
                pids.append(int(line.split()[4]))
            if len(pids) == 2:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)

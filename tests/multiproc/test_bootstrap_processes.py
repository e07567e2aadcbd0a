"""The bootstrap among real processes: late, dead, stopped, forked and restarted ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SECRET = "a secret that only this test knows"

# A rank: joins, runs the statements it is given, prints what came of it in one line.
RANK = """
import os, signal, sys, time
from commrt.bootstrap import detect, join, launchers, rendezvous  # not to time the imports
rank, size, place, timeout_s, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5]
start = time.monotonic()
try:
    store = join(detect(rank=rank, size=size, rendezvous=place), timeout_s=timeout_s)
    exec(body)
    print("ok", end="")
except Exception as error:
    print(type(error).__name__, getattr(error, "missing", ""), error, f"| {time.monotonic() - start:.2f}", end="")
"""
EXCHANGE = "assert store.exchange('k', b'%d' % rank) == [b'%d' % r for r in range(size)]; store.close()"


@pytest.fixture
def place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(place: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a rank; whatever still runs at the end is killed."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    started: list[subprocess.Popen[str]] = []

    def start_rank(rank: int, size: int, body: str, timeout_s: float = 20) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), place, str(timeout_s), body],
            env=os.environ | {"COMMRT_SECRET_FILE": str(secret)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_rank
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], timeout_s: float = 30) -> str:
    """What it says from here on. Not by communicate(), which loses what readline() has read ahead."""
    assert process.stdout is not None
    assert process.stderr is not None
    process.wait(timeout_s)
    assert process.stderr.read() == ""
    return process.stdout.read()


def wait_for_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_eight_processes_join(start: Start) -> None:
    ranks = [start(rank, 8, EXCHANGE) for rank in range(8)]
    assert [end(rank) for rank in ranks] == ["ok"] * 8


def test_the_one_that_never_starts_is_named(start: Start) -> None:
    ranks = [start(rank, 8, "", timeout_s=3) for rank in range(8) if rank != 5]
    for rank in ranks:
        said = end(rank)
        assert said.startswith("BootstrapTimeout [5] rank 5 of 8")
        assert float(said.rpartition("|")[2]) < 4


def test_twice_the_same_rank_is_an_error_on_all(start: Start) -> None:
    ranks = [start(rank, 4, "") for rank in (0, 1, 2, 2)]
    for rank in ranks:
        assert "BootstrapError  rank 2 joined twice" in end(rank)


def test_another_world_size_is_an_error_on_all(start: Start) -> None:
    ranks = [start(0, 3, ""), start(1, 3, ""), start(2, 4, "")]
    for rank in ranks:
        said = end(rank)
        assert "world size 3" in said
        assert "world size 4" in said


MEET_THEN_WAIT = "print('joined', flush=True); store.exchange('wait', b'', 5)"


@pytest.mark.parametrize(("victim", "word"), [(2, "rank 2 disconnected"), (0, "rank 0's store is gone")])
def test_a_killed_process_is_named_within_two_seconds(start: Start, victim: int, word: str) -> None:
    idle = "print('joined', flush=True); time.sleep(60)"
    ranks = [start(rank, 4, idle if rank == victim else MEET_THEN_WAIT) for rank in range(4)]
    assert [wait_for_line(rank) for rank in ranks] == ["joined\n"] * 4
    ranks[victim].kill()
    killed = time.monotonic()
    for rank in ranks:
        if rank is not ranks[victim]:
            assert word in end(rank)
    assert time.monotonic() - killed < 2


def test_a_stopped_process_is_named_at_the_timeout(start: Start) -> None:
    body = "print('joined', flush=True); time.sleep(60) if rank == 1 else store.exchange('k', b'', 1.5)"
    ranks = [start(rank, 3, body) for rank in range(3)]
    assert [wait_for_line(rank) for rank in ranks] == ["joined\n"] * 3
    ranks[1].send_signal(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        said = end(rank)
        assert said.startswith("BootstrapTimeout [1]")


def test_a_stopped_rank_0_is_named_within_a_second_of_the_timeout(start: Start) -> None:
    body = "print('joined', flush=True); time.sleep(60) if rank == 0 else store.exchange('k', b'', 1)"
    ranks = [start(rank, 2, body) for rank in range(2)]
    assert [wait_for_line(rank) for rank in ranks] == ["joined\n"] * 2
    ranks[0].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert end(ranks[1]).startswith("BootstrapTimeout [0]")
    assert time.monotonic() - stopped < 2.5


def test_a_killed_job_is_started_again_on_its_port(start: Start) -> None:
    for _ in range(3):
        ranks = [start(rank, 3, "print('joined', flush=True); time.sleep(60)") for rank in range(3)]
        assert [wait_for_line(rank) for rank in ranks] == ["joined\n"] * 3
        for rank in ranks:
            rank.kill()
            rank.wait()
    ranks = [start(rank, 3, EXCHANGE) for rank in range(3)]
    assert [end(rank) for rank in ranks] == ["ok"] * 3


def test_leaving_without_close_is_silent_and_clean(start: Start) -> None:
    ranks = [start(rank, 3, "store.barrier('b')") for rank in range(3)]
    assert [end(rank) for rank in ranks] == ["ok"] * 3
    assert [rank.returncode for rank in ranks] == [0] * 3


FORK = """
import warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
    held = [os.readlink(path) for path in paths if os.path.lexists(path)]
    try:
        store.exchange("child", b"")
    except Exception as error:
        refused = "forked" in str(error)
    store.close()
    os._exit(0 if refused and not any("socket" in name for name in held) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_child_leaves_the_parent_alone(start: Start) -> None:
    ranks = [start(rank, 2, FORK + EXCHANGE) for rank in range(2)]
    assert [end(rank) for rank in ranks] == ["ok"] * 2


def test_a_forked_child_does_not_keep_a_dead_rank_alive(start: Start) -> None:
    body = """
if rank == 1:
    child = os.fork()
    if child == 0:
        time.sleep(8)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
print('joined', flush=True)
store.exchange('k', b'')
"""
    ranks = [start(rank, 2, body) for rank in range(2)]
    child = int(wait_for_line(ranks[1]))
    assert wait_for_line(ranks[0]) == "joined\n"
    ranks[1].kill()
    killed = time.monotonic()
    assert "rank 1 disconnected" in end(ranks[0])
    assert time.monotonic() - killed < 2
    os.kill(child, signal.SIGKILL)


def test_another_secret_is_refused_at_once(start: Start, place: str, tmp_path: Path) -> None:
    ranks = [start(0, 2, EXCHANGE)]
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("another secret, as long as needed")
    stranger = subprocess.run(
        [sys.executable, "-c", RANK, "1", "2", place, "10", ""],
        env=os.environ | {"COMMRT_SECRET_FILE": str(other)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert stranger.stdout.startswith("AuthenticationError")
    assert "another secret, as" not in stranger.stdout + stranger.stderr
    ranks.append(start(1, 2, EXCHANGE))
    assert ranks[1].communicate(timeout=30) == ("ok", "")
    out, err = ranks[0].communicate(timeout=30)
    assert out == "ok"
    assert SECRET not in err

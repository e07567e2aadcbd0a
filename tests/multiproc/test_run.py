"""`commrt run`, as a user meets it: a process with outputs, an exit status and signals."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commrt.errors import InvalidArgument
from commrt.launcher import launch

RUN = """
import typer
from commrt.cli.run import CONTEXT_SETTINGS, run
app = typer.Typer(pretty_exceptions_enable=False)
app.command(context_settings=CONTEXT_SETTINGS)(run)
app()
"""


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", RUN, *args]


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), input=stdin, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "prog.py"
        path.write_text("import os, signal, subprocess, sys, time\nrank = int(os.environ['COMMRT_RANK'])\n" + text)
        return str(path)

    return write


Script = Callable[[str], str]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 5) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_lines_are_prefixed_and_on_their_stream(script: Script) -> None:
    done = run("-n", "3", script("print('out', sys.argv[1:])\nprint('err', file=sys.stderr)"), "-n", "7", "--x")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] out ['-n', '7', '--x']" for rank in range(3)]
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] err" for rank in range(3)]


def test_lines_are_never_mixed(script: Script) -> None:
    text = """
for turn in range(200):
    for piece in (f"<{rank} {turn} ", "x" * 50, ">\\n"):
        os.write(1, piece.encode())
os.write(1, b"no end")
"""
    done = run("-n", "4", script(text))
    lines = done.stdout.splitlines()
    assert len(lines) == 4 * 201
    assert all(re.fullmatch(r"\[(\d)\] (<\1 \d+ x{50}>|no end)", line) for line in lines)
    for rank in range(4):
        turns = [int(line.split()[2]) for line in lines if line.startswith(f"[{rank}] <")]
        assert turns == list(range(200))


def test_without_a_prefix(script: Script) -> None:
    done = run("-n", "2", "--no-prefix", script("print('out')"))
    assert done.stdout == "out\nout\n"


def test_a_line_longer_than_any_buffer(script: Script) -> None:
    done = run("-n", "2", script("print('x' * 300_000)"))
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] " + "x" * 300_000 for rank in range(2)]


def test_ranks_meet_again_and_again_and_hand_nothing_down(script: Script) -> None:
    text = """
from commrt.bootstrap import detect, join
for turn in range(5):
    info = detect()
    store = join(info, timeout_s=20)
    assert store.exchange("k", b"%d" % rank) == [b"%d" % r for r in range(info.size)]
    if turn != 2:
        store.close()
seen = "import os; print(sorted(n for n in os.environ if n.endswith('_FD')), len(os.listdir('/proc/self/fd')))"
print(subprocess.run([sys.executable, "-c", seen], close_fds=False, capture_output=True, text=True).stdout, end="")
"""
    done = run("-n", "4", script(text))
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [] 4" for rank in range(4)]


def test_the_secret_is_in_no_argument_and_no_variable(script: Script) -> None:
    text = """
secret = os.pread(int(os.environ["COMMRT_SECRET_FD"]), 100, 0)
assert len(secret) >= 16
for pid in (os.getpid(), os.getppid()):
    shown = open(f"/proc/{pid}/cmdline", "rb").read() + open(f"/proc/{pid}/environ", "rb").read()
    assert secret not in shown and secret.hex().encode() not in shown
"""
    assert run("-n", "2", script(text)).returncode == 0


def test_modules_and_programs(script: Script) -> None:
    path = script("print('module', sys.argv[1:])")
    done = subprocess.run(
        command("-n", "2", "-m", "prog", "--flag"),
        cwd=Path(path).parent,
        env=os.environ | {"PYTHONPATH": f"{Path(path).parent}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] module ['--flag']" for rank in range(2)]
    assert run("-n", "1", "sh", "-c", "echo $COMMRT_RANK of $COMMRT_SIZE").stdout == "[0] 0 of 1\n"


def test_rank_0_alone_reads_the_input(script: Script) -> None:
    done = run("-n", "2", script("print(repr(sys.stdin.read()))"), stdin="hello")
    assert sorted(done.stdout.splitlines()) == ["[0] 'hello'", "[1] ''"]


def test_the_first_failure_stops_the_others(script: Script) -> None:
    text = """
if rank == 2:
    print("going down", flush=True)
    sys.exit(7)
time.sleep(100)
"""
    start = time.monotonic()
    done = run("-n", "4", script(text))
    assert done.returncode == 7
    assert done.stdout == "[2] going down\n"
    assert done.stderr.splitlines()[-1] == "commrt run: rank 2 failed with exit status 7; the other ranks were stopped"
    assert time.monotonic() - start < 10


def test_a_rank_killed_by_a_signal(script: Script) -> None:
    done = run("-n", "3", script("os.kill(os.getpid(), signal.SIGSEGV) if rank == 1 else time.sleep(100)"))
    assert done.returncode == 128 + signal.SIGSEGV
    assert done.stderr.splitlines()[-1].startswith("commrt run: rank 1 was killed by SIGSEGV")


def test_siblings_that_ignore_the_request_are_killed_with_their_children(script: Script) -> None:
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
if rank == 0:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(3)
time.sleep(100)
"""
    path = script(text)
    flag = Path(path).with_name("flag")
    process = subprocess.Popen(
        command("-n", "2", path, str(flag)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[1:]]
    flag.touch()
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert len(pids) == 4
    assert not any(map(is_alive, pids))


def test_children_left_behind_by_ranks_that_succeed_are_ended(script: Script) -> None:
    done = run("-n", "2", script("print(subprocess.Popen(['sleep', '100']).pid)"))
    assert done.returncode == 0
    pids = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_time_limit(script: Script) -> None:
    done = run("-n", "2", "--timeout", "1", script("print('up', flush=True)\ntime.sleep(100)"))
    assert done.returncode == 124
    assert done.stderr.splitlines()[-1].startswith("commrt run: the time limit passed")


@pytest.mark.parametrize(
    ("program", "status"), [("/no/such/program", 127), ("no-such-program", 127), ("/etc/passwd", 126)]
)
def test_a_program_that_cant_be_started(program: str, status: int) -> None:
    done = run("-n", "2", program)
    assert done.returncode == status
    assert done.stderr.startswith(f"commrt run: can't start {program}: ")
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away() -> None:
    process = subprocess.Popen(command("-n", "2", "yes"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() in (b"[0] y\n", b"[1] y\n")
    process.stdout.close()
    assert process.wait(20) == 128 + signal.SIGPIPE
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.fixture
def running(script: Script) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A job of two ranks with a child each, up and waiting, and their process numbers."""
    text = """
child = subprocess.Popen(["sleep", "100"])
counts = []
signal.signal(signal.SIGINT, lambda *_: counts.append(1))
signal.signal(signal.SIGTERM, lambda *_: counts.append(1))
print(os.getpid(), child.pid, flush=True)
while not counts:
    time.sleep(0.01)
time.sleep(0.3)
print("signals", len(counts), flush=True)
"""
    process = subprocess.Popen(
        command("-n", "2", script(text)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[1:]]
    assert len(pids) == 4
    yield process, pids
    process.kill()
    process.communicate()
    for pid in filter(is_alive, pids):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(running: tuple[subprocess.Popen[str], list[int]], signum: signal.Signals) -> None:
    process, pids = running
    os.killpg(process.pid, signum)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signum
    assert sorted(out.splitlines()) == ["[0] signals 1", "[1] signals 1"]
    assert err == f"commrt run: stopped by {signum.name}\n"
    assert not any(map(is_alive, pids))


def test_a_second_signal_kills(script: Script) -> None:
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(100)"
    process = subprocess.Popen(
        command("-n", "2", script(text)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert all(map(is_alive, pids))
    second = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - second < 2
    assert not any(map(is_alive, pids))


def test_the_launcher_killed_leaves_no_orphan(running: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = running
    process.kill()
    process.wait(10)
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_launch_as_a_function(script: Script) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    path = script("print(os.environ['EXTRA'], repr(sys.stdin.read()))\nsys.exit(5 if rank == 1 else 0)")
    before = len(os.listdir("/proc/self/fd"))
    status = launch([sys.executable, path], 2, env={"EXTRA": "more"}, stdout=out, stderr=err, name="commrt bench")
    assert status == 5
    assert b"[1] more ''\n" in out.getvalue()
    assert err.getvalue() == b"commrt bench: rank 1 failed with exit status 5; the other ranks were stopped\n"
    assert len(os.listdir("/proc/self/fd")) == before


def test_launch_refuses_no_ranks() -> None:
    with pytest.raises(InvalidArgument):
        launch(["true"], 0)


def test_launch_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_pid: int) -> int:
        raise OSError("no such call")

    monkeypatch.setattr(os, "pidfd_open", unavailable)
    out, err = io.BytesIO(), io.BytesIO()
    assert launch(["sh", "-c", "echo hi; exit $COMMRT_RANK"], 2, stdout=out, stderr=err) == 1
    assert b"[1] hi\n" in out.getvalue()


def test_ranks_outside_the_main_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    out = io.BytesIO()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch, ["echo", "hi"], 2, stdout=out, stderr=out).result(20) == 0
    assert sorted(out.getvalue().splitlines()) == [b"[0] hi", b"[1] hi"]

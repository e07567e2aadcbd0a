"""Jobs on several nodes: one launcher each, on one host's loopback address or in network namespaces of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commrt.errors import ConfigError
from commrt.launcher import launch
from commrt.launching.nodes import Node
from commrt.plugins import default_registry

COMMRT = [sys.executable, "-m", "commrt"]
LIMIT_S = 60
FOREIGN = ("COMMRT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_")

# Every rank prints who it is, then does what its arguments say.
PROGRAM = """
import os, signal, sys, time
import numpy as np
import commrt
with commrt.init(timeout=20) as comm:
    x = np.full(4, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    print(f"rank {comm.rank} of {comm.size} local {os.environ['COMMRT_LOCAL_RANK']} has {x[0]:g}", flush=True)
    if sys.argv[1:] == [str(comm.rank), "exits"]:
        sys.exit(7)
    if sys.argv[1:] == [str(comm.rank), "crashes"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1:]:
        time.sleep(100)
"""


@dataclass
class Done:
    """How a launcher ended."""

    status: int
    out: list[str]
    err: str


class Launchers:
    """Launchers of one job, one a node; those that still run at the end are killed."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, node: int, command: list[str], *, nodes: int = 2, n: int = 2, inside: list[str] | None = None, **env: str
    ) -> subprocess.Popen[str]:
        """`commrt run` or `commrt bench`, as node number `node`. `inside`: a command that runs it elsewhere."""
        flags = ["-n", n, "--nodes", nodes, "--node-rank", node, "--rendezvous", self.rendezvous]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        argv = [*(inside or []), *COMMRT, command[0], *map(str, flags), *command[1:]]
        process = subprocess.Popen(
            argv,
            env={**inherited, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def end(self) -> list[Done]:
        """Wait for all."""
        done = []
        for process in self.processes:
            out, err = process.communicate(timeout=LIMIT_S)
            done.append(Done(process.returncode, sorted(out.splitlines()), err))
        return done


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    jobs = Launchers()
    yield jobs
    for process in jobs.processes:
        process.kill()
        process.communicate()


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def secret_file(tmp_path: Path) -> Callable[..., str]:
    def write(secret: str | None = None, mode: int = 0o600) -> str:
        path = tmp_path / f"secret-{secrets.token_hex(4)}"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16) if secret is None else secret)
        path.chmod(mode)
        return str(path)

    return write


def test_two_nodes_of_two_ranks(launchers: Launchers, program: str) -> None:
    for node in (1, 0):
        launchers.start(node, ["run", program])
    second, first = launchers.end()
    assert (first.status, first.err) == (second.status, second.err) == (0, "")
    assert first.out == [f"[{rank}] rank {rank} of 4 local {rank} has 10" for rank in (0, 1)]
    assert second.out == [f"[{rank}] rank {rank} of 4 local {rank - 2} has 10" for rank in (2, 3)]


def test_flags_win_over_what_launchers_around_say(launchers: Launchers, program: str) -> None:
    around = {
        **{"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"},
        **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        **{"COMMRT_RANK": "7", "COMMRT_SIZE": "8", "COMMRT_RENDEZVOUS": "192.0.2.1:1", "COMMRT_INSECURE": "1"},
    }
    for node in (0, 1):
        launchers.start(node, ["run", program], n=1, **around)
    first, second = launchers.end()
    assert (first.status, first.out) == (0, ["[0] rank 0 of 2 local 0 has 3"])
    assert (second.status, second.out) == (0, ["[1] rank 1 of 2 local 0 has 3"])


def test_bench_tells_on_each_node(launchers: Launchers, secret_file: Callable[..., str]) -> None:
    secret = secret_file()
    for node in (0, 1):
        launchers.start(node, ["bench", "all_reduce", "-e", "64", "--iters", "2"], COMMRT_SECRET_FILE=secret, RANK="1")
    first, second = launchers.end()
    for done in (first, second):
        assert (done.status, done.err) == (0, "")
        assert "# Out of bounds values : 0 OK" in done.out
    table = [line.split() for line in first.out if not line.startswith("#")]
    assert [cells[8] for cells in table] == ["0", "0"]
    assert sum(line.startswith("#  Rank") for line in first.out) == 4
    assert all(line.startswith("#") for line in second.out)


@pytest.mark.parametrize(
    ("what", "status", "story"),
    [("exits", 7, "failed with exit status 7"), ("crashes", 137, "was killed by SIGKILL")],
)
def test_ranks_that_fail_end_those_of_other_nodes(
    launchers: Launchers, program: str, what: str, status: int, story: str
) -> None:
    for node in (0, 1):
        launchers.start(node, ["run", program, "3", what])
    began = time.monotonic()
    for done in launchers.end():
        assert done.status == status
        (line,) = [line for line in done.err.splitlines() if line.startswith("commrt run: ")]
        assert line == f"commrt run: rank 3 on node 1 (ranks 2, 3) {story}; the other ranks were stopped"
    assert time.monotonic() - began < 30


def test_a_launcher_that_is_killed_ends_the_job_elsewhere(launchers: Launchers, program: str) -> None:
    first, second = (launchers.start(node, ["run", program, "none", "fails"]) for node in (0, 1))
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[")
    second.kill()
    done = launchers.end()[0]
    assert done.status != 0
    assert "commrt run: node 1 (ranks 2, 3) is gone" in done.err


def test_the_node_of_the_store_that_is_killed_ends_the_job_elsewhere(launchers: Launchers, program: str) -> None:
    first, second = (launchers.start(node, ["run", program, "none", "fails"]) for node in (0, 1))
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[")
    first.kill()
    done = launchers.end()[1]
    assert done.status != 0
    assert "commrt run: node 0 (ranks 0, 1) is gone" in done.err


def test_an_interrupt_on_one_node_ends_all(launchers: Launchers, program: str) -> None:
    first, second = (launchers.start(node, ["run", program, "none", "fails"]) for node in (0, 1))
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[")
    second.send_signal(signal.SIGINT)
    for done in launchers.end():
        assert done.status == 130
        assert done.err.splitlines()[-1] == "commrt run: node 1 (ranks 2, 3) was stopped by SIGINT"


def test_a_program_that_cant_be_started_on_one_node(launchers: Launchers, program: str) -> None:
    launchers.start(0, ["run", program, "none", "fails"])
    launchers.start(1, ["run", "/no/such/program"])
    first, second = launchers.end()
    assert (first.status, second.status) == (1, 127)
    assert first.err.splitlines()[-1].startswith("commrt run: node 1 (ranks 2, 3) could not start its ranks")


def test_a_node_that_never_comes_is_named(launchers: Launchers, program: str) -> None:
    launchers.start(0, ["run", program], nodes=3, COMMRT_INIT_TIMEOUT_S="6")
    launchers.start(2, ["run", program], nodes=3, COMMRT_INIT_TIMEOUT_S="30")
    first, third = launchers.end()
    assert (first.status, third.status) == (1, 1)
    for done, timeout_s in ((first, 6), (third, 30)):
        assert done.err == f"commrt: node 1 (ranks 2, 3) did not come to {launchers.rendezvous} within {timeout_s} s\n"


def test_no_node_0(launchers: Launchers, program: str) -> None:
    launchers.start(1, ["run", program], COMMRT_INIT_TIMEOUT_S="1")
    (done,) = launchers.end()
    assert done.status == 1
    assert done.err.startswith(f"commrt: node 0 (ranks 0, 1) did not come to {launchers.rendezvous} within 1 s")
    assert "Connection refused" in done.err


def test_a_rendezvous_port_that_stays_in_use(launchers: Launchers, program: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        launchers.rendezvous = f"127.0.0.1:{other.getsockname()[1]}"
        launchers.start(0, ["run", program], COMMRT_INIT_TIMEOUT_S="1")
        (done,) = launchers.end()
    assert done.status == 1
    assert "the port stayed in use by another process" in done.err.splitlines()[-1]


def test_nodes_that_differ_in_number_of_ranks(launchers: Launchers, program: str) -> None:
    for node in (0, 1):
        launchers.start(node, ["run", program], n=1 + node)
    for done in launchers.end():
        assert done.status == 2
        assert "-n differs: 1 on node 0, 2 on node 1" in done.err


def test_two_launchers_with_one_node_rank(launchers: Launchers, program: str) -> None:
    for node in (0, 1, 1):
        launchers.start(node, ["run", program], nodes=3)
    for done in launchers.end():
        assert done.status == 1
        assert "node 1 joined twice" in done.err


def test_a_wrong_secret(launchers: Launchers, program: str, secret_file: Callable[..., str]) -> None:
    own = [secret_file(), secret_file()]
    for node in (0, 1):
        timeout_s = ("6", "30")[node]
        launchers.start(node, ["run", program], COMMRT_SECRET_FILE=own[node], COMMRT_INIT_TIMEOUT_S=timeout_s)
    first, second = launchers.end()
    assert (first.status, second.status) == (1, 1)
    assert second.err == f"commrt: node 0 at {launchers.rendezvous} was given another secret than this node\n"
    assert "node 1 (ranks 2, 3) did not come" in first.err
    for secret in own:
        assert Path(secret).read_text() not in first.err + second.err


@pytest.mark.parametrize(
    ("secret", "mode", "message"),
    [(None, 0o640, "mode 0600"), ("short", 0o600, "holds 5 bytes"), ("missing", 0, "can't be read")],
)
def test_secret_files_that_are_refused(
    launchers: Launchers, program: str, secret_file: Callable[..., str], secret: str | None, mode: int, message: str
) -> None:
    path = "/no/such/file" if secret == "missing" else secret_file(secret, mode)
    launchers.start(0, ["run", program], COMMRT_SECRET_FILE=path)
    (done,) = launchers.end()
    assert (done.status, done.out) == (2, [])
    assert f"COMMRT_SECRET_FILE={path}" in done.err
    assert message in done.err


def test_beyond_loopback_a_secret_is_needed(launchers: Launchers, program: str) -> None:
    launchers.rendezvous = "192.0.2.1:29400"
    launchers.start(1, ["run", program])
    launchers.start(1, ["run", "--insecure", program], COMMRT_INIT_TIMEOUT_S="1")
    refused, allowed = launchers.end()
    assert refused.status == 2
    assert "is not a loopback address and there is no secret: set COMMRT_SECRET_FILE" in refused.err
    assert allowed.status == 1
    assert "node 0 (ranks 0, 1)" in allowed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((None, 0, None, False), "--node-rank given without --nodes"),
        ((None, None, "a:1", True), "--rendezvous and --insecure given without --nodes"),
        ((2, None, None, False), "--nodes 2 needs --node-rank and --rendezvous"),
        ((2, 1, None, False), "--nodes 2 needs --rendezvous"),
        ((2, 2, "a:1", False), "--node-rank is 2, and must lie within 0..1"),
        ((2, -1, "a:1", False), "--node-rank is -1, and must lie within 0..1"),
        ((0, None, None, False), "--nodes is 0"),
        ((2, 0, "a", False), "is not host:port"),
        ((1, None, None, True), "--nodes 1 needs --rendezvous"),
    ],
)
def test_flags_that_contradict(flags: tuple[int | None, int | None, str | None, bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Node.from_flags(*flags)


@pytest.mark.parametrize("command", [["run"], ["bench", "all_reduce"]], ids=["run", "bench"])
def test_bad_flags_are_one_line(command: list[str]) -> None:
    flags = ["--nodes", "2", "--node-rank", "0", "--rendezvous", "0.0.0.0:7000"]
    done = subprocess.run(
        [*COMMRT, *command, *flags, *(["true"] if command == ["run"] else [])],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "names no address of node 0" in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_node_leaves_nothing_behind() -> None:
    assert Node.from_flags(1, 0, None, False) is None
    with socket.create_server(("127.0.0.1", 0)) as free:
        node = Node(0, 1, f"127.0.0.1:{free.getsockname()[1]}")
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull, "wb") as nowhere:
        assert launch(["true"], 2, node=node, stdout=nowhere, stderr=nowhere) == 0
        with pytest.raises(FileNotFoundError):
            launch(["/no/such/program"], 2, node=node, stdout=nowhere, stderr=nowhere)
    assert len(os.listdir("/proc/self/fd")) == before


@dataclass(frozen=True)
class Namespaces:
    """Two network namespaces with a pair of interfaces between them; the first has 10.83.0.1."""

    names: tuple[str, str]

    def inside(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[node]]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    tag = secrets.token_hex(3)
    names = (f"crt-{tag}-0", f"crt-{tag}-1")
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ip("link", "add", f"v{tag}0", "netns", names[0], "type", "veth", "peer", f"v{tag}1", "netns", names[1])
            for node, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.83.0.{node + 1}/24", "dev", f"v{tag}{node}")
                ip("-n", name, "link", "set", f"v{tag}{node}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        yield Namespaces(names)


def test_bench_between_network_namespaces(
    launchers: Launchers, namespaces: Namespaces, secret_file: Callable[..., str]
) -> None:
    if "tcp" not in default_registry().names("transports"):
        pytest.skip("no transport that joins hosts here: tcp")
    launchers.rendezvous = "10.83.0.1:29400"
    secret = secret_file()
    command = ["bench", "all_reduce", "-e", "256K", "-f", "32", "--iters", "3", "--transport", "tcp"]
    for node in (0, 1):
        launchers.start(node, command, inside=namespaces.inside(node), COMMRT_SECRET_FILE=secret)
    first, second = launchers.end()
    for done in (first, second):
        assert done.status == 0, done.err
        assert "# Out of bounds values : 0 OK" in done.out
    assert "# links: tcp algorithm: by size" in first.out
    assert {line.split()[8] for line in first.out if not line.startswith("#")} == {"0"}


def test_the_meeting_of_launchers_is_between_namespaces(
    launchers: Launchers, namespaces: Namespaces, secret_file: Callable[..., str]
) -> None:
    launchers.rendezvous = "10.83.0.1:29400"
    secret = secret_file()
    for node in (0, 1):
        launchers.start(
            node, ["run", "sh", "-c", "echo $COMMRT_RENDEZVOUS; exit $COMMRT_RANK"],
            inside=namespaces.inside(node), n=1, COMMRT_SECRET_FILE=secret,
        )  # fmt: skip
    first, second = launchers.end()
    assert (first.status, second.status) == (1, 1)
    assert first.out == ["[0] 10.83.0.1:29400"]
    assert first.err == second.err
    assert "rank 1 on node 1 (rank 1) failed with exit status 1" in first.err

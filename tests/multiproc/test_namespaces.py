"""Two hosts, as network namespaces with a cable between them: mixed links, and a cable that is pulled.

What a network namespace can't show: another kernel, a real network's delay and loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

PATIENCE_S = 60.0
BOUND_S = 3.0  # beyond a deadline
RANK = str(Path(__file__).parent / "_programs" / "flow_rank.py")
FOREIGN = ("COMMRT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_")
OWN_PROCESSES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass
class Hosts:
    """Two network namespaces. Each has one interface besides `lo`: `cable0` with 10.84.0.1, `cable1` with 10.84.0.2."""

    names: tuple[str, str]
    secret: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, host: int, argv: list[str], *, inside: list[str] | None = None, **env: str
    ) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *(inside or []), *argv],
            env={**inherited, "COMMRT_SECRET_FILE": self.secret, **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def pull(self, host: int) -> None:
        """Take the host's end of the cable down. Nobody is told: no connection is closed or reset."""
        ip("-n", self.names[host], "link", "set", f"cable{host}", "down")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    tag = secrets.token_hex(3)
    names = (f"crt-{tag}-a", f"crt-{tag}-b")
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(16))
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "cable1", "netns", names[1])
            for host, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.84.0.{host + 1}/24", "dev", f"cable{host}")
                ip("-n", name, "link", "set", f"cable{host}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        made = Hosts(names, str(secret))
        stack.callback(end, made)
        yield made


def end(hosts: Hosts) -> None:
    for process in hosts.processes:
        process.kill()
        process.communicate()


def test_shared_memory_within_hosts_and_tcp_between(hosts: Hosts) -> None:
    """Two hosts of two ranks, with processes of their own too, so that shared memory ends where a host does."""
    for host in (0, 1):
        place = ["-n", "2", "--nodes", "2", "--node-rank", str(host), "--rendezvous", "10.84.0.1:29500"]
        argv = [sys.executable, "-m", "commrt", "bench", "all_reduce", "-e", "1M", "-f", "64", "--iters", "3", *place]
        hosts.start(host, argv, inside=OWN_PROCESSES)
    told = [process.communicate(timeout=PATIENCE_S) for process in hosts.processes]
    for process, (out, err) in zip(hosts.processes, told, strict=True):
        assert process.returncode == 0, err
        assert "# Out of bounds values : 0 OK" in out
    table = [line.split() for line in told[0][0].splitlines() if not line.startswith("#")]
    assert {cells[8] for cells in table} == {cells[12] for cells in table} == {"0"}
    assert "shm" in links(told[0][0]) and "tcp" in links(told[0][0])


def links(out: str) -> str:
    return next(line for line in out.splitlines() if line.startswith("# links:"))


class Flow:
    """Ranks that all-reduce without an end, two on each host. What they say, as it comes."""

    def __init__(self, hosts: Hosts, timeout_s: float) -> None:
        self._said: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._readers = []
        for rank in range(4):
            argv = [sys.executable, RANK, str(rank), "4", "10.84.0.1:29501", str(timeout_s)]
            process = hosts.start(rank // 2, argv, COMMRT_TRANSPORT="tcp", COMMRT_NET_INTERFACE="cable")
            said = self._said[rank] = queue.SimpleQueue()
            assert process.stdout is not None
            self._readers.append(threading.Thread(target=self._read, args=(process.stdout, said), daemon=True))
            self._readers[-1].start()

    @staticmethod
    def _read(lines: IO[str], said: queue.SimpleQueue[dict[str, Any]]) -> None:
        for line in lines:
            said.put(json.loads(line))

    def hear(self, rank: int, within_s: float = PATIENCE_S) -> dict[str, Any]:
        try:
            return self._said[rank].get(timeout=within_s)
        except queue.Empty:
            raise AssertionError(f"rank {rank} says nothing within {within_s} s") from None


@pytest.mark.parametrize(
    ("timeout_s", "error", "most_s"), [(3.0, "OperationTimeout", 3.0 + BOUND_S), (60.0, "PeerLost", 25.0)]
)
def test_a_cable_that_is_pulled(hosts: Hosts, timeout_s: float, error: str, most_s: float) -> None:
    """Each host's ranks name one of the other's: by the deadline, or once the link has not answered for long."""
    flow = Flow(hosts, timeout_s)
    for rank in range(4):
        assert flow.hear(rank)["flows"]
    hosts.pull(1)
    pulled = time.monotonic()
    facts = [flow.hear(rank, most_s + PATIENCE_S) for rank in range(4)]
    first = {host: min((facts[2 * host], facts[2 * host + 1]), key=lambda fact: fact["at"]) for host in (0, 1)}
    for host, fact in first.items():
        assert fact["error"] == error, facts
        assert fact["peer"] in (2 - 2 * host, 3 - 2 * host), facts
        assert f"rank {fact['peer']}" in fact["message"], facts
        if error == "PeerLost":
            assert "it can't be reached: its system has not answered" in fact["message"], facts
    for fact in facts:
        assert fact["at"] - pulled < most_s, facts

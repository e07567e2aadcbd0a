"""What launched this process, from arguments and environment variables. The launchers are rows of a table; a new one is
a new row.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from commrt.bootstrap.contract import FileRendezvous, LaunchInfo, Rendezvous, TcpRendezvous, TorchRendezvous
from commrt.bootstrap.net import parse_address, parse_port
from commrt.bootstrap.wire import MAX_WORLD
from commrt.errors import ConfigError

_SLURM_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


class _Variables:
    """The environment, remembering what was used of it. An empty variable counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.used: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return bool(self._environ.get(name))

    def get(self, name: str | None) -> str | None:
        value = self._environ.get(name) if name else None
        if name and value:
            self.used[name] = value
        return value or None

    def number(self, name: str | None, least: int, most: int) -> int | None:
        text = self.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise ConfigError(f"{name}={text[:40]} must be a whole number within {least}..{most}")
        return int(text)


@dataclass(frozen=True)
class Launcher:
    """One kind of launcher: the variables that tell a rank who it is.

    `job` names the variables that together name this launch, `processes` the launcher's own processes that do so where
    no variable does. `nested` is set by the launcher where it started the ranks itself, so that variables of a launcher
    around it don't contradict it. `generic` marks names that others use too: one of them alone is a fault only if no
    other launcher is there. `outermost` never contradicts. `inherits`: it may hand over descriptors. `agent_store` is
    "True" if it serves a store itself at MASTER_ADDR:MASTER_PORT.
    """

    name: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    job: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    nested: str | None = None
    generic: bool = False
    outermost: bool = False
    inherits: bool = False
    agent_store: str | None = None
    applies: Callable[[_Variables], bool] = lambda variables: True
    count_local: Callable[[_Variables], int | None] = lambda variables: None


def _is_slurm_step(variables: _Variables) -> bool:
    """The shell of a batch job has SLURM_PROCID=0 too, without being started as a rank: then there is neither a step
    nor a second task.
    """
    tasks = variables.number("SLURM_NTASKS", 1, MAX_WORLD)
    return variables.has("SLURM_STEP_ID") or (tasks is not None and tasks > 1)


def _count_slurm_tasks(variables: _Variables) -> int | None:
    """This node's part of a list like `4(x2),3`."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    node = variables.number("SLURM_NODEID", 0, MAX_WORLD)
    if text is None or node is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = _SLURM_TASKS.fullmatch(part)
        if match is None or len(counts) > MAX_WORLD:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text[:80]} is malformed")
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_WORLD)
    if node >= len(counts):
        raise ConfigError(f"SLURM_NODEID={node} is out of range for SLURM_STEP_TASKS_PER_NODE={text[:80]}")
    return counts[node]


LAUNCHERS = (
    Launcher(
        "COMMRT_*",
        "COMMRT_RANK",
        "COMMRT_SIZE",
        "COMMRT_LOCAL_RANK",
        "COMMRT_LOCAL_SIZE",
        nested="COMMRT_LAUNCHER",
        inherits=True,
    ),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        nested="TORCHELASTIC_RUN_ID",
        generic=True,
        agent_store="TORCHELASTIC_USE_AGENT_STORE",
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
        processes=("prterun", "prted", "prte", "mpirun", "orted"),
    ),
    Launcher(
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        job=("PMI_JOBID",),
        processes=("hydra_pmi_proxy", "hydra_bstrap_proxy", "mpiexec.hydra", "mpiexec.gforker"),
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        processes=("slurmstepd",),
        outermost=True,
        applies=_is_slurm_step,
        count_local=_count_slurm_tasks,
    ),
)


@dataclass(frozen=True)
class _Found:
    launcher: Launcher
    rank: int
    size: int
    variables: _Variables

    def __str__(self) -> str:
        return f"{self.launcher.rank}={self.rank} {self.launcher.size}={self.size}"


def detect(environ: Mapping[str, str], *, rank: int | None, size: int | None, rendezvous: str | None) -> LaunchInfo:
    """See `commrt.bootstrap.detect`."""
    secret_file = environ.get("COMMRT_SECRET_FILE") or None
    if rank is not None and size is not None and (rendezvous is not None or size == 1):
        _check_range("rank", rank, "size", size)
        place = None if rendezvous is None else _parse_place(rendezvous, "rendezvous")
        return LaunchInfo(rank, size, rank, size, "arguments", place, secret_file)
    found = _choose(list(_find(environ)))
    if found is None:
        return _without_launcher(_Variables(environ), rank, size, rendezvous, secret_file)
    _agree("rank", rank, found.launcher.rank, found.rank)
    _agree("size", size, found.launcher.size, found.size)
    local_rank, local_size = _locate(found)
    place = _place(found, rendezvous, local_size) if found.size > 1 else _named_place(found.variables, rendezvous)
    return LaunchInfo(
        found.rank, found.size, local_rank, local_size, found.launcher.name, place, secret_file, found.variables.used
    )


def _without_launcher(
    variables: _Variables, rank: int | None, size: int | None, rendezvous: str | None, secret_file: str | None
) -> LaunchInfo:
    if rank is None and size is None:
        if rendezvous is not None:
            raise ConfigError(
                f"rendezvous={rendezvous!r} is given, but neither arguments nor a launcher tell rank and size"
            )
        return LaunchInfo(0, 1, 0, 1, "none", None, secret_file)
    if rank is None or size is None:
        given, other = (f"rank={rank}", "size") if size is None else (f"size={size}", "rank")
        raise ConfigError(f"{given} is given without {other}, and no launcher tells it")
    _check_range("rank", rank, "size", size)
    place = _named_place(variables, rendezvous) or _master_place(variables)
    return LaunchInfo(rank, size, rank, size, "arguments", place, secret_file, variables.used)


def _find(environ: Mapping[str, str]) -> Iterator[_Found]:
    """Every launcher whose variables are there, in the order of the table."""
    lonely: ConfigError | None = None
    found = False
    for launcher in LAUNCHERS:
        variables = _Variables(environ)
        has = {name: variables.has(name) for name in (launcher.rank, launcher.size)}
        if not any(has.values()) or not launcher.applies(variables):
            continue
        if all(has.values()):
            found = True
            yield _read(launcher, variables)
            continue
        fault = ConfigError(
            "; ".join(f"{name}={environ[name][:40]} is set" if has[name] else f"{name} is not" for name in has)
        )
        if not launcher.generic:
            raise fault
        lonely = fault
    if lonely is not None and not found:
        raise lonely


def _read(launcher: Launcher, variables: _Variables) -> _Found:
    size = variables.number(launcher.size, 1, MAX_WORLD) or 1
    rank = variables.number(launcher.rank, 0, MAX_WORLD) or 0
    _check_range(launcher.rank, rank, launcher.size, size)
    return _Found(launcher, rank, size, variables)


def _choose(found: list[_Found]) -> _Found | None:
    """The first. The others must agree with it, unless they stand for a launch around it."""
    for other in found[1:]:
        first = found[0]
        around = first.variables.has(first.launcher.nested or "") or other.launcher.outermost or other.size == 1
        if not around and (first.rank, first.size) != (other.rank, other.size):
            raise ConfigError(
                f"contradictory launcher variables: {first} ({first.launcher.name}), {other} ({other.launcher.name})"
            )
    return found[0] if found else None


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if not 1 <= size <= MAX_WORLD:
        raise ConfigError(f"{size_name}={size} must lie within 1..{MAX_WORLD}")
    if not 0 <= rank < size:
        raise ConfigError(f"{rank_name}={rank} is out of range for {size_name}={size}")


def _agree(argument: str, given: int | str | None, name: str, told: int | str) -> None:
    if given is not None and given != told:
        raise ConfigError(f"contradiction: the argument {argument}={given}, the variable {name}={told}")


def _locate(found: _Found) -> tuple[int, int]:
    launcher, variables = found.launcher, found.variables
    size = variables.number(launcher.local_size, 1, MAX_WORLD) or launcher.count_local(variables) or found.size
    size_name = launcher.local_size or "local size"
    if size > found.size:
        raise ConfigError(f"{size_name}={size} exceeds {launcher.size}={found.size}")
    rank = variables.number(launcher.local_rank, 0, MAX_WORLD)
    if rank is None:
        return found.rank % size, size
    _check_range(str(launcher.local_rank), rank, size_name, size)
    return rank, size


def _place(found: _Found, rendezvous: str | None, local_size: int) -> Rendezvous | None:
    variables = found.variables
    named = _named_place(variables, rendezvous)
    if isinstance(named, TcpRendezvous) and found.launcher.inherits:
        listen_fd = variables.number("COMMRT_STORE_FD", 0, 1 << 20) if found.rank == 0 else None
        secret_fd = variables.number("COMMRT_SECRET_FD", 0, 1 << 20)
        insecure = variables.number("COMMRT_INSECURE", 0, 1) == 1
        return TcpRendezvous(named.host, named.port, listen_fd, secret_fd, insecure)
    if named is not None:
        return named
    master = _master_place(variables)
    if master and found.launcher.agent_store and variables.get(found.launcher.agent_store) == "True":
        restart = f"{variables.get('TORCHELASTIC_RUN_ID')}/{variables.get('TORCHELASTIC_RESTART_COUNT')}"
        return TorchRendezvous(master.host, master.port, f"commrt/{restart}")
    if master or local_size < found.size:
        return master
    return _private_place(found)


def _named_place(variables: _Variables, rendezvous: str | None) -> Rendezvous | None:
    told = variables.get("COMMRT_RENDEZVOUS")
    if told is not None:
        _agree("rendezvous", rendezvous, "COMMRT_RENDEZVOUS", told)
        return _parse_place(told, "COMMRT_RENDEZVOUS")
    return None if rendezvous is None else _parse_place(rendezvous, "rendezvous")


def _parse_place(text: str, source: str) -> Rendezvous:
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "tcp":
        return TcpRendezvous(*parse_address(rest if separator else text, source))
    parts = urlsplit(text)
    options = dict(parse_qsl(parts.query))
    host = options.pop("host", "127.0.0.1")
    if (
        scheme != "file"
        or parts.netloc not in ("", "localhost")
        or options
        or not parts.path.strip("/")
        or "\0" in text
    ):
        raise ConfigError(
            f"{source}={text[:200]!r} must be host:port or file:///path (with ?host=ADDRESS for rank 0's interface)"
        )
    return FileRendezvous(unquote(parts.path), host)


def _master_place(variables: _Variables) -> TcpRendezvous | None:
    host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if host is None or port is None:
        return None
    return TcpRendezvous(host, parse_port(port, "MASTER_PORT"))


def _private_place(found: _Found) -> FileRendezvous | None:
    """For launchers of one host that name no place: a file of this user, named after the launch."""
    job = [found.variables.get(name) for name in found.launcher.job]
    if not job or None in job:
        job = [_ancestor(found.launcher.processes)]
    if None in job:
        return None
    name = hashlib.sha256("\0".join((found.launcher.name, *map(str, job))).encode()).hexdigest()[:32]
    runtime = found.variables.get("XDG_RUNTIME_DIR")
    directory = f"{runtime}/commrt" if runtime and os.path.isdir(runtime) else f"/tmp/commrt-{os.geteuid()}"
    return FileRendezvous(f"{directory}/{name}", private=True)


def _ancestor(names: tuple[str, ...]) -> str | None:
    """The nearest process above this one that has one of these names, with its pid and the time it started."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            return None
        fields = tail.split()
        name = head.partition("(")[2]
        if name in {known[:15] for known in names}:
            return f"{name} {pid} {fields[19]}"
        pid = int(fields[1])
    return None

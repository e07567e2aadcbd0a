"""Where the benchmark's ranks come from: processes of its own, threads of this one, or a launcher around it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from commrt.bench import report
from commrt.bench.measure import measure
from commrt.bench.options import DEFAULT_RANKS, Options, backend_of, cells
from commrt.bench.progress import Progress
from commrt.bootstrap import detect
from commrt.errors import CommrtError, ConfigError, InvalidArgument, UnknownName
from commrt.plan import Plan
from commrt.plugins import default_registry
from commrt.selection import NATIVE

if TYPE_CHECKING:
    from commrt.launcher import Node


def run(options: Options, ranks: int | None, node: Node | None = None) -> int:
    """Measure, print, and return the exit status: 0, 1 for wrong data or a failed operation, 2 for bad arguments.

    Under a launcher this process is one rank of it; `ranks` must then be the launcher's number, or None. With `node`
    it starts its own ranks nevertheless, `ranks` of them on each node.
    """
    found = detect() if node is None else None
    if found is not None and found.launcher != "none":
        if ranks not in (None, found.size):
            raise ConfigError(f"-n is {ranks}, but {found.launcher} started {found.size} ranks")
        return run_rank(options)
    ranks = DEFAULT_RANKS if ranks is None else ranks
    if ranks < 1:
        raise InvalidArgument(f"-n is {ranks}, and must be at least 1")
    size = ranks * (node.count if node else 1)
    if options.root >= size:
        raise InvalidArgument(f"-r is {options.root}, and must lie within -1..{size - 1}")
    _check_names(options)
    if not _joins_threads(options.transport):
        return _run_processes(options, ranks, node)
    if node is not None:
        raise ConfigError(f"--transport {options.transport} contradicts --nodes: its ranks are threads of one process")
    return _run_threads(options, ranks)


def _library(options: Options) -> str | None:
    """The library that is to carry everything."""
    libraries = set(default_registry().names("providers")) - {NATIVE}
    return options.algorithm if options.algorithm in libraries else None


def _joins_threads(transport: str | None) -> bool:
    return transport is not None and default_registry().require("transports", transport).probe().joins == "threads"


def _check_names(options: Options) -> None:
    """What every rank would find out, once and before any is started."""
    registry = default_registry()
    if options.transport not in (None, *registry.names("transports")):
        raise UnknownName("transport", str(options.transport), registry.names("transports"))
    for name in options.backends:
        registry.require("backends", name)
    collective = "send" if options.collective == "sendrecv" else options.collective
    pairs = [name.split("/", 1) for name in registry.names("algorithms") if "/" in name]
    algorithms = [name for of, name in pairs if of == collective]
    known = [*algorithms, *registry.names("providers")]
    if options.algorithm not in (None, *known):
        raise UnknownName(f"{collective} algorithm", str(options.algorithm), known)


def _run_processes(options: Options, ranks: int, node: Node | None) -> int:
    from commrt.launcher import launch

    options = msgspec.structs.replace(options, told_by_each_node=node is not None)
    argv = [sys.executable, "-m", "commrt.bench", msgspec.json.encode(options).decode()]
    rows = 0
    if node is None or node.rank == 0:
        rows = sum(1 for _ in cells(options, ranks * (node.count if node else 1)))
    with Progress(rows) as progress:
        return launch(argv, ranks, node=node, prefix=False, stdout=cast(BinaryIO, progress), name="commrt bench")


def _run_threads(options: Options, ranks: int) -> int:
    from commrt.testing.world import World

    settings: dict[str, Any] = {} if options.timeout_s is None else {"timeout_s": options.timeout_s}
    settings |= {} if _library(options) is None else {"providers": _library(options)}
    backends = [backend_of(options, rank) or "cpu" for rank in range(ranks)]
    with World(ranks, transport=str(options.transport), backends=backends, **settings) as world:
        return max(world.run(lambda comm: report_rank(comm, options)))


def run_rank(options: Options) -> int:
    """Be one rank of a launched job; returns its exit status, having said on stderr what went wrong."""
    import commrt

    rank = detect().rank
    try:
        backend = backend_of(options, rank)
        with commrt.init(
            transport=options.transport, backend=backend, providers=_library(options), timeout=options.timeout_s
        ) as comm:
            return report_rank(comm, options)
    except (CommrtError, OSError) as error:
        # Every rank has the same arguments: the first says what is wrong with them.
        if not isinstance(error, InvalidArgument) or rank == 0:
            print(f"commrt bench: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def report_rank(comm: Any, options: Options) -> int:
    """Measure; on rank 0, print and write. Returns 1 if this rank saw or heard of wrong data, else 0.

    The first rank of any other node prints what is below the table, if the options say so.
    """
    began, places = time.time(), _places(comm)
    if comm.rank == 0:
        report.say(sys.stdout, report.header(options, places, comm.links.values(), _digest(comm, options)))
    rows = []
    for row in measure(comm, options):
        rows.append(row)
        if comm.rank == 0:
            report.say(sys.stdout, [report.line(row, options)])
    if comm.rank == 0 or (options.told_by_each_node and detect().local_rank == 0):
        report.say(sys.stdout, report.footer(rows))
    if comm.rank == 0 and options.json is not None:
        report.write_json(options.json, report.document(options, places, rows, began, os.environ))
    return 1 if report.wrong_elements(rows) else 0


def _places(comm: Any) -> list[report.Place]:
    place = report.Place(comm.rank, os.getpid(), socket.gethostname()[:64], comm.backend.name, _levels(comm))
    own = msgspec.json.encode(place)
    return [msgspec.json.decode(one, type=report.Place) for one in comm.exchange(own)]


def _digest(comm: Any, options: Options) -> str:
    """Of the forced algorithm's plan: the same on every kind of link, as the plan is."""
    named = default_registry().names("providers")
    if options.algorithm is None or options.algorithm in named or options.collective == "sendrecv":
        return ""
    algorithm = comm.setup.registry.require("algorithms", f"{options.collective}/{options.algorithm}")
    plan: Plan = algorithm.plan(comm.size, root=max(options.root, 0))
    return plan.digest[:16]


def _levels(comm: Any) -> tuple[str, ...]:
    transports = [comm.setup.registry.require("transports", name) for name in sorted(set(comm.links.values()))]
    levels = dict.fromkeys(plugin.probe().level for plugin in (comm.backend, *transports))
    return tuple(level[:80] for level in levels if level)[:8]

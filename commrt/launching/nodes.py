"""A job on several nodes: one launcher on each, which meet before their ranks do, and end together.

They meet in a store of their own at the rendezvous address, on node 0. Once all are there, the first launcher stops
listening and hands the socket to rank 0, whose store is at the same address. While ranks run, the launchers tell one
another in rounds how their part stands; so all of them see the same outcome in the same round.
"""

from __future__ import annotations

import ipaddress
import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from commrt.bootstrap import net
from commrt.bootstrap.auth import Hello
from commrt.bootstrap.secrets import read_secret_file, require_secret
from commrt.bootstrap.server import StoreServer
from commrt.bootstrap.store import TcpStore, connect
from commrt.bootstrap.wire import MAX_WORLD, PROTOCOL_VERSION
from commrt.bootstrap.world import name_ranks
from commrt.errors import AuthenticationError, BootstrapError, BootstrapTimeout, ConfigError
from commrt.launching.ending import LOST, Ending
from commrt.launching.meeting import Meeting
from commrt.settings import registry

if TYPE_CHECKING:
    from types import TracebackType

PERIOD_S = 0.5
SILENCE_S = 30.0
_LAST_WORDS_S = 3.0
_REMEDY = "set COMMRT_SECRET_FILE, a file of mode 0600 (--insecure lets anyone who reaches the port join)"


@dataclass(frozen=True)
class Node:
    """One of `count` nodes, all of which have as many ranks: those of node I come behind those of node I-1.

    `rendezvous` is HOST:PORT, an address of node 0. `insecure`: do without a secret, even beyond this host.
    """

    rank: int
    count: int
    rendezvous: str
    insecure: bool = False

    @classmethod
    def from_flags(
        cls, nodes: int | None, node_rank: int | None, rendezvous: str | None, insecure: bool
    ) -> Node | None:
        """What the command line says; None for this host alone. Raises ConfigError for flags that contradict."""
        given = {"--node-rank": node_rank is not None, "--rendezvous": rendezvous is not None, "--insecure": insecure}
        if nodes is None:
            if any(given.values()):
                flags = " and ".join(flag for flag, is_given in given.items() if is_given)
                raise ConfigError(f"{flags} given without --nodes")
            return None
        if not 1 <= nodes <= MAX_WORLD:
            raise ConfigError(f"--nodes is {nodes}, and must lie within 1..{MAX_WORLD}")
        if not 0 <= (node_rank or 0) < nodes:
            raise ConfigError(f"--node-rank is {node_rank}, and must lie within 0..{nodes - 1} for --nodes {nodes}")
        if nodes == 1 and rendezvous is None and not insecure:
            return None
        needed = ["--rendezvous"] if nodes == 1 else ["--node-rank", "--rendezvous"]
        missing = [flag for flag in needed if not given[flag]]
        if rendezvous is None or missing:
            raise ConfigError(f"--nodes {nodes} needs {' and '.join(missing)}")
        net.parse_address(rendezvous, "--rendezvous")
        return cls(node_rank or 0, nodes, rendezvous, insecure)


class Nodes:
    """The launchers of all nodes, as one of them sees it. Of one thread, which hears of the others by `fileno`."""

    def __init__(self, node: Node, store: TcpStore, meeting: Meeting) -> None:
        self.node, self.meeting = node, meeting
        self.outcome: tuple[Ending, int | None] | None = None
        self._store = store
        self._mine: Ending | None = None
        self._changed = threading.Event()
        self._ear, self._mouth = socket.socketpair()
        self._thread = threading.Thread(target=self._hear, name="commrt-nodes", daemon=True)

    @classmethod
    def meet(cls, node: Node, n: int, environ: Mapping[str, str]) -> Nodes:
        """Once the launchers of all nodes are there, each with `n` ranks.

        Raises ConfigError for what can't be used, BootstrapTimeout naming the nodes that did not come within the init
        timeout of `environ`, BootstrapError.
        """
        if n * node.count > MAX_WORLD:
            raise ConfigError(f"{node.count} nodes of {n} ranks are more than {MAX_WORLD} ranks")
        settings = {setting.name: setting for setting in registry()}
        timeout_s = float(settings["init_timeout_s"].resolve(environ)[0])
        secret_file = settings["secret_file"].resolve(environ)[0]
        secret = read_secret_file(secret_file) if secret_file else b""
        try:
            return _meet(node, n, secret, time.monotonic() + timeout_s)
        except BootstrapTimeout as error:
            raise _absent(error, node, n, timeout_s) from None
        except AuthenticationError:
            raise AuthenticationError(f"node 0 at {node.rendezvous} was given another secret than this node") from None
        except BootstrapError as error:
            raise BootstrapError(f"the nodes can't meet at {node.rendezvous}: {_plain(error)}") from None

    def report(self, ending: Ending) -> None:
        """How this node's ranks ended, if they have, or why they are being stopped. A failure stays one."""
        if self._mine is None or not self._mine.status:
            self._mine = ending
            self._changed.set()

    def heard(self) -> bool:
        """Take the news that made this readable; whether they are of a failure."""
        with suppress(BlockingIOError):
            self._ear.recv(1, socket.MSG_DONTWAIT)
        return self.outcome is not None and bool(self.outcome[0].status)

    def fileno(self) -> int:
        """Readable once there is an outcome that nobody has heard."""
        return self._ear.fileno()

    def words(self, node: int | None) -> str:
        """A node and its ranks."""
        return "" if node is None else _words([node], self.meeting.local_size)

    def __enter__(self) -> Nodes:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.report(Ending(LOST, "launcher"))
            self._thread.join(_LAST_WORDS_S)
        self._store.close()
        self._thread.join()
        if self.meeting.listener is not None:
            self.meeting.listener.close()
        for end in (self._ear, self._mouth):
            end.close()

    def _hear(self) -> None:
        try:
            self.outcome = self._rounds()
        except BootstrapError as error:
            self.outcome = Ending(LOST, "lost"), _culprit(error)
        except msgspec.DecodeError:
            self.outcome = Ending(LOST, "lost"), None
        self._mouth.send(b"\0")

    def _rounds(self) -> tuple[Ending, int | None]:
        for turn in itertools.count():
            self._changed.clear()
            mine = msgspec.json.encode(self._mine)
            said = self._store.exchange(f"round {turn}", mine, SILENCE_S)
            outcome = _judge([msgspec.json.decode(one, type=Ending | None) for one in said])
            if outcome is not None:
                return outcome
            self._changed.wait(PERIOD_S)
        raise AssertionError("counting has no end")


def _judge(endings: Sequence[Ending | None]) -> tuple[Ending, int | None] | None:
    """The job's ending and whose it is, once there is one: any failure, or that all have ended well."""
    failed = [(ending, node) for node, ending in enumerate(endings) if ending is not None and ending.status]
    if failed:
        return max(failed, key=lambda one: one[0].likelihood)
    return (Ending(), None) if None not in endings else None


def _meet(node: Node, n: int, secret: bytes, deadline: float) -> Nodes:
    addresses = net.resolve(*net.parse_address(node.rendezvous, "--rendezvous"), deadline)
    for address in addresses:
        if ipaddress.ip_address(str(address.sockaddr[0]).partition("%")[0]).is_unspecified:
            raise ConfigError(f"--rendezvous {node.rendezvous} names no address of node 0: others could not reach it")
    if not node.insecure:
        require_secret(secret, node.rendezvous, addresses, _REMEDY)
    if node.rank:
        meeting = Meeting(node.rendezvous, secret, None, node.rank * n, n, node.count * n, node.insecure)
        return _enter(node, meeting, addresses, deadline, _nothing)
    listener = net.listen(addresses, deadline)
    address = net.Address(listener.family, listener.getsockname())
    try:
        server = StoreServer(listener.dup(), secret)
        try:
            server.open_world(0, node.count, "node")
            meeting = Meeting(str(address), secret, listener, 0, n, node.count * n, node.insecure)
            return _enter(node, meeting, [address], deadline, server.stop, server.stop_listening)
        except BaseException:
            server.stop()
            raise
    except BaseException:
        listener.close()
        raise


def _nothing() -> None:
    pass


def _enter(
    node: Node,
    meeting: Meeting,
    addresses: list[net.Address],
    deadline: float,
    leave: Callable[[], None],
    all_here: Callable[[], None] = _nothing,
) -> Nodes:
    hello = Hello(PROTOCOL_VERSION, node.count, node.rank, 0)
    link = connect(lambda: (f"at {node.rendezvous}", addresses, meeting.secret), hello, deadline)
    store = TcpStore(link, node.rank, node.count, SILENCE_S, leave)
    try:
        left_s = max(0.0, deadline - time.monotonic())
        counts = store.exchange("ranks", b"%d" % meeting.local_size, left_s)
        if len(set(counts)) > 1:
            told = ", ".join(f"{count[:10].decode(errors='replace')} on node {k}" for k, count in enumerate(counts))
            raise ConfigError(f"-n differs: {told}")
        # No rank of any node may come before the launcher of node 0 has stopped taking connections.
        all_here()
        store.barrier("start", left_s)
    except BaseException:
        store.close()
        raise
    return Nodes(node, store, meeting)


def _absent(error: BootstrapTimeout, node: Node, n: int, timeout_s: float) -> BootstrapTimeout:
    missing = [number for number in error.missing if number != node.rank]
    if not missing:
        return BootstrapTimeout(_plain(error))
    told = f" ({_plain(error)})" if missing == [0] else ""
    return BootstrapTimeout(
        f"{_words(missing, n)} did not come to {node.rendezvous} within {timeout_s:g} s{told}", missing
    )


def _plain(error: BootstrapError) -> str:
    """Its message without the ranks that it was raised with, which are nodes here."""
    return str(error).removesuffix(f" [{error.context}]")


def _culprit(error: BootstrapError) -> int | None:
    missing = error.missing if isinstance(error, BootstrapTimeout) else []
    return missing[0] if missing else error.context.peer


def _words(nodes: Sequence[int], n: int) -> str:
    return ", ".join(f"node {node} ({name_ranks(range(node * n, node * n + n))})" for node in nodes[:20]) + (
        f" and {len(nodes) - 20} more nodes" if len(nodes) > 20 else ""
    )

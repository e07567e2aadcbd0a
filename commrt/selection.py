"""Which algorithm, or which other library, carries a collective, and why.

A choice depends only on what all ranks know alike: collective, total bytes, number of ranks, kind of memory, what the
links offer, which libraries were joined, and what they support. A measured table ranks algorithms and libraries; what
it names and this job can't run is passed over, in the table's order. Forcing is strict: it runs, or the call fails.

Bytes are totals, as nccl-tests counts them: all_gather, reduce_scatter, all_to_all, gather and scatter count the groups
of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from commrt.algorithm import Algorithm
from commrt.carried import Carried, Element
from commrt.errors import ConfigError, InvalidArgument, Unavailable, UnknownName, UnsupportedType
from commrt.plan import COLLECTIVES, MAX_RANKS, groups
from commrt.provider import Provider
from commrt.settings import parse_nbytes

NATIVE = "native"
MAX_NBYTES = (1 << 64) - 1
TABLE_VERSION = 1
MAX_TABLE_BYTES = 1 << 20

# algorithms/device: a slot is of whole lines, its first packet is the header, half of a packet is flags.
_LINE, _PACKET, _PACKET_DATA = 128, 16, 8

Memory = Literal["any", "ordinary", "symmetric"]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table's advice for some numbers of ranks and a kind of memory.

    `use`: lines of an inclusive upper bound in bytes and the algorithms or providers for it, the best first. Bounds
    ascend.
    """

    use: tuple[tuple[int | str, ...], ...]
    ranks: tuple[int, int] = (1, MAX_RANKS)
    memory: Memory = "any"

    def fits(self, ranks: int, symmetric: bool) -> bool:
        """Whether this row is for such a job."""
        return self.ranks[0] <= ranks <= self.ranks[1] and self.memory in ("any", _memory(symmetric))

    def lines(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(bound, algorithms), parsed. Raises ValueError on a malformed bound or name."""
        for bound, *names in self.use:
            if not names or not all(isinstance(name, str) for name in names):
                raise ValueError(f"a line is a bound and names of algorithms, not {[bound, *names]}")
            yield MAX_NBYTES if bound == "max" else parse_nbytes(bound), tuple(map(str, names))


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured advice by collective: rows, the first that fits counts; and what to fall back on, in order."""

    version: int
    rows: dict[str, tuple[Row, ...]]
    fallback: dict[str, tuple[str, ...]]

    def row(self, collective: str, ranks: int, symmetric: bool) -> Row | None:
        """The row for such a job, if there is one."""
        return next((row for row in self.rows.get(collective, ()) if row.fits(ranks, symmetric)), None)

    def names(self) -> set[str]:
        """All algorithms and providers that it names."""
        lines = (line for rows in self.rows.values() for row in rows for line in row.lines())
        return {name for _, names in lines for name in names} | {
            name for names in self.fallback.values() for name in names
        }

    def to_json(self) -> bytes:
        """For handing rank 0's table to the others; `load_table` reads it."""
        return msgspec.json.encode(self)


def load_table(text: bytes | str) -> Table:
    """Read and check a table (YAML, of which JSON is a part). Raises ConfigError."""
    import yaml

    if len(text) > MAX_TABLE_BYTES:
        raise ConfigError(f"a selection table of {len(text)} bytes exceeds {MAX_TABLE_BYTES}")
    try:
        table = msgspec.convert(yaml.safe_load(text), Table)
        _check(table)
    except (yaml.YAMLError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise ConfigError(f"malformed selection table: {error}") from error
    return table


def read_table(path: Path) -> Table:
    """Read a table from a file. Raises ConfigError, OSError."""
    with path.open("rb") as file:
        return load_table(file.read(MAX_TABLE_BYTES + 1))


@functools.cache
def default_table() -> Table:
    """The table that ships with commrt."""
    return load_table((resources.files("commrt") / "tables" / "default.yaml").read_bytes())


def _check(table: Table) -> None:
    if table.version != TABLE_VERSION:
        raise ValueError(f"version {table.version}, not {TABLE_VERSION}")
    unknown = sorted({*table.rows, *table.fallback} - set(COLLECTIVES))
    if unknown:
        raise ValueError(f"unknown collectives {unknown}")
    for collective, rows in table.rows.items():
        for row in rows:
            bounds = [bound for bound, _ in row.lines()]
            if bounds != sorted(set(bounds)) or bounds[-1:] != [MAX_NBYTES]:
                raise ValueError(f"the bounds of a row of {collective} don't ascend to max: {bounds}")


@dataclass(frozen=True)
class Choice:
    """What runs, and in a few words why."""

    provider: str
    algorithm: Algorithm | Carried
    reason: str

    @property
    def name(self) -> str:
        """The algorithm's name within its collective, or the library's."""
        return self.algorithm.name

    def __str__(self) -> str:
        collective = self.algorithm.collective
        return f"{self.provider} {collective}{f'/{self.name}' if self.provider == NATIVE else ''}"


@dataclass(frozen=True)
class Explanation:
    """What would run and why, what else there is and why not, and where the choice changes with size."""

    collective: str
    nbytes: int
    ranks: int
    memory: str
    capabilities: tuple[str, ...]
    choice: Choice
    others: Mapping[str, str]
    thresholds: Sequence[tuple[int, str]]

    def __str__(self) -> str:
        links = ", ".join(self.capabilities) or "puts and signals only"
        lines = [
            f"{self.collective} of {format_nbytes(self.nbytes)} on {self.ranks} ranks, {self.memory} memory, "
            f"links: {links}",
            f"  runs {self.choice}: {self.choice.reason}",
            *(f"  not {name}: {why}" for name, why in self.others.items()),
            "  by size: " + ", ".join(f"{name} up to {format_nbytes(bound)}" for bound, name in self.thresholds),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Job:
    collective: str
    ranks: int
    symmetric: bool
    capabilities: frozenset[str]
    precise: bool
    element: Element | None


@dataclass(frozen=True)
class Selection:
    """Chooses for one job. Immutable, so safe to share between threads; equal inputs give equal choices on all ranks.

    `algorithms`: by `collective/name`. `packets_half`, `pair_packets_half`: bytes of packet memory that one window has,
    for collectives and for "send"; plans of packets are not chosen (but can be forced) for messages that need more.
    `forced`: the only algorithm to use, as `name` or, for one collective alone, `collective/name`.
    `providers`: the libraries that were joined, by name, and why others were not. Their names stand beside those of
    algorithms; the name "native" is for what is best of the algorithms.
    """

    algorithms: Mapping[str, Algorithm]
    table: Table = field(default_factory=default_table)
    packets_half: int = 1 << 17
    pair_packets_half: int = 1 << 13
    forced: str | None = None
    providers: Mapping[str, Provider] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def choose(
        self,
        collective: str,
        nbytes: int,
        ranks: int,
        symmetric: bool = False,
        capabilities: Iterable[str] = (),
        algorithm: str | None = None,
        precise: bool = False,
        element: Element | None = None,
    ) -> Choice:
        """The algorithm for an operation. `algorithm` forces one; `precise` prefers those that round once.

        `capabilities`: what the job's links offer: "mapped", "direct" (peers' ordinary memory can be read), "switch".
        `element`: of the call; None: of any call, some of which may then be chosen for differently.
        Raises UnknownName for a collective or algorithm that isn't there, InvalidArgument if the forced one can't run,
        Unavailable for a library that was not joined.
        """
        job = self._job(collective, ranks, symmetric, capabilities, precise, element)
        name = algorithm or self._forced_for(collective)
        if name not in (None, NATIVE):
            return self._force(job, str(name))
        for candidate, reason in self._ranked(job, nbytes):
            passed = name == NATIVE and isinstance(candidate, Carried)
            if not passed and not self._unfit(job, candidate, nbytes):
                return _choice(candidate, reason)
        raise InvalidArgument(f"no algorithm carries {collective} here: {self._refusals(job)}", operation=collective)

    def candidate(self, collective: str, name: str) -> Algorithm | Carried:
        """What a name stands for. Raises StopIteration for one that `choose` would not answer."""
        return next(one for one in self._of(collective) if one.name == name)

    def thresholds(
        self,
        collective: str,
        ranks: int,
        symmetric: bool = False,
        capabilities: Iterable[str] = (),
        algorithm: str | None = None,
        precise: bool = False,
        element: Element | None = None,
    ) -> list[tuple[int, str]]:
        """`choose` for all sizes: ascending (largest bytes, algorithm), the last for 2^64 - 1."""
        job = self._job(collective, ranks, symmetric, capabilities, precise, element)
        row = self.table.row(collective, ranks, symmetric)
        bounds = {MAX_NBYTES} | {bound for bound, _ in (row.lines() if row else ())}
        bounds |= {
            limit for candidate in self._of(collective) if (limit := self._packet_limit(job, candidate)) is not None
        }
        found: list[tuple[int, str]] = []
        for bound in sorted(bounds):
            name = self.choose(collective, bound, ranks, symmetric, capabilities, algorithm, precise, element).name
            if found and found[-1][1] == name:
                found.pop()
            found.append((bound, name))
        return found

    def explain(
        self,
        collective: str,
        nbytes: int,
        ranks: int,
        symmetric: bool = False,
        capabilities: Iterable[str] = (),
        algorithm: str | None = None,
        precise: bool = False,
        element: Element | None = None,
    ) -> Explanation:
        """Why `choose` chooses as it does."""
        offered = frozenset(capabilities)
        choice = self.choose(collective, nbytes, ranks, symmetric, offered, algorithm, precise, element)
        job = self._job(collective, ranks, symmetric, offered, precise, element)
        better = "one was forced" if algorithm or self._forced_for(collective) else "the table prefers the other here"
        others = {
            candidate.name: self._unfit(job, candidate, nbytes) or better
            for candidate in self._of(collective)
            if candidate.name != choice.name
        }
        steps = self.thresholds(collective, ranks, symmetric, offered, algorithm, precise, element)
        links = tuple(sorted(offered))
        return Explanation(collective, nbytes, ranks, _memory(symmetric), links, choice, others, steps)

    def _job(
        self, collective: str, ranks: int, symmetric: bool, capabilities: Iterable[str], precise: bool,
        element: Element | None,
    ) -> _Job:  # fmt: skip
        if collective not in COLLECTIVES:
            raise UnknownName("collective", collective, COLLECTIVES)
        return _Job(collective, ranks, symmetric, frozenset(capabilities), precise, element)

    def _of(self, collective: str) -> list[Algorithm | Carried]:
        """All candidates; a library does not take an algorithm's name."""
        carried = self.providers.values() if collective != "send" else ()
        found: dict[str, Algorithm | Carried] = {one.name: Carried(collective, one) for one in carried}
        found |= {one.name: one for one in self.algorithms.values() if one.collective == collective}
        return [found[name] for name in sorted(found)]

    def _forced_for(self, collective: str) -> str | None:
        other = self.forced and "/" in self.forced and not self.forced.startswith(f"{collective}/")
        if other or (collective == "send" and self.forced in self.providers):  # libraries carry collectives
            return None
        return self.forced

    def _force(self, job: _Job, name: str) -> Choice:
        known = {candidate.name: candidate for candidate in self._of(job.collective)}
        short = name.removeprefix(f"{job.collective}/")
        candidate = known.get(short)
        if candidate is None and short in self.absent:
            raise Unavailable(f"provider {short!r} can't carry {job.collective}: {self.absent[short]}")
        if candidate is None:
            raise UnknownName(f"{job.collective} algorithm", name, known)
        why = self._unfit(job, candidate)
        if why and isinstance(candidate, Carried):
            raise UnsupportedType(
                f"provider {short} can't carry this {job.collective}: it {why}", operation=job.collective
            )
        if why:
            raise InvalidArgument(
                f"{job.collective}/{candidate.name} can't run here: it {why}", operation=job.collective
            )
        return _choice(candidate, "it was forced")

    def _ranked(self, job: _Job, nbytes: int) -> Iterator[tuple[Algorithm | Carried, str]]:
        """Candidates, the best first, with why each would be taken. Those that round more than once follow if asked."""
        known = {candidate.name: candidate for candidate in self._of(job.collective)}
        rest = [name for name, one in known.items() if isinstance(one, Algorithm)]
        advice = [*self._advice(job, nbytes), *((name, "nothing that the table names can run here") for name in rest)]
        ranked = [(known[name], reason) for name, reason in advice if name in known]
        if job.precise:
            ranked.sort(key=lambda entry: isinstance(entry[0], Carried) or entry[0].rounds(job.ranks) > 1)
        yield from ranked

    def _advice(self, job: _Job, nbytes: int) -> Iterator[tuple[str, str]]:
        row = self.table.row(job.collective, job.ranks, job.symmetric)
        line = next(((bound, names) for bound, names in row.lines() if nbytes <= bound), None) if row else None
        bound, names = line or (MAX_NBYTES, ())
        for place, name in enumerate(names):
            passed = f", after {', '.join(names[:place])}, which can't run here" if place else ""
            reach = "however large" if bound == MAX_NBYTES else f"up to {format_nbytes(bound)}"
            yield name, f"the table's choice {reach}{passed}"
        for name in self.table.fallback.get(job.collective, ()):
            yield name, "the table's fallback, as its choice can't run here"

    def _unfit(self, job: _Job, candidate: Algorithm | Carried, nbytes: int = 0) -> str:
        """Why a candidate can't (or, for its size, shouldn't) run; empty if it can."""
        if isinstance(candidate, Carried):
            return candidate.unfit(job.element)
        if not candidate.least_ranks <= job.ranks <= candidate.most_ranks:
            return f"needs {candidate.least_ranks}..{candidate.most_ranks} ranks, and there are {job.ranks}"
        for requirement in candidate.requires:
            if not _offers(requirement, job):
                return f"needs {_NEEDS[requirement]}"
        limit = self._packet_limit(job, candidate)
        if limit is not None and nbytes > limit:
            return f"would cut the message: packet memory holds {format_nbytes(limit)} of it at once"
        return ""

    def _packet_limit(self, job: _Job, candidate: Algorithm | Carried) -> int | None:
        """The most bytes that an algorithm's packets carry in one window, as the executor lays them out."""
        if isinstance(candidate, Carried):
            return None
        if not candidate.least_ranks <= job.ranks <= candidate.most_ranks or not candidate.packet_slots(job.ranks):
            return None
        half = self.pair_packets_half if job.collective == "send" else self.packets_half
        slot = half // candidate.packet_slots(job.ranks) // _LINE * _LINE
        chunk = max(slot - _PACKET, 0) // _PACKET * _PACKET_DATA // 64 * 64
        return chunk * candidate.parts(job.ranks) * max(groups(job.collective, job.ranks))

    def _refusals(self, job: _Job) -> str:
        reasons = (f"{candidate.name} {self._unfit(job, candidate)}" for candidate in self._of(job.collective))
        return "; ".join(reasons) or "there is none"


def _choice(candidate: Algorithm | Carried, reason: str) -> Choice:
    return Choice(candidate.name if isinstance(candidate, Carried) else NATIVE, candidate, reason)


_NEEDS: dict[str, str] = {
    "mapped": "links over which peers' memory can be loaded and stored",
    "symmetric": "symmetric memory, over links that can load and store it",
    "direct": "links that can read peers' memory, or symmetric memory over links that can load and store it",
    "switch": "a switch that reduces",
}


def _offers(requirement: str, job: _Job) -> bool:
    shared = job.symmetric and "mapped" in job.capabilities
    if requirement == "symmetric":
        return shared
    return requirement in job.capabilities or (requirement == "direct" and shared)


def _memory(symmetric: bool) -> Literal["ordinary", "symmetric"]:
    return "symmetric" if symmetric else "ordinary"


def format_nbytes(nbytes: int) -> str:
    """`4 MiB`, `1000 B`, "any size" for the largest bound."""
    if nbytes == MAX_NBYTES:
        return "any size"
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"

"""What `commrt bench` was asked for: checked once, and passed on to the ranks as JSON."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from commrt.dtypes import DTYPES, REDUCE_OPS, REDUCIBLE, by_name
from commrt.errors import InvalidArgument, UnknownName, UnsupportedType
from commrt.settings import parse_nbytes, parse_seconds
from commrt.testing.data import COLLECTIVES, REDUCING, ROOTED, numpy_dtype

DEFAULT_RANKS = 2
DEFAULT_MAX_BYTES = 16 << 20
AVERAGES = ("rank0", "avg", "min", "max")
ALIASES = {"float": "float32", "double": "float64", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_PER_RANK = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
_MOST = 1 << 30


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the benchmark, with nccl-tests' meanings. Sizes are in bytes. Made by `make`, which checks it."""

    collective: str
    min_bytes: int = 8
    max_bytes: int = DEFAULT_MAX_BYTES
    step_bytes: int | None = None
    step_factor: int = 4
    iters: int = 20
    warmup: int = 5
    aggregate: int = 1
    ops: tuple[str, ...] = ("sum",)
    dtypes: tuple[str, ...] = ("float32",)
    root: int = 0
    check: int = 1
    average: int = 1
    cycles: int = 1
    json: str | None = None
    timeout_s: float | None = None
    per_iteration: bool = False
    misalign: int = 0
    timestamps: bool = False
    algorithm: str | None = None
    transport: str | None = None
    backends: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    told_by_each_node: bool = False


class Cell(msgspec.Struct, frozen=True):
    """One row to measure: `nbytes` in all, `count` elements as nccl-tests counts them."""

    nbytes: int
    count: int
    dtype: str
    op: str
    root: int


def make(
    collective: str, *, op: str = "sum", dtype: str = "float32", backend: str | None = None, **rest: Any
) -> Options:
    """Options from what the command line gave; None means "not given".

    Raises InvalidArgument naming what is wrong, UnknownName with a near match for a name.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    given = {name: value for name, value in rest.items() if value is not None}
    for flag, name in (("-b", "min_bytes"), ("-e", "max_bytes"), ("-i", "step_bytes")):
        if name in given:
            given[name] = _nbytes(flag, given[name])
    if "max_bytes" not in given:
        given["max_bytes"] = max(given.get("min_bytes", 0), DEFAULT_MAX_BYTES)
    dtypes, skipped = _dtypes(collective, dtype)
    backends = tuple(name.strip() for name in (backend or "").split(",")) if backend else ()
    names: dict[str, Any] = {
        "collective": collective,
        "dtypes": dtypes,
        "skipped": skipped,
        "ops": _ops(collective, op),
    }
    names["backends"] = backends
    options = msgspec.convert({**names, **given}, Options)
    _check(options)
    return options


def sizes(options: Options) -> Iterator[int]:
    """The sizes in bytes to measure, from the least on."""
    if options.collective == "barrier":
        yield 0
        return
    nbytes = options.min_bytes
    while nbytes <= options.max_bytes:
        yield nbytes
        nbytes = nbytes + options.step_bytes if options.step_bytes else nbytes * options.step_factor


def cells(options: Options, ranks: int) -> Iterator[Cell]:
    """The rows of the table, in order."""
    roots = range(ranks) if options.root == -1 else (options.root,)
    rooted = roots if options.collective in ROOTED else (-1,)
    for _, dtype, op, root in itertools.product(range(options.cycles), options.dtypes, options.ops, rooted):
        unit = by_name(dtype).itemsize * (ranks if options.collective in _PER_RANK else 1)
        for nbytes in sizes(options):
            yield Cell(nbytes // unit * unit, nbytes // unit, dtype, op, root)


def backend_of(options: Options, rank: int) -> str | None:
    """Where that rank's arrays are, if it was said: the names in turn."""
    return options.backends[rank % len(options.backends)] if options.backends else None


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: what a link carries of each byte."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in _PER_RANK else 1.0


def _nbytes(flag: str, value: object) -> int:
    try:
        return parse_nbytes(value)
    except ValueError:
        expected = "a positive number of bytes, like 8, 64K or 128M"
        raise InvalidArgument(f"{flag} is {value!r}, and must be {expected}") from None


def _dtypes(collective: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dtypes to measure, and those of "all" that numpy lacks here."""
    if collective == "barrier":
        return ("uint8",), ()
    known = [dtype.name for dtype in (REDUCIBLE if collective in REDUCING else DTYPES)]
    if name != "all":
        chosen = _known("dtype", ALIASES.get(name, name), known)
        numpy_dtype(chosen)
        return (chosen,), ()
    usable = tuple(filter(_in_numpy, known))
    return usable, tuple(name for name in known if name not in usable)


def _in_numpy(name: str) -> bool:
    try:
        numpy_dtype(name)
    except UnsupportedType:
        return False
    return True


def _ops(collective: str, name: str) -> tuple[str, ...]:
    known = [op.name for op in REDUCE_OPS]
    chosen = tuple(known) if name == "all" else (_known("reduction", name, known),)
    return chosen if collective in REDUCING else ("none",)


def _known(kind: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise UnknownName(kind, name, [*known, "all"])
    return name


def _check(options: Options) -> None:
    bounds = (
        ("--iters", options.iters, 1, _MOST),
        ("-w", options.warmup, 0, _MOST),
        ("-m", options.aggregate, 1, 1 << 12),
        ("-f", options.step_factor, 2, _MOST),
        ("-c", options.check, 0, _MOST),
        ("-a", options.average, 0, len(AVERAGES) - 1),
        ("-N", options.cycles, 1, _MOST),
        ("-r", options.root, -1, _MOST),
        ("-u", options.misalign, 0, 1 << 12),
    )
    for flag, value, least, most in bounds:
        if not least <= value <= most:
            raise InvalidArgument(f"{flag} is {value}, and must lie within {least}..{most}")
    if options.max_bytes < options.min_bytes:
        raise InvalidArgument(f"-e ({options.max_bytes} bytes) is less than -b ({options.min_bytes} bytes)")
    if options.timeout_s is not None:
        _check_seconds(options.timeout_s)
    if options.json is not None:
        _check_json(Path(options.json).absolute())


def _check_json(path: Path) -> None:
    """It is written at the end, atomically, by way of a file beside it."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgument(f"-J is {str(path)!r}, and there is no folder where that file could be written")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidArgument(f"-J is {str(path)!r}, and no file can be made in its folder: {error.strerror}") from None


def _check_seconds(value: float) -> None:
    try:
        parse_seconds(value)
    except ValueError:
        raise InvalidArgument(f"-T is {value:g}, and must be a positive number of seconds") from None

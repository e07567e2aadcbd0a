"""What the benchmark says: nccl-tests' table on a stream, and its JSON keys in a file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import msgspec

from commrt import __version__
from commrt.bench.measure import Measured, Row
from commrt.bench.options import AVERAGES, Options
from commrt.settings import registry

_BLOCK = "{:>7} {:>6} {:>6} {:>6}"
_SPREAD = " {:>7} {:>7} {:>7} {:>5}"
_LEFT = "{:>12}  {:>12}  {:>9}  {:>6}  {:>6}"


class Place(msgspec.Struct, frozen=True):
    """Where a rank runs, and at which levels: see `commrt.backend.Probe`."""

    rank: int
    pid: int
    host: str
    device: str
    levels: tuple[str, ...] = ()


def header(options: Options, places: Sequence[Place], links: Iterable[str], plan: str = "") -> list[str]:
    """The lines above the table. `plan`: the digest of the forced algorithm's."""
    digest = f" plan: {plan}" if plan else ""
    step = f"{options.step_bytes}(bytes)" if options.step_bytes else f"{options.step_factor}(factor)"
    lines = [
        f"# commrt {__version__} {options.collective} ranks: {len(places)} minBytes {options.min_bytes} "
        f"maxBytes {options.max_bytes} step: {step} warmup iters: {options.warmup} iters: {options.iters} "
        f"agg iters: {options.aggregate} validation: {options.check} average: {AVERAGES[options.average]}",
        f"# links: {', '.join(sorted(set(links))) or 'none'} algorithm: {options.algorithm or 'by size'}{digest}",
        f"# level: {level(places)}",
    ]
    if options.skipped:
        lines.append(f"# left out, as ml_dtypes is not installed: {', '.join(options.skipped)}")
    lines += ["#", "# Using devices"]
    lines += [f"#  Rank {one.rank:2} Pid {one.pid:6} on {one.host} device {one.device}" for one in places]
    return [*lines, "#", *_headings(options)]


def level(places: Iterable[Place]) -> str:
    """What the results were obtained on, over all ranks."""
    return ", ".join(dict.fromkeys(level for place in places for level in place.levels)) or "not told"


def _headings(options: Options) -> list[str]:
    spread = options.per_iteration
    names = _BLOCK.format("time", "algbw", "busbw", "#wrong")
    units = _BLOCK.format("(us)", "(GB/s)", "(GB/s)", "")
    if spread:
        names += _SPREAD.format("min", "max", "p99", "cv")
        units += _SPREAD.format("(us)", "(us)", "(us)", "(%)")
    width = len(names)
    stamp = "  timestamp" if options.timestamps else ""
    return [
        _comment(_LEFT.format(*[""] * 5) + f"   {'out-of-place':^{width}}   {'in-place':^{width}}"),
        _comment(_LEFT.format("size", "count", "type", "redop", "root") + f"   {names}   {names}{stamp}"),
        _comment(_LEFT.format("(B)", "(elements)", *[""] * 3) + f"   {units}   {units}"),
    ]


def _comment(line: str) -> str:
    return "#" + line[1:].rstrip()


def line(row: Row, options: Options) -> str:
    """One row of the table."""
    cell = row.cell
    left = _LEFT.format(cell.nbytes, cell.count, cell.dtype, cell.op, cell.root)
    blocks = "".join("   " + _block(form, options) for form in (row.out_of_place, row.in_place))
    stamp = datetime.fromtimestamp(row.stamp, timezone.utc).strftime("  %Y-%m-%dT%H:%M:%SZ")
    return left + blocks + (stamp if options.timestamps else "")


def _block(form: Measured | None, options: Options) -> str:
    if form is None:
        return _BLOCK.format(*["N/A"] * 4) + (_SPREAD.format(*["N/A"] * 4) if options.per_iteration else "")
    wrong = "N/A" if form.nwrong is None else form.nwrong
    text = _BLOCK.format(_microseconds(form.time), f"{form.alg_bw:.2f}", f"{form.bus_bw:.2f}", wrong)
    if form.iterations is not None:
        spread = form.iterations
        text += _SPREAD.format(*map(_microseconds, (spread.min, spread.max, spread.p99)), f"{spread.cv:.1f}")
    return text


def _microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def wrong_elements(rows: Sequence[Row]) -> int:
    """Over all rows and forms."""
    return sum(form.nwrong or 0 for form in _forms(rows))


def footer(rows: Sequence[Row]) -> list[str]:
    """The lines below the table."""
    wrong = wrong_elements(rows)
    return [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average_bus_bandwidth(rows):g}",
        "#",
    ]


def average_bus_bandwidth(rows: Sequence[Row]) -> float:
    """GB/s, over all rows and forms."""
    forms = _forms(rows)
    return sum(form.bus_bw for form in forms) / max(1, len(forms))


def _forms(rows: Sequence[Row]) -> list[Measured]:
    return [form for row in rows for form in (row.out_of_place, row.in_place) if form is not None]


def document(
    options: Options, places: Sequence[Place], rows: Sequence[Row], began: float, environ: Mapping[str, str]
) -> dict[str, Any]:
    """The JSON of a run. Of the environment it has commrt's settings alone, and of those no path to a secret."""
    wrong = wrong_elements(rows)
    settings = {setting.variable for setting in registry()} - {"COMMRT_SECRET_FILE"}
    return {
        "version": f"commrt {__version__}",
        "times": {"start": _iso(began), "stop": _iso(time.time())},
        "args": {"ranks": len(places), **msgspec.to_builtins(options)},
        "env": {name: value for name, value in sorted(environ.items()) if name in settings},
        "level": level(places),
        "devices": msgspec.to_builtins(list(places)),
        "results": [_result(row) for row in rows],
        "out_of_bounds": {"count": wrong, "okay": not wrong},
        "average_bus_bandwidth": {"bandwidth": average_bus_bandwidth(rows)},
    }


def _result(row: Row) -> dict[str, Any]:
    cell = row.cell
    left = {"size": cell.nbytes, "count": cell.count, "type": cell.dtype, "redop": cell.op, "root": cell.root}
    forms = {"out_of_place": row.out_of_place, "in_place": row.in_place}
    return {**left, **msgspec.to_builtins(forms), "timestamp": _iso(row.stamp)}


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="milliseconds")


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Write a whole file or none. Raises OSError."""
    target = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def say(stream: TextIO, lines: Sequence[str]) -> None:
    """Print lines at once, whole."""
    stream.write("".join(f"{one}\n" for one in lines))
    stream.flush()

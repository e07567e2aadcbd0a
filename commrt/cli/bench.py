"""`commrt bench`: how fast the collectives are here, checked in the same run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from commrt.cli._groups import grouped
from commrt.cli._nodes import NodeFlags

# The fields of the groups are called as those of `commrt.bench.options.Options`, and what `make` makes of them.


@dataclass(frozen=True)
class Sizes:
    """Which sizes to measure."""

    min_bytes: Annotated[
        str | None, typer.Option("-b", "--minbytes", show_default="8", help="Least size: 8, 64K, 128M.")
    ] = None
    max_bytes: Annotated[str | None, typer.Option("-e", "--maxbytes", show_default="16M", help="Largest size.")] = None
    step_bytes: Annotated[str | None, typer.Option("-i", "--stepbytes", help="Add this at each step.")] = None
    step_factor: Annotated[
        int | None, typer.Option("-f", "--stepfactor", show_default="4", help="Or multiply by this.")
    ] = None


@dataclass(frozen=True)
class Effort:
    """How often to call."""

    iters: Annotated[int | None, typer.Option("--iters", show_default="20", help="Timed iterations a size.")] = None
    warmup: Annotated[
        int | None, typer.Option("-w", "--warmup_iters", show_default="5", help="Untimed iterations before them.")
    ] = None
    aggregate: Annotated[
        int | None, typer.Option("-m", "--agg_iters", show_default="1", help="Calls in flight an iteration.")
    ] = None


@dataclass(frozen=True)
class Calls:
    """What to call it with."""

    op: Annotated[str, typer.Option("-o", "--op", help="sum, prod, min, max, avg or all")] = "sum"
    dtype: Annotated[str, typer.Option("-d", "--datatype", help="float32, bfloat16, int8, ... or all")] = "float32"
    root: Annotated[
        int | None, typer.Option("-r", "--root", show_default="0", help="The root; -1: each rank in turn.")
    ] = None


@dataclass(frozen=True)
class Report:
    """What to check, and how to tell the results."""

    check: Annotated[
        int | None, typer.Option("-c", "--check", show_default="1", help="Checked calls a size; 0: none.")
    ] = None
    average: Annotated[
        int | None,
        typer.Option("-a", "--average", show_default="1", help="Time over ranks: 0 rank 0's, 1 mean, 2 min, 3 max."),
    ] = None
    cycles: Annotated[int | None, typer.Option("-N", "--run_cycles", show_default="1", help="Repeat the sweep.")] = None
    json: Annotated[str | None, typer.Option("-J", "--json", metavar="FILE", help="Write the results here.")] = None
    timeout_s: Annotated[float | None, typer.Option("-T", "--timeout", help="Seconds a call may take.")] = None
    per_iteration: Annotated[bool, typer.Option("-I", "--iter_stats", help="Spread over the iterations.")] = False
    misalign: Annotated[
        int | None, typer.Option("-u", "--unalign", show_default="0", help="Start arrays this many elements off.")
    ] = None
    timestamps: Annotated[bool, typer.Option("-S", "--report_timestamps", help="Say when each row was done.")] = False


@dataclass(frozen=True)
class Forced:
    """What to measure it on, instead of what commrt would choose."""

    algorithm: Annotated[str | None, typer.Option("--algo", help="Force this algorithm or provider.")] = None
    transport: Annotated[
        str | None, typer.Option("--transport", help="Force this transport; loopback: ranks as threads.")
    ] = None
    backend: Annotated[
        str | None, typer.Option("--backend", help="Where arrays are: a backend, or one for each rank, with commas.")
    ] = None


@grouped
def bench(
    collective: Annotated[str, typer.Argument(metavar="OP", help="all_reduce, all_gather, ..., sendrecv, barrier")],
    *,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", show_default="2", help="Number of ranks, on each node.")
    ] = None,
    sizes: Sizes,
    effort: Effort,
    calls: Calls,
    report: Report,
    forced: Forced,
    place: NodeFlags,
) -> None:
    """Time a collective and check what it computes, in and out of place.

    Exits with 1 if any element was wrong or a call failed, with 2 for bad arguments.
    """
    from commrt.bench.options import make
    from commrt.bench.run import run

    options = make(collective, **asdict(sizes), **asdict(effort), **asdict(calls), **asdict(report), **asdict(forced))
    raise typer.Exit(run(options, ranks, place.node()))

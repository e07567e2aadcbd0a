"""`commrt bench`: how fast the collectives are here, checked in the same run."""

from __future__ import annotations

from typing import Annotated

import typer


def bench(
    collective: Annotated[str, typer.Argument(metavar="OP", help="all_reduce, all_gather, ..., sendrecv, barrier")],
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", show_default="2", help="Number of ranks.")] = None,
    minbytes: Annotated[
        str | None, typer.Option("-b", "--minbytes", show_default="8", help="Least size: 8, 64K, 128M.")
    ] = None,
    maxbytes: Annotated[str | None, typer.Option("-e", "--maxbytes", show_default="16M", help="Largest size.")] = None,
    stepbytes: Annotated[str | None, typer.Option("-i", "--stepbytes", help="Add this at each step.")] = None,
    stepfactor: Annotated[
        int | None, typer.Option("-f", "--stepfactor", show_default="4", help="Or multiply by this.")
    ] = None,
    iters: Annotated[int | None, typer.Option("--iters", show_default="20", help="Timed iterations a size.")] = None,
    warmup: Annotated[
        int | None, typer.Option("-w", "--warmup_iters", show_default="5", help="Untimed iterations before them.")
    ] = None,
    aggregate: Annotated[
        int | None, typer.Option("-m", "--agg_iters", show_default="1", help="Calls in flight an iteration.")
    ] = None,
    op: Annotated[str, typer.Option("-o", "--op", help="sum, prod, min, max, avg or all")] = "sum",
    datatype: Annotated[str, typer.Option("-d", "--datatype", help="float32, bfloat16, int8, ... or all")] = "float32",
    root: Annotated[
        int | None, typer.Option("-r", "--root", show_default="0", help="The root; -1: each rank in turn.")
    ] = None,
    check: Annotated[
        int | None, typer.Option("-c", "--check", show_default="1", help="Checked calls a size; 0: none.")
    ] = None,
    average: Annotated[
        int | None,
        typer.Option("-a", "--average", show_default="1", help="Time over ranks: 0 rank 0's, 1 mean, 2 min, 3 max."),
    ] = None,
    cycles: Annotated[
        int | None, typer.Option("-N", "--run_cycles", show_default="1", help="Repeat the sweep.")
    ] = None,
    json: Annotated[str | None, typer.Option("-J", "--json", metavar="FILE", help="Write the results here.")] = None,
    timeout: Annotated[float | None, typer.Option("-T", "--timeout", help="Seconds a call may take.")] = None,
    per_iteration: Annotated[bool, typer.Option("-I", "--iter_stats", help="Spread over the iterations.")] = False,
    misalign: Annotated[
        int | None, typer.Option("-u", "--unalign", show_default="0", help="Start arrays this many elements off.")
    ] = None,
    timestamps: Annotated[bool, typer.Option("-S", "--report_timestamps", help="Say when each row was done.")] = False,
    algorithm: Annotated[str | None, typer.Option("--algo", help="Force this algorithm.")] = None,
    transport: Annotated[str | None, typer.Option(help="Force this transport; loopback: ranks as threads.")] = None,
) -> None:
    """Time a collective and check what it computes, in and out of place.

    Exits with 1 if any element was wrong or a call failed, with 2 for bad arguments.
    """
    from commrt.bench.options import make
    from commrt.bench.run import run

    options = make(
        collective,
        op=op,
        dtype=datatype,
        min_bytes=minbytes,
        max_bytes=maxbytes,
        step_bytes=stepbytes,
        step_factor=stepfactor,
        iters=iters,
        warmup=warmup,
        aggregate=aggregate,
        root=root,
        check=check,
        average=average,
        cycles=cycles,
        json=json,
        timeout_s=timeout,
        per_iteration=per_iteration,
        misalign=misalign,
        timestamps=timestamps,
        algorithm=algorithm,
        transport=transport,
    )
    raise typer.Exit(run(options, ranks))

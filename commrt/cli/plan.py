"""`commrt plan`: plans as text, and the schema of their files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from commrt.errors import CommrtError
from commrt.plan import MAX_BYTES, SELF, Operation, Plan, Ref, load, schema
from commrt.plugins import default_registry

plan = typer.Typer(help="Show plans, and the schema of plan files.", no_args_is_help=True)


@plan.command("schema")
def print_schema() -> None:
    """Print the JSON schema of plan files."""
    typer.echo(json.dumps(schema(), indent=2))


@plan.command()
def show(
    source: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A plan file, or a name such as all_reduce/ring.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks, for a NAME.")] = 2,
    root: Annotated[int, typer.Option("--root", min=0, help="The root, for a NAME of a rooted collective.")] = 0,
    rank: Annotated[int | None, typer.Option("--rank", help="Show this rank alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan's canonical JSON.")] = False,
) -> None:
    """Check a plan and print its operations."""
    try:
        found = _find(source, ranks, root)
        lines = [found.to_json().decode()] if as_json else describe(found, rank)
        for line in lines:
            typer.echo(line)
    except CommrtError as error:
        typer.echo(f"commrt plan show: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        raise typer.BadParameter(str(error)) from None


def _find(source: str, ranks: int, root: int) -> Plan:
    path = Path(source)
    if path.exists() or path.suffix == ".json":
        with path.open("rb") as file:
            return load(file.read(MAX_BYTES + 1))
    if root >= ranks:
        raise typer.BadParameter(f"root {root} is not in 0..{ranks - 1}")
    algorithm = default_registry().require("algorithms", source)
    if not algorithm.least_ranks <= ranks <= algorithm.most_ranks:
        raise typer.BadParameter(f"{source} is for {algorithm.least_ranks}..{algorithm.most_ranks} ranks, not {ranks}")
    built: Plan = algorithm.plan(ranks, root=root)
    return built


def describe(plan: Plan, rank: int | None = None) -> Iterator[str]:
    """The lines that show a plan, or one rank's program of it. Raises PlanError if the plan doesn't hold that rank."""
    needs = ", ".join(plan.requires) or "puts and signals"
    yield f"{plan.name}: {plan.collective} on {plan.ranks} ranks, {plan.launch_class}, needs {needs}"
    yield (
        f"  {plan.parts} parts, {plan.scratch_slots} scratch slots, {plan.packet_slots} packet slots, "
        f"{plan.channels} channels, {plan.rounds} roundings" + (f", slices of {plan.unit} B" if plan.unit else "")
    )
    yield f"  sha256 {plan.digest}"
    for program in plan.programs if rank is None else (plan.program(rank),):
        for number, block in enumerate(program.blocks):
            yield f"rank {program.rank}, block {number}"
            width = len(str(len(block)))
            for position, operation in enumerate(block):
                yield f"  {position:{width}}  {_operation(operation)}".rstrip()


def _operation(operation: Operation) -> str:
    if operation.name in ("signal", "wait"):
        whom = ", ".join(map(str, operation.peers))
        address = ", addresses" if operation.publish else ""
        preposition = "to" if operation.name == "signal" else "for"
        return f"{operation.name} {preposition} {whom} on channel {operation.channel}{address}"
    if operation.name == "loop":
        return f"loop to {operation.target} over {operation.size.buffer} part {operation.size.part}"
    if not operation.dst:
        return operation.name
    targets, sources = (", ".join(map(_ref, refs)) for refs in (operation.dst, operation.src))
    marks = [mark for mark, holds in (("final", operation.final), ("sliced", operation.sliced)) if holds]
    return f"{operation.name} {targets} <- {sources}" + (f" ({', '.join(marks)})" if marks else "")


def _ref(ref: Ref) -> str:
    """`input[group][part]`, `scratch[slot]`; `@rank` for a peer's."""
    part = f"[{ref.part}]" if ref.buffer in ("input", "output") else ""
    return f"{ref.buffer}[{ref.index}]{part}" + ("" if ref.rank == SELF else f"@{ref.rank}")

"""`commrt explain`: which algorithm would carry a collective, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commrt.carried import Element
from commrt.dtypes import as_op, by_name
from commrt.errors import CommrtError, UnknownName
from commrt.plugins import default_registry
from commrt.provider import JoiningProvider
from commrt.selection import Selection, default_table, read_table
from commrt.settings import parse_nbytes

LINKS = ("mapped", "direct", "switch")


def explain(
    collective: Annotated[str, typer.Argument(help="all_reduce, all_gather, ...")],
    nbytes: Annotated[str, typer.Argument(metavar="SIZE", help="Total bytes, such as 64K or 4M.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = 2,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="For arrays made by `comm.empty`.")] = False,
    links: Annotated[str, typer.Option(help="What the links offer, of mapped, direct, switch.")] = "mapped,direct",
    algorithm: Annotated[str | None, typer.Option("--algo", "-a", help="Force this algorithm or provider.")] = None,
    precise: Annotated[bool, typer.Option("--precise", help="Prefer algorithms that round once.")] = False,
    table: Annotated[Path | None, typer.Option(help="A selection table (YAML) instead of commrt's own.")] = None,
    dtype: Annotated[str, typer.Option(help="What the arrays are of; libraries support some.")] = "float32",
    op: Annotated[str, typer.Option(help="What reduces: sum, prod, min, max, avg.")] = "sum",
) -> None:
    """Print what would run, what else there is and why not, and where the choice changes with size.

    Other libraries are taken for joined where they are installed.
    """
    try:
        advice = default_table() if table is None else read_table(table)
        libraries, absent = _libraries()
        algorithms = default_registry().usable("algorithms")
        selection = Selection(algorithms, advice, providers=libraries, absent=absent)
        element = Element(by_name(dtype), as_op(op))
        offered = [link.strip() for link in links.split(",") if link.strip()]
        for link in offered:
            if link not in LINKS:
                raise UnknownName("link capability", link, LINKS)
        size = _size(nbytes)
        typer.echo(str(selection.explain(collective, size, ranks, symmetric, offered, algorithm, precise, element)))
    except CommrtError as error:
        typer.echo(f"commrt explain: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        raise typer.BadParameter(str(error)) from None


def _size(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a size such as 1000, 64K or 4M") from None


def _libraries() -> tuple[dict[str, JoiningProvider], dict[str, str]]:
    """Those that could be joined here, and why others could not."""
    usable = default_registry().usable("providers").items()
    joining = {name: provider for name, provider in usable if isinstance(provider, JoiningProvider)}
    reasons = {name: provider.probe().reason for name, provider in joining.items()}
    return {name: joining[name] for name in joining if not reasons[name]}, {k: why for k, why in reasons.items() if why}

"""`commrt plugins`: every plugin found, and why those that can't be used can't."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any

import typer

from commrt.cli._table import print_table
from commrt.errors import Unavailable
from commrt.plugins import Plugin, default_registry


def plugins(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List transports, backends, algorithms and providers, each loaded once to see whether it can be."""
    rows = [_row(plugin) for plugin in default_registry().plugins()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        print_table(("kind", "name", "origin", "api", "state"), map(_cells, rows))


def _row(plugin: Plugin) -> dict[str, Any]:
    with contextlib.suppress(Unavailable):
        plugin.load()
    return {
        "kind": plugin.kind,
        "name": plugin.name,
        "origin": plugin.origin,
        "api": plugin.api_version,
        "state": "ok" if plugin.error is None else "unusable",
        "reason": plugin.error,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    state = row["state"] if row["reason"] is None else f"{row['state']}: {row['reason']}"
    return row["kind"], row["name"], row["origin"], "-" if row["api"] is None else str(row["api"]), state

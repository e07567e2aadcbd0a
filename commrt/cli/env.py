"""`commrt env`: every setting with its value, where that came from, and what it means."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from commrt.cli._table import print_table
from commrt.errors import ConfigError
from commrt.settings import LAUNCHER_VARIABLES, Setting, registry, warn_of_unknown


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the settings in force. Exits with 1 if a variable is malformed."""
    warn_of_unknown(os.environ)
    rows = [_setting_row(setting, os.environ) for setting in registry()] + _launcher_rows(os.environ)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        print_table(("variable", "value", "source", "default", "meaning"), map(_cells, rows))
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


def _setting_row(setting: Setting, environ: Mapping[str, str]) -> dict[str, Any]:
    row = {"name": setting.name, "variable": setting.variable, "default": setting.default, "help": setting.help}
    try:
        value, source = setting.resolve(environ)
    except ConfigError as error:
        return {**row, "value": None, "source": "environment", "error": str(error)}
    return {**row, "value": value, "source": source, "error": None}


def _launcher_rows(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    blank = {"name": None, "default": None, "error": None, "source": "environment"}
    return [
        {**blank, "variable": variable, "value": environ[variable], "help": help}
        for variable, help in LAUNCHER_VARIABLES.items()
        if variable in environ
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    value = row["error"] or _shown(row["value"])
    return row["variable"], value, row["source"], _shown(row["default"]), row["help"]


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

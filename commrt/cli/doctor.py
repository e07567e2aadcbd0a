"""`commrt doctor`: what is here, why the rest isn't, and whether it works."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from commrt.doctor import LIMIT_S, Finding, examine


def doctor(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Only these; all if none is given.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option("-T", "--timeout", min=0.1, help="Seconds for each attempt.")] = LIMIT_S,
) -> None:
    """Probe every backend, transport and provider, and try each that is there between two processes.

    Exits with 1 if one that says it is there doesn't work.
    """
    findings = []
    for finding in examine(names or (), timeout):
        findings.append(finding)
        if not as_json:
            typer.echo(_line(finding))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.state == "fails" for finding in findings):
        raise typer.Exit(1)


def _line(finding: Finding) -> str:
    origin = "" if finding.origin == "in-tree" else f" ({finding.origin})"
    level = f" [{finding.level}]" if finding.level else ""
    state = finding.state.upper() if finding.state == "fails" else finding.state
    what = f"{finding.kind[:-1]:9} {finding.name + origin:14} {state:8}"
    return f"{what} {' '.join(finding.detail.split())}{level}"

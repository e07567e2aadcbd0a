"""Options of a command in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from commrt.cli._groups import grouped


@dataclass(frozen=True)
class Size:
    """A group."""

    width: Annotated[int, typer.Option("-w", "--width")] = 1
    name: Annotated[str | None, typer.Option("--called")] = None


def test_groups_are_spread_and_gathered() -> None:
    seen: list[object] = []

    @grouped
    def command(what: Annotated[str, typer.Argument()], *, loud: bool = False, size: Size) -> None:
        """What the help says."""
        seen.append((what, loud, size))

    app = typer.Typer()
    app.command()(command)
    runner = CliRunner()
    assert runner.invoke(app, ["thing", "-w", "3", "--loud"]).exit_code == 0
    assert runner.invoke(app, ["thing", "--called", "x"]).exit_code == 0
    assert seen == [("thing", True, Size(3)), ("thing", False, Size(name="x"))]
    assert "What the help says." in runner.invoke(app, ["--help"]).output
    assert runner.invoke(app, ["thing", "-w", "three"]).exit_code == 2

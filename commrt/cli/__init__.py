"""The `commrt` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from commrt import __version__
from commrt.cli.bench import bench
from commrt.cli.doctor import doctor
from commrt.cli.env import env
from commrt.cli.explain import explain
from commrt.cli.plan import plan
from commrt.cli.plugins import plugins
from commrt.cli.run import CONTEXT_SETTINGS, run
from commrt.errors import CommrtError, InvalidArgument

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"commrt {__version__}")
        raise typer.Exit


@app.callback()
def commrt(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Collectives between processes, over whatever link joins them."""


app.command(context_settings=CONTEXT_SETTINGS)(run)
for _command in (bench, explain, plugins, doctor, env):
    app.command()(_command)
app.add_typer(plan, name="plan")


def main() -> None:
    """Run the command line. Errors of commrt are one line on stderr; exits with 2 if the arguments were at fault."""
    try:
        app()
    except CommrtError as error:
        print(f"commrt: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InvalidArgument) else 1)

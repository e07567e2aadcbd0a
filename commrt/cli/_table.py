"""A plain table for the commands that list things."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells to stdout: wrapped to a terminal's width, elsewhere one plain line a row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=heading == headings[0], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 1000).print(table)

"""How far a long sweep is, while its rows pass by."""

from __future__ import annotations

import io
import sys
from types import TracebackType
from typing import Any


class Progress(io.RawIOBase):
    """A binary stream that passes the table on to stdout, and on a terminal keeps a bar under it.

    The bar is on stderr; where only stdout is a terminal, or neither, there is none.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and self._rows > 1:
            self._bar, self._task = _bar(self._rows)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._bar is None:
            return self._pass_on(data)
        rows = sum(not line.startswith(b"#") for line in bytes(data).splitlines())
        if sys.stdout.isatty():
            self._bar.console.print(bytes(data).decode(), end="", markup=False, highlight=False, soft_wrap=True)
        else:
            self._pass_on(data)
        self._bar.advance(self._task, rows)
        return len(data)

    def _pass_on(self, data: Any) -> int:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return len(data)


def _bar(rows: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(file=sys.stdout if sys.stdout.isatty() else sys.stderr)
    columns = TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Bar(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    return bar, bar.add_task("rows", total=rows)

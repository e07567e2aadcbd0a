"""Running a program of `_programs` on real processes."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commrt.launcher import launch

Ranks = Callable[..., str]


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """ranks(program, size, *arguments): all ranks must exit with 0, within `timeout_s`; what they printed."""

    def run(program: str, size: int, *arguments: object, timeout_s: float = 120, transport: str = "shm") -> str:
        out, err = io.BytesIO(), io.BytesIO()
        argv = [sys.executable, str(Path(__file__).parent / "_programs" / f"{program}.py"), *map(str, arguments)]
        status = launch(argv, size, timeout_s=timeout_s, stdout=out, stderr=err, env={"COMMRT_TRANSPORT": transport})
        assert status == 0, f"status {status}\n{out.getvalue().decode()}\n{err.getvalue().decode()}"
        return out.getvalue().decode()

    return run

"""The example packages: short, found through their entry points, and what their pages say works."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from commrt.group import Options
from commrt.launcher import launch
from commrt.testing import World, matrix

from .conftest import EXAMPLES, ROOT, Installed

PROGRAM = """
import commrt, numpy as np
with commrt.init() as comm:
    for count in (0, 1, 1000, 100_003):
        x = np.arange(count, dtype=np.float64) * (comm.rank + 1)
        comm.all_reduce(x)
        assert (x == np.arange(count) * (comm.size * (comm.size + 1) // 2)).all(), count
    assert set(comm.links.values()) == {"socket"}, comm.links
    choice = comm.explain("all_reduce", 1000).choice.name
    assert choice == "star", choice
"""
PAGES = sorted(EXAMPLES.glob("*/README.md"))


@pytest.mark.parametrize(
    ("file", "most"),
    [("socket_transport/commrt_socket/__init__.py", 99), ("star_algorithm/commrt_star/__init__.py", 59)],
)
def test_short(file: str, most: int) -> None:
    assert len((EXAMPLES / file).read_text().splitlines()) <= most


@pytest.mark.parametrize(
    ("kind", "name", "origin"),
    [("transports", "socket", "commrt-socket"), ("algorithms", "all_reduce/star", "commrt-star")],
)
def test_found_through_its_entry_point(kind: str, name: str, origin: str, installed: Installed) -> None:
    (plugin,) = [one for one in installed.registry.plugins() if (one.kind, one.name) == (kind, name)]
    assert plugin.origin == origin
    plugin.load()
    module = sys.modules[plugin.reference]
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(installed.folder)


def test_the_core_does_not_know_them() -> None:
    sources = [path for top in ("commrt", "transports", "algorithms", "backends") for path in (ROOT / top).glob("**/*")]
    for path in sources:
        if path.suffix in (".py", ".h", ".cpp", ".yaml"):
            assert not re.search(r"commrt_socket|commrt_star", path.read_text()), path


def test_both_carry_an_all_reduce_between_processes(installed: Installed, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**installed.env, "COMMRT_TRANSPORT": "socket", "COMMRT_ALGORITHM": "all_reduce/star"}
    err = io.BytesIO()
    status = launch([sys.executable, str(program)], 4, timeout_s=120, env=env, stderr=err)
    assert status == 0, err.getvalue().decode()


@pytest.mark.parametrize("size", [3, 8])
def test_the_socket_carries_everything(size: int, installed: Installed) -> None:
    """A part of the long list, each rank with an engine of its own, and packet flags that wrap all the time."""
    with World(
        size, "socket", registry=installed.registry, shared_engine=False, options=Options(lap=6), timeout_s=60
    ) as world:
        whole = matrix.sample(matrix.variants(size, world.communicators[0].capabilities), 150, size)
        assert world.run(lambda comm: matrix.run(comm, whole)) == [len(whole)] * size


def test_a_rank_that_is_killed_is_named(installed: Installed, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import commrt, numpy, os, sys\n"
        "comm = commrt.init(timeout=60)\n"
        "comm.barrier()\n"
        "if comm.rank == 1: os._exit(0)\n"
        "try: comm.all_reduce(numpy.ones(10))\n"
        "except commrt.errors.PeerLost as error: sys.exit(0 if error.context.peer == 1 else 3)\n"
        "sys.exit(4)\n"
    )
    env = {**installed.env, "COMMRT_TRANSPORT": "socket"}
    assert launch([sys.executable, str(program)], 2, timeout_s=60, env=env) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_what_their_pages_say(page: Path, installed: Installed) -> None:
    commands = [
        line for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL) for line in block.splitlines()
    ]
    assert commands
    for command in commands:
        words = shlex.split(command)
        if words[:2] == ["pip", "install"]:
            assert (ROOT / words[2]).is_dir(), f"{page} installs {words[2]}"
            continue
        assert words[0] == "commrt"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_every_example_has_a_page() -> None:
    assert {page.parent for page in PAGES} == {path for path in EXAMPLES.iterdir() if path.is_dir()}

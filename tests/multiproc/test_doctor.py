"""`commrt doctor` with plugins that are sound, absent, broken, lying, crashing and hanging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commrt._doctor_child import check_all
from commrt.testing.world import World

LIMIT_S = 6
HEAD = """
import os, time
from commrt.backend import Probe
from commrt.errors import TransportError
PLUGIN_API = 1
class Toy:
    memory_kinds = ()
    backends = ("cpu",)
    groups = False
    def __init__(self, name):
        self.name = name
    def probe(self):
        return Probe(("a toy",), level="toy level")
"""
PLUGINS = {
    "broken": "raise ImportError('libtoy.so.1 is missing')",
    "absent": "class A(Toy):\n    def probe(self): return Probe(reason='no toy is plugged in')\nplugin = A('absent')",
    "liar": "class L(Toy):\n    def open(self, context): raise TransportError('there is no toy')\nplugin = L('liar')",
    "raises": "class R(Toy):\n    def probe(self): raise KeyError('toy')\nplugin = R('raises')",
    "nonsense": "class N(Toy):\n    def probe(self): return 'yes'\nplugin = N('nonsense')",
    "crashes": "class C(Toy):\n    def probe(self): os.kill(os.getpid(), 11)\nplugin = C('crashes')",
    "quits": "class Q(Toy):\n    def probe(self): os._exit(0)\nplugin = Q('quits')",
    "hangs": "class H(Toy):\n    def probe(self): time.sleep(1000)\nplugin = H('hangs')",
    "sleeps": "class S(Toy):\n    def open(self, context): time.sleep(1000)\nplugin = S('sleeps')",
}


def doctor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "commrt", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def install(folder: Path, names: tuple[str, ...]) -> None:
    """What pip leaves behind for a distribution with these transports."""
    for name in names:
        (folder / f"toy_{name}.py").write_text(HEAD + PLUGINS[name] + "\n")
    info = folder / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    points = "".join(f"{name} = toy_{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[commrt.transports]\n{points}")


def test_what_is_here_works_and_the_rest_says_why_not(tmp_path: Path) -> None:
    install(tmp_path, ("absent", "broken"))
    done = doctor(tmp_path)
    lines = {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for plugin in (("backend", "cpu"), ("transport", "shm"), ("transport", "loopback"), ("provider", "native")):
        assert lines[plugin].split()[2] == "works"
    assert lines["transport", "loopback"].endswith("[threads of one process]")
    assert lines["transport", "fault"].split()[2] == "untried"
    assert lines["transport", "absent"] == "transport absent (toys)  absent   no toy is plugged in"
    assert lines["transport", "broken"].startswith("transport broken (toys)  unusable Unavailable")


def test_each_fault_is_told_and_none_spoils_another(tmp_path: Path) -> None:
    install(tmp_path, tuple(PLUGINS))
    began = time.monotonic()
    done = doctor(tmp_path, *PLUGINS, "cpu", "shm", "native", "--json", "-T", str(LIMIT_S))
    assert time.monotonic() - began < 90
    assert done.returncode == 1
    found: dict[str, Any] = {finding["name"]: finding for finding in json.loads(done.stdout)}
    told = {name: (found[name]["state"], found[name]["detail"]) for name in PLUGINS}
    unusable = "Unavailable: transport 'broken' (toys) can't be used: ImportError: libtoy.so.1 is missing"
    lie = "there is no toy"
    assert told["liar"][0] == "fails"
    assert lie in told["liar"][1] and told["liar"][1].endswith("(it had found: a toy)")
    del told["liar"]
    assert told == {
        "broken": ("unusable", unusable),
        "absent": ("absent", "no toy is plugged in"),
        "raises": ("fails", "KeyError: 'toy'"),
        "nonsense": ("fails", "TypeError: its probe answered str, no Probe"),
        "crashes": ("fails", "its probe was killed by SIGSEGV"),
        "quits": ("fails", "its probe ended without an answer"),
        "hangs": ("fails", f"its probe did not end within {LIMIT_S} s"),
        "sleeps": ("fails", f"its trial did not end within {LIMIT_S} s (it had found: a toy)"),
    }
    assert (found["liar"]["origin"], found["liar"]["level"]) == ("toys", "toy level")
    assert {found[name]["state"] for name in ("cpu", "shm", "native")} == {"works"}


def test_a_name_that_nothing_has(tmp_path: Path) -> None:
    done = doctor(tmp_path, "shmm")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'shm'" in done.stderr


def check_with_a_fault() -> None:
    """Rank 1 finds its first element overwritten by the last, which differs from 1000 elements on."""
    with World(2) as world:
        check_all(world)
        comm: Any = world.communicators[1]
        right = comm.all_reduce

        def wrong(x: Any, **keywords: Any) -> None:
            right(x, **keywords)
            comm.backend.copy(x.address, x.address + 4 * (x.count - 1), 4)

        comm.all_reduce = wrong
        check_all(world)


def test_one_wrong_element_is_noticed() -> None:
    with pytest.raises(ArithmeticError, match="1 of the 1000 elements"):
        check_with_a_fault()

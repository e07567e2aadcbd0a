"""`import commrt` loads no optional package and has no side effects."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest

FORBIDDEN = {
    *("numpy", "typer", "rich", "click", "msgspec", "cffi", "_cffi_backend", "yaml", "torch", "ml_dtypes", "cupy"),
    *("jax", "cuda", "mpi4py", "matplotlib", "transports", "backends", "algorithms"),
}

PROBE = """
import sys, threading
events = []
watched = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "ctypes.dlopen", "os.mkdir")
writing = lambda event, args: event == "open" and isinstance(args[1], str) and args[1][:1] in "wax+"
sys.addaudithook(lambda event, args: (event.startswith(watched) or writing(event, args)) and events.append(event))
sys.dont_write_bytecode = True
__import__(sys.argv[1])
import json
print(json.dumps({"loaded": sorted(sys.modules), "events": events, "threads": threading.active_count()}))
"""


class Probed(TypedDict):
    loaded: list[str]
    events: list[str]
    threads: int


def probe(module: str, path: Path) -> Probed:
    """What importing a module does to a fresh interpreter."""
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", PROBE, module]
    done = subprocess.run(command, env=environ, cwd=path, capture_output=True, text=True, timeout=60, check=True)
    probed: Probed = json.loads(done.stdout)
    return probed


def package_root() -> Path:
    spec = importlib.util.find_spec("commrt")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]).parent


def forbidden(probed: Probed) -> list[str]:
    return sorted(FORBIDDEN & set(probed["loaded"]))


def test_import_loads_nothing_optional_and_does_nothing() -> None:
    probed = probe("commrt", package_root())
    assert "commrt" in probed["loaded"]
    assert forbidden(probed) == []
    assert [name for name in probed["loaded"] if name.startswith(("commrt.transports.", "commrt.backends."))] == []
    assert probed["events"] == []
    assert probed["threads"] == 1


@pytest.mark.parametrize("module", ["commrt.errors", "commrt.plugins", "commrt.settings", "commrt.logs"])
def test_light_modules_stay_light(module: str) -> None:
    assert forbidden(probe(module, package_root())) == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("import numpy", "numpy"),
        ("import socket; socket.socket().close()", "socket.__new__"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', ''])", "subprocess.Popen"),
        ("open('left-behind', 'w').close()", "open"),
        ("import ctypes; ctypes.CDLL(None)", "ctypes.dlopen"),
        ("import threading; threading.Thread(target=threading.Event().wait, args=(1,)).start()", "a thread"),
    ],
)
def test_the_probe_sees_what_it_must(tmp_path: Path, body: str, found: str) -> None:
    (tmp_path / "heavy.py").write_text(body)
    probed = probe("heavy", tmp_path)
    seen = forbidden(probed) + probed["events"] + ["a thread"] * (probed["threads"] > 1)
    assert found in seen

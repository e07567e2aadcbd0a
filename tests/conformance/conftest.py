"""The example packages, installed as an outside package is."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commrt.plugins import Registry, discover

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PACKAGES = ("socket_transport", "star_algorithm")


@dataclass(frozen=True)
class Installed:
    """A folder with the packages, a registry that has found them, and the environment of a process that will."""

    folder: Path
    registry: Registry
    env: dict[str, str]


@pytest.fixture(scope="package")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Both packages, found through their entry points."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    command += ["--no-build-isolation", "--target", str(folder), *(str(EXAMPLES / name) for name in PACKAGES)]
    subprocess.run(command, check=True, timeout=120)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        importlib.invalidate_caches()
        yield Installed(folder, Registry(discover()), {"PYTHONPATH": os.pathsep.join(paths)})

"""Driver libraries for GPUs that are not there, and kernels for them: see device.h. What ran on one ran on no GPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = HERE.parents[1] / "algorithms" / "device"
LABEL = "fake driver: no GPU"
LIMIT_S = 240

_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
_CACHE = HERE.parents[1] / "build" / "fakegpu"


class Unavailable(Exception):
    """A tool or a header is not here; the message says which."""


def build(library: str, sources: Sequence[str], flags: Sequence[str] = ()) -> Path:
    """The folder that holds the driver library, for LD_LIBRARY_PATH. `sources`: of this folder, device.cpp beside."""
    files = [HERE / name for name in (*sources, "device.cpp")]
    return _compiled(library, [*files, *HERE.glob("*.h")], files, ("-O1", *flags)).parent


def kernels(source: str, *symbols: str) -> Path:
    """The folder with that source compiled for the CPU, for FAKEGPU_KERNELS. `symbols`: its kernels."""
    entries = "".join(f"FAKEGPU_ENTRY({symbol})\n" for symbol in symbols)
    text = f'#include "kernel.h"\n#include "kernel_entry.h"\n{source}\n{entries}'
    inputs = [HERE / "kernel_entry.h", *HEADERS.glob("*.h")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cpp")
        file.write_text(text)
        flags = ("-O2", "-DCR_SPIN=1", f"-I{HEADERS}", f"-I{HERE}")
        return _compiled("kernels.so", [file, *inputs], [file], flags).parent


def environment(library: Path, kernels: Path | None = None, **settings: object) -> dict[str, str]:
    """Of a process that finds that driver library. `settings`: FAKEGPU_*, in lower case and without the prefix."""
    paths = [str(library), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    given = {f"FAKEGPU_{name.upper()}": str(value) for name, value in settings.items()}
    if kernels is not None:
        given["FAKEGPU_KERNELS"] = str(kernels)
    return {**_without_settings(os.environ), **given, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _without_settings(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith("FAKEGPU_")}


def _compiled(name: str, inputs: Sequence[Path], files: Sequence[Path], flags: Sequence[str]) -> Path:
    """Made once for each content; other processes may be making it too."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable("no C++ compiler (g++ or clang++) on PATH")
    digest = hashlib.sha256(repr((name, flags)).encode())
    for path in sorted(inputs):
        digest.update(path.read_bytes())
    made = _CACHE / digest.hexdigest()[:20] / name
    if not made.exists():
        made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}")
        command = [compiler, *_FLAGS, *flags, *map(str, files), "-o", str(unfinished)]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        unfinished.rename(made)
    return made

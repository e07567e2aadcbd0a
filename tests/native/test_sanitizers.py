"""The native core under ThreadSanitizer, and under AddressSanitizer with UBSan: ranks as threads, real plans and data.

Sanitizers see one process and one mapping of shared memory, so that is how these ranks live (harness.h). Seeded bugs
(`CR_SEEDED`, in platform.h) prove that a clean run says something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
NATIVE = ROOT / "commrt" / "_native"
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-tsan"]
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize=null,object-size", "-fno-sanitize-recover=all"]
# None too: what stores past the caches do is not what sanitizers are shown.
SANITIZERS = {"thread": ["-fsanitize=thread"], "address": ["-fsanitize=address", *UNDEFINED], "none": ["-O2"]}
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
LIMIT_S = 120
OF_PYTHON = ("calls",)  # belongs to the interpreter's side
BASE, LEVELS = "cr_reduce_table_base", ("v3", "v4", "v4bf16")  # one instruction set is enough here

# mode, ranks, seed, steps. Bits of the seed: 1 memory as shm makes it, 2 little scratch, 4 epochs from just below 2^32.
RUNS = [
    ("plans", 2, 1, 120), ("plans", 3, 2, 160), ("plans", 3, 5, 160), ("plans", 4, 4, 160), ("plans", 4, 7, 160),
    ("shared", 2, 3, 120), ("shared", 4, 4, 120), ("scratch", 3, 2, 120), ("scratch", 3, 5, 120),
    ("threads", 2, 1, 60), ("threads", 3, 2, 60), ("threads", 4, 5, 40), ("trouble", 2, 1, 0), ("trouble", 3, 6, 0),
    ("kernels", 2, 1, 80), ("kernels", 3, 6, 80), ("channels", 2, 1, 300), ("channels", 3, 2, 300),
    ("streams", 2, 1, 60), ("streams", 3, 6, 60), ("stream-threads", 3, 2, 30), ("stream-trouble", 2, 3, 0),
]  # fmt: skip
SOAK_MODES = ("plans", "streams", "threads", "kernels", "channels")
SOAK = [(mode, ranks, seed, 400) for mode in SOAK_MODES for ranks in (2, 3, 4) for seed in range(8, 20)]

# Which mode must catch a bug, and whether it must be the sanitizer that does. The sizes and delays of one seed may hide
# a reuse that comes too early: several are tried.
BUGS = [("NO_RELEASE", "plans", True), ("NO_ACQUIRE", "plans", True), ("NO_BARRIER", "plans", True),
        ("NO_BARRIER", "kernels", True), ("EARLY_REUSE", "scratch", False), ("ONE_HALF", "scratch", False),
        ("NO_RELEASE", "channels", True), ("NO_ACQUIRE", "channels", True)]  # fmt: skip
SEEDS = (2, 3, 6, 7)


def compiler() -> str:
    """A C++ compiler."""
    found = shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("no C++ compiler")
    return found


@dataclass
class Build:
    """The core's objects for one sanitizer, and the programs made of them."""

    folder: Path
    flags: list[str]

    def __post_init__(self) -> None:
        core = [path for path in NATIVE.glob("*.cpp") if path.stem not in OF_PYTHON]
        sources = [NATIVE / "reduce_kernels.cpp", *sorted(core), HERE / "harness.cpp"]
        with ThreadPoolExecutor(2) as pool:
            self.objects = dict(zip((s.stem for s in sources), pool.map(self.compile, sources), strict=True))

    def compile(self, source: Path, seeded: str = "NO_BUG") -> Path:
        """One object. The kernels wait as threads do; all else is compiled as the package is."""
        out = self.folder / f"{source.stem}-{seeded}.o"
        own = ["-DCR_SPIN=1"] if source.stem == "kernels" else []
        defines = [f"-DCR_REDUCE_TABLE={BASE}", f"-DCR_SEEDED={seeded}", *own]
        run([compiler(), *FLAGS, *self.flags, *defines, "-c", source, "-o", out])
        return out

    def program(self, name: str, seeded: str) -> Path:
        """harness, kernels or channel_kernels, with a bug in what moves the data there, or with none."""
        out = self.folder / f"{name}-{seeded}"
        if out.exists():
            return out
        objects = dict(self.objects) if name != "channel_kernels" else {}
        if name != "harness":
            objects["harness"] = self.compile(HERE / f"{name}.cpp", seeded)
        elif seeded != "NO_BUG":
            objects["launch"] = self.compile(NATIVE / "launch.cpp", seeded)
        aliases = [f"-Wl,--defsym,cr_reduce_table_{level}={BASE}" for level in LEVELS if objects.get("api")]
        run([compiler(), *FLAGS, *self.flags, *objects.values(), "-o", out, "-pthread", *aliases])
        return out


def run(command: Iterable[str | Path]) -> None:
    """A build step; its output is the failure's text."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All plans of worlds of two to four."""
    pytest.importorskip("commrt._native._core")
    file = tmp_path_factory.mktemp("plans") / "plans.txt"
    run([sys.executable, HERE / "dump_plans.py", file, "2", "3", "4"])
    return file


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Build]:
    """By sanitizer, built when first asked for."""

    class Builds(dict[str, Build]):
        def __missing__(self, sanitizer: str) -> Build:
            folder, flags = tmp_path_factory.mktemp(sanitizer), SANITIZERS[sanitizer]
            probe(folder, flags)
            self[sanitizer] = Build(folder, flags)
            return self[sanitizer]

    return Builds()


def probe(folder: Path, flags: Sequence[str]) -> None:
    """Skips where the compiler has no runtime for the sanitizer, or the system can't run it."""
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n")
    built = subprocess.run([compiler(), *flags, source, "-o", program], capture_output=True, text=True, check=False)
    ran = not built.returncode and subprocess.run([program], capture_output=True, text=True, timeout=20, check=False)
    if not ran or ran.returncode:
        pytest.skip(f"{flags[0]} can't be used here: {(ran.stderr if ran else built.stderr)[-300:]}")


def execute(
    build: Build, plans: Path, mode: str, ranks: int, seed: int, steps: int, seeded: str = "NO_BUG"
) -> tuple[int, str]:
    """Exit status and all output of one run. Raises TimeoutExpired if it hangs."""
    name = {"kernels": "kernels", "channels": "channel_kernels"}.get(mode, "harness")
    arguments = {"kernels": [plans], "channel_kernels": []}.get(name, [mode, plans])
    command = [build.program(name, seeded), *arguments, *map(str, (ranks, seed, steps))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **OPTIONS}
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize(("mode", "ranks", "seed", "steps"), RUNS)
def test_clean(
    builds: dict[str, Build], plans: Path, sanitizer: str, mode: str, ranks: int, seed: int, steps: int
) -> None:
    status, text = execute(builds[sanitizer], plans, mode, ranks, seed, steps)
    assert status == 0, text
    assert "all right" in text


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks", "seed", "steps"), SOAK)
def test_clean_for_long(builds: dict[str, Build], plans: Path, mode: str, ranks: int, seed: int, steps: int) -> None:
    status, text = execute(builds["thread"], plans, mode, ranks, seed, steps)
    assert status == 0, text


@pytest.mark.parametrize(("bug", "mode", "by_sanitizer"), BUGS)
def test_seeded_bug_is_caught(builds: dict[str, Build], plans: Path, bug: str, mode: str, by_sanitizer: bool) -> None:
    """A wrong result counts too where it must not be the sanitizer."""
    seen = []
    for seed in SEEDS:
        status, text = execute(builds["thread"], plans, mode, 3, seed, 100, bug)
        race, wrong = "WARNING: ThreadSanitizer: data race" in text, "WRONG" in text
        if status and (race or (wrong and not by_sanitizer)):
            print(f"{bug}: caught by {'ThreadSanitizer' if race else 'a wrong result'} at seed {seed}")
            return
        seen.append((seed, status, text[:400]))
    pytest.fail(f"nothing catches {bug}: {seen}")


@pytest.mark.parametrize("mode", sorted({mode for _, mode, _ in BUGS}))
def test_without_a_bug_the_same_runs_are_clean(builds: dict[str, Build], plans: Path, mode: str) -> None:
    for seed in SEEDS:
        status, text = execute(builds["thread"], plans, mode, 3, seed, 100)
        assert status == 0, text

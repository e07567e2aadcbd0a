"""The hip backend and the xgmi transport, on a fake driver: real bindings, code objects by a real compiler, no GPU.

What this shows is that calls, handles and kernels' parameters are right, not what a device would do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commrt.backends.hip.compile import _clang
from commrt.testing import BackendSuite, TransportSuite
from commrt.testing.backend_suite import KERNEL

from . import HERE, LABEL, environment, kernels
from ._programs.hip_cases import ADD, EXECUTOR, TWICE
from .conftest import LIMIT_S, PROGRAMS, RESIDENT, Fake

CASES, NO_GPU = PROGRAMS / "hip_cases.py", "the HIP runtime finds no AMD GPU (hipErrorNoDevice)"
REAL = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so.5")


@pytest.fixture(scope="module")
def bindings() -> None:
    pytest.importorskip("hip", reason="hip-python is not installed")


@pytest.fixture(scope="module")
def compiler() -> None:
    if _clang() is None:
        pytest.skip("no clang++ for AMD GPUs")


def run(env: Mapping[str, str], case: str) -> Any:
    """What a case says that runs on what `env` makes it find."""
    command = [sys.executable, str(CASES), case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- conformance -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend_outcomes(fake_hip: Fake, compiler: None) -> Any:
    return fake_hip.run(PROGRAMS / "suite.py", "backend", "hip", "hip", kernels=kernels(KERNEL, "count"))


@pytest.fixture(scope="module")
def transport_outcomes(fake_hip: Fake, plan_kernels: Path, compiler: None) -> Any:
    command = (PROGRAMS / "suite.py", "transport", "xgmi", "hip")
    return fake_hip.run(*command, kernels=plan_kernels, multiprocessors=RESIDENT)


def see(outcome: tuple[str, str]) -> None:
    status, text = outcome
    if status == "skipped":
        pytest.skip(text)
    assert status == "passed", text


@pytest.mark.parametrize("check", BackendSuite.checks())
def test_backend(check: str, backend_outcomes: Any) -> None:
    see(backend_outcomes[check])


@pytest.mark.parametrize("check", TransportSuite.checks())
def test_transport(check: str, transport_outcomes: Any) -> None:
    see(transport_outcomes[check])


def test_two_processes_exchange_by_kernels(
    fake_hip: Fake, exchange_kernels: Path, compiler: None, tmp_path: Path
) -> None:
    """Each kernel puts into the other process's memory, opened by its IPC handle, signals and waits."""
    command = (PROGRAMS / "exchange.py", tmp_path, "RANK", 4, 20, "xgmi", "hip")
    for output in fake_hip.ranks(2, *command, kernels=exchange_kernels):
        assert LABEL in output["devices"]
        assert (output["wrong"], output["failed"], output["reach"]) == (0, 0, True)


# ---- what may be missing ---------------------------------------------------------------------------------------------


def expect_reason(env: Mapping[str, str], reason: str) -> None:
    """One clear line; asked for all the same, an error that says so; asked for nothing, all is well without."""
    backend, transport, allocate, forced, unforced = run(env, "probe")
    assert backend == transport and reason in backend and "\n" not in backend
    assert allocate == f"Unavailable: {backend}"
    assert forced.startswith(f"Unavailable: transport 'xgmi' can't serve here: {backend}")
    assert unforced == "nothing"


def test_no_bindings(tmp_path: Path) -> None:
    Path(tmp_path, "hip.py").write_text("raise ImportError('hidden by a test')\n")
    expect_reason({**os.environ, "PYTHONPATH": str(tmp_path)}, "hip-python is not installed")


def test_no_library(bindings: None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    expect_reason(env, "no HIP runtime (libamdhip64.so) is installed")


@pytest.mark.parametrize("content", ["not a library", None])
def test_broken_library(bindings: None, tmp_path: Path, content: str | None) -> None:
    """One that can't be loaded, and one that lacks all functions."""
    file = Path(tmp_path, "libamdhip64.so")
    if content is None:
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(file)], check=True, timeout=60)
    else:
        file.write_text(content)
    expect_reason({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, "the HIP runtime can't be used: failed to ")


def test_no_device(fake_hip: Fake) -> None:
    expect_reason(fake_hip.env(devices=0), NO_GPU)


def test_real_runtime_without_a_device(bindings: None, tmp_path: Path) -> None:
    """Debian's, which is no fake."""
    if not REAL.exists():
        pytest.skip("no real HIP runtime is here (libamdhip64-5)")
    if Path("/dev/kfd").exists():
        pytest.skip("there may be an AMD GPU")
    Path(tmp_path, "libamdhip64.so").symlink_to(REAL)
    expect_reason({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, NO_GPU)


# ---- memory, streams, kernels ----------------------------------------------------------------------------------------


def test_kernels_use_pinned_and_device_memory(fake_hip: Fake, compiler: None) -> None:
    twice, *rest = fake_hip.run(CASES, "add", kernels=kernels(ADD, "add"), multiprocessors=3, threads=2048)
    assert twice.startswith("TransportError: ") and "hipErrorHostMemoryAlreadyRegistered" in twice
    assert rest == ["nothing", "nothing", True, 3 * 2048 // 512]


@pytest.mark.parametrize("architecture", ["gfx942", "gfx90a"])
def test_the_executor_is_built_and_loaded(fake_hip: Fake, compiler: None, architecture: str) -> None:
    built = kernels(EXECUTOR, "run_plan_float32_sum")
    (resident,) = fake_hip.run(CASES, "executor", kernels=built, architecture=architecture)
    assert resident > 0


def test_hiprtc_builds_kernels(fake_hip: Fake, tmp_path: Path) -> None:
    """The real one of Debian, which is a part of its runtime there, and knows no newer GPU than gfx90a."""
    if not REAL.exists():
        pytest.skip("no real hiprtc is here (libamdhip64-5)")
    Path(tmp_path, "libhiprtc.so").symlink_to(REAL)
    env = environment(fake_hip.library, kernels(TWICE, "twice"), architecture="gfx90a")
    paths = env["LD_LIBRARY_PATH"] + os.pathsep + str(tmp_path)
    compiler, result, error = run({**env, "LD_LIBRARY_PATH": paths, "XDG_CACHE_HOME": str(tmp_path)}, "twice")
    assert compiler.startswith("hiprtc ") and result == 42
    assert error.startswith("InvalidArgument: the kernel does not compile for gfx90a:\n") and "error: " in error


def test_parameters_are_compared(fake_hip: Fake, compiler: None) -> None:
    other = kernels(ADD.replace("u64 n)", "unsigned n)"), "add")
    refused = "InvalidArgument: the kernel 'add' can't be loaded: hipErrorInvalidImage"
    assert fake_hip.run(CASES, "build_add", kernels=other) == [refused]


def test_code_for_another_gpu_is_refused(fake_hip: Fake, compiler: None) -> None:
    assert fake_hip.run(CASES, "foreign") == ["hipErrorNoBinaryForGpu"]


def test_refusals(fake_hip: Fake) -> None:
    memory, work, pinned, forged, closed = fake_hip.run(CASES, "refusals")
    assert memory.startswith("MemoryError: ")
    assert work.startswith("OperationError: ") and "hipErrorIllegalState" in work
    assert pinned.startswith("InvalidArgument: pinned memory")
    assert forged.startswith("TransportError: ") and "hipErrorInvalidContext" in forged  # of this very process
    assert closed.startswith("TransportError: ")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("hipMalloc:2", "MemoryError: hipMalloc: no memory left on AMD GPU 0"),
        (
            "hipModuleLoadData:209",
            "OperationError: hipModuleLoadData failed on AMD GPU 0: hipErrorNoBinaryForGpu (209)",
        ),
        ("hipHostRegister:801", "TransportError: 8192 bytes of host memory can't be pinned: "),
    ],
)
def test_calls_that_fail(fake_hip: Fake, compiler: None, failure: str, said: str) -> None:
    cases = f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import hip_cases as cases"
    program = f"{cases}; print(cases.json.dumps(cases.said(cases.add)))"
    assert fake_hip.run("-c", program, kernels=kernels(ADD, "add"), fail=failure).startswith(said)


def test_a_kernel_that_faults(fake_hip: Fake, compiler: None) -> None:
    """It shows where the stream is waited for; the device is of no use any more."""
    _, outcome, copied, *_ = fake_hip.run(CASES, "add", kernels=kernels(ADD, "add"), fail="kernel:700")
    assert outcome == "OperationError: hipStreamSynchronize failed on AMD GPU 0: hipErrorIllegalAddress (700)"
    assert copied.endswith("hipErrorIllegalAddress (700)")


def test_graphs(fake_hip: Fake, compiler: None) -> None:
    *captured, before, after = fake_hip.run(CASES, "graph", kernels=kernels(ADD, "add"))
    assert captured == [True, False, "InvalidArgument: work of Python can't become part of a graph"]
    assert (before, after) == (0, 1000)


def test_nothing_is_left_behind(fake_hip: Fake, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    assert fake_hip.run(CASES, "streams", log=log) == ["nothing"]
    calls = Counter(line.split()[1] for line in log.read_text().splitlines())
    assert calls["hipEventCreateWithFlags"] - calls["hipEventDestroy"] <= 2
    assert calls["hipStreamCreateWithFlags"] - calls["hipStreamDestroy"] <= 2 + 8


@pytest.mark.parametrize(("local", "chosen", "device"), [(0, 0, 0), (1, 0, 1), (3, 0, 1), (0, 1, 1)])
def test_ranks_have_devices_in_turn(
    fake_hip: Fake, monkeypatch: pytest.MonkeyPatch, local: int, chosen: int, device: int
) -> None:
    launched = {"RANK": local, "WORLD_SIZE": 4, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}
    for name, value in {**launched, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    assert fake_hip.run(CASES, "device", chosen) == [device, chosen]


def test_other_backends_are_not_reached(fake_hip: Fake) -> None:
    assert fake_hip.run(CASES, "reach") == [[0, 1], [1, 0]]


@pytest.mark.parametrize("peers", [1, 0])
def test_gpus_that_do_not_reach_each_other_are_not_joined(fake_hip: Fake, peers: int) -> None:
    assert fake_hip.run(CASES, "locations", peers=peers) == [True, bool(peers), True, False]


def test_kernels_are_kept_on_disk(fake_hip: Fake, tmp_path: Path, compiler: None) -> None:
    """The second process finds what the first has compiled; what is spoilt is compiled again."""
    fake, built, folder = (
        replace(fake_hip, cache=tmp_path),
        kernels(ADD, "add"),
        tmp_path / "commrt" / "kernels" / "hip",
    )

    def files() -> list[tuple[str, int]]:
        assert fake.run(CASES, "build_add", kernels=built) == ["nothing"]
        return [(path.name, path.stat().st_mtime_ns) for path in folder.iterdir()]

    first = files()
    assert len(first) == 1 and files() == first
    (folder / first[0][0]).write_bytes(b"spoilt")
    second = files()
    assert len(second) == 1 and second != first and files() == second


# ---- the fake itself -------------------------------------------------------------------------------------------------


def test_numbers_are_the_bindings(bindings: None) -> None:
    from hip import hip as real

    text = (HERE / "hip.h").read_text()
    numbers = {
        name: int(value) for name, value in re.findall(r"^ +(hipError\w+|hipSuccess) = (\d+),", text, re.MULTILINE)
    }
    assert len(numbers) > 20
    assert {name: int(real.hipError_t[name]) for name in numbers} == numbers
    assert int(real.hipMemcpyKind.hipMemcpyDefault) == 4
    assert int(real.hipDeviceAttribute_t.hipDeviceAttributeMultiprocessorCount) == 63

"""The fake libcuda.so.1 refuses what drivers refuse, and its devices hold as many blocks as they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commrt.backends.cuda import compile
from commrt.errors import Unavailable

from .conftest import LIMIT_S, PROGRAMS, Fake

REFUSED = {
    "no_start": ["NOT_INITIALIZED"],
    "no_context": ["INVALID_CONTEXT", "INVALID_CONTEXT", "INVALID_DEVICE"],
    "memory": ["SUCCESS", *["INVALID_VALUE"] * 4, "SUCCESS", *["INVALID_VALUE"] * 3, "OUT_OF_MEMORY"],
    "host_memory": [
        "INVALID_VALUE", "SUCCESS", "SUCCESS", "HOST_MEMORY_ALREADY_REGISTERED", "SUCCESS",
        "HOST_MEMORY_NOT_REGISTERED", "INVALID_VALUE",
    ],
    "sharing": ["INVALID_CONTEXT", "INVALID_VALUE", "INVALID_VALUE", "INVALID_VALUE"],
    "images": ["INVALID_IMAGE", "NO_BINARY_FOR_GPU", "NOT_FOUND", "SUCCESS", "SUCCESS", "INVALID_HANDLE"],
    "launches": ["INVALID_VALUE", "INVALID_VALUE", "INVALID_VALUE", "SUCCESS", "INVALID_HANDLE", "INVALID_HANDLE"],
    "host_functions": ["NOT_PERMITTED"],
    "captures": [
        "ILLEGAL_STATE", "STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_ISOLATION", "STREAM_CAPTURE_INVALIDATED",
        "STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED", "CAPTURED_EVENT", "STREAM_CAPTURE_UNSUPPORTED",
        "STREAM_CAPTURE_INVALIDATED",
    ],
    "graphs": ["0", "7", "8", "9", "SUCCESS", "INVALID_VALUE"],
}  # fmt: skip
FAILED = "OperationError: {} failed on NVIDIA GPU 0: {}"
EXPORT = "cuMemExportToShareableHandle"
TIMED_OUT = 12  # of channel.h
BUILD = "from commrt.backends.cuda.compile import cubin; import sys; sys.stdout.buffer.write(cubin({!r}, {}))"


@pytest.fixture(scope="module")
def answers(fake_cuda: Fake, exchange_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    code = tmp_path_factory.mktemp("code") / "exchange.cubin"
    program = BUILD.format((PROGRAMS / "exchange.cu").read_text(), (9, 0))
    built = subprocess.run([sys.executable, "-c", program], env=fake_cuda.env(), capture_output=True, check=False,
                           timeout=LIMIT_S)  # fmt: skip
    if built.returncode:
        pytest.skip(built.stderr.decode().splitlines()[-1])
    code.write_bytes(built.stdout)
    return fake_cuda.run(PROGRAMS / "cuda_rules.py", code, kernels=exchange_kernels)


@pytest.mark.parametrize("rule", REFUSED)
def test_refuses(rule: str, answers: Any) -> None:
    assert answers[rule] == REFUSED[rule]


@pytest.mark.parametrize(("blocks", "codes"), [(2, [0, 0]), (5, [0, TIMED_OUT])])
def test_two_grids_that_wait_for_each_other_must_be_resident(
    fake_cuda: Fake, exchange_kernels: Path, blocks: int, codes: list[int]
) -> None:
    """A device with room for four blocks: two grids of two meet there. Of two of five, one keeps the other out."""
    settings = {"multiprocessors": 1, "devices": 1}
    outcome = fake_cuda.run(PROGRAMS / "two_grids.py", blocks, "cuda", kernels=exchange_kernels, **settings)
    assert outcome.pop("resident") == 4
    assert sorted(outcome["codes"]) == codes


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        ("cuMemCreate:2", "MemoryError: cuMemCreate: no memory left on NVIDIA GPU 0"),
        ("cuMemMap:1@2", FAILED.format("cuMemMap", "CUDA_ERROR_INVALID_VALUE (1)")),
        ("cuMemSetAccess:1", FAILED.format("cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE (1)")),
        (
            "cuMemExportToShareableHandle:801",
            FAILED.format("cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED (801)"),
        ),
        ("cuMemHostRegister:712", "TransportError: 4096 bytes of host memory can't be pinned"),
        ("cuModuleLoadData:200", FAILED.format("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE (200)")),
        ("cuLaunchKernel:701", FAILED.format("cuLaunchKernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)")),
        ("kernel:700", FAILED.format("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS (700)")),
        ("cuLaunchHostFunc:999", FAILED.format("cuLaunchHostFunc", "CUDA_ERROR_UNKNOWN (999)")),
    ],
)
def test_errors_of_the_driver_name_call_and_device(
    fake_cuda: Fake, exchange_kernels: Path, fail: str, error: str
) -> None:
    said = fake_cuda.run(PROGRAMS / "use_all.py", kernels=exchange_kernels, fail=fail, devices=1)
    assert said["error"].startswith(error)


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        ("cuMemAlloc:2", "MemoryError: cuMemAlloc: no memory left on NVIDIA GPU 0"),
        ("cuMemAlloc:1@2", FAILED.format("cuMemAlloc", "CUDA_ERROR_INVALID_VALUE (1)")),
        ("cuIpcGetMemHandle:801", FAILED.format("cuIpcGetMemHandle", "CUDA_ERROR_NOT_SUPPORTED (801)")),
    ],
)
def test_errors_of_memory_that_is_not_made_of_pieces(
    fake_cuda: Fake, exchange_kernels: Path, fail: str, error: str
) -> None:
    said = fake_cuda.run(PROGRAMS / "use_all.py", kernels=exchange_kernels, fail=fail, devices=1, vmm=0)
    assert said["error"].startswith(error)


@pytest.mark.parametrize("vmm", [0, 1])
def test_what_use_all_does_works(fake_cuda: Fake, exchange_kernels: Path, vmm: int) -> None:
    """The control of the tests above."""
    assert fake_cuda.run(PROGRAMS / "use_all.py", kernels=exchange_kernels, vmm=vmm)["error"] == ""


@pytest.mark.parametrize(("vmm", "pair"), [(0, ("cuMemAlloc", "cuMemFree")), (1, ("cuMemMap", "cuMemUnmap"))])
def test_calls_are_logged(fake_cuda: Fake, tmp_path: Path, vmm: int, pair: tuple[str, str]) -> None:
    log = tmp_path / "calls"
    ask = "from commrt.backends.cuda import plugin; plugin.allocate(1).close(); print(1)"
    fake_cuda.run("-c", ask, log=log, vmm=vmm)
    calls = [line.split()[1] for line in log.read_text().splitlines()]
    assert calls.count(pair[0]) == calls.count(pair[1]) == 1
    assert json.dumps(calls).count("cuInit") == 1


def test_what_ends_in_a_host_function_is_given_back_later(fake_cuda: Fake, tmp_path: Path) -> None:
    """A driver must not be called there, and work may hold the last of an event or a stream."""
    log = tmp_path / "calls"
    ask = """
from commrt.backends.cuda import plugin
stream = plugin.stream()
def queue():
    other = plugin.stream()
    stream.submit(lambda: (other, other.record))
    other.synchronize()
queue()
stream.synchronize()
last = plugin.stream()
print(1)
"""
    fake_cuda.run("-c", ask, log=log)
    calls = [line.split()[1] for line in log.read_text().splitlines()]
    assert calls.count("cuStreamDestroy") == calls.count("cuEventDestroy") == 1
    assert "refused" not in calls


@pytest.mark.parametrize(
    ("known", "capability", "expected"),
    [
        ([75, 80, 86, 90], (9, 0), "sm_90"),
        ([80, 86], (8, 9), "sm_86"),
        ([80, 120], (12, 1), "sm_120"),
        ([80], (7, 0), ""),
    ],
)
def test_the_newest_architecture_that_compiler_and_device_know(
    known: list[int], capability: tuple[int, int], expected: str
) -> None:
    nvrtc = SimpleNamespace(nvrtcGetSupportedArchs=lambda: (0, known))
    if expected:
        assert compile._architecture(nvrtc, capability) == expected
    else:
        with pytest.raises(Unavailable, match="does not compile for sm_70"):
            compile._architecture(nvrtc, capability)

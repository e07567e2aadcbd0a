"""The example of a user's kernel: exact, on threads and on processes; its source builds for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest

from commrt.launcher import launch
from commrt.testing import World

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_kernel" / "custom_kernel.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("transport", ["loopback", "shm"])
@pytest.mark.parametrize("count", [1, 1000, 20_001])
def test_on_threads(transport: str, count: int) -> None:
    example = load(EXAMPLE)
    with World(4, transport, timeout_s=60) as world:
        world.run(lambda comm: example.main(comm, count, 5))


def test_on_processes() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    env = {"COMMRT_TRANSPORT": "shm"}
    status = launch([sys.executable, str(EXAMPLE)], 4, timeout_s=120, env=env, stdout=out, stderr=err)
    assert status == 0, err.getvalue().decode()
    assert out.getvalue().decode().splitlines() == [
        "[0] all_reduce_puts: 1000 elements on 4 ranks and 2 blocks, 0 wrong",
        "[0] all_reduce_packets: 1000 elements on 4 ranks and 2 blocks, 0 wrong",
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx942"])
def test_for_gpus(arch: str) -> None:
    gpu_compile = load(ROOT / "ci" / "gpu_compile.py")
    try:
        built = gpu_compile.build(load(EXAMPLE).SOURCE, arch)
    except gpu_compile.Unavailable as reason:
        pytest.skip(str(reason))
    assert set(built.usage) == {"all_reduce_puts", "all_reduce_packets"}
    assert {usage.spilled for usage in built.usage.values()} == {0}

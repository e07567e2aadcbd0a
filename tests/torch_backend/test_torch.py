"""The torch.distributed backend, in processes of its own: against Gloo, in training, and when a rank is killed."""

from __future__ import annotations

import ast
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commrt.launcher import launch

pytest.importorskip("torch", reason="torch is not installed")
PROGRAMS = Path(__file__).parent / "_programs"
ROOT = Path(__file__).parents[2]
CASES = re.findall(r"^@case\ndef (\w+)", (PROGRAMS / "cases.py").read_text(), re.MULTILINE)
ENVIRON = {"OMP_NUM_THREADS": "1"}


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRON, **environ}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=150, check=False
    )


def torchrun(program: Path) -> str:
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- every case on three ranks ---


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = io.BytesIO()
    store = tmp_path_factory.mktemp("store") / "store"
    argv = [sys.executable, str(PROGRAMS / "cases_rank.py"), str(store)]
    launch(argv, 3, timeout_s=150, prefix=False, stdout=out, stderr=out, env=ENVIRON)
    return out.getvalue().decode().splitlines()


def test_there_are_cases() -> None:
    assert {"all_reduce", "functional_collectives", "a_hundred_random_operations"} <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: list[str]) -> None:
    failed = [line.partition(": ")[2] for line in outcomes if line.startswith(f"{name} failed: ")]
    assert not failed, ast.literal_eval(failed[0]).decode()
    assert outcomes.count(f"{name} right") == 3, "\n".join(outcomes)


def test_the_ranks_leave_in_good_order(outcomes: list[str]) -> None:
    assert outcomes.count("left in good order") == 3, "\n".join(outcomes)


# --- training ---


def test_models_train_as_over_gloo() -> None:
    told = torchrun(PROGRAMS / "training_rank.py")
    for what in ("DDP equal", "DDP with views equal", "DDP with a hook equal", "FSDP equal"):
        assert told.count(what) == 2, told


def test_the_example_runs() -> None:
    told = torchrun(ROOT / "examples" / "ddp.py")
    assert "the ranks have the same parameters" in told


# --- failures ---


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    program = [sys.executable, str(PROGRAMS / "killed_rank.py"), str(tmp_path / "store")]
    victim = subprocess.Popen([*program, "1"], stdout=subprocess.DEVNULL, env={**os.environ, **ENVIRON})
    try:
        told = subprocess.run([*program, "0"], capture_output=True, text=True, timeout=100, check=False)
        assert told.returncode == 0, told.stdout + told.stderr
        assert victim.wait(10) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()
    lines = told.stdout.splitlines()
    assert len(lines) == 8 and lines[-1] == "left in good order"
    for line, kind in zip(lines, ("", "CommunicatorBroken", "", "CommunicatorBroken", "", "", ""), strict=False):
        assert "rank 1 died before its part of operation" in line, told.stdout
        assert (kind or "PeerLost") in line
        assert float(re.findall(r"after ([\d.]+) s", line)[0]) < 5


ABANDONED = """
import atexit, sys, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
import torch, torch.distributed as dist
dist.init_process_group("commrt", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
future = dist.irecv(torch.ones(1), 0).get_future()
print([thread.name for thread in threading.enumerate()], future.done())
"""


def test_no_thread_outlives_the_interpreter(tmp_path: Path) -> None:
    done = python("-c", ABANDONED, str(tmp_path / "store"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["['MainThread', 'commrt-futures'] False", "['MainThread']"]


# --- how torch finds it ---

KNOWN = "print('known' if 'COMMRT' in torch.distributed.Backend._plugins else 'unknown')"
HEAVY = "import sys; print([name for name in ('commrt.native', 'commrt.errors', 'msgspec') if name in sys.modules])"


def test_torch_loads_it_and_little_else() -> None:
    done = python("-c", f"import torch\n{KNOWN}\n{HEAVY}\nimport commrt.torch.process_group\n{HEAVY}")
    assert done.stdout.splitlines() == ["known", "[]", "['commrt.native', 'commrt.errors', 'msgspec']"], done.stderr


def test_it_can_be_imported_where_torch_loads_nothing() -> None:
    done = python("-c", f"import torch\n{KNOWN}\nimport commrt.torch\n{KNOWN}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines() == ["unknown", "known"], done.stdout + done.stderr


def test_it_can_be_imported_first() -> None:
    done = python("-c", f"import commrt.torch, torch\n{KNOWN}")
    assert done.stdout.splitlines() == ["known"], done.stdout + done.stderr


def test_torch_imports_without_it() -> None:
    done = python("-c", f"import sys; sys.modules['commrt.torch'] = None\nimport torch\n{KNOWN}")
    assert done.stdout.splitlines() == ["unknown"], done.stdout + done.stderr
    assert "won't know the backend commrt" in done.stderr

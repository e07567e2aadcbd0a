"""All ranks' GPUs joined by a multicast object, on a fake driver: no NVLink, no GPU. Results are right, and nothing is
left behind, whichever step fails on one rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from commrt.testing.world import World

from .conftest import PROGRAMS, Fake
from .test_collectives import launched

sys.path.insert(0, str(PROGRAMS))
from nvls import digest, sums

RANKS = 4
MAPPED = 2 + RANKS - 1  # which mapping of a rank is that of the object: behind its own memory's, and the peers'
NONE = (-1, "", None)
FORCED = (1, "cuMulticastAddDevice:801", "nvls")
# The rank on which a step fails, and how.
STEPS = [
    (2, "cuMulticastGetGranularity:801"),
    (0, "cuMulticastCreate:801"),
    (0, "cuMemExportToShareableHandle:801@2"),
    (3, f"cuMemImportFromShareableHandle:801@{RANKS}"),
    (1, "cuMulticastAddDevice:801"),
    (2, "cuMulticastBindAddr:801"),
    (3, f"cuMemAddressReserve:801@{MAPPED}"),
    (0, f"cuMemMap:801@{MAPPED}"),
    (2, f"cuMemSetAccess:801@{MAPPED}"),
]
CASES = [NONE, *((*step, None) for step in STEPS), (-1, "", "nvls"), FORCED]


def run(env: dict[str, str], out: Path, backend: str, cases: list[Any], ranks: int = RANKS) -> list[Any]:
    """By case, what every rank reports."""
    done = launched(env, ranks, "run", PROGRAMS / "nvls.py", out, backend, json.dumps(cases))
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    return list(zip(*reports, strict=True))


@pytest.fixture(scope="module")
def on_hosts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What shared memory gives."""
    (reports,) = run(dict(os.environ), tmp_path_factory.mktemp("hosts") / "out", "cpu", [NONE])
    return reports[0]["outcome"]["chosen"]


@pytest.fixture(scope="module")
def on_loopback() -> Any:
    """What its emulated switch gives, to every rank, and by which plan."""
    with World(RANKS) as world:
        found = world.run(lambda comm: (sums(comm, "switch"), digest(comm)))
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.fixture(scope="module")
def reports(fake_cuda: Fake, plan_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("nvls")
    env = fake_cuda.env(plan_kernels, devices=RANKS, log=folder / "calls")
    found = dict(zip(CASES, run(env, folder / "out", "cuda", CASES), strict=True))
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    assert len({process for process, call in calls if call == "multimem"}) == RANKS  # kernels went through the object
    return found


@pytest.mark.parametrize("forced", [None, "nvls"])
def test_the_plan_of_the_emulated_switch_gives_the_same_bits(
    reports: Any, on_hosts: Any, on_loopback: Any, forced: str | None
) -> None:
    for report in reports[-1, "", forced]:
        assert not report["said"] and not report["left"]
        outcome = report["outcome"]
        assert "switch" in outcome["offered"] and outcome["links"] == ["cuda_ipc"]
        assert outcome["switch"] == outcome["chosen"] == on_hosts
        assert [outcome["switch"], outcome["digest"]] == list(on_loopback)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
def test_where_one_rank_fails_all_do_without(reports: Any, on_hosts: Any, step: tuple[int, str]) -> None:
    rank, fail = step
    why = f"transport nvls is left out: rank {rank}: {fail.partition(':')[0]}: CUDA_ERROR_NOT_SUPPORTED"
    for report in reports[(*step, None)]:
        assert report["said"] == [why] and not report["left"]
        outcome = report["outcome"]
        assert "switch" not in outcome["offered"] and "a switch that reduces" in outcome["switch"]
        assert outcome["chosen"] == on_hosts


def test_one_that_is_forced_says_why_it_can_not_serve(reports: Any) -> None:
    for report in reports[FORCED]:
        assert report["outcome"] == "Unavailable: rank 1: cuMulticastAddDevice: CUDA_ERROR_NOT_SUPPORTED"
        assert not report["left"]


@pytest.mark.parametrize(
    ("settings", "ranks", "said"),
    [
        ({"devices": 1}, 2, ["transport nvls is left out: ranks 0 and 1 are on one GPU"]),
        ({"vmm": 0}, 2, ["transport nvls is left out: rank 0: cuMulticastBindAddr: CUDA_ERROR_INVALID_VALUE; "]),
        ({"multicast": 0}, 2, []),
        ({}, 1, []),
    ],
)
def test_devices_without_a_switch(
    fake_cuda: Fake, plan_kernels: Path, tmp_path: Path, settings: dict[str, int], ranks: int, said: list[str]
) -> None:
    (reports,) = run(fake_cuda.env(plan_kernels, **settings), tmp_path / "out", "cuda", [NONE], ranks)
    for report in reports:
        outcome = report["outcome"]
        assert "switch" not in outcome["offered"] and isinstance(outcome["chosen"], list)
        assert [line[: len(start)] for line, start in zip(report["said"], said, strict=True)] == said
        assert not report["left"]

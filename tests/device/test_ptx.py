"""The plan executor's PTX, as NVRTC emits it, run by `tests/ptxsim` for ranks x blocks x threads on a weak memory.

Simulated, and evidence rather than proof (see there). Seeded bugs show what a clean run is worth.
"""

from __future__ import annotations

import functools
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

pytest.importorskip("commrt._native._core")
from commrt.algorithm import Algorithm
from commrt.lowering import with_syncs
from commrt.plan import Plan, RankProgram
from commrt.plugins import default_registry

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("ci", "tests", "tests/device", "tests/native")]
import gpu_compile  # noqa: E402
from dump_plans import TWO_BLOCKS  # noqa: E402
from ptxsim.machine import Divergence  # noqa: E402
from ptxsim.memory import Fault  # noqa: E402
from ptxsim.translate import Program, translate  # noqa: E402
from simulated import Layouts, Ranks, Setting, expected  # noqa: E402

ARCH = "sm_90a"  # the first with multimem
THREADS, OPERATIONS = 4, 2
STEPS = 2_000_000  # a run takes some ten thousand; waiting ones more if some threads are slow
MISMATCH = 1

# algorithm, ranks, schedules
RUNS = [
    ("all_reduce/oneshot", 2, 100), ("all_reduce/twoshot", 2, 100), ("all_reduce/pairs", 2, 100),
    ("all_reduce/pull", 2, 100), ("all_reduce/switch", 2, 40), ("all_reduce/pipelined", 2, 20),
    ("all_reduce/direct", 2, 20), ("all_reduce/two_blocks", 2, 20), ("all_reduce/pairs", 3, 10),
    ("all_gather/packets", 2, 20), ("broadcast/put", 2, 20), ("broadcast/packets", 2, 20),
]  # fmt: skip
# bug, an algorithm that shows it
BUGS = [
    ("NO_RELEASE", "all_reduce/pairs"), ("NO_ACQUIRE", "all_reduce/pairs"), ("UNSYNCED_SIGNAL", "all_reduce/pairs"),
    ("UNSYNCED_WAIT", "all_reduce/pairs"), ("ONE_FLAG", "all_reduce/oneshot"), ("NO_BARRIER", "all_reduce/two_blocks"),
    ("EARLY_REUSE", "broadcast/put"), ("ONE_HALF", "all_reduce/oneshot"), ("NO_SWITCH_FENCE", "all_reduce/switch"),
]  # fmt: skip
TRIES = 60


@functools.cache
def kernel(seeded: str = "NO_BUG") -> Program:
    """The executor for float32 sums."""
    try:
        built = gpu_compile.build(gpu_compile.executor_source([("float32", "sum")]), ARCH, (f"-DCR_SEEDED={seeded}",))
    except gpu_compile.Unavailable as reason:
        pytest.skip(str(reason))
    return translate(built.assembly, "run_plan_float32_sum")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    """As this host's compiler lays out what it shares with kernels."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    return Layouts(compiler, tmp_path_factory.mktemp("layouts"))


def plan_of(name: str, ranks: int) -> Plan:
    """Loops in slices of a line, so that they turn."""
    algorithms: dict[str, Algorithm] = {**default_registry().usable("algorithms"), "all_reduce/two_blocks": TWO_BLOCKS}
    plan = algorithms[name].plan(ranks)
    return replace(plan, unit=64) if plan.unit else plan


def trouble(
    layouts: Layouts,
    program: Program,
    plan: Plan,
    seed: int,
    lowered: Callable[[RankProgram], RankProgram] = with_syncs,
) -> str:
    """What goes wrong in one schedule of some operations, one after another; nothing if nothing does."""
    chance = random.Random(seed)
    setting = Setting.drawn(plan, chance)
    ranks = Ranks(layouts, plan, setting, chance, lowered)
    for operation in range(1, OPERATIONS + 1):
        data = ranks.inputs()
        outputs = [ranks.launch(program, rank, data[rank], THREADS) for rank in range(plan.ranks)]
        where = f"seed {seed}, {setting}, operation {operation}"
        try:
            if not ranks.machine.run(STEPS):
                return f"{where}: no end"
        except (Fault, Divergence) as error:
            return f"{where}: {error}"
        for rank, want in enumerate(expected(plan, data, setting.count)):
            wrong = np.flatnonzero(ranks.array(outputs[rank], len(want)) != want)
            if wrong.size or ranks.completed(rank) != operation or ranks.lane_word(rank, "failure"):
                return f"{where}, rank {rank}: elements {wrong[:8]} are wrong"
    return ""


@pytest.mark.parametrize(("name", "ranks", "schedules"), RUNS)
def test_right_in_every_schedule(layouts: Layouts, name: str, ranks: int, schedules: int) -> None:
    plan = plan_of(name, ranks)
    for seed in range(schedules):
        assert not (what := trouble(layouts, kernel(), plan, seed)), what


@pytest.mark.parametrize(("bug", "name"), BUGS)
def test_seeded_bug_is_caught(layouts: Layouts, bug: str, name: str) -> None:
    plan = plan_of(name, 2)
    assert any(trouble(layouts, kernel(bug), plan, seed) for seed in range(TRIES)), f"nothing catches {bug}"


@pytest.mark.parametrize("name", ["all_reduce/pairs", "all_reduce/pipelined"])
def test_missing_syncs_are_caught(layouts: Layouts, name: str) -> None:
    plan = plan_of(name, 2)
    assert any(trouble(layouts, kernel(), plan, seed, lambda program: program) for seed in range(TRIES))


@pytest.mark.parametrize("name", ["all_reduce/oneshot", "all_reduce/pairs", "all_reduce/two_blocks"])
def test_an_abort_ends_who_waits(layouts: Layouts, name: str) -> None:
    plan = plan_of(name, 2)
    for seed in range(5):
        chance = random.Random(seed)
        ranks = Ranks(layouts, plan, Setting.drawn(plan, chance), chance)
        ranks.launch(kernel(), 0, ranks.inputs()[0], THREADS)
        assert not ranks.machine.run(50_000), "nobody else is there"
        ranks.abort()
        assert ranks.machine.run(STEPS)
        assert ranks.completed(0) == 0
        ranks.launch(kernel(), 0, ranks.inputs()[0], THREADS)
        assert ranks.machine.run(STEPS), "an aborted lane's kernels end at once"
        assert ranks.completed(0) == 0


@pytest.mark.parametrize("name", ["all_reduce/oneshot", "all_reduce/pairs", "all_reduce/two_blocks"])
def test_an_abort_at_any_time_is_clean(layouts: Layouts, name: str) -> None:
    """Threads of a block stop together: nothing is touched that is not the plan's, and what is complete is right."""
    plan, complete = plan_of(name, 2), 0
    for seed in range(24):
        chance = random.Random(seed)
        ranks = Ranks(layouts, plan, Setting.drawn(plan, chance), chance)
        data = ranks.inputs()
        outputs = [ranks.launch(kernel(), rank, data[rank], THREADS) for rank in range(2)]
        ranks.machine.run(1000 * seed)
        ranks.abort()
        assert ranks.machine.run(STEPS)
        for rank, want in enumerate(expected(plan, data, ranks.setting.count)):
            complete += ranks.completed(rank)
            assert not ranks.completed(rank) or (ranks.array(outputs[rank], len(want)) == want).all(), (seed, rank)
    assert 0 < complete < 48, "all too early, or all too late"


@pytest.mark.parametrize("name", ["all_reduce/oneshot", "all_reduce/pairs"])
def test_ranks_that_disagree_find_out(layouts: Layouts, name: str) -> None:
    plan = plan_of(name, 2)
    for seed in range(5):
        chance = random.Random(seed)
        ranks = Ranks(layouts, plan, Setting.drawn(plan, chance), chance)
        for rank, data in enumerate(ranks.inputs()):
            ranks.launch(kernel(), rank, data, THREADS, tag=70 + rank)
        if not ranks.machine.run(200_000):
            ranks.abort()
            assert ranks.machine.run(STEPS)
        assert MISMATCH in [ranks.lane_word(rank, "failure") & 0xFFFFFFFF for rank in range(2)]
        assert [ranks.completed(rank) for rank in range(2)] == [0, 0]

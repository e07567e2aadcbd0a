"""The device sources for GPUs that are not here: compiled, and the machine code read. Nothing runs."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import gpu_compile  # noqa: E402

PRIMITIVES = (Path(__file__).parent / "primitives.cu").read_text()
PAIRS = [("float32", "sum"), ("bfloat16", "avg"), ("int8", "max")]
# With PAIRS: every type and every operator.
FURTHER_PAIRS = [
    ("float16", "prod"), ("float64", "min"), ("int64", "sum"), ("uint16", "avg"), ("uint8", "min"), ("int16", "max"),
    ("int32", "sum"), ("uint32", "prod"), ("uint64", "max"),
]  # fmt: skip

NVIDIA = ["sm_80", "sm_90a"]
AMD = ["gfx942", "gfx90a", "gfx1100"]
# What the executor is built for, each with PAIRS and a part of the others. Bytes of stack, where there are too few
# registers: some that hold no data, but where the block stands.
MATRIX = ["sm_75", *NVIDIA, "sm_100a", "sm_120a", *AMD]
STACK = {"sm_75": 16, "sm_100a": 32, "sm_120a": 64}
REGISTERS = {"sm_": 64, "gfx": 128}  # what a block of 1024 threads leaves to each

# What the machine code must hold for the named kernel, in this order; and what it must not.
RELEASE = {
    "sm_": [r"MEMBAR\.\w+\.SYS", r"ST\S*\.STRONG\.SYS"],
    "gfx942": ["buffer_wbl2 sc0 sc1", "global_store.* sc0 sc1"],
    "gfx90a": ["buffer_wbl2", "global_store"],
    "gfx1100": ["s_waitcnt", "global_store"],
}
ACQUIRE = {
    "sm_": [r"LD\S*\.STRONG\.SYS", r"CCTL\.IVALL"],
    "gfx942": ["global_load.* sc0 sc1", "s_waitcnt", "buffer_inv sc0 sc1"],
    "gfx90a": ["global_load.* glc", "s_waitcnt", "buffer_invl2"],
    "gfx1100": ["global_load.* glc", "s_waitcnt", "buffer_gl1_inv", "buffer_gl0_inv"],
}
ORDERING = r"MEMBAR|CCTL|buffer_"
# What an NVLink switch folds: the instruction, and its PTX.
SWITCHED = {
    ("float32", "sum"): (r"LDGMC\S*\.ADD\.F32x4\S*\.STRONG\.SYS", "add.v4.f32"),
    ("float16", "sum"): (r"LDGMC\S*ADD\.F16x8\S*\.STRONG\.SYS", "add.acc::f32.v4.f16x2"),
    ("bfloat16", "avg"): (r"LDGMC\S*ADD\.BF16x8\S*\.STRONG\.SYS", "add.acc::f32.v4.bf16x2"),
    ("int32", "sum"): (r"LDGMC\S*\.ADD\S*\.STRONG\.SYS", "add.s32"),
    ("uint32", "max"): (r"LDGMC\S*\.MAX\S*\.STRONG\.SYS", "max.u32"),
}
CONTRACTED = r"\b(FFMA|v_(pk_)?(fma|fmac|mac|mad)\w*_f32|v_dual_fmac\w*)"
CONTRACT = {"sm_": "--fmad=true", "gfx": "-ffp-contract=fast"}
FLUSH = {"sm_": "--ftz=true", "gfx": "-fgpu-flush-denormals-to-zero"}


def for_arch(table: dict[str, list[str]], arch: str) -> list[str]:
    """A row of the tables above."""
    return table.get(arch) or table[arch[:3]]


@functools.cache
def build(source: str, arch: str, extra: tuple[str, ...] = ()) -> gpu_compile.Built:
    """Built once; a test of what can't be built here is skipped."""
    try:
        return gpu_compile.build(source, arch, extra)
    except gpu_compile.Unavailable as reason:
        pytest.skip(str(reason))


def machine_code(built: gpu_compile.Built) -> dict[str, list[str]]:
    """By kernel; skips where it can't be read."""
    try:
        return gpu_compile.machine_code(built)
    except gpu_compile.Unavailable as reason:
        pytest.skip(str(reason))


def holds(code: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether instructions that match the patterns follow each other, others between them."""
    rest = iter(code)
    return all(any(re.search(pattern, line) for line in rest) for pattern in patterns)


@pytest.mark.parametrize("arch", [*NVIDIA, *AMD])
def test_executor_needs_no_local_memory(arch: str) -> None:
    usage = build(gpu_compile.executor_source(PAIRS), arch).usage
    assert set(usage) == {f"run_plan_{dtype}_{op}" for dtype, op in PAIRS}
    for name, takes in usage.items():
        assert takes.stack == takes.spilled == 0, (name, takes)
        assert 16 < takes.registers <= REGISTERS[arch[:3]], (name, takes)


@pytest.mark.parametrize("arch", [*NVIDIA, *AMD])
def test_release_and_acquire_reach_the_system(arch: str) -> None:
    code = machine_code(build(PRIMITIVES, arch))
    release, acquire = for_arch(RELEASE, arch), for_arch(ACQUIRE, arch)
    assert holds(code["release_word"], release)
    assert holds(code["acquire_word"], acquire)
    assert holds(code["arrive"], [release[0], "ATOM|global_atomic_add", acquire[-1]])
    for name in ("relaxed_word", "packet_out"):
        assert not holds(code[name], [ORDERING]), name
        assert holds(code[name], [release[-1]]), name
    executor = machine_code(build(gpu_compile.executor_source(PAIRS), arch))
    for name, instructions in {**executor, "channel_operations": code["channel_operations"]}.items():
        assert holds(instructions, release), name
        assert holds(instructions, acquire), name


@pytest.mark.parametrize("arch", MATRIX)
def test_executor_for_every_type(arch: str) -> None:
    for pairs in (PAIRS, FURTHER_PAIRS[MATRIX.index(arch) % 3 :: 3]):
        built = build(gpu_compile.executor_source(pairs), arch)
        kernels = machine_code(built)
        assert set(kernels) == {f"run_plan_{dtype}_{op}" for dtype, op in pairs}
        for name, instructions in kernels.items():
            takes = built.usage[name]
            assert takes.registers <= REGISTERS[arch[:3]] and takes.stack <= STACK.get(arch, 0), (name, takes)
            assert holds(instructions, for_arch(RELEASE, arch)), name
            assert holds(instructions, for_arch(ACQUIRE, arch)), name


def test_switch_folds() -> None:
    built = build(gpu_compile.executor_source([*SWITCHED, ("float64", "sum")]), "sm_90a")
    kernels, entries = machine_code(built), built.assembly.split(".visible .entry ")
    for (dtype, op), (instruction, ptx) in SWITCHED.items():
        name = f"run_plan_{dtype}_{op}"
        (entry,) = (text for text in entries if text.startswith(name + "("))
        assert holds(kernels[name], [instruction]), name
        assert holds(entry.split("\n"), ["fence.proxy.alias", f"multimem.ld_reduce.*{ptx}", "fence.proxy.alias"]), name
        assert "multimem.st.relaxed.sys.global.v4.f32" in entry, name
    assert not holds(kernels["run_plan_float64_sum"], ["LDGMC"]), "the switch is not asked for what it can't do"
    older = build(gpu_compile.executor_source(PAIRS), "sm_80")
    assert "multimem" not in older.assembly


@pytest.mark.parametrize("arch", [*NVIDIA, *AMD])
def test_nothing_is_contracted(arch: str) -> None:
    assert not holds(machine_code(build(PRIMITIVES, arch))["two_roundings"], [CONTRACTED])
    contracted = machine_code(build(PRIMITIVES, arch, (CONTRACT[arch[:3]],)))["two_roundings"]
    assert holds(contracted, [CONTRACTED]), "the check finds nothing where it must"


@pytest.mark.parametrize("arch", [*NVIDIA, *AMD])
def test_denormals_are_kept(arch: str) -> None:
    def flushes(assembly: str) -> bool:
        return bool(re.search(r"\.ftz\b|amdhsa_float_denorm_mode_\w+ [012]\b", assembly))

    assert not flushes(build(gpu_compile.executor_source(PAIRS), arch).assembly)
    assert flushes(build(PRIMITIVES, arch, (FLUSH[arch[:3]],)).assembly), "the check finds nothing where it must"


@pytest.mark.parametrize("arch", NVIDIA)
def test_arithmetic_rounds_to_nearest(arch: str) -> None:
    ptx = build(gpu_compile.executor_source(PAIRS), arch).assembly
    floats = re.findall(r"(?<!\S)(?:add|sub|mul|div|fma)\.\S*f(?:16|32|64)\b", ptx)
    assert floats
    assert {operation.split(".")[1] for operation in floats} == {"rn"}
    assert not [operation for operation in floats if operation.startswith("fma")]


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_errors_are_errors(arch: str) -> None:
    build(PRIMITIVES, arch)
    with pytest.raises(gpu_compile.CompileError, match="no_such_thing"):
        gpu_compile.build("int f() { return no_such_thing; }", arch)


def test_wrong_instruction_is_refused() -> None:
    """A virtual architecture would let it pass."""
    build(PRIMITIVES, "sm_80")
    body = 'asm volatile("st.release.moon.u64 [%0], 1;" :: "l"(0ull));'
    with pytest.raises(gpu_compile.CompileError):
        gpu_compile.build(f'extern "C" __global__ void k() {{ {body} }}', "sm_80")


@pytest.mark.slow
def test_every_nvidia_architecture() -> None:
    try:
        architectures = gpu_compile.nvidia_architectures()
    except gpu_compile.Unavailable as reason:
        pytest.skip(str(reason))
    assert {"sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120"} <= set(architectures)
    for arch in architectures:
        build(PRIMITIVES, arch)
        for name, takes in build(gpu_compile.executor_source(PAIRS), arch).usage.items():
            assert takes.registers <= REGISTERS["sm_"], (arch, name)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "gfx942", "gfx1101", "gfx1200"])
def test_further_pairs(arch: str) -> None:
    for name, takes in build(gpu_compile.executor_source(FURTHER_PAIRS), arch).usage.items():
        assert takes.stack == takes.spilled == 0, (name, takes)

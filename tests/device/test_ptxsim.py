"""The interpreter itself, on kernels of a few lines: what its memory allows, what it forbids, and what it refuses."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ptxsim import arithmetic
from ptxsim.machine import Divergence, Machine
from ptxsim.memory import Fault, Memory
from ptxsim.parse import PtxError
from ptxsim.translate import Program, translate

SCHEDULES, WORDS = 150, 40
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def kernel(body: str) -> Program:
    """`body` finds its arguments in %a0 and %a1."""
    loads = "ld.param.u64 %a0, [p0];\nld.param.u64 %a1, [p1];\n"
    head = ".visible .entry k(.param .u64 p0, .param .u64 p1)"
    return translate(f"{head}\n{{\n.shared .align 8 .b8 s[64];\n{loads}{body}\nret;\n}}\n", "k")


def outcomes(programs: Sequence[Program], threads: int = 1, results: int = 1) -> set[tuple[int, ...]]:
    """The first words of memory, zero before, after each of many schedules of one grid each of `programs`.

    The second argument is a multimem address of words 24 and 32.
    """
    seen = set()
    for seed in range(SCHEDULES):
        chance = random.Random(seed)
        memory = Memory(chance)
        machine = Machine(memory, chance)
        address = memory.allocate(8 * WORDS)
        arguments = [address, memory.alias([address + 192, address + 256], 8)]
        for program in programs:
            machine.launch(program, arguments, 1, threads)
        assert machine.run(200_000)
        seen.add(tuple(int.from_bytes(memory.read(address + 8 * k, 8), "little") for k in range(results)))
    return seen


# Word 8 is the data, word 16 the flag; what was read goes to word 0.
WRITE = "st.u64 [%a0+64], 7; st.{order}.sys.global.u64 [%a0+128], 1;"
AGAIN = "$again: ld.{order}.sys.global.u64 %f, [%a0+128]; setp.eq.s64 %p, %f, 0; @%p bra $again;"
READ = AGAIN + "ld.u64 %d, [%a0+64]; st.u64 [%a0], %d;"


@pytest.mark.parametrize(
    ("write", "read", "stale"),
    [
        ("release", "acquire", False),
        ("relaxed", "acquire", True),
        ("release", "relaxed", True),
        ("relaxed", "relaxed", True),
    ],
)
def test_a_message_needs_release_and_acquire(write: str, read: str, stale: bool) -> None:
    reader = READ.format(order=read)
    # It has read the data once, so that an old value of it may be at hand.
    programs = [kernel(WRITE.format(order=write)), kernel("ld.u64 %d, [%a0+64];" + reader)]
    assert outcomes(programs) == ({(0,), (7,)} if stale else {(7,)})


def test_an_acquire_takes_only_what_was_released_to_it() -> None:
    writer = kernel(
        "st.u64 [%a0+64], 7; st.release.sys.global.u64 [%a0+136], 1; st.relaxed.sys.global.u64 [%a0+128], 1;"
    )
    assert outcomes([writer, kernel(READ.format(order="acquire"))]) == {(0,), (7,)}


def test_a_barrier_hands_over_what_a_thread_has_done() -> None:
    def writer(meet: str) -> Program:
        return kernel(
            f"mov.u32 %t, %tid.x; setp.ne.s32 %p, %t, 0; @%p bra $second; st.u64 [%a0+64], 7; {meet} ret;"
            f"$second: {meet} st.release.sys.global.u64 [%a0+128], 1;"
        )

    reader = READ.format(order="acquire")
    one = kernel(f"mov.u32 %t, %tid.x; setp.ne.s32 %p, %t, 0; @%p ret; {reader}")
    assert outcomes([writer(""), one], threads=2) == {(0,), (7,)}
    meeting = kernel(
        "mov.u32 %t, %tid.x; setp.eq.s32 %p, %t, 0; @%p st.u64 [%a0+64], 7; bar.sync 0;"
        "@!%p st.release.sys.global.u64 [%a0+128], 1;"
    )
    assert outcomes([meeting, one], threads=2) == {(7,)}


def test_wide_accesses_tear() -> None:
    writer = kernel("st.relaxed.sys.global.v2.u64 [%a0+64], {1, 1};")
    reader = kernel(
        "$again: ld.relaxed.sys.global.v2.u64 {%x, %y}, [%a0+64]; or.b64 %z, %x, %y; setp.eq.s64 %p, %z, 0;"
        "@%p bra $again; st.u64 [%a0], %x; st.u64 [%a0+8], %y;"
    )
    assert outcomes([writer, reader], results=2) == {(1, 1), (0, 1), (1, 0)}


def test_atomics_lose_nothing_and_pass_releases_on() -> None:
    counting = kernel("atom.relaxed.sys.global.add.u64 %x, [%a0], 3;")
    assert outcomes([counting, counting], threads=3) == {(18,)}
    first = kernel("st.u64 [%a0+64], 7; st.release.sys.global.u64 [%a0+128], 1;")
    second = kernel(AGAIN.format(order="relaxed") + "atom.relaxed.sys.global.add.u64 %x, [%a0+128], 1;")
    third = kernel(READ.format(order="acquire").replace("setp.eq.s64 %p, %f, 0", "setp.ne.s64 %p, %f, 2"))
    assert outcomes([first, second, third]) == {(7,)}


def test_own_stores_are_seen_in_order() -> None:
    body = "st.u64 [%a0+64], 1; st.u32 [%a0+68], 2; ld.u64 %x, [%a0+64]; st.u64 [%a0], %x;"
    assert outcomes([kernel(body)]) == {(2 << 32 | 1,)}


def test_a_vote_is_for_all_or_for_none() -> None:
    body = (
        "mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, {against}; bar.red.and.pred %q, 0, %p; selp.u64 %x, 1, 2, %q;"
        "mul.wide.u32 %o, %t, 8; add.s64 %o, %o, %a0; st.u64 [%o], %x;"
    )
    assert outcomes([kernel(body.format(against=1))], threads=3, results=3) == {(2, 2, 2)}
    assert outcomes([kernel(body.format(against=9))], threads=3, results=3) == {(1, 1, 1)}


@pytest.mark.parametrize(("fence", "sums"), [("", {(0,), (5,), (9,), (14,)}), ("fence.proxy.alias;", {(14,)})])
def test_multimem_needs_a_fence(fence: str, sums: set[tuple[int, ...]]) -> None:
    writer = kernel("st.u32 [%a0+192], 5; st.u32 [%a0+256], 9; st.release.sys.global.u64 [%a0+128], 1;")
    fold = f"{fence} multimem.ld_reduce.relaxed.sys.global.add.u32 %d, [%a1]; st.u32 [%a0], %d;"
    assert outcomes([writer, kernel(AGAIN.format(order="acquire") + fold)]) == sums


@pytest.mark.parametrize(("fence", "seen"), [("", {(0,), (7,)}), ("fence.proxy.alias;", {(7,)})])
def test_what_multimem_stores_needs_one_too(fence: str, seen: set[tuple[int, ...]]) -> None:
    writer = kernel(f"multimem.st.relaxed.sys.global.u32 [%a1], 7; {fence} st.release.sys.global.u64 [%a0+128], 1;")
    for member in (192, 256):
        reader = kernel(AGAIN.format(order="acquire") + f"ld.u32 %d, [%a0+{member}]; st.u32 [%a0], %d;")
        assert outcomes([writer, reader]) == seen


@pytest.mark.parametrize(
    "body",
    [
        "frobnicate.u32 %x, %y;", "add.sat.s32 %x, %y, 1;", "ld.global.nc.u64 %x, [%a0];",
        "st.release.gpu.global.u64 [%a0], 1;",
        "mov.u32 %x, nothing;", "call.uni f;", "bar.sync 1;", "bar.red.or.pred %q, 0, %p;", "ld.u64 {%x, %y}, [%a0];",
        "fma.rn.f32 %x, %y, %z, %w;", "add.rn.f64 %x, %y, %z;", "atom.acq_rel.sys.global.cas.u64 %x, [%a0], 1, 2;",
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(body: str) -> None:
    with pytest.raises(PtxError):
        kernel(body)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("ld.u64 %x, [%a0+4];", Fault), ("st.u64 [%a0+320], 1;", Fault), ("ld.shared.u64 %x, [s+64];", Fault),
        ("multimem.st.relaxed.sys.global.u32 [%a0], 1;", Fault),
        ("mov.u32 %t, %tid.x; setp.eq.s32 %p, %t, 0; @%p bra $l; bar.sync 0; $l: bar.sync 0;", Divergence),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_reported(body: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        outcomes([kernel(body)], threads=2)


def value(opcode: str, *sources: int) -> int:
    """What an instruction computes."""
    return int(eval(arithmetic.expression(opcode, [str(source) for source in sources]), dict(arithmetic.NAMES)))


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> bits - 1 else x


@settings(deadline=None)
@given(U32, U32)
def test_arithmetic_of_32_bits(a: int, b: int) -> None:
    x, y = signed(a, 32), signed(b, 32)
    ones = 2**32 - 1
    assert value("add.s32", a, b) == (a + b) & ones and value("sub.u32", a, b) == (a - b) & ones
    assert value("mul.wide.s32", a, b) == x * y & 2**64 - 1 and value("mul.hi.u32", a, b) == a * b >> 32
    assert value("min.s32", a, b) == min(x, y) & ones and value("max.u32", a, b) == max(a, b)
    assert value("mad.lo.s32", a, b, 5) == (a * b + 5) & ones
    assert value("shr.s32", a, b % 40) == x >> b % 40 & ones and value("shl.b32", a, b % 40) == a << b % 40 & ones
    assert bool(value("setp.lt.s32", a, b)) == (x < y) and bool(value("setp.ge.u32", a, b)) == (a >= b)
    assert value("cvt.s64.s32", a) == x & 2**64 - 1 and value("cvt.u16.u32", a) == a & 0xFFFF


@settings(deadline=None)
@given(U64, U64, st.integers(0, 70), st.integers(0, 70))
def test_bits_are_inserted(field: int, into: int, position: int, length: int) -> None:
    bits = [into >> k & 1 for k in range(64)]
    for k in range(min(length, max(0, 64 - position))):
        bits[position + k] = field >> k & 1
    assert value("bfi.b64", field, into, position, length) == sum(bit << k for k, bit in enumerate(bits))


@settings(deadline=None)
@given(U32, U32, st.integers(0, 0xFFFF))
def test_bytes_are_permuted(low: int, high: int, selector: int) -> None:
    eight = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    want = []
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = eight[nibble & 7]
        want.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    assert value("prmt.b32", low, high, selector) == int.from_bytes(bytes(want), "little")


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_floats_round_once(a: float, b: float) -> None:
    x, y = arithmetic.bits_of_32(a), arithmetic.bits_of_32(b)
    with np.errstate(all="ignore"):
        for name, want in (
            ("add", np.float32(a) + np.float32(b)),
            ("mul", np.float32(a) * np.float32(b)),
            ("div", np.float32(a) / np.float32(b)),
        ):
            got = arithmetic.float_of_32(value(f"{name}.rn.f32", x, y))
            assert got == want or (np.isnan(got) and np.isnan(want)), name
    assert bool(value("setp.lt.f32", x, y)) == (a < b)

"""The CPU's reduction kernels and the kernel header they share their arithmetic with, against numpy, bit for bit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cffi
import ml_dtypes
import numpy as np
import pytest

from commrt import dtypes
from commrt.dtypes import DType, ReduceOp

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "commrt" / "_native"
X86 = platform.machine() == "x86_64"
LEVELS = {
    "base": [],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4"],
    "v4bf16": ["-march=x86-64-v4", "-mavx512bf16"],
}
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
COUNTS = (0, 1, 2, 3, 5, 7, 9, 15, 31, 63, 64, 65, 127, 1021)
MOST = max(COUNTS)
OFFSETS = ((0, 0, 0), (1, 2, 3), (8, 4, 16), (63, 31, 15))
GUARD = 64

PAIRS = [(dtype, op) for dtype in dtypes.REDUCIBLE for op in dtypes.REDUCE_OPS]
FLOATS = [dtype for dtype in dtypes.REDUCIBLE if dtype.kind == "float"]

CDEF = """
typedef void (*cr_reduce_fn)(char* const* dsts, unsigned ndst, const char* const* srcs, unsigned nsrc,
                             unsigned long long count, unsigned divisor);
cr_reduce_fn cr_reduce_lookup(int dtype, int op);
cr_reduce_fn cr_reduce_lookup_at(int level, int dtype, int op);
int cr_reduce_levels(void);
cr_reduce_fn device_reduce(int dtype, int op);
unsigned long long word_fold(int dtype, int op, const unsigned long long* words, unsigned n, unsigned divisor);
unsigned in_float_mode(unsigned mode, cr_reduce_fn, char* const* dsts, const char* const* srcs, unsigned nsrc,
                       unsigned long long count, unsigned divisor);
"""

# Sources and destination end where unreadable memory starts: one byte too far is a crash.
AT_THE_EDGE = """
import cffi, ctypes, mmap, sys
ffi = cffi.FFI()
ffi.cdef(sys.argv[2])
lib = ffi.dlopen(sys.argv[1])
page = mmap.PAGESIZE
ends = []
for _ in range(4):
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0):
        sys.exit("no unreadable page")
    ends.append((start + page, memory))
for level in range(lib.cr_reduce_levels()):
    for dtype, size in ((2, 1), (9, 2), (10, 2), (11, 4), (12, 8)):
        f = lib.cr_reduce_lookup_at(level, dtype, 0)
        for count in range(1, 300):
            at = [ffi.cast("char*", end - count * size) for end, _ in ends]
            if f:
                f(ffi.new("char*[]", at[:1]), 1, ffi.new("char*[]", at[1:]), 3, count, 0)
"""


class Kernels:
    """The library under test."""

    def __init__(self, library: Path, objects: dict[str, Path]) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.path = library
        self.lib: Any = self.ffi.dlopen(str(library))
        self.objects = objects

    def levels(self) -> dict[int, str]:
        """The instruction sets that this machine has."""
        names = list(self.objects)
        return {level: names[level] for level in range(len(names)) if self.lib.cr_reduce_lookup_at(level, 11, 0)}

    def functions(self, dtype: DType, op: ReduceOp) -> dict[str, Any]:
        """Every implementation of a pair: each instruction set's, and the kernel header's loop."""
        found = {
            name: self.lib.cr_reduce_lookup_at(level, dtype.code, op.code) for level, name in self.levels().items()
        }
        return {**found, "device": self.lib.device_reduce(dtype.code, op.code)}

    def pointers(self, arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
        return self.ffi.new("char*[]", [self.ffi.cast("char*", x.ctypes.data) for x in arrays])

    def call(self, function: Any, dsts: Sequence[Any], srcs: Sequence[Any], count: int, divisor: int = 0) -> None:
        function(self.pointers(dsts), len(dsts), self.pointers(srcs), len(srcs), count, divisor)


def compile_all(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    for process in running:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("reduce")
    levels = LEVELS if X86 else {"base": []}
    objects = {name: out / f"{name}.o" for name in levels}
    source = str(NATIVE / "reduce_kernels.cpp")
    builds = [
        [compiler, *FLAGS, *flags, f"-DCR_REDUCE_TABLE=cr_reduce_table_{name}", "-c", source, "-o", str(objects[name])]
        for name, flags in levels.items()
    ]
    for path in (Path(__file__).with_name("reduce_shim.cpp"), NATIVE / "reduce.cpp"):
        builds.append([compiler, *FLAGS, "-c", str(path), "-o", str(out / f"{path.stem}.o")])
    compile_all(builds)
    library = out / "libreduce.so"
    parts = [str(path) for path in (*objects.values(), out / "reduce_shim.o", out / "reduce.o")]
    compile_all([[compiler, "-shared", "-o", str(library), *parts]])
    return Kernels(library, objects)


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


# --- the oracle ---


def numpy_type(dtype: DType) -> Any:
    return np.dtype(ml_dtypes.bfloat16) if dtype is dtypes.BFLOAT16 else np.dtype(dtype.name)


def bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.view(f"u{x.itemsize}")


def lesser(a: Any, b: Any) -> Any:
    """Minimum with -0 below +0 and NaN above all."""
    if a.dtype.kind != "f":
        return np.minimum(a, b)
    zeros = (a == 0) & (b == 0)
    return np.where(zeros, np.where(np.signbit(a), a, b), np.minimum(a, b))


def greater(a: Any, b: Any) -> Any:
    return -lesser(-a, -b) if a.dtype.kind == "f" else np.maximum(a, b)


def divided(x: Any, n: int) -> Any:
    if x.dtype.kind == "f":
        return x / x.dtype.type(n)
    if x.dtype.kind == "u":
        return (x.astype(np.uint64) // np.uint64(n)).astype(x.dtype)
    wide = x.astype(np.int64)
    return (wide // n + ((wide % n != 0) & (wide < 0))).astype(x.dtype)


CANONICAL = {np.dtype(np.float16): 0x7E00, np.dtype(np.float32): 0x7FC00000, np.dtype(np.float64): 0x7FF8 << 48}


def expected(op: ReduceOp, srcs: Sequence[np.ndarray[Any, Any]], divisor: int = 0) -> np.ndarray[Any, Any]:
    """In order, narrow floats in float32 and rounded once."""
    dtype = srcs[0].dtype
    narrow = dtype.itemsize == 2 and dtype.kind not in "iu"
    fold: Any = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": lesser, "max": greater}[op.name]
    total: Any = None
    for source in srcs:
        x = source.astype(np.float32) if narrow else source
        total = x if total is None else fold(total, x)
    if divisor:
        total = divided(total, divisor)
    out: np.ndarray[Any, Any] = total.astype(dtype)
    if dtype.kind not in "iu":
        bits(out)[np.isnan(total)] = CANONICAL.get(dtype, 0x7FC0)
    return out


# --- data and memory ---


def finfo(dtype: DType) -> Any:
    describe: Any = ml_dtypes.finfo
    return describe(numpy_type(dtype))


def special(dtype: DType) -> np.ndarray[Any, Any]:
    """Zeros, infinities, NaNs, denormals and extremes, or an integer's ends."""
    kind = numpy_type(dtype)
    if dtype.kind != "float":
        info = np.iinfo(kind)
        return np.array([0, 1, info.max, info.min, info.max - 1, info.min + 1, 3, 100], kind)
    info = finfo(dtype)
    tiny = [info.smallest_subnormal, info.smallest_normal, info.smallest_normal - info.smallest_subnormal]
    values = [0.0, 1.0, np.inf, np.nan, info.max, *tiny]
    signaling = {2: 0x7F81, 4: 0x7F800001, 8: 0x7FF0000000000001}[dtype.itemsize]
    row = np.array([*values, *(-np.array(values, kind))], kind)
    return np.concatenate([row, np.array([signaling], f"u{dtype.itemsize}").view(kind)])


def wild(dtype: DType, seed: int, count: int = MOST) -> np.ndarray[Any, Any]:
    """Every kind of element: a third random bits, a third of like sizes, so that sums round, a third special values."""
    rng = np.random.default_rng(seed)
    kind = numpy_type(dtype)
    out: np.ndarray[Any, Any] = np.frombuffer(rng.bytes(count * kind.itemsize), kind).copy()
    if dtype.kind == "float":
        out[1::3] = rng.normal(size=len(out[1::3])).astype(kind)
    out[2::3] = rng.choice(special(dtype), size=len(out[2::3]))
    return out


def placed(values: np.ndarray[Any, Any], offset: int) -> np.ndarray[Any, Any]:
    """A copy of the values that starts `offset` bytes past a 64-byte boundary, guards around it."""
    raw = np.full(values.nbytes + 4 * GUARD, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64 + GUARD + offset
    place: np.ndarray[Any, Any] = raw[start : start + values.nbytes].view(values.dtype)
    place[:] = values
    return place


def assert_guards(place: np.ndarray[Any, Any], used: int) -> None:
    raw: Any = place
    while raw.base is not None:
        raw = raw.base
    start = place.ctypes.data - raw.ctypes.data
    assert np.all(raw[:start] == 0xA5)
    assert np.all(raw[start + used : start + place.nbytes] == 0)
    assert np.all(raw[start + place.nbytes :] == 0xA5)


def assert_same_bits(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], what: object) -> None:
    wrong = np.flatnonzero(bits(got) != bits(want))
    assert not len(wrong), f"{what}: {len(wrong)} wrong, first at {wrong[0]}: {got[wrong[0]]!r}, not {want[wrong[0]]!r}"


# --- the tests ---


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: x.name)
def test_every_count_and_alignment(kernels: Kernels, dtype: DType, op: ReduceOp) -> None:
    for nsrc in range(1, 10):
        values = [wild(dtype, 100 * nsrc + k) for k in range(nsrc)]
        divisor = nsrc if op is dtypes.AVG else 0
        want = expected(op, values, divisor)
        for shift, step, base in OFFSETS:
            srcs = [placed(x, (base + step * k) % 64) for k, x in enumerate(values)]
            for name, function in kernels.functions(dtype, op).items():
                for count in COUNTS:
                    dst = placed(np.zeros_like(want), shift)
                    kernels.call(function, [dst], srcs, count, divisor)
                    assert_same_bits(dst[:count], want[:count], (name, nsrc, count, shift))
                    assert_guards(dst, count * dtype.itemsize)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: x.name)
def test_several_destinations_one_of_them_a_source(kernels: Kernels, dtype: DType, op: ReduceOp) -> None:
    for nsrc in (1, 2, 3):
        values = [wild(dtype, 7 * k, 301) for k in range(nsrc)]
        want = expected(op, values)
        for name, function in kernels.functions(dtype, op).items():
            for own in range(nsrc):
                for others in (0, 2):
                    srcs = [placed(x, 4 * k) for k, x in enumerate(values)]
                    dsts = [srcs[own], *(placed(np.zeros_like(want), 5 + k) for k in range(others))]
                    kernels.call(function, dsts, srcs, 301)
                    for dst in dsts:
                        assert_same_bits(dst, want, (name, nsrc, own))
                    for k in set(range(nsrc)) - {own}:
                        assert_same_bits(srcs[k], values[k], "an untouched source")


def test_nothing_past_the_end_is_touched(kernels: Kernels) -> None:
    command = [sys.executable, "-c", AT_THE_EDGE, str(kernels.path), CDEF]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", dtypes.REDUCIBLE, ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 64, 300, 70_000])
def test_averages_by_any_number(kernels: Kernels, dtype: DType, divisor: int) -> None:
    values = [wild(dtype, 11), wild(dtype, 12)]
    want = expected(dtypes.AVG, values, divisor)
    for name, function in kernels.functions(dtype, dtypes.AVG).items():
        dst = placed(np.zeros_like(want), 0)
        kernels.call(function, [dst], values, MOST, divisor)
        assert_same_bits(dst, want, name)


def test_integer_averages_truncate_toward_zero(kernels: Kernels) -> None:
    sums = np.array([-7, -6, -1, 0, 1, 6, 7], np.int32)
    for dtype in (dtypes.INT8, dtypes.INT16, dtypes.INT32, dtypes.INT64):
        for function in kernels.functions(dtype, dtypes.AVG).values():
            dst = sums.astype(numpy_type(dtype))
            kernels.call(function, [dst], [dst.copy(), np.zeros_like(dst)], len(dst), 2)
            assert dst.tolist() == [-3, -3, 0, 0, 0, 3, 3]


@pytest.mark.parametrize("dtype", [dtypes.FLOAT16, dtypes.BFLOAT16], ids=str)
@pytest.mark.parametrize("op", [dtypes.SUM, dtypes.PROD], ids=str)
def test_every_narrow_float_with_many_partners(kernels: Kernels, dtype: DType, op: ReduceOp) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(numpy_type(dtype))
    rng = np.random.default_rng(3)
    for round_ in range(8):
        partner = rng.permutation(every)
        if round_ >= 4:  # of like size, so that roundings and ties abound
            bits(partner)[:] = bits(every) ^ rng.integers(0, 1 << 11, 1 << 16, dtype=np.uint16)
        want = expected(op, [every, partner])
        for name, function in kernels.functions(dtype, op).items():
            dst = np.zeros_like(every)
            kernels.call(function, [dst], [every, partner], 1 << 16)
            assert_same_bits(dst, want, (name, round_))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_narrow_floats_round_once(kernels: Kernels, dtype: DType) -> None:
    """1 + e/2 + e/2, e the spacing at 1: two roundings would give 1, one gives 1 + e. Wider floats round each step."""
    kind = numpy_type(dtype)
    half_spacing = np.array(finfo(dtype).eps, kind) / np.array(2, kind)
    srcs = [np.full(70, x, kind) for x in (1, half_spacing, half_spacing)]
    step = 1 + float(finfo(dtype).eps) if dtype.itemsize == 2 else 1.0
    for function in kernels.functions(dtype, dtypes.SUM).values():
        dst = np.zeros(70, kind)
        kernels.call(function, [dst], srcs, 70)
        assert dst.astype(np.float64).tolist() == [step] * 70


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: x.name)
def test_an_element_has_the_same_bits_wherever_it_lies(kernels: Kernels, dtype: DType, op: ReduceOp) -> None:
    divisor = 3 if op is dtypes.AVG else 0
    for row in zip(*(wild(dtype, seed, 60) for seed in (21, 22, 23)), strict=True):
        values = [np.repeat(np.array([x], numpy_type(dtype)), 333) for x in row]
        outputs = set()
        for function in kernels.functions(dtype, op).values():
            for offset in (0, 1, 17):
                dst = placed(np.zeros_like(values[0]), offset)
                kernels.call(function, [dst], [placed(x, offset) for x in values], 333, divisor)
                outputs |= set(bits(dst).tolist())
        assert len(outputs) == 1


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: x.name)
def test_words_fold_as_arrays_do(kernels: Kernels, dtype: DType, op: ReduceOp) -> None:
    lanes = 8 // dtype.itemsize
    for nsrc in (1, 2, 5):
        values = [wild(dtype, 30 + k, 120 * lanes) for k in range(nsrc)]
        divisor = nsrc if op is dtypes.AVG else 0
        want = expected(op, values, divisor).view(np.uint64).tolist()
        columns = zip(*(x.view(np.uint64).tolist() for x in values), strict=True)
        got = [kernels.lib.word_fold(dtype.code, op.code, list(words), nsrc, divisor) for words in columns]
        assert got == want


@pytest.mark.skipif(not X86, reason="the mode is set by x86's control register")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", [0x8040, 0x2000, 0x6000], ids=["flush", "down", "toward-zero"])
def test_the_callers_float_mode_has_no_effect_and_stays(kernels: Kernels, dtype: DType, mode: int) -> None:
    values = [wild(dtype, 41), wild(dtype, 42)]
    for op in (dtypes.SUM, dtypes.PROD, dtypes.AVG):
        divisor = 7 if op is dtypes.AVG else 0
        want = expected(op, values, divisor)
        for level, name in kernels.levels().items():
            dst = np.zeros_like(want)
            function = kernels.lib.cr_reduce_lookup_at(level, dtype.code, op.code)
            addresses = kernels.pointers([dst]), kernels.pointers(values)
            assert kernels.lib.in_float_mode(mode, function, *addresses, 2, MOST, divisor) == mode
            assert_same_bits(dst, want, (name, op.name))


def test_only_arithmetic_pairs_have_functions(kernels: Kernels) -> None:
    for code in range(-2, 25):
        for op in range(-2, 10):
            known = 0 <= code < len(dtypes.DTYPES) and 0 <= op < len(dtypes.REDUCE_OPS)
            reduces = known and bool(dtypes.supported_ops(dtypes.by_code(code)))
            assert bool(kernels.lib.cr_reduce_lookup(code, op)) == reduces


def test_the_best_level_of_the_machine_is_chosen(kernels: Kernels) -> None:
    assert kernels.lib.cr_reduce_levels() == len(kernels.objects)
    best = max(kernels.levels())
    assert kernels.lib.cr_reduce_lookup(11, 0) == kernels.lib.cr_reduce_lookup_at(best, 11, 0)
    assert not kernels.lib.cr_reduce_lookup_at(best + 1, 11, 0)
    assert not kernels.lib.cr_reduce_lookup_at(-1, 11, 0)
    if X86 and "avx512f" in Path("/proc/cpuinfo").read_text():
        assert best >= list(kernels.objects).index("v4")


def test_no_code_of_an_instruction_set_is_shared(kernels: Kernels) -> None:
    """A function with external linkage could replace another level's at link time, and crash an older machine."""
    for name, path in kernels.objects.items():
        command = ["nm", "--defined-only", "--extern-only", "--format=posix", str(path)]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")
        shared = {line.split()[0] for line in listed if line and not line.startswith("DW.ref.")}
        assert shared == {f"cr_reduce_table_{name}"}

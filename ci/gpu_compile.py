"""Compiles the device sources for GPUs that are not here, and reads the machine code.

    python ci/gpu_compile.py OUT [ARCH...]        # sm_80 sm_90a gfx942, say: the executor for a few pairs

NVIDIA: NVRTC, from its wheel; no driver, no toolkit. AMD: clang with its AMDGPU target, or the one inside the ziglang
wheel; no ROCm. What is missing is said by `Unavailable`. Nothing here runs a kernel.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ROOT / "algorithms" / "device"

# Rounded as written, denormals kept. A real architecture, not a virtual one: only then is inline assembly checked.
NVIDIA_FLAGS = (
    "--std=c++17", "-default-device", "--fmad=false", "--ftz=false", "--prec-div=true", "--ptxas-options=-v",
)  # fmt: skip
AMD_FLAGS = (
    "-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-std=c++17", "-O3", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Werror",
)  # fmt: skip
LIMIT_S = 240


class Unavailable(Exception):
    """A tool is not here; the message says which."""


class CompileError(Exception):
    """The compiler refused; the message is its log."""


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: registers of a thread, bytes of local stack, bytes spilled to it."""

    registers: int
    stack: int
    spilled: int


@dataclass(frozen=True)
class Built:
    """One architecture's code: the loadable object, the compiler's assembly (PTX, or AMD's) and usage by kernel."""

    arch: str
    code: bytes
    assembly: str
    usage: dict[str, Usage]


def executor_source(pairs: Sequence[tuple[str, str]]) -> str:
    """The plan executor's kernels for (dtype, op) pairs."""
    return '#include "run_plan.h"\n' + "".join(f"CR_RUN_PLAN({dtype}, {op})\n" for dtype, op in pairs)


def build(source: str, arch: str, extra: Sequence[str] = ()) -> Built:
    """Compile for `arch`: sm_* or gfx*. Raises Unavailable or CompileError."""
    return _nvidia(source, arch, extra) if arch.startswith("sm_") else _amd(source, arch, extra)


def machine_code(built: Built) -> dict[str, list[str]]:
    """The instructions of each kernel, in order. Raises Unavailable if no disassembler is here."""
    return _sass(built.code) if built.arch.startswith("sm_") else _amd_instructions(built.assembly)


# ---- NVIDIA ----------------------------------------------------------------------------------------------------------


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except ImportError:
        raise Unavailable("cuda-bindings is not installed") from None
    except RuntimeError as error:
        raise Unavailable(f"NVRTC can't be loaded (nvidia-cuda-nvrtc): {error}") from None
    return nvrtc


def nvidia_architectures() -> list[str]:
    """Every sm_* that the installed NVRTC knows, and the variants with features of their own."""
    known = [int(arch) for arch in _nvrtc().nvrtcGetSupportedArchs()[1]]
    return [f"sm_{arch}" for arch in known] + [f"sm_{arch}a" for arch in known if arch in (90, 100, 103, 120)]


def _nvidia(source: str, arch: str, extra: Sequence[str]) -> Built:
    nvrtc = _nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
    options = [option.encode() for option in (f"--gpu-architecture={arch}", *NVIDIA_FLAGS, f"-I{HEADERS}", *extra)]
    (answer,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _fetch(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode()
    if int(answer):
        raise CompileError(log)
    code = _fetch(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    ptx = _fetch(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0").decode()
    return Built(arch, code, ptx, _ptxas_usage(log))


def _fetch(program: Any, size: Any, content: Any) -> bytes:
    buffer = b" " * int(size(program)[1])
    content(program, buffer)
    return buffer


def _ptxas_usage(log: str) -> dict[str, Usage]:
    pattern = (
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    found = re.findall(pattern, log, re.DOTALL)
    return {name: Usage(int(used), int(stack), int(out) + int(back)) for name, stack, out, back, used in found}


def _sass(code: bytes) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "k.cubin")
        file.write_bytes(code)
        text = _run([_nvdisasm(), "-c", str(file)])
    kernels: dict[str, list[str]] = {}
    for section in re.split(r"\n\.text\.", text)[1:]:
        name = section.partition(":")[0]
        kernels[name] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;/]+?)\s*;", section)
    return kernels


def _nvdisasm() -> str:
    found = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        found = found or next((str(path) for path in Path(folder).glob("*/bin/nvdisasm")), None)
    if not found:
        raise Unavailable("nvdisasm is not here (nvidia-cuda-nvdisasm)")
    return found


# ---- AMD -------------------------------------------------------------------------------------------------------------


@functools.cache
def _clang() -> tuple[list[str], list[str]]:
    """The compiler and the linker that goes with it."""
    clang, lld = shutil.which("clang++-19"), shutil.which("ld.lld-19")
    if clang and lld:
        return [clang], [lld]
    if importlib.util.find_spec("ziglang"):
        zig = [sys.executable, "-m", "ziglang"]
        return [*zig, "clang"], [*zig, "ld.lld"]
    raise Unavailable("neither clang-19 with lld-19 nor the ziglang wheel is here")


def _amd(source: str, arch: str, extra: Sequence[str]) -> Built:
    clang, lld = _clang()
    with tempfile.TemporaryDirectory() as folder:
        text, assembly, relocatable, code = (str(Path(folder, name)) for name in ("k.cu", "k.s", "k.o", "k.co"))
        Path(text).write_text(source)
        target = ["--target=x86_64-linux-gnu", f"--offload-arch={arch}", f"-I{HEADERS}"]
        _run([*clang, *target, *AMD_FLAGS, *extra, "-S", "-o", assembly, text])
        device = ["--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-x", "assembler"]
        _run([*clang, *device, "-c", "-o", relocatable, assembly])
        _run([*lld, "-shared", "-o", code, relocatable])
        built = Path(assembly).read_text()
        return Built(arch, Path(code).read_bytes(), built, _amd_usage(built))


def _amd_usage(assembly: str) -> dict[str, Usage]:
    """From the kernels' metadata. Spills of scalar registers go to vector registers: they are no memory traffic."""
    usage = {}
    kernels = assembly.partition("amdhsa.kernels:")[2].partition("\namdhsa.")[0]
    for entry in kernels.split("\n  - ")[1:]:
        fields = dict(re.findall(r"^ {4}\.(\w+):\s+(\S+)$", entry, re.MULTILINE))
        counts = [int(fields[key]) for key in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")]
        usage[fields["name"]] = Usage(*counts)
    return usage


def _amd_instructions(assembly: str) -> dict[str, list[str]]:
    kernels = {}
    for name, body in re.findall(r"^(\w+):\s*; @\1\n(.*?)^\.Lfunc_end", assembly, re.DOTALL | re.MULTILINE):
        lines = (line.split(";")[0].strip() for line in body.split("\n") if line.startswith("\t"))
        kernels[name] = [line for line in lines if line and not line.startswith(".")]
    return kernels


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    except subprocess.CalledProcessError as error:
        raise CompileError(error.stderr or error.stdout) from None


def main() -> None:
    """Build the executor for a few pairs, and say what it takes."""
    out, architectures = Path(sys.argv[1]), sys.argv[2:] or ["sm_80", "sm_90a", "gfx942"]
    out.mkdir(parents=True, exist_ok=True)
    source = executor_source([("float32", "sum"), ("bfloat16", "avg"), ("uint8", "max")])
    for arch in architectures:
        built = build(source, arch)
        Path(out, f"run_plan_{arch}.{'cubin' if arch.startswith('sm_') else 'co'}").write_bytes(built.code)
        for name, usage in built.usage.items():
            print(f"{arch:8} {name:24} {usage}")


if __name__ == "__main__":
    main()

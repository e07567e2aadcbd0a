"""A kernel to Python: a list of functions, each of which runs up to and including one access to memory.

A function takes a thread's registers and the thread, and returns the number of the next function, or END.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import arithmetic
from .parse import Instruction, Kernel, PtxError, parse

if TYPE_CHECKING:
    from .machine import Thread

END = -1
SHARED = 1 << 62  # where a block's shared memory lies for generic addresses

Step = Callable[[list[int], "Thread"], int]

_SPECIAL = {
    "%tid.x": "t.number", "%ntid.x": "t.block.threads", "%ctaid.x": "t.block.number", "%nctaid.x": "t.block.blocks",
}  # fmt: skip
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_LOAD = re.compile(r"ld(\.relaxed\.sys|\.acquire\.sys)?(\.global|\.shared)?(?:\.v([24]))?\.[ubsf](8|16|32|64)")
_STORE = re.compile(r"st(\.relaxed\.sys|\.release\.sys)?(\.global|\.shared)?(?:\.v([24]))?\.[ubsf](8|16|32|64)")
_ATOMIC = re.compile(r"(?:atom|red)\.(relaxed|acquire|release|acq_rel)\.sys\.global\.(add)\.u(32|64)")
_REDUCE_ALL = re.compile(r"multimem\.ld_reduce\.relaxed\.sys\.global\.add(?:\.v([24]))?\.([usf])(32|64)")
_STORE_ALL = re.compile(r"multimem\.st\.relaxed\.sys\.global(?:\.v([24]))?\.[ubsf](32|64)")


@dataclass(frozen=True)
class Program:
    """A kernel that threads can run. Step 0 is its beginning."""

    kernel: Kernel
    steps: tuple[Step, ...]
    registers: int
    source: str


def translate(ptx: str, name: str) -> Program:
    """The entry `name` of a module. Raises PtxError on whatever is not understood."""
    return _Translation(parse(ptx, name)).program()


class _Translation:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._registers: dict[str, int] = {}
        self._starts: dict[int, int] = {}  # instruction to step
        self._lines: list[str] = []

    def program(self) -> Program:
        code = self._kernel.code
        starts = {0, *self._kernel.labels.values()}
        starts |= {k + 1 for k, instruction in enumerate(code) if _is_access(instruction.opcode)}
        self._starts = {start: k for k, start in enumerate(sorted(starts))}
        for start in self._starts:
            self._step(start)
        source = "\n".join(self._lines) + "\n"
        names = {**arithmetic.NAMES, "SHARED": SHARED}
        exec(compile(source, f"<{self._kernel.name}>", "exec"), names)
        steps = tuple(names[f"step{k}"] for k in range(len(self._starts)))
        return Program(self._kernel, steps, len(self._registers), source)

    def _step(self, start: int) -> None:
        self._lines.append(f"def step{self._starts[start]}(r, t):")
        at, code = start, self._kernel.code
        while at < len(code):
            instruction = code[at]
            self._emit(instruction, at)
            at += 1
            if at in self._starts:
                break
        self._lines.append(f"    return {self._starts.get(at, END)}")

    def _emit(self, instruction: Instruction, at: int) -> None:
        indent = "    "
        if instruction.guard:
            unless = "not " if instruction.negated else ""
            self._lines.append(f"    if {unless}{self._register(instruction.guard)}:")
            indent += "    "
        self._lines += [indent + line for line in self._statement(instruction, at)]

    def _statement(self, instruction: Instruction, at: int) -> list[str]:
        opcode, x = instruction.opcode, instruction.operands
        if opcode in ("bra", "bra.uni"):
            return [f"return {self._starts[self._kernel.labels[x[0]]]}"]
        if opcode in ("ret", "exit"):
            return [f"return {END}"]
        if opcode == "bar.sync" and x == ("0",):
            return [f"t.arrive({at})"]
        if opcode == "bar.red.and.pred" and x[1] == "0":
            target = self._register(x[0])
            return [f"t.arrive({at}, {self._register(x[2])}, {target[2:-1]})"]
        if opcode == "fence.proxy.alias":
            return ["t.fence_alias()"]
        if opcode == "mov.u64" and x[1] == "%globaltimer":
            return [f"{self._register(x[0])} = t.now()"]
        if opcode.startswith("ld.param."):
            number = self._kernel.parameters.index(x[1].strip("[]"))
            return [f"{self._register(x[0])} = t.block.arguments[{number}]"]
        if opcode.startswith("mov.b") and "{" in x[0] + x[1]:
            return self._packing(opcode, x)
        return self._access(opcode, x) or self._compute(opcode, x)

    def _compute(self, opcode: str, x: tuple[str, ...]) -> list[str]:
        width = re.search(r"\d+$", opcode)
        sources = [self._value(source, int(width[0]) if width else 1) for source in x[1:]]
        return [f"{self._register(x[0])} = {arithmetic.expression(opcode, sources)}"]

    def _packing(self, opcode: str, x: tuple[str, ...]) -> list[str]:
        """mov between one register and a vector of its parts."""
        vector, whole = (x[0], x[1]) if "{" in x[0] else (x[1], x[0])
        parts = self._vector(vector)
        bits = int(opcode.removeprefix("mov.b")) // len(parts)
        if vector is x[1]:
            return [f"{self._register(whole)} = " + " | ".join(f"{part} << {bits * k}" for k, part in enumerate(parts))]
        value, ones = self._value(whole, bits * len(parts)), arithmetic.mask(bits)
        return [f"{part} = {value} >> {bits * k} & {ones}" for k, part in enumerate(parts)]

    # ---- accesses to memory; a vector's elements are accessed one by one ----

    def _access(self, opcode: str, x: tuple[str, ...]) -> list[str]:
        if found := _LOAD.fullmatch(opcode):
            size, acquire = int(found[4]) // 8, found[1] == ".acquire.sys"
            address, targets = self._address(x[1], found[2]), self._elements(x[0], found[3])
            return [f"{to} = t.load({address} + {k * size}, {size}, {acquire})" for k, to in enumerate(targets)]
        if found := _STORE.fullmatch(opcode):
            size, release = int(found[4]) // 8, found[1] == ".release.sys"
            address, sources = self._address(x[0], found[2]), self._elements(x[1], found[3])
            return [f"t.store({address} + {k * size}, {size}, {of}, {release})" for k, of in enumerate(sources)]
        if found := _ATOMIC.fullmatch(opcode):
            return self._atomic(found, x)
        return self._multimem(opcode, x)

    def _atomic(self, found: re.Match[str], x: tuple[str, ...]) -> list[str]:
        size, target = int(found[3]) // 8, f"{self._register(x[0])} = " if len(x) == 3 else ""
        order = f"{found[1] in ('acquire', 'acq_rel')}, {found[1] in ('release', 'acq_rel')}"
        value = self._value(x[-1], size * 8)
        return [f"{target}t.add({self._address(x[-2], '.global')}, {size}, {value}, {order})"]

    def _multimem(self, opcode: str, x: tuple[str, ...]) -> list[str]:
        if found := _REDUCE_ALL.fullmatch(opcode):
            bits = int(found[3])
            kind = f"f{bits}" if found[2] == "f" else f"u{bits}"
            plus = arithmetic.expression(f"add.rn.{kind}" if found[2] == "f" else f"add.{kind}", ["a", "b"])
            address, targets = self._address(x[1], ".global"), self._elements(x[0], found[1])
            fold, size = f"lambda a, b: {plus}", bits // 8
            return [f"{to} = t.load_all({address} + {k * size}, {size}, {fold})" for k, to in enumerate(targets)]
        if found := _STORE_ALL.fullmatch(opcode):
            address, sources, size = self._address(x[0], ".global"), self._elements(x[1], found[1]), int(found[2]) // 8
            return [f"t.store_all({address} + {k * size}, {size}, {of})" for k, of in enumerate(sources)]
        return []

    # ---- operands ----

    def _register(self, name: str) -> str:
        if not re.fullmatch(r"%\w+", name):
            raise PtxError(f"{name} is not a register")
        return f"r[{self._registers.setdefault(name, len(self._registers))}]"

    def _value(self, operand: str, bits: int) -> str:
        if operand in _SPECIAL:
            return _SPECIAL[operand]
        if operand.startswith("%"):
            return self._register(operand)
        if operand in self._kernel.shared:
            return str(self._kernel.shared[operand])
        if re.fullmatch(r"0[fd][0-9A-Fa-f]+", operand):
            return str(int(operand[2:], 16))
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
            return str(int(operand, 0) & arithmetic.mask(bits))
        raise PtxError(f"unknown operand {operand}")

    def _address(self, operand: str, space: str | None) -> str:
        found = _ADDRESS.fullmatch(operand)
        if not found:
            raise PtxError(f"{operand} is not an address")
        base = "SHARED + " if space == ".shared" else ""
        return f"{base}{self._value(found[1], 64)} + {found[2] or 0}"

    def _vector(self, operand: str) -> list[str]:
        return [self._value(element.strip(), 64) for element in operand.strip("{}").split(",")]

    def _elements(self, operand: str, count: str | None) -> list[str]:
        elements = self._vector(operand)
        if len(elements) != int(count or 1):
            raise PtxError(f"{operand} has not {count or 1} elements")
        return elements


def _is_access(opcode: str) -> bool:
    """Whether other threads may run between this instruction and the next."""
    return opcode.startswith(("ld.", "st.", "atom.", "red.", "multimem.", "bar.")) and not opcode.startswith("ld.param")

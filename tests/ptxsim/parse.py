"""PTX text to instructions. Only what NVRTC writes into the body of a kernel is understood."""

from __future__ import annotations

import re
from dataclasses import dataclass


class PtxError(Exception):
    """The text is not what this package understands."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard opcode operands`. `negated`: the guard must be false."""

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False


@dataclass(frozen=True)
class Kernel:
    """An entry. `shared`: offsets of its variables in a block's shared memory. `labels`: indices into `code`."""

    name: str
    parameters: tuple[str, ...]
    shared: dict[str, int]
    shared_bytes: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]


_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"(\$\w+)\s*:\s*")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.[busf](\d+)\s+(\w+)(?:\[(\d+)\])?")


def parse(ptx: str, name: str) -> Kernel:
    """The entry `name` of a module. Raises PtxError."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(rf"\.entry\s+{name}\s*\((.*?)\)[^{{]*\{{(.*?)\n\}}", text, re.DOTALL)
    if not entry:
        raise PtxError(f"no entry {name}")
    shared, shared_bytes = _shared(entry[2])
    code, labels = _body(entry[2])
    return Kernel(
        name, tuple(re.findall(r"\.param\s+\.\w+\s+(\w+)", entry[1])), shared, shared_bytes, tuple(code), labels
    )


def _body(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and the labels before them. Registers declared in inner braces hide others of their name."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = []
    for statement in text.split(";"):
        rest = statement.strip()
        while found := _LABEL.match(rest) or re.match(r"([{}])\s*", rest):
            rest = rest[found.end() :]
            if found[1] == "{":
                scopes.append({})
            elif found[1] == "}":
                scopes.pop()
            else:
                labels[found[1]] = len(code)
        if rest.startswith(".reg") and scopes:
            scopes[-1] |= {name: f"{name}_in_{len(code)}" for name in re.findall(r"%\w+", rest)}
        elif rest and not rest.startswith("."):
            for scope in reversed(scopes):
                rest = re.sub(r"%\w+", lambda register: scope.get(register[0], register[0]), rest)  # noqa: B023
            code.append(_instruction(rest))
    return code, labels


def _instruction(text: str) -> Instruction:
    found = _STATEMENT.fullmatch(text)
    if not found:
        raise PtxError(f"not understood: {text!r}")
    operands = tuple(operand.strip() for operand in _OPERAND.findall(found[4]))
    return Instruction(found[3], operands, found[2] or "", found[1] == "!")


def _shared(body: str) -> tuple[dict[str, int], int]:
    """Where the shared variables lie, and how many bytes they take."""
    offsets, end = {}, 0
    for align, bits, name, count in _SHARED.findall(body):
        at = -(-end // int(align)) * int(align)
        offsets[name] = at
        end = at + int(bits) // 8 * int(count or 1)
    return offsets, end

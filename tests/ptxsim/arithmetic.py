"""Instructions on registers, as Python expressions.

A register holds an unsigned integer of its width (floats: their bits), a predicate a bool. An opcode that no rule
matches as a whole, modifiers included, is refused.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence

from .parse import PtxError

Rule = Callable[["re.Match[str]", Sequence[str]], str]
_RULES: list[tuple[re.Pattern[str], Rule]] = []


def expression(opcode: str, sources: Sequence[str]) -> str:
    """The value of an instruction, from the expressions of its sources. Raises PtxError on an unknown opcode."""
    for pattern, rule in _RULES:
        if found := pattern.fullmatch(opcode):
            return rule(found, sources)
    raise PtxError(f"unknown instruction {opcode}")


def _rule(pattern: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.append((re.compile(pattern), rule))
        return rule

    return register


def mask(bits: int) -> int:
    """All ones."""
    return (1 << bits) - 1


def signed(source: str, bits: int) -> str:
    """The same bits, read as two's complement."""
    return f"(({source} ^ {1 << bits - 1}) - {1 << bits - 1})"


def _number(source: str, kind: str, bits: int) -> str:
    return signed(source, bits) if kind == "s" else source


def _numbers(found: re.Match[str], x: Sequence[str]) -> list[str]:
    return [_number(source, found["kind"], int(found["bits"])) for source in x]


def _wrapped(value: str, bits: int) -> str:
    return f"({value}) & {mask(bits)}"


# ---- integers --------------------------------------------------------------------------------------------------------

_INTEGER = r"\.(?P<kind>[us])(?P<bits>16|32|64)"
_BITS = r"\.b(?P<bits>16|32|64)"
_SYMBOLS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}


@_rule(r"(add|sub)" + _INTEGER)
def _add(found: re.Match[str], x: Sequence[str]) -> str:
    return _wrapped(f"{x[0]} {_SYMBOLS[found[1]]} {x[1]}", int(found["bits"]))


@_rule(r"(and|or|xor)\.(?:b(?:16|32|64)|pred)")
def _bitwise(found: re.Match[str], x: Sequence[str]) -> str:
    return f"{x[0]} {_SYMBOLS[found[1]]} {x[1]}"


@_rule(r"not" + _BITS)
def _not(found: re.Match[str], x: Sequence[str]) -> str:
    return f"{x[0]} ^ {mask(int(found['bits']))}"


@_rule(r"not\.pred")
def _not_predicate(found: re.Match[str], x: Sequence[str]) -> str:
    return f"not {x[0]}"


@_rule(r"(neg|abs)\.(?P<kind>s)(?P<bits>16|32|64)")
def _negated(found: re.Match[str], x: Sequence[str]) -> str:
    value = _numbers(found, x)[0]
    return _wrapped(f"-{value}" if found[1] == "neg" else f"abs({value})", int(found["bits"]))


@_rule(r"(min|max)" + _INTEGER)
def _least(found: re.Match[str], x: Sequence[str]) -> str:
    return _wrapped(f"{found[1]}({', '.join(_numbers(found, x))})", int(found["bits"]))


@_rule(r"(mul|mad)\.(lo|hi|wide)" + _INTEGER)
def _product(found: re.Match[str], x: Sequence[str]) -> str:
    a, b, *addend = _numbers(found, x[:2]) + list(x[2:])
    bits = int(found["bits"])
    value = f"({a} * {b})" + (f" >> {bits}" if found[2] == "hi" else "")
    total = f"({value}) + {addend[0]}" if addend else value
    return _wrapped(total, bits * 2 if found[2] == "wide" else bits)


@_rule(r"(div|rem)\.u(16|32|64)")
def _quotient(found: re.Match[str], x: Sequence[str]) -> str:
    return f"{x[0]} {'//' if found[1] == 'div' else '%'} {x[1]}"


@_rule(r"shl" + _BITS)
def _shift_left(found: re.Match[str], x: Sequence[str]) -> str:
    return _wrapped(f"{x[0]} << min({x[1]}, {found['bits']})", int(found["bits"]))


@_rule(r"shr\.(?P<kind>[ubs])(?P<bits>16|32|64)")
def _shift_right(found: re.Match[str], x: Sequence[str]) -> str:
    bits = int(found["bits"])
    return _wrapped(f"{_number(x[0], found['kind'], bits)} >> min({x[1]}, {bits})", bits)


@_rule(r"bfi\.b(32|64)")
def _insert(found: re.Match[str], x: Sequence[str]) -> str:
    return f"insert_bits({', '.join(x)}, {found[1]})"


@_rule(r"prmt\.b32")
def _permute(found: re.Match[str], x: Sequence[str]) -> str:
    return f"permute_bytes({', '.join(x)})"


# ---- choice and conversion -------------------------------------------------------------------------------------------

_COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


@_rule(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.(?P<kind>[usb])(?P<bits>16|32|64)")
def _compare(found: re.Match[str], x: Sequence[str]) -> str:
    return f" {_COMPARISONS[found[1]]} ".join(_numbers(found, x))


@_rule(r"setp\.(num|nan|eq|neu|lt|le|gt|ge)\.f(32|64)")
def _compare_floats(found: re.Match[str], x: Sequence[str]) -> str:
    a, b = (f"float_of_{found[2]}({source})" for source in x)
    if found[1] in ("num", "nan"):
        ordered = f"{a} == {a} and {b} == {b}"
        return ordered if found[1] == "num" else f"not ({ordered})"
    return f"{a} {_COMPARISONS.get(found[1], '!=')} {b}"


@_rule(r"selp\.[busf](16|32|64)")
def _select(found: re.Match[str], x: Sequence[str]) -> str:
    return f"{x[0]} if {x[2]} else {x[1]}"


@_rule(r"mov\.(?:[busf](?:16|32|64)|pred)|cvta\.(?:to\.)?global\.u64")
def _same(found: re.Match[str], x: Sequence[str]) -> str:
    return x[0]


@_rule(r"cvta\.(to\.)?shared\.u(?:32|64)")
def _shared_address(found: re.Match[str], x: Sequence[str]) -> str:
    return f"{x[0]} {'-' if found[1] else '+'} SHARED"


@_rule(r"cvt\.[us](8|16|32|64)\.(?P<kind>[us])(?P<bits>8|16|32|64)")
def _convert(found: re.Match[str], x: Sequence[str]) -> str:
    bits = int(found["bits"])
    return _wrapped(_number(f"({x[0]} & {mask(bits)})", found["kind"], bits), int(found[1]))


@_rule(r"cvt\.rn\.f(32|64)\.(?P<kind>[us])(?P<bits>8|16|32|64)")
def _to_float(found: re.Match[str], x: Sequence[str]) -> str:
    return f"bits_of_{found[1]}(float({_numbers(found, x)[0]}))"


@_rule(r"cvt\.f(32|64)\.f(16|32)|cvt\.rn\.f(?P<to>16|32)\.f(?P<of>32|64)")
def _convert_float(found: re.Match[str], x: Sequence[str]) -> str:
    return f"bits_of_{found['to'] or found[1]}(float_of_{found['of'] or found[2]}({x[0]}))"


# ---- floats ----------------------------------------------------------------------------------------------------------


@_rule(r"(add|sub|mul|div)\.rn\.f(32)")
def _float_operation(found: re.Match[str], x: Sequence[str]) -> str:
    """Rounding a double that holds the operation's result is right for these four (and for float32 alone)."""
    a, b = (f"float_of_32({source})" for source in x)
    symbol = {"add": "+", "sub": "-", "mul": "*"}.get(found[1])
    return f"bits_of_32({a} {symbol} {b})" if symbol else f"bits_of_32(quotient({a}, {b}))"


def quotient(a: float, b: float) -> float:
    """a / b as IEEE 754 wants it."""
    if b:
        return a / b
    sign = struct.pack("<d", a)[7] ^ struct.pack("<d", b)[7]
    return float("nan") if a == 0 or math.isnan(a) else float("-inf" if sign & 0x80 else "inf")


def _codec(bits: int, code: str, integer: str, infinity: int) -> tuple[Callable[[int], float], Callable[[float], int]]:
    of, into = struct.Struct(f"<{code}"), struct.Struct(f"<{integer}")

    def to_float(word: int) -> float:
        return float(of.unpack(into.pack(word))[0])

    def to_bits(value: float) -> int:
        try:
            return int(into.unpack(of.pack(value))[0])
        except OverflowError:
            return infinity | (value < 0) << bits - 1

    return to_float, to_bits


float_of_16, bits_of_16 = _codec(16, "e", "H", 0x7C00)
float_of_32, bits_of_32 = _codec(32, "f", "I", 0x7F800000)
float_of_64, bits_of_64 = _codec(64, "d", "Q", 0x7FF << 52)


def insert_bits(field: int, into: int, position: int, length: int, bits: int) -> int:
    """bfi: `length` low bits of `field` at `position`."""
    hole = mask(length & 0xFF) << (position & 0xFF) & mask(bits)
    return into & ~hole | field << (position & 0xFF) & hole


def permute_bytes(low: int, high: int, selector: int) -> int:
    """prmt: four bytes of eight, each chosen by a nibble whose top bit replicates the byte's sign."""
    eight, out = high << 32 | low, 0
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = eight >> 8 * (nibble & 7) & 0xFF
        out |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * k
    return out


# What the expressions call.
NAMES = {
    name: globals()[name]
    for name in (
        "quotient", "insert_bits", "permute_bytes", "float_of_16", "float_of_32", "float_of_64", "bits_of_16",
        "bits_of_32", "bits_of_64",
    )
}  # fmt: skip

"""The dependency rule: dependencies point down only.

1. A transport, backend, algorithm or provider imports the contracts in `commrt/` and its own modules: no other family,
   and no other member of its own family. Names that start with "_" are helpers that a family's members may share.
2. Nothing else under `commrt/` imports a member of any family: members are found by name, through the registry.
3. Nobody imports the bare names `transports`, `backends`, `algorithms`.
4. A file in `algorithms/device` includes files of `algorithms/device` only.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("transports", "backends", "algorithms")
FAMILIES = (*LINKED, "providers")
SOURCES = ("commrt", *LINKED, "tests", "examples", "ci")
NATIVE = (".h", ".hpp", ".hh", ".cuh", ".c", ".cc", ".cpp", ".cu", ".hip")


def violations(root: Path) -> list[str]:
    """Every breach in a tree, as `file:line: what`."""
    found = []
    for path in python_files(root):
        for line, target in imports(root, path):
            if (reason := breach(root, module_name(root, path), target)) is not None:
                found.append(f"{path.relative_to(root)}:{line}: {reason}")
    return sorted([*found, *include_violations(root)])


def python_files(root: Path) -> Iterator[Path]:
    for top in SOURCES:
        for folder, _, names in os.walk(root / top):  # does not follow the links in commrt/
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def module_name(root: Path, path: Path) -> str:
    """The dotted name a file is imported by; the linked folders are subpackages of commrt."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[0] in LINKED:
        parts.insert(0, "commrt")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import statement and each import_module("constant") of a file."""
    module = module_name(root, path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(package, node.level, node.module)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and (name := dynamic_target(node)) is not None:
            dots = len(name) - len(name.lstrip("."))
            yield node.lineno, absolute(package, dots, name.lstrip("."))


def absolute(package: str, level: int, name: str | None) -> str:
    if level == 0:
        return name or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


def dynamic_target(call: ast.Call) -> str | None:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__") or not call.args:
        return None
    first = call.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def breach(root: Path, importer: str, target: str) -> str | None:
    """Why `importer` may not import `target`; None if it may."""
    if target.split(".", maxsplit=1)[0] in LINKED:
        return f"imports the bare name {target!r}"
    target_family, target_member = split(root, target)
    if (not importer.startswith("commrt.") and importer != "commrt") or target_family is None:
        return None
    family, member = split(root, importer)
    if family is None:
        return f"the core imports {target!r}" if target_member is not None else None
    if family != target_family:
        return f"{family} import {target_family}: {target!r}"
    if target_member in (None, "", member):
        return None
    return f"{member or 'a helper'} imports its sibling {target!r}"


def split(root: Path, name: str) -> tuple[str | None, str | None]:
    """(family, member) of a dotted name. No member: the family's package itself; "": a helper that members share."""
    parts = name.split(".")
    if len(parts) < 2 or parts[0] != "commrt" or parts[1] not in FAMILIES:
        return None, None
    inside = parts[2:]
    if not inside:
        return parts[1], None
    if parts[1] != "algorithms":
        return parts[1], "" if inside[0].startswith("_") else inside[0]
    helper = any(part.startswith("_") for part in inside[:2])
    collective = (root / "algorithms" / inside[0]).is_dir()
    return parts[1], "/".join(inside[:2]) if collective and len(inside) > 1 and not helper else ""


def include_violations(root: Path) -> Iterator[str]:
    device = root / "algorithms" / "device"
    for path in sorted(device.rglob("*")):
        if path.suffix not in NATIVE:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r"\s*#\s*include(?:_next)?\b\s*(.*)", line)
            if match and not included_from_device(device, path, match[1]):
                yield f"{path.relative_to(root)}:{number}: includes {match[1]}"


def included_from_device(device: Path, path: Path, argument: str) -> bool:
    quoted = re.match(r'"([^"]+)"', argument)
    if quoted is None:
        return False
    for start in (path.parent, device):
        file = (start / quoted[1]).resolve()
        if file.is_file() and file.is_relative_to(device.resolve()):
            return True
    return False


# --- the tree itself ---


def test_the_tree_keeps_the_rule() -> None:
    assert violations(ROOT) == []


def test_the_check_reads_the_tree() -> None:
    names = {module_name(ROOT, path) for path in python_files(ROOT)}
    assert {"commrt.errors", "commrt.plugins", "tests.unit.test_dependency_rule"} <= names
    assert len(names) == len(list(python_files(ROOT)))


# --- must-fail controls ---

CLEAN = {
    "commrt/__init__.py": "from commrt.errors import CommrtError\n",
    "commrt/errors.py": "",
    "commrt/transport.py": "",
    "commrt/registry.py": "import importlib\ndef load(name):\n    return importlib.import_module(name)\n",
    "commrt/testing/transports.py": "from commrt import transport\n",
    "commrt/providers/native.py": "from commrt.errors import CommrtError\nfrom ._shared import x\n",
    "commrt/providers/_shared.py": "",
    "transports/shm/__init__.py": "from commrt.transport import Transport\nfrom .pairs import Pair\nimport os\n",
    "transports/shm/pairs.py": "from commrt.transports.shm import layout\nfrom commrt.transports._sockets import x\n",
    "transports/shm/layout.py": "",
    "transports/tcp.py": "",
    "transports/_sockets.py": "",
    "backends/cpu/__init__.py": "from .. import _common\n",
    "backends/_common.py": "",
    "algorithms/patterns.py": "",
    "algorithms/all_reduce/__init__.py": "",
    "algorithms/all_reduce/_math.py": "",
    "algorithms/all_reduce/ring.py": "from commrt import algorithm\nfrom .. import patterns\nfrom ._math import x\n",
    "algorithms/all_reduce/tree.py": "from commrt.algorithms.patterns import x\n",
    "algorithms/device/platform.h": "#pragma once\n",
    "algorithms/device/parts/packet.h": '#include "../platform.h"\n#include "executor.h"  // from the top of device\n',
    "algorithms/device/executor.h": '// #include <vector>\n#include "platform.h"\n',
    "commrt/_native/module.cpp": '#include <vector>\n#include "../../algorithms/device/executor.h"\n',
    "tests/unit/test_ring.py": "from commrt.algorithms.all_reduce import ring\nimport commrt.transports.shm\n",
}

BREACHES = [
    ("transports/shm/__init__.py", "import commrt.backends.cpu", "transports import backends"),
    ("transports/shm/__init__.py", "from commrt import backends", "transports import backends"),
    ("transports/shm/pairs.py", "from ...backends import cpu", "transports import backends"),
    ("transports/shm/pairs.py", "def f():\n    from commrt.backends._common import x", "transports import backends"),
    ("transports/shm/pairs.py", "from commrt.algorithms.patterns import x", "transports import algorithms"),
    ("transports/tcp.py", "from commrt.transports.shm import layout", "tcp imports its sibling"),
    ("transports/tcp.py", "from . import shm", "tcp imports its sibling"),
    ("transports/_sockets.py", "from . import shm", "a helper imports its sibling"),
    ("transports/tcp.py", "from importlib import import_module\nimport_module('commrt.transports.shm')", "sibling"),
    ("backends/cpu/__init__.py", "from commrt.transports.shm import layout", "backends import transports"),
    ("backends/cpu/__init__.py", "from commrt.providers import native", "backends import providers"),
    ("algorithms/all_reduce/ring.py", "import commrt.transports.shm as shm", "algorithms import transports"),
    ("algorithms/all_reduce/ring.py", "from commrt import errors, backends", "algorithms import backends"),
    ("algorithms/all_reduce/ring.py", "from .tree import x", "all_reduce/ring imports its sibling"),
    ("algorithms/patterns.py", "from commrt.backends.cpu import x", "algorithms import backends"),
    ("commrt/providers/native.py", "from commrt.algorithms.all_reduce.ring import x", "providers import algorithms"),
    ("commrt/registry.py", "import commrt.transports.shm", "the core imports"),
    ("commrt/registry.py", "from commrt.transports import shm", "the core imports"),
    ("commrt/registry.py", "from .backends.cpu import x", "the core imports"),
    (
        "commrt/registry.py",
        "import importlib\nimportlib.import_module('.transports.shm', 'commrt')",
        "the core imports",
    ),
    ("commrt/registry.py", "__import__('commrt.providers.native')", "the core imports"),
    ("commrt/registry.py", "if TYPE_CHECKING:\n    from commrt.algorithms.all_reduce import ring", "the core imports"),
    ("commrt/testing/transports.py", "from commrt.transports._sockets import x", "the core imports"),
    ("commrt/registry.py", "import transports", "imports the bare name"),
    ("tests/unit/test_ring.py", "from transports.shm import layout", "imports the bare name"),
    ("examples/star/star.py", "import algorithms.patterns", "imports the bare name"),
    ("algorithms/device/executor.h", "#include <vector>", "includes <vector>"),
    ("algorithms/device/executor.h", '#include "../../commrt/_native/module.cpp"', "includes"),
    ("algorithms/device/parts/packet.h", '#  include "missing.h"', 'includes "missing.h"'),
    ("algorithms/device/executor.h", "#include HEADER", "includes HEADER"),
]


def build(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for family in LINKED:
        (root / "commrt" / family).symlink_to(f"../{family}")


def test_a_tree_that_keeps_the_rule_passes(tmp_path: Path) -> None:
    build(tmp_path, CLEAN)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(("file", "text", "reason"), BREACHES)
def test_one_breach_is_found(tmp_path: Path, file: str, text: str, reason: str) -> None:
    build(tmp_path, CLEAN | {file: text + "\n"})
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}:")
    assert reason in found

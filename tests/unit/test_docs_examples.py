"""Every snippet of the README and of the pages in docs/ runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RANKS = 2

# They make environments, for minutes; CI runs what they run.
SETS_UP = ("bash ci/demo.sh", "bash ci/test.sh", "make test", "pip install .")


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets() -> list[Snippet]:
    found = []
    for page in PAGES:
        content = page.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", content, re.MULTILINE | re.DOTALL):
            found.append(Snippet(page, content[: match.start()].count("\n") + 1, match[1], match[2]))
    return found


SNIPPETS = snippets()


def torchrun(*arguments: str) -> list[str]:
    pytest.importorskip("torch", reason="torch is not installed")
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def run(command: list[str], folder: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMMRT_")}
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pages_have_snippets_of_known_languages() -> None:
    assert {snippet.page.name for snippet in SNIPPETS} >= {"README.md", "quickstart.md"}
    assert {snippet.language for snippet in SNIPPETS} <= {"python", "sh", "text", "cpp", "toml"}


@pytest.mark.parametrize("snippet", [one for one in SNIPPETS if one.language == "python"], ids=str)
def test_programs_run(snippet: Snippet, tmp_path: Path) -> None:
    program = tmp_path / "snippet.py"
    program.write_text(snippet.text)
    if "init_process_group" in snippet.text:
        run(torchrun("--standalone", "--nproc-per-node", str(RANKS), str(program)), tmp_path)
    else:
        run([sys.executable, "-m", "commrt", "run", "-n", str(RANKS), str(program)], tmp_path)


@pytest.mark.parametrize("snippet", [one for one in SNIPPETS if one.language == "sh"], ids=str)
def test_commands_run(snippet: Snippet, tmp_path: Path) -> None:
    for name, page in (("hello.py", "README.md"), ("train.py", "torch.md")):
        program = next(one for one in SNIPPETS if one.language == "python" and one.page.name == page)
        (tmp_path / name).write_text(program.text)
    for line in snippet.text.splitlines():
        words = shlex.split(line, comments=True)
        if not words or line in SETS_UP:
            continue
        assert words[0] in ("commrt", "torchrun"), f"{snippet}: don't know how to run {line!r}"
        run(torchrun(*words[1:]) if words[0] == "torchrun" else [sys.executable, "-m", *words], tmp_path)


def test_the_first_program_prints_what_it_should(tmp_path: Path) -> None:
    hello = next(one for one in SNIPPETS if one.language == "python" and one.page.name == "README.md")
    (tmp_path / "hello.py").write_text(hello.text)
    lines = run([sys.executable, "-m", "commrt", "run", "-n", "4", "hello.py"], tmp_path).splitlines()
    assert sorted(lines) == [
        "[0] rank 0 of 4 has [10. 10. 10. 10.]",
        "[0] squares: [0 1 4 9]",
        "[1] rank 1 of 4 has [10. 10. 10. 10.]",
        "[2] rank 2 of 4 has [10. 10. 10. 10.]",
        "[3] rank 3 of 4 has [10. 10. 10. 10.]",
    ]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        assert set(re.findall(r"(?:`|^)make (\w+)", page.read_text(), re.MULTILINE)) <= targets, page

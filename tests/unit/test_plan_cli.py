"""`commrt plan` and `commrt explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from commrt.cli.explain import explain
from commrt.cli.plan import plan
from commrt.plan import load
from commrt.plugins import default_registry

app = typer.Typer()
app.add_typer(plan, name="plan")
app.command("explain")(explain)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_show_by_name() -> None:
    text = run("plan", "show", "all_reduce/ring", "-n", "3", "--rank", "1")
    assert text.startswith("all_reduce/ring: all_reduce on 3 ranks, synchronising, needs puts and signals")
    assert "rank 1, block 0" in text
    assert "rank 0, block 0" not in text
    assert "put scratch[0]@2 <- input[0][1]" in text


def test_every_built_in_plan_can_be_shown() -> None:
    for name in default_registry().names("algorithms"):
        ranks = default_registry().require("algorithms", name).least_ranks
        assert run("plan", "show", name, "-n", str(ranks)).startswith(f"{name}: ")


def test_files_and_json_agree(tmp_path: Path) -> None:
    text = run("plan", "show", "all_reduce/pipelined", "-n", "2", "--json")
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert load(text).to_json() == text.strip().encode()
    assert run("plan", "show", str(file)) == run("plan", "show", "all_reduce/pipelined", "-n", "2")


def test_schema() -> None:
    assert "Operation" in json.loads(run("plan", "schema"))["$defs"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("plan", "show", "all_reduce/rink"), 2, "did you mean 'all_reduce/ring'"),
        (("plan", "show", "absent.json"), 2, "absent.json"),
        (("plan", "show", "send/put", "-n", "3"), 2, "2..2 ranks"),
        (("plan", "show", "broadcast/put", "-n", "3", "--root", "3"), 2, "root 3"),
        (("plan", "show", "all_reduce/ring", "--rank", "7"), 2, "no program for rank 7"),
        (("explain", "all_reduced", "4M"), 2, "did you mean 'all_reduce'"),
        (("explain", "all_reduce", "4Q"), 2, "not a size"),
        (("explain", "all_reduce", "4M", "--algo", "direct"), 2, "symmetric memory"),
        (("explain", "all_reduce", "4M", "--table", "absent.yaml"), 2, "absent.yaml"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], code: int, words: str) -> None:
    output = " ".join(run(*arguments, code=code).replace("│", " ").split())
    assert words in output


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    assert "malformed plan" in run("plan", "show", str(file), code=2)


def test_explain() -> None:
    text = run("explain", "all_reduce", "4M", "-n", "8")
    assert text.startswith("all_reduce of 4 MiB on 8 ranks, ordinary memory")
    assert "runs native all_reduce/" in text
    assert "not direct: needs symmetric memory" in text
    assert "runs native all_reduce/direct" in run("explain", "all_reduce", "4M", "-n", "8", "--symmetric")


def test_explain_with_a_table(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text("version: 1\nrows: {all_reduce: [{use: [[max, ring]]}]}\nfallback: {}\n")
    assert "runs native all_reduce/ring" in run("explain", "all_reduce", "4M", "--table", str(file))

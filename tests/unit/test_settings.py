"""Settings from arguments and environment, the page that documents them, and the log they configure."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from commrt import __version__, logs
from commrt.errors import ConfigError, InvalidArgument
from commrt.settings import (
    LAUNCHER_VARIABLES,
    Settings,
    environment_markdown,
    parse_nbytes,
    parse_seconds,
    registry,
)

# By its full name: commrt.cli may have a function called `env`.
command = importlib.import_module("commrt.cli.env")

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_stand_without_arguments_or_variables() -> None:
    settings = Settings.from_environment({})
    assert settings == Settings()
    assert (settings.timeout_s, settings.init_timeout_s, settings.transport) == (300.0, 120.0, None)
    assert set(settings.sources) == {setting.name for setting in registry()}
    assert set(settings.sources.values()) == {"default"}


def test_argument_wins_over_environment_wins_over_default() -> None:
    environ = {"COMMRT_TIMEOUT_S": "7.5", "COMMRT_TRANSPORT": "shm", "COMMRT_DEBUG": ""}
    settings = Settings.from_environment(environ, timeout_s=2, transport=None)
    assert (settings.timeout_s, settings.transport, settings.debug) == (2.0, "shm", None)
    assert settings.sources["timeout_s"] == "argument"
    assert settings.sources["transport"] == "environment"
    assert settings.sources["debug"] == "default"


MALFORMED = [
    ("TIMEOUT_S", text, "a positive number of seconds") for text in ("soon", "0", "-1", "nan", "inf", "1e300", " ")
] + [
    ("SCRATCH_BYTES", "-4M", "a positive number of bytes"),
    ("SCRATCH_BYTES", "0", "a positive number of bytes"),
    ("PACKET_BYTES", "4T", "a positive number of bytes"),
    ("PACKET_BYTES", "9999G", "a positive number of bytes"),
    ("DEBUG", "LOUD", "one of VERSION, WARN, INFO, TRACE"),
    ("DEBUG_SUBSYS", "net;shm", "comma-separated"),
    ("DEBUG_SUBSYS", "net,^shm", "comma-separated"),
    ("TRANSPORT", "shm tcp", "a transport's name"),
    ("ALGORITHM", "../ring", "an algorithm's name"),
    ("SECRET_FILE", "a\0b", "a path"),
]


@pytest.mark.parametrize(("name", "value", "expected"), MALFORMED)
def test_malformed_variable_is_named_with_what_was_expected(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings.from_environment({f"COMMRT_{name}": value})
    assert f"COMMRT_{name}={value!r}" in str(raised.value)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"), [("timeout_s", True), ("timeout_s", [1]), ("scratch_bytes", 1.5), ("debug", 3)]
)
def test_malformed_argument_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"{name}={value!r}: expected")):
        Settings.from_environment({}, **{name: value})


def test_malformed_variable_does_not_matter_where_an_argument_is_given() -> None:
    assert Settings.from_environment({"COMMRT_TIMEOUT_S": "soon"}, timeout_s=1).timeout_s == 1.0


def test_unknown_argument_offers_a_near_match() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'timeot_s'; did you mean timeout_s"):
        Settings.from_environment({}, timeot_s=1)


def test_unknown_variable_warns_with_a_near_match(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"COMMRT_TRANSPROT": "shm", "COMMRT_ZZ": "1", "OTHER": "1", **dict.fromkeys(LAUNCHER_VARIABLES, "0")}
    with caplog.at_level(logging.WARNING, logger="commrt.env"):
        Settings.from_environment(environ)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "unknown environment variable COMMRT_TRANSPROT is ignored; did you mean COMMRT_TRANSPORT?"
    assert second == "unknown environment variable COMMRT_ZZ is ignored"


def test_log_tells_each_value_that_took_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="commrt.env"):
        Settings.from_environment({"COMMRT_TIMEOUT_S": "5"}, transport="shm").log()
    assert [record.getMessage() for record in caplog.records] == [
        "timeout_s=5.0 (environment)",
        "transport=shm (argument)",
    ]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1", 1), ("64K", 65536), ("64k", 65536), ("4M", 4 << 20), ("4MiB", 4 << 20), ("1G", 1 << 30)]
)
def test_sizes_are_binary(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@given(st.text(max_size=20) | st.integers() | st.floats() | st.none())
def test_parsers_give_a_value_in_range_or_value_error(value: object) -> None:
    for parse in (parse_seconds, parse_nbytes):
        with contextlib.suppress(ValueError, OverflowError):
            assert parse(value) > 0


def test_page_matches_the_registry() -> None:
    assert (ROOT / "docs/environment.md").read_text() == environment_markdown()


def test_page_lists_every_variable_once() -> None:
    listed = re.findall(r"^\| `(COMMRT_\w+)`", environment_markdown(), re.MULTILINE)
    assert listed == [setting.variable for setting in registry()] + list(LAUNCHER_VARIABLES)


def test_every_variable_that_the_sources_name_is_known() -> None:
    known = {setting.variable for setting in registry()} | set(LAUNCHER_VARIABLES)
    sources = [path for top in ("commrt", "transports", "backends") for path in (ROOT / top).rglob("*.py")]
    named = {name: path for path in sources for name in re.findall(r"\bCOMMRT_[A-Z][A-Z_]*\b", path.read_text())}
    assert "COMMRT_RANK" in named
    assert {name: path for name, path in named.items() if name not in known} == {}


def test_command_shows_values_sources_and_what_is_malformed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"COMMRT_TIMEOUT_S": "7", "COMMRT_DEBUG": "LOUD", "COMMRT_RANK": "3"}
    monkeypatch.setattr(os, "environ", environ)
    with pytest.raises(typer.Exit) as exited:
        command.env(as_json=True)
    assert exited.value.exit_code == 1
    rows = {row["variable"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["COMMRT_TIMEOUT_S"]["value"], rows["COMMRT_TIMEOUT_S"]["source"]) == (7.0, "environment")
    assert (rows["COMMRT_SCRATCH_BYTES"]["value"], rows["COMMRT_SCRATCH_BYTES"]["source"]) == (4 << 20, "default")
    assert "COMMRT_DEBUG='LOUD': expected one of" in rows["COMMRT_DEBUG"]["error"]
    assert rows["COMMRT_RANK"]["value"] == "3"
    assert "COMMRT_SIZE" not in rows
    del environ["COMMRT_DEBUG"]
    command.env()
    assert re.search(r"^COMMRT_TIMEOUT_S +7 +environment +300 +Deadline", capsys.readouterr().out, re.MULTILINE)


# --- the log ---


@pytest.fixture(autouse=True)
def _no_handler_left() -> Iterator[None]:
    logger = logging.getLogger("commrt")
    level = logger.level
    yield
    for handler in [handler for handler in logger.handlers if isinstance(handler, logs.DebugHandler)]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)


def log_with(tmp_path: Path, debug: str, debug_subsys: str) -> list[str]:
    """The lines written for one record of each level to each of two subsystems."""
    file = tmp_path / "log"
    logs.configure(Settings(debug_file=str(file), debug=debug, debug_subsys=debug_subsys), rank=3)
    for subsystem in ("net", "shm"):
        logger = logs.RankLogger(subsystem)
        logger.trace("%s trace", subsystem)
        logger.info("%s info", subsystem)
        logger.warning("%s warn", subsystem)
        logger.log(logs.VERSION, "%s version", subsystem)
    first, *lines = (line.split(": ", 1)[1] for line in file.read_text().splitlines())
    assert first == f"commrt {__version__}"
    return lines


def test_no_handler_unless_asked_for() -> None:
    before = list(logging.getLogger("commrt").handlers)
    assert logs.configure(Settings()) is None
    assert logging.getLogger("commrt").handlers == before


@pytest.mark.parametrize(
    ("level", "subsystems", "expected"),
    [
        ("VERSION", "all", ["net version", "shm version"]),
        ("WARN", "all", ["net warn", "net version", "shm warn", "shm version"]),
        ("INFO", "net", ["net info", "net warn", "net version", "shm warn", "shm version"]),
        ("INFO", "^net", ["net warn", "net version", "shm info", "shm warn", "shm version"]),
        ("TRACE", "shm,coll", ["net warn", "net version", "shm trace", "shm info", "shm warn", "shm version"]),
        ("INFO", "^net, shm", ["net warn", "net version", "shm warn", "shm version"]),
    ],
)
def test_levels_and_subsystems(tmp_path: Path, level: str, subsystems: str, expected: list[str]) -> None:
    assert log_with(tmp_path, debug=level, debug_subsys=subsystems) == expected


def test_line_tells_host_process_thread_rank_level_and_subsystem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logs.configure(Settings(debug="INFO", debug_subsys="net"), rank=2)
    stream.truncate(0)
    stream.seek(0)
    logging.getLogger("commrt.net.pairs").info("joined %d", 7)
    logs.RankLogger("net", 5).info("joined")
    where = f"{logs.host_name()}:{os.getpid()}:{threading.get_native_id()}"
    assert stream.getvalue() == f"{where} [2] commrt INFO net: joined 7\n{where} [5] commrt INFO net: joined\n"


def test_text_from_elsewhere_can_neither_forge_a_line_nor_drive_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logs.configure(Settings(debug="INFO", debug_subsys="net"))
    stream.truncate(0)
    stream.seek(0)
    logging.getLogger("commrt.net").info("hello %s", "\x1b[2J\nhost:1:1 [0] commrt WARN coll: \u2028forged")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert all(" [-] commrt INFO net: " in line for line in lines)
    assert "\x1b" not in stream.getvalue()


def test_second_configuration_changes_nothing(tmp_path: Path) -> None:
    first = logs.configure(Settings(debug="INFO", debug_file=str(tmp_path / "one")))
    assert logs.configure(Settings(debug="TRACE", debug_file=str(tmp_path / "two"))) is first
    assert not (tmp_path / "two").exists()


def test_file_name_takes_host_and_process(tmp_path: Path) -> None:
    logs.configure(Settings(debug="INFO", debug_file=f"{tmp_path}/%h.%p.%%.%x"))
    assert [file.name for file in tmp_path.iterdir()] == [f"{logs.host_name()}.{os.getpid()}.%.%x"]


def test_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"COMMRT_DEBUG_FILE=.* can't be opened: No such file"):
        logs.configure(Settings(debug="INFO", debug_file=f"{tmp_path}/missing/log"))

"""Logging: stdlib loggers `commrt.<subsystem>`, and the one handler that `COMMRT_DEBUG` asks for.

Subsystems are `init bootstrap env net shm coll tune topo plugin` and whatever a plugin adds under its own name.
Without COMMRT_DEBUG nothing is configured: records go where the program's own logging sends them. With it, each line is

    host:pid:tid [rank] commrt INFO net: text

Levels are VERSION < WARN < INFO < TRACE. WARN and worse pass whatever their subsystem; INFO and TRACE lines are
chosen by COMMRT_DEBUG_SUBSYS.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from commrt import __version__
from commrt.errors import ConfigError

if TYPE_CHECKING:
    from commrt.settings import Settings

TRACE = 5
VERSION = logging.CRITICAL + 10
_THRESHOLDS = {"VERSION": VERSION, "WARN": logging.WARNING, "INFO": logging.INFO, "TRACE": TRACE}
_NAMES = {logging.WARNING: "WARN", VERSION: "VERSION", TRACE: "TRACE", logging.DEBUG: "TRACE"}

# A record's text may quote what a peer sent: it must not be able to drive a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # not subscriptable at run time before Python 3.11
    """A logger whose records carry a rank, so that several ranks of one process can be told apart."""

    def __init__(self, subsystem: str, rank: int | None = None) -> None:
        super().__init__(logging.getLogger(f"commrt.{subsystem}"), {"rank": rank})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to what the caller passes as `extra`."""
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs

    def trace(self, message: str, *args: object) -> None:
        """Log at TRACE."""
        self.log(TRACE, message, *args)


class LineFormatter(logging.Formatter):
    """`host:pid:tid [rank] commrt LEVEL subsystem: text`; every line of a record carries that prefix."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._host = host_name()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """One or more complete lines, without the last line's end."""
        rank = getattr(record, "rank", None)
        rank = self._rank if rank is None else rank
        where = f"{self._host}:{record.process}:{threading.get_native_id()} [{'-' if rank is None else rank}]"
        level = _NAMES.get(record.levelno, record.levelname)
        prefix = f"{where} commrt {level} {subsystem_of(record.name)}: "
        text = _CONTROL.sub("?", super().format(record))
        return "\n".join(prefix + line for line in text.splitlines() or [""])


class SubsystemFilter(logging.Filter):
    """Passes WARN and worse, and below that the subsystems of a COMMRT_DEBUG_SUBSYS value."""

    def __init__(self, subsystems: str) -> None:
        super().__init__()
        self._excluding = subsystems.startswith("^")
        self._named = {name.strip().lower() for name in subsystems.removeprefix("^").split(",")}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written."""
        named = "all" in self._named or subsystem_of(record.name) in self._named
        return record.levelno >= logging.WARNING or named != self._excluding


class DebugHandler(logging.StreamHandler):  # type: ignore[type-arg]  # as above
    """The handler that `configure` adds, to stderr or to a file that it owns; a logger carries at most one."""

    def __init__(self, path: str | None = None) -> None:
        self._file = None if path is None else open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        super().__init__(self._file)

    def close(self) -> None:
        """Close the file; stderr is left open. Harmless when repeated."""
        super().close()
        if self._file is not None:
            self._file.close()


def configure(settings: Settings, rank: int | None = None) -> DebugHandler | None:
    """Write commrt's log as `settings` say; the handler is returned, or None where COMMRT_DEBUG is not set.

    The first call in a process decides, later ones change nothing. `rank` marks the lines of records that carry none.
    Raises ConfigError if COMMRT_DEBUG_FILE can't be opened.
    """
    logger = logging.getLogger("commrt")
    present = [handler for handler in logger.handlers if isinstance(handler, DebugHandler)]
    if present or settings.debug is None:
        return present[0] if present else None
    handler = _handler(settings.debug_file)
    handler.setFormatter(LineFormatter(rank))
    handler.addFilter(SubsystemFilter(settings.debug_subsys))
    handler.setLevel(_THRESHOLDS[settings.debug])
    logger.addHandler(handler)
    # Handlers of the program itself still get the warnings that VERSION keeps out of ours.
    logger.setLevel(min(_THRESHOLDS[settings.debug], logging.WARNING))
    RankLogger("init", rank).log(VERSION, "commrt %s", __version__)
    return handler


def _handler(template: str | None) -> DebugHandler:
    try:
        return DebugHandler(expand(template) if template else None)
    except OSError as error:
        raise ConfigError(f"COMMRT_DEBUG_FILE={template!r} can't be opened: {error.strerror}") from error


def expand(template: str) -> str:
    """%h and %p of a file name replaced by the host's name and this process's id; %% is a percent sign."""
    words = {"%h": host_name(), "%p": str(os.getpid()), "%%": "%"}
    return re.sub("%[hp%]", lambda match: words[match[0]], template)


def host_name() -> str:
    """This host's name up to the first dot."""
    return platform.node().partition(".")[0] or "localhost"


def subsystem_of(logger_name: str) -> str:
    """`net` of `commrt.net` and of `commrt.net.pairs`; `commrt` of the root of them all."""
    parts = logger_name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]

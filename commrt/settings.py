"""The settings: one typed registry, read from explicit arguments and from the environment.

A field of `Settings` called `timeout_s` is the environment variable `COMMRT_TIMEOUT_S`.
An argument wins over the environment; None as an argument and an empty variable mean "not given".
`docs/environment.md` is `environment_markdown()`.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from commrt.errors import ConfigError

PREFIX = "COMMRT_"
MAX_SECONDS = 1e8
MAX_NBYTES = 1 << 40
DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "TRACE")

LAUNCHER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "COMMRT_LAUNCHER": "What started this rank; set by `commrt run`, which may itself run under another launcher.",
        "COMMRT_RANK": "Rank of this process, from 0.",
        "COMMRT_SIZE": "Number of ranks.",
        "COMMRT_LOCAL_RANK": "Rank of this process among those of its host, from 0.",
        "COMMRT_LOCAL_SIZE": "Number of ranks on this host.",
        "COMMRT_RENDEZVOUS": "Where the ranks meet: `host:port` of the store, or `file:///path`, where rank 0 says it.",
        "COMMRT_STORE_FD": "Inherited descriptor of the store's listening socket (rank 0).",
        "COMMRT_SECRET_FD": "Inherited descriptor to read the job's secret from.",
        "COMMRT_INSECURE": "1 after `commrt run --insecure`: the ranks may meet beyond one host without a secret.",
    }
)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_log = logging.getLogger("commrt.env")


def parse_seconds(value: object) -> float:
    """A finite, positive number of seconds, from a number or its text. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)
    seconds = float(value)
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
        raise ValueError(value)
    return seconds


def parse_nbytes(value: object) -> int:
    """A positive number of bytes, from an int or from text like `65536`, `64K`, `4M` or `4MiB`. Raises ValueError."""
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,15})([KMG]?)(?:i?B)?", value.strip(), re.IGNORECASE)
        if match is None:
            raise ValueError(value)
        value = int(match[1]) * _UNITS[match[2].upper()]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_NBYTES:
        raise ValueError(value)
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w./-]*", value.strip()):
        raise ValueError(value)
    return value.strip()


def _ib_device(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]*(:[0-9]{1,3})?", value.strip()):
        raise ValueError(value)
    return value.strip()


def _small_number(value: object) -> int:
    index = int(value) if isinstance(value, str) else value
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= 255:
        raise ValueError(value)
    return index


def _level(value: object) -> str:
    if not isinstance(value, str) or value.strip().upper() not in DEBUG_LEVELS:
        raise ValueError(value)
    return value.strip().upper()


def _subsystems(value: object) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    if not re.fullmatch(r"\^?\w+(\s*,\s*\w+)*", text):
        raise ValueError(value)
    return text


def _interfaces(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not re.fullmatch(r"\^?=?[^\s,^=/]+(,[^\s,^=/]+)*", text):
        raise ValueError(value)
    return text


def _path(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)) or "\0" in (path := os.fsdecode(value)) or not path:
        raise ValueError(value)
    return path


def _setting(parse: Callable[[object], Any], expected: str, default: Any, help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "expected": expected, "help": help})


def _names(value: object) -> str:
    names = value.split(",") if isinstance(value, str) else ()
    return ",".join(_name(name) for name in names) or _name(None)


_OWN = frozenset(
    {
        "backend", "debug", "debug_subsys", "debug_file", "secret_file", "device", "ib_device", "ib_gid_index",
        "net_interface",
    }
)  # fmt: skip
_SECONDS = "a positive number of seconds"
_NBYTES = "a positive number of bytes, like 65536, 64K or 4M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting with its value; `sources` says for each where it came from: argument, environment or default."""

    timeout_s: float = _setting(
        parse_seconds, _SECONDS, 300.0, "Deadline of an operation, unless its call says otherwise."
    )
    init_timeout_s: float = _setting(
        parse_seconds, _SECONDS, 120.0, "Deadline for all ranks to arrive and be connected."
    )
    close_timeout_s: float = _setting(
        parse_seconds, _SECONDS, 10.0, "How long close() gives work to end, and peers to begin what they were sent."
    )
    transport: str | None = _setting(
        _name, "a transport's name", None, "The only transport to use; init fails where it can't serve."
    )
    backend: str = _setting(_name, "a backend's name", "cpu", "The kind of device that this rank's arrays are on.")
    algorithm: str | None = _setting(
        _name, "an algorithm's name", None, "The only algorithm to use; a collective that can't run it fails."
    )
    providers: str | None = _setting(
        _names, "names of providers, separated by commas", None,
        "Other libraries to join; init fails where one can't be. Unset: those that the table names and all ranks have.",
    )  # fmt: skip
    table: str | None = _setting(
        _path, "a path", None, "Selection table (YAML) of rank 0, which holds for all ranks, instead of commrt's own."
    )
    scratch_bytes: int = _setting(
        parse_nbytes, _NBYTES, 4 << 20, "Scratch memory of a rank, fixed at init; larger messages are sliced over it."
    )
    packet_bytes: int = _setting(
        parse_nbytes, _NBYTES, 256 << 10, "Packet memory of a rank, fixed at init; bounds the messages sent as packets."
    )
    device: int | None = _setting(
        _small_number, "a number from 0 to 255", None,
        "GPU of this rank, of those it sees; unset: the one its thread has chosen, else dealt by local rank.",
    )  # fmt: skip
    ib_device: str | None = _setting(
        _ib_device, "a verbs device, or device:port", None,
        "InfiniBand or RoCE device of this rank, and its port; unset: the first with an active port.",
    )  # fmt: skip
    ib_gid_index: int | None = _setting(
        _small_number, "a number from 0 to 255", None,
        "Entry of the port's GID table, its source address; unset: RoCE v2 over IPv4, if there is such an entry.",
    )  # fmt: skip
    net_interface: str | None = _setting(
        _interfaces,
        "prefixes of interface names, like `eth,ib`; `=` before them for whole names, `^` first to exclude",
        None,
        "Network interface for links between hosts, the first that fits; unset: any, `lo` and `docker...` last.",
    )
    debug: str | None = _setting(
        _level,
        f"one of {', '.join(DEBUG_LEVELS)}",
        None,
        "How much to log to stderr, from least to most; unset adds no log handler.",
    )
    debug_subsys: str = _setting(
        _subsystems,
        "a comma-separated list of subsystems, or ^ and the list of those to leave out",
        "init,bootstrap,env",
        "Subsystems whose INFO and TRACE lines are logged; `all` is every one, `^net,shm` is all but these.",
    )
    debug_file: str | None = _setting(
        _path, "a path", None, "Log to this file instead of stderr; %h becomes the host's name, %p the process id."
    )
    secret_file: str | None = _setting(
        _path, "a path", None, "File with the job's secret, mode 0600; the launcher's own secret needs none."
    )
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **explicit: Any) -> Settings:
        """Explicit arguments first, then `environ`, then defaults.

        Raises ConfigError for a malformed value (naming it and what was expected) or an unknown argument.
        Warns through the logger `commrt.env` of COMMRT_* variables that mean nothing.
        """
        known = {setting.name for setting in registry()}
        for name in explicit:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}{_near(name, known)}")
        warn_of_unknown(environ)
        resolved = {setting.name: setting.resolve(environ, explicit.get(setting.name)) for setting in registry()}
        sources = MappingProxyType({name: source for name, (_, source) in resolved.items()})
        return cls(**{name: value for name, (value, _) in resolved.items()}, sources=sources)

    def shared(self) -> dict[str, Any]:
        """What rank 0 settles for all ranks: all but where and how this one logs, its secret, its devices."""
        return {setting.name: getattr(self, setting.name) for setting in registry() if setting.name not in _OWN}

    def adopt(self, shared: Mapping[str, Any]) -> Settings:
        """These settings with rank 0's `shared` ones. Raises ConfigError if those are malformed."""
        known = {setting.name: setting for setting in registry() if setting.name not in _OWN}
        values = {name: known[name].resolve({}, value)[0] for name, value in shared.items() if name in known}
        return replace(self, **values)

    def log(self) -> None:
        """Log each setting that is not at its default, with its source, at INFO through `commrt.env`."""
        for setting in registry():
            if (source := self.sources.get(setting.name, "default")) != "default":
                _log.info("%s=%s (%s)", setting.name, getattr(self, setting.name), source)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one setting. `expected` says in words which values are well-formed."""

    name: str
    variable: str
    type: str
    default: Any
    expected: str
    help: str
    parse: Callable[[object], Any]

    def resolve(self, environ: Mapping[str, str], explicit: object = None) -> tuple[Any, str]:
        """The value and its source. Raises ConfigError if the one that counts is malformed."""
        if explicit is not None:
            return self._parsed(explicit, self.name), "argument"
        if text := environ.get(self.variable):
            return self._parsed(text, self.variable), "environment"
        return self.default, "default"

    def _parsed(self, value: object, where: str) -> Any:
        try:
            return self.parse(value)
        except (ValueError, OverflowError):
            raise ConfigError(f"{where}={value!r}: expected {self.expected}") from None


def registry() -> tuple[Setting, ...]:
    """Every setting, in the order of the fields of `Settings`."""
    return tuple(
        Setting(f.name, PREFIX + f.name.upper(), str(f.type), f.default, **f.metadata)
        for f in fields(Settings)
        if f.metadata
    )


def warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Warn of each COMMRT_* variable that is neither a setting nor a launcher's."""
    known = {setting.variable for setting in registry()} | set(LAUNCHER_VARIABLES)
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            _log.warning("unknown environment variable %s is ignored%s", name, _near(name, known))


def environment_markdown() -> str:
    """The text of docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "This page is generated from `commrt/settings.py`. `commrt env` prints the values in force and their sources.",
        "An explicit argument wins over the variable; an empty variable counts as not set.",
        "A malformed value is an error; an unknown `COMMRT_*` variable is warned of.",
        "",
        "## Settings",
        "",
        "| variable | setting | default | value | meaning |",
        "|---|---|---|---|---|",
        *(_row(s.variable, f"`{s.name}`", _shown(s.default), s.expected, s.help) for s in registry()),
        "",
        "## Launcher variables",
        "",
        "Set by `commrt run` for each rank; set them by hand only where you start ranks yourself.",
        "",
        "| variable | meaning |",
        "|---|---|",
        *(_row(variable, help) for variable, help in LAUNCHER_VARIABLES.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(variable: str, *cells: str) -> str:
    return f"| {' | '.join([f'`{variable}`', *cells])} |"


def _shown(default: object) -> str:
    return "not set" if default is None else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _near(name: str, known: Iterable[str]) -> str:
    # Compared without the prefix that all variables share: it would make everything look alike.
    spelled = {other.removeprefix(PREFIX): other for other in known}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), spelled, n=1)
    return f"; did you mean {spelled[near[0]]}?" if near else ""

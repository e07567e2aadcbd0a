"""What is here and whether it works: each backend, transport and provider probed, then tried between two processes.

Everything runs in processes of its own, each with a deadline: a plugin that crashes or hangs spoils its own line only.
"""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from commrt.backend import Joins
from commrt.errors import UnknownName
from commrt.launcher import TIMED_OUT, launch
from commrt.plugins import Kind, Plugin, default_registry

KINDS: tuple[Kind, ...] = ("transports", "backends", "providers")
LIMIT_S = 30.0
REASON = "reason: "
FOUND = "found: "
UNUSABLE = 3
_MOST_TEXT = 300

State = Literal["works", "absent", "unusable", "untried", "fails"]


class Facts(msgspec.Struct, frozen=True):
    """What a plugin says of itself. `backend`: on which its arrays are to be. See `commrt.backend.Probe`."""

    devices: tuple[str, ...]
    reason: str
    level: str
    joins: Joins
    backend: str


@dataclass(frozen=True)
class Finding:
    """One plugin. `detail`: its devices, or why it is not there or doesn't work, in a line.

    state: "works", shown by an all_reduce; "absent", as it says itself; "unusable": it can't be loaded; "untried": it
    serves only with options; "fails": it says that it is there, or does not even say anything, and doesn't work.
    """

    kind: Kind
    name: str
    origin: str
    state: State
    detail: str
    level: str = ""
    seconds: float = 0.0


def examine(names: Collection[str] = (), limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """A finding for each plugin, or for those of that name, as soon as it is there.

    Neither a probe nor a trial takes longer than about `limit_s`. Raises UnknownName before the first.
    """
    plugins = [plugin for kind in KINDS for plugin in default_registry().plugins(kind)]
    known = {plugin.name for plugin in plugins}
    for name in names:
        if name not in known:
            raise UnknownName("transport, backend or provider", name, known)
    doctor = _Doctor(limit_s)
    return (doctor.examine(plugin) for plugin in plugins if not names or plugin.name in names)


class _Doctor:
    """Remembers a transport that works, so that what is wrong with another one spoils no later trial."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._sound: dict[str, str] = {}

    def examine(self, plugin: Plugin) -> Finding:
        began = time.monotonic()
        state, detail, level = self._judge(plugin)
        return Finding(plugin.kind, plugin.name, plugin.origin, state, detail, level, time.monotonic() - began)

    def _judge(self, plugin: Plugin) -> tuple[State, str, str]:
        if plugin.error is not None:
            return "unusable", plugin.error, ""
        probe = _Child("probe", plugin, 1, self._limit_s, {})
        if probe.reason:
            return ("unusable" if probe.status == UNUSABLE else "fails"), probe.reason, ""
        facts = probe.facts()
        if not facts.devices:
            return "absent", facts.reason or "it finds no devices and gives no reason", facts.level
        if facts.joins == "options":
            return "untried", "it serves only with options", facts.level
        trial = _Child("try", plugin, 1 if facts.joins == "threads" else 2, self._limit_s, self._forced(plugin, facts))
        devices = "; ".join(facts.devices)
        if trial.reason:
            return "fails", f"{trial.reason} (it had found: {devices})", facts.level
        if plugin.kind == "transports" and facts.joins == "processes":
            self._sound.setdefault(facts.backend, plugin.name)
        return "works", devices, facts.level

    def _forced(self, plugin: Plugin, facts: Facts) -> dict[str, str]:
        """The settings of a trial: nothing of the caller's decides what is tried."""
        transport = plugin.name if plugin.kind == "transports" else self._sound.get(facts.backend, "")
        if facts.joins == "groups":  # beside transports that join pairs
            transport = ""
        carrier = plugin.name if plugin.kind == "providers" else ""
        return {"COMMRT_TRANSPORT": transport, "COMMRT_BACKEND": facts.backend, "COMMRT_ALGORITHM": carrier}


class _Child:
    """A finished run of `commrt._doctor_child`. `reason`: why it failed, in a line."""

    def __init__(self, what: str, plugin: Plugin, ranks: int, limit_s: float, env: Mapping[str, str]) -> None:
        out, err = io.BytesIO(), io.BytesIO()
        argv = [sys.executable, "-m", "commrt._doctor_child", what, plugin.kind, plugin.name]
        limits = {"COMMRT_TIMEOUT_S": f"{limit_s:g}", "COMMRT_INIT_TIMEOUT_S": f"{limit_s:g}"}
        self.status = launch(
            argv, ranks, timeout_s=limit_s, prefix=False, env={**env, **limits}, stdout=out, stderr=err, grace_s=1.0
        )
        self._found = _lines(out, FOUND)
        self.reason = self._why("its probe" if what == "probe" else "its trial", limit_s, _lines(err, REASON))

    def facts(self) -> Facts:
        """What a probe found."""
        return msgspec.json.decode(self._found[0], type=Facts)

    def _why(self, what: str, limit_s: float, told: list[str]) -> str:
        if self.status == 0:
            return "" if self._found else f"{what} ended without an answer"
        if self.status == TIMED_OUT:
            return f"{what} did not end within {limit_s:g} s"
        if told:
            return told[0][:_MOST_TEXT]
        with suppress(ValueError):
            return f"{what} was killed by {signal.Signals(self.status - 128).name}"
        return f"{what} ended with status {self.status}"


def _lines(stream: io.BytesIO, prefix: str) -> list[str]:
    lines = stream.getvalue().decode(errors="replace").splitlines()
    return [" ".join(line.removeprefix(prefix).split()) for line in lines if line.startswith(prefix)]

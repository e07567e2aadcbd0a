"""Finding transports, backends, algorithms and providers.

A plugin is a module that exports `PLUGIN_API = 1` and `plugin`, the object that serves (an instance or a factory: the
registry does not care which). In-tree ones are found by listing the names in `commrt.transports`, `commrt.backends`,
`commrt.algorithms` and `commrt.providers`; outside ones by the entry-point groups of the same names, each referring to
a `module`, or to a `module:attribute` that stands in for `plugin`. Names that start with "_" are helpers, not plugins.
An algorithm is named `collective/algorithm`, in-tree as the file `algorithms/<collective>/<algorithm>.py`.

Finding imports nothing: a plugin's module is imported when it is first asked for. A plugin that can't be used is kept
with its reason and never stops the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from commrt.errors import Unavailable, UnknownName

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PLUGIN_API = 1
IN_TREE = "in-tree"

Kind = Literal["transports", "backends", "algorithms", "providers"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# algorithms/device holds the C++ headers that backends compile.
_NOT_PLUGINS = frozenset({"device"})

_log = logging.getLogger("commrt.plugin")


@dataclass(slots=True, eq=False)
class Plugin:
    """One plugin, loaded or not. Safe to share between threads.

    `reference` is `module` or `module:attribute`; `origin` is "in-tree" or the name of the distribution it came with.
    `api_version` is None until the module was imported; `error` is None unless the plugin can't be used.
    """

    kind: Kind
    name: str
    origin: str
    reference: str
    api_version: int | None = None
    error: str | None = None
    _loaded: Any = field(default=None, repr=False)

    def load(self) -> Any:
        """The plugin's object, imported on first use. Raises Unavailable, with the same reason each time."""
        if self._loaded is None and self.error is None:
            try:
                self._loaded = self._import()
            except (Exception, SystemExit) as error:
                self.error = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
                _log.info("%s %r from %s failed to load", self.kind[:-1], self.name, self.origin, exc_info=True)
        if self.error is not None:
            raise Unavailable(f"{self.kind[:-1]} {self.name!r} ({self.origin}) can't be used: {self.error}")
        return self._loaded

    def _import(self) -> Any:
        module_name, _, attribute = self.reference.partition(":")
        module = importlib.import_module(module_name)
        self.api_version = getattr(module, "PLUGIN_API", None)
        if self.api_version != PLUGIN_API:
            stated = "states no PLUGIN_API" if self.api_version is None else f"has plugin API {self.api_version!r}"
            raise Unavailable(f"{module_name} {stated}; this commrt needs {PLUGIN_API}")
        loaded = functools.reduce(getattr, (attribute or "plugin").split("."), module)
        if loaded is None:
            raise Unavailable(f"{self.reference} is None")
        if self.kind != "algorithms" and getattr(loaded, "name", self.name) != self.name:
            raise Unavailable(f"it calls itself {loaded.name!r}: the entry point must have the same name")
        return loaded


class Registry:
    """The plugins of a process by kind and name. The set is fixed when it is made; safe to share between threads.

    Of two plugins with the same kind and name the first one serves; the other is kept, with that as its error. So an
    outside plugin can't take the place of an in-tree one.
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self._all = tuple(plugins)
        self._serving: dict[tuple[str, str], Plugin] = {}
        for plugin in self._all:
            first = self._serving.setdefault((plugin.kind, plugin.name), plugin)
            if first is not plugin:
                plugin.error = f"the name is taken by the {first.kind[:-1]} of {first.origin}"

    def plugins(self, kind: Kind | None = None) -> tuple[Plugin, ...]:
        """Every plugin found, in order of discovery, unusable ones included."""
        return tuple(plugin for plugin in self._all if kind in (None, plugin.kind))

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The names `require` knows, sorted; loading may still fail."""
        return tuple(sorted(name for of_kind, name in self._serving if of_kind == kind))

    def require(self, kind: Kind, name: str) -> Any:
        """The object of that plugin. Raises UnknownName (with a near match), or Unavailable with the reason."""
        plugin = self._serving.get((kind, name))
        if plugin is None:
            raise UnknownName(kind[:-1], name, self.names(kind))
        return plugin.load()

    def usable(self, kind: Kind) -> dict[str, Any]:
        """Name to object of all plugins of a kind that load; those that don't are logged and left out."""
        found: dict[str, Any] = {}
        for name in self.names(kind):
            try:
                found[name] = self.require(kind, name)
            except Unavailable as error:
                _log.warning("%s", error)
        return found


@functools.cache
def default_registry() -> Registry:
    """The registry of everything installed, found once a process."""
    return Registry(discover())


def discover(packages: Mapping[Kind, str] | None = None) -> Iterator[Plugin]:
    """All in-tree plugins, then all outside ones. `packages` maps kinds to the packages listed as in-tree."""
    for kind, package in (packages or {kind: f"commrt.{kind}" for kind in KINDS}).items():
        yield from _in_tree(kind, package)
    yield from _outside()


def _in_tree(kind: Kind, package: str) -> Iterator[Plugin]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return
    path = list(spec.submodule_search_locations)
    for name, is_package in _listed(path):
        if kind != "algorithms":
            yield Plugin(kind, name, IN_TREE, f"{package}.{name}")
        elif is_package:
            for algorithm, _ in _listed([f"{folder}/{name}" for folder in path]):
                yield Plugin(kind, f"{name}/{algorithm}", IN_TREE, f"{package}.{name}.{algorithm}")


def _listed(path: list[str]) -> Iterator[tuple[str, bool]]:
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_") and module.name not in _NOT_PLUGINS:
            yield module.name, module.ispkg


def _outside() -> Iterator[Plugin]:
    from importlib import metadata

    try:
        points = metadata.entry_points()
    except Exception:  # one damaged distribution makes the whole query raise
        _log.warning("entry points can't be read: no outside plugins", exc_info=True)
        return
    for kind in KINDS:
        yield from (_from_entry_point(kind, point) for point in points.select(group=f"commrt.{kind}"))


def _from_entry_point(kind: Kind, point: EntryPoint) -> Plugin:
    origin = point.dist.name if point.dist is not None else "unknown distribution"
    plugin = Plugin(kind, point.name, origin, point.value.partition("[")[0].strip())
    if kind == "algorithms" and point.name.count("/") != 1:
        plugin.error = "an algorithm's entry point is named collective/algorithm"
    return plugin

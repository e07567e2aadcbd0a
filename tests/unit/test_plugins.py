"""Discovery: what is found, what is imported when, and what is said about plugins that can't be used."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from commrt.errors import Unavailable, UnknownName
from commrt.plugins import IN_TREE, PLUGIN_API, Kind, Plugin, Registry, default_registry, discover

# By its full name: commrt.cli may have a function called `plugins`.
command = importlib.import_module("commrt.cli.plugins")

GOOD = "PLUGIN_API = 1\nplugin = 'served by ' + __name__\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for the commrt package: `toyrt` with transports and algorithms."""
    write(
        tmp_path,
        {
            "toyrt/__init__.py": "",
            "toyrt/transports/__init__.py": "",
            "toyrt/transports/wire.py": GOOD,
            "toyrt/transports/folder/__init__.py": GOOD,
            "toyrt/transports/_helper.py": "raise RuntimeError('imported')",
            "toyrt/transports/broken.py": "raise ImportError('libwire.so.1 is missing')",
            "toyrt/transports/quits.py": "raise SystemExit(3)",
            "toyrt/transports/old.py": "PLUGIN_API = 0\nplugin = 1\n",
            "toyrt/transports/silent.py": "plugin = 1\n",
            "toyrt/transports/empty.py": "PLUGIN_API = 1\n",
            "toyrt/transports/nothing.py": "PLUGIN_API = 1\nplugin = None\n",
            "toyrt/algorithms/__init__.py": "",
            "toyrt/algorithms/helpers.py": "",
            "toyrt/algorithms/device/__init__.py": "",
            "toyrt/algorithms/device/executor.py": "",
            "toyrt/algorithms/all_reduce/__init__.py": "",
            "toyrt/algorithms/all_reduce/ring.py": GOOD,
            "toyrt/algorithms/all_reduce/_math.py": "",
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in [name for name in sys.modules if name.split(".")[0] in ("toyrt", "star_pkg", "impostor")]:
        del sys.modules[module]


@pytest.fixture
def registry(tree: Path) -> Registry:
    return Registry(discover({"transports": "toyrt.transports", "algorithms": "toyrt.algorithms"}))


def install(root: Path, name: str, entry_points: str) -> None:
    """What pip leaves behind for a distribution, as far as discovery can see it."""
    write(
        root,
        {
            f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            f"{name}-1.0.dist-info/entry_points.txt": entry_points,
        },
    )


def test_lists_names_without_importing(registry: Registry) -> None:
    expected = ("broken", "empty", "folder", "nothing", "old", "quits", "silent", "wire")
    assert registry.names("transports") == expected
    assert registry.names("algorithms") == ("all_reduce/ring",)
    assert registry.names("backends") == ()
    assert not [name for name in sys.modules if name.startswith("toyrt.transports.")]


def test_require_imports_once_and_gives_the_object(registry: Registry) -> None:
    assert registry.require("transports", "wire") == "served by toyrt.transports.wire"
    assert registry.require("transports", "folder") is registry.require("transports", "folder")
    assert registry.require("algorithms", "all_reduce/ring") == "served by toyrt.algorithms.all_reduce.ring"
    wire = next(plugin for plugin in registry.plugins("transports") if plugin.name == "wire")
    assert (wire.origin, wire.api_version, wire.error) == (IN_TREE, PLUGIN_API, None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "ImportError: libwire.so.1 is missing"),
        ("quits", "SystemExit: 3"),
        ("old", "has plugin API 0; this commrt needs 1"),
        ("silent", "states no PLUGIN_API; this commrt needs 1"),
        ("empty", "AttributeError: module 'toyrt.transports.empty' has no attribute 'plugin'"),
        ("nothing", "is None"),
    ],
)
def test_unusable_plugin_says_why_each_time(registry: Registry, name: str, reason: str) -> None:
    for _ in range(2):
        with pytest.raises(Unavailable, match=rf"transport '{name}' \(in-tree\) can't be used: .*{reason}"):
            registry.require("transports", name)
    record = next(plugin for plugin in registry.plugins() if plugin.name == name)
    assert reason in str(record.error)


def test_unusable_plugins_leave_the_others_alone(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="commrt.plugin"):
        assert set(registry.usable("transports")) == {"wire", "folder"}
    assert "libwire.so.1 is missing" in caplog.text


def test_unknown_name_offers_a_near_match(registry: Registry) -> None:
    with pytest.raises(UnknownName, match="unknown transport 'wrie'; did you mean 'wire'"):
        registry.require("transports", "wrie")
    with pytest.raises(UnknownName, match="unknown algorithm 'all_reduce/rnig'; did you mean 'all_reduce/ring'"):
        registry.require("algorithms", "all_reduce/rnig")
    with pytest.raises(UnknownName, match="known: none"):
        registry.require("providers", "native")


def test_missing_subpackage_means_no_plugins(tree: Path) -> None:
    assert Registry(discover({"providers": "toyrt.providers"})).names("providers") == ()


def test_entry_points_to_module_and_attribute(tree: Path) -> None:
    write(tree, {"star_pkg.py": GOOD + "class Holder:\n    inner = 'the attribute'\n"})
    install(
        tree,
        "rt-star",
        "[commrt.transports]\nstar = star_pkg\nstar2 = star_pkg:Holder.inner\n"
        "[commrt.algorithms]\nall_reduce/star = star_pkg\nstar = star_pkg\n[console_scripts]\nstar = star_pkg:main\n",
    )
    registry = Registry(discover({"transports": "toyrt.transports"}))
    assert "star_pkg" not in sys.modules
    assert registry.require("transports", "star") == "served by star_pkg"
    assert registry.require("transports", "star2") == "the attribute"
    assert registry.require("algorithms", "all_reduce/star") == "served by star_pkg"
    with pytest.raises(Unavailable, match="named collective/algorithm"):
        registry.require("algorithms", "star")
    assert {plugin.origin for plugin in registry.plugins() if "star" in plugin.name} == {"rt-star"}


def test_outside_plugin_cannot_shadow_in_tree(tree: Path) -> None:
    write(tree, {"impostor.py": "PLUGIN_API = 1\nplugin = 'impostor'\n"})
    install(tree, "rt-impostor", "[commrt.transports]\nwire = impostor\n")
    registry = Registry(discover({"transports": "toyrt.transports"}))
    assert registry.require("transports", "wire") == "served by toyrt.transports.wire"
    (reported,) = [plugin for plugin in registry.plugins() if plugin.origin == "rt-impostor"]
    assert reported.error == "the name is taken by the transport of in-tree"
    with pytest.raises(Unavailable, match="taken"):
        reported.load()
    assert "impostor" not in sys.modules


def test_first_of_two_outside_plugins_serves() -> None:
    kind: Kind = "providers"
    first, second = (Plugin(kind, "same", origin, "json:loads") for origin in ("one", "two"))
    registry = Registry([first, second])
    assert first.error is None
    assert second.error == "the name is taken by the provider of one"
    assert registry.names(kind) == ("same",)


def test_damaged_distribution_is_not_fatal(
    tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(**_: object) -> metadata.EntryPoints:
        raise ValueError("entry_points.txt, line 1")

    monkeypatch.setattr(metadata, "entry_points", damaged)
    with caplog.at_level(logging.WARNING, logger="commrt.plugin"):
        assert "wire" in Registry(discover({"transports": "toyrt.transports"})).names("transports")
    assert "no outside plugins" in caplog.text


@pytest.mark.parametrize("plugin", default_registry().plugins(), ids=lambda plugin: f"{plugin.kind}/{plugin.name}")
def test_every_in_tree_plugin_loads(plugin: Plugin) -> None:
    if plugin.origin != IN_TREE:
        pytest.skip(f"it belongs to {plugin.origin}")
    assert plugin.load() is not None
    assert plugin.api_version == PLUGIN_API


def test_discovery_imports_no_plugin() -> None:
    program = (
        "import sys, commrt.plugins as p; p.default_registry().plugins();"
        "print([m for m in sys.modules if m.startswith(tuple(f'commrt.{kind}.' for kind in p.KINDS))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_command_lists_reasons(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "default_registry", lambda: registry)
    command.plugins()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "transports wire in-tree 1 ok" in lines
    assert "transports broken in-tree - unusable: ImportError: libwire.so.1 is missing" in lines
    command.plugins(as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["wire"] | {"reason": None, "state": "ok", "api": 1} == rows["wire"]
    assert (rows["old"]["state"], rows["old"]["api"]) == ("unusable", 0)

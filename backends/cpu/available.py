"""How much memory can still be had. Anonymous files know no limit: without asking first, the kernel kills somebody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 62
_CGROUPS = Path("/sys/fs/cgroup")


def available_nbytes() -> int:
    """Bytes that the system and this process's control groups still have; files' caches count as free."""
    return min([_system(), *(_group(*files) for files in _groups())])


def _system() -> int:
    found = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")) if ":" in line)
    kilobytes = [found[name].split()[0] for name in ("MemAvailable", "SwapFree") if name in found]
    return 1024 * sum(map(int, kilobytes)) if kilobytes else _UNLIMITED


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Folder, and names of limit and usage, of each group above this process. A container sees its own as the root."""
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = _CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = root / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if folder == root or root in folder.parents:
                yield (folder, *names)


def _group(folder: Path, limit: str, usage: str) -> int:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
    except (OSError, ValueError):
        return _UNLIMITED
    if not most.isdigit():
        return _UNLIMITED
    caches = [line.split()[1] for line in _lines(folder / "memory.stat") if line.startswith("inactive_file ")]
    return int(most) - used + sum(map(int, caches))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

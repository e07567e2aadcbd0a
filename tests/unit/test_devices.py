"""What backends with a driver share."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from commrt.backend import MemoryKind
from commrt.devices import (
    DeviceMemory,
    HostFunctions,
    KernelCache,
    Lifeline,
    own_device,
    passes_descriptors,
    pointers,
    take_descriptor,
    wait_until,
)
from commrt.errors import ConfigError, InvalidArgument, TransportError
from commrt.native import lib


class Compiler:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> bytes:
        self.runs += 1
        return b"code"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return KernelCache("test")


def test_cache_keeps_what_was_compiled(cache: KernelCache, tmp_path: Path) -> None:
    compiler = Compiler()
    assert {cache.get(["a", "b"], compiler) for _ in range(3)} == {b"code"}
    assert compiler.runs == 1
    assert KernelCache("test").get(["a", "b"], compiler) == b"code" and compiler.runs == 1
    cache.get(["ab", ""], compiler)
    assert compiler.runs == 2
    assert len(list((tmp_path / "commrt" / "kernels" / "test").iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"short", bytes(100)])
def test_cache_ignores_what_is_corrupt(cache: KernelCache, tmp_path: Path, content: bytes) -> None:
    compiler = Compiler()
    cache.get(["a"], compiler)
    (file,) = (tmp_path / "commrt" / "kernels" / "test").iterdir()
    file.write_bytes(content)
    assert cache.get(["a"], compiler) == b"code"
    assert compiler.runs == 2
    cache.get(["a"], compiler)
    assert compiler.runs == 2


def test_cache_does_without_a_folder(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "commrt").write_text("in the way")
    assert cache.get(["a"], lambda: b"code") == b"code"


def test_memory_is_freed_once_by_its_last_holder() -> None:
    freed: list[int] = []
    memory = DeviceMemory(4096, 10, MemoryKind("m", "kernel"), lambda: freed.append(1))
    assert memory.retain() is memory
    memory.close()
    assert not freed
    memory.close()
    assert freed == [1]


def test_host_functions_are_called_by_number() -> None:
    functions, seen = HostFunctions(), []
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(functions.entry)
    numbers = [functions.add(lambda value=value: seen.append(value)) for value in "abc"]
    for number in reversed(numbers):
        entry(number)
    assert seen == ["c", "b", "a"]


def test_pointers() -> None:
    arguments = (ctypes.c_uint64(7), ctypes.c_double(2.5))
    array = pointers(arguments)
    assert ctypes.c_uint64.from_address(array[0]).value == 7
    assert ctypes.c_double.from_address(array[1]).value == 2.5
    with pytest.raises(InvalidArgument, match="ctypes"):
        pointers([7])


def test_wait_until() -> None:
    done = threading.Event()
    assert not wait_until(done.is_set, 0.01)
    threading.Timer(0.02, done.set).start()
    assert wait_until(done.is_set, None)


def test_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device(2) == 0
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert own_device(2) == 1
    assert own_device(2, 0) == 0
    monkeypatch.setenv("COMMRT_DEVICE", "1")
    assert own_device(2, 0) == 1
    monkeypatch.setenv("COMMRT_DEVICE", "2")
    with pytest.raises(ConfigError, match="sees 2 devices"):
        own_device(2)


def test_lifeline_ends_with_its_process() -> None:
    program = (
        "import sys; from commrt.devices import Lifeline as L; print(L.create().exported.hex(), flush=True); input()"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin and owner.stdout
    line = Lifeline.open(bytes.fromhex(owner.stdout.readline()))
    assert lib.cr_memory_owner_lives(line.fd)
    owner.communicate("\n", timeout=20)
    assert not lib.cr_memory_owner_lives(line.fd)
    line.close()
    for exported in (b"", line.exported, bytes(16), os.urandom(17)):
        with pytest.raises(TransportError):
            Lifeline.open(exported)


def test_descriptors_pass_between_processes(tmp_path: Path) -> None:
    """The same open file, which goes on where the other process is in it; nothing else is taken for one."""
    if not passes_descriptors():
        pytest.skip("this kernel keeps processes from each other's descriptors")
    path = tmp_path / "file"
    path.write_bytes(b"content")
    ask = (
        "import sys; from commrt.devices import export_descriptor; file = open(sys.argv[1]); file.seek(3);"
        "print(export_descriptor(file.fileno()).hex(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", ask, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        exported = bytes.fromhex(owner.stdout.readline())
        fd = take_descriptor(exported)
        assert os.read(fd, 100) == b"tent" and not os.get_inheritable(fd)
        os.close(fd)
        with pytest.raises(TransportError, match="can't be taken"):
            take_descriptor(exported[:4] + (9999).to_bytes(4, "little"))
        owner.stdin.close()
    for nothing in (exported, bytes(len(exported)), exported[:-1], b"\xff" * len(exported)):
        with pytest.raises(TransportError):
            take_descriptor(nothing)

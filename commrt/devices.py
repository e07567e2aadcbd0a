"""What backends have alike whose devices are reached through a vendor's driver. Knows no vendor.

Only such backends and their transports import this.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commrt.backend import MemoryKind
from commrt.errors import ConfigError, InvalidArgument, TransportError
from commrt.native import ffi, lib

HEADERS = Path(__file__).parent / "algorithms" / "device"

_log = logging.getLogger("commrt.device")
_LIFELINE, _LIFELINE_NBYTES = struct.Struct("<IIQ"), 4096  # process, descriptor, inode
_DESCRIPTOR = struct.Struct("<ii")  # process, descriptor
_PIDFD_GETFD = 438  # the same on all architectures
_TRACE_SCOPE, _NO_TRACING, _CAP_SYS_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope"), 3, 19
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


@dataclass(eq=False)
class DeviceMemory:
    """Implements `commrt.backend.Memory`. `free` gives it back, once, when the last holder closes it."""

    address: int
    nbytes: int
    kind: MemoryKind
    free: Callable[[], object] = field(repr=False)
    _holders: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def retain(self) -> DeviceMemory:
        """One more holder."""
        with self._lock:
            self._holders += 1
        return self

    def close(self) -> None:
        """One holder less."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self.free()


class HostFunctions:
    """Python functions that a driver calls later, from a thread of its own: `entry` with the number that `add` gave."""

    def __init__(self) -> None:
        self._functions: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count(1)
        self._keep = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._call)
        self.entry: int = ctypes.cast(self._keep, ctypes.c_void_p).value or 0

    def add(self, function: Callable[[], object]) -> int:
        """A number for it, good for one call. It must not raise."""
        number = next(self._numbers)
        self._functions[number] = function
        return number

    def discard(self, number: int) -> None:
        """The driver has refused it."""
        self._functions.pop(number, None)

    def _call(self, number: int) -> None:
        self._functions.pop(number)()


class KernelCache:
    """Machine code on disk, under the user's cache folder. What can't be read or written there costs only time.

    Callable from any thread and from several processes at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def get(self, made_of: Sequence[str], compile: Callable[[], bytes]) -> bytes:
        """The code for `made_of` (source, options, target, compiler: all that it depends on beside the headers)."""
        path = self._folder() / digest(made_of)
        code = _read(path)
        if code is None:
            code = compile()
            _write(path, code)
        return code

    def _folder(self) -> Path:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(root) / "commrt" / "kernels" / self._name


def digest(made_of: Sequence[str]) -> str:
    """Names code by what it is made of, headers included."""
    whole = hashlib.sha256(_headers())
    for part in made_of:
        whole.update(len(part).to_bytes(8, "little") + part.encode())
    return whole.hexdigest()


@functools.cache
def _headers() -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for path in sorted(HEADERS.glob("*.h")))


def _read(path: Path) -> bytes | None:
    """The code behind its own hash, or None if it is not there or not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    stored, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == stored else None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError as error:
        _log.info("kernels are not cached in %s: %s", path.parent, error)


def pointers(arguments: Sequence[Any]) -> Any:
    """An array of pointers to ctypes values, as drivers take a kernel's arguments, for as long as those live.

    Raises InvalidArgument for anything else.
    """
    try:
        addresses = [ctypes.addressof(argument) for argument in arguments]
    except TypeError as error:
        raise InvalidArgument(f"a kernel's arguments are ctypes values: {error}") from None
    return (ctypes.c_void_p * max(1, len(addresses)))(*addresses)


def wait_until(done: Callable[[], bool], timeout_s: float | None) -> bool:
    """Ask again and again, ever more slowly; False when the timeout passes first."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause = _FIRST_PAUSE_S
    while not done():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


class Lifeline:
    """A descriptor whose lock a process holds for as long as it lives, for peers that map no file of its.

    `exported` opens it in another process of this user.
    """

    def __init__(self, fd: int, address: Any, exported: bytes) -> None:
        self.fd, self.exported = fd, exported
        self._address = address

    @classmethod
    def create(cls) -> Lifeline:
        """This process's. Raises TransportError."""
        fd, address = ffi.new("int*"), ffi.new("void**")
        _succeed(lib.cr_memory_create(_LIFELINE_NBYTES, fd, address))
        lib.cr_memory_lock(fd[0])
        return cls(fd[0], address[0], _LIFELINE.pack(os.getpid(), fd[0], os.fstat(fd[0]).st_ino))

    @classmethod
    def open(cls, exported: bytes) -> Lifeline:
        """A peer's. Raises TransportError if it is not there, or not of this user."""
        if len(exported) != _LIFELINE.size:
            raise TransportError(f"a peer's lifeline has {len(exported)} bytes, not {_LIFELINE.size}")
        pid, remote, inode = _LIFELINE.unpack(exported)
        fd, address = ffi.new("int*"), ffi.new("void**")
        path = f"/proc/{pid}/fd/{remote}".encode()
        _succeed(lib.cr_memory_open(path, _LIFELINE_NBYTES, inode, fd, address))
        return cls(fd[0], address[0], exported)

    def close(self) -> None:
        """Once."""
        lib.cr_memory_close(self._address, _LIFELINE_NBYTES, self.fd)


def _succeed(error: int) -> None:
    if error:
        raise TransportError(f"a peer's life can't be watched: {os.strerror(-error)}")


def export_descriptor(fd: int) -> bytes:
    """For `take_descriptor`, in another process of this user and host, for as long as it stays open here."""
    return _DESCRIPTOR.pack(os.getpid(), fd)


def take_descriptor(exported: bytes) -> int:
    """The same open file, as a descriptor of this process, which the caller closes. Raises TransportError."""
    if len(exported) != _DESCRIPTOR.size:
        raise TransportError(f"a peer's descriptor has {len(exported)} bytes, not {_DESCRIPTOR.size}")
    pid, remote = _DESCRIPTOR.unpack(exported)
    try:
        process = os.pidfd_open(pid)
        try:
            return _take(process, remote)
        finally:
            os.close(process)
    except OSError as error:
        raise TransportError(f"descriptor {remote} of process {pid} can't be taken: {error.strerror}") from error


def passes_descriptors() -> bool:
    """Whether this kernel lets processes of one user take each other's descriptors.

    Not where it is too old, filtered as in some containers, or keeps processes from tracing their siblings.
    """
    try:
        with open("/proc/self/status") as status:
            os.close(take_descriptor(export_descriptor(status.fileno())))
            granted = re.search(r"^CapEff:\s*(\w+)$", status.read(), re.MULTILINE)
        scope = int(_TRACE_SCOPE.read_text()) if _TRACE_SCOPE.exists() else 0
    except (TransportError, OSError):
        return False
    may_trace = granted is not None and bool(int(granted[1], 16) >> _CAP_SYS_PTRACE & 1)
    return scope == 0 or (scope < _NO_TRACING and may_trace)


def _take(process: int, remote: int) -> int:
    """The C library of many systems has no pidfd_getfd. Its descriptors close on exec."""
    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, remote, 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def own_device(count: int, chosen: int | None = None) -> int:
    """Which of the `count` devices that this process sees is its rank's.

    COMMRT_DEVICE says, else `chosen`: the one that the calling thread has made its own. Without either they are dealt
    to the ranks of a host in turn. Raises ConfigError where the variable names none, or the launcher's are malformed.
    """
    from commrt import bootstrap
    from commrt.settings import registry

    setting = next(one for one in registry() if one.name == "device")
    named: int | None = setting.resolve(os.environ)[0]
    if named is not None and named >= count:
        raise ConfigError(f"{setting.variable}={named}: this process sees {count} devices, from 0")
    if named is not None:
        return named
    return bootstrap.detect().local_rank % count if chosen is None else chosen

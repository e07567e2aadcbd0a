"""Memory in anonymous files, which other processes find by process id and descriptor."""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass, field

from commrt.backend import MemoryKind
from commrt.backends.cpu.available import available_nbytes
from commrt.native import ffi, lib

HOST = MemoryKind("host", "kernel")
_EXPORT = struct.Struct("<IIQQ")  # process, descriptor, inode, bytes
_PAGE = 4096
_PIECE = 16 << 20


@dataclass(eq=False)
class SharedMemory:
    """A mapping and the file behind it. Not inherited by forked children; gone when its last holder closes it."""

    address: int
    nbytes: int
    fd: int
    owner_pid: int
    kind: MemoryKind = HOST
    _holders: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def create(cls, nbytes: int, reserve: bool) -> SharedMemory:
        """A new one of at least `nbytes`. Raises MemoryError saying how much was asked for."""
        size = max(_PAGE, (nbytes + _PAGE - 1) // _PAGE * _PAGE)
        if size > available_nbytes():
            raise MemoryError(f"can't allocate {nbytes} bytes of shareable memory: only {available_nbytes()} are free")
        fd, address = ffi.new("int*"), ffi.new("void**")
        error = lib.cr_memory_create(size, fd, address)
        if error:
            raise MemoryError(f"can't allocate {nbytes} bytes of shareable memory: {os.strerror(-error)}")
        lib.cr_memory_lock(fd[0])
        memory = cls(int(ffi.cast("uintptr_t", address[0])), size, fd[0], os.getpid())
        if reserve:
            memory._reserve()
        return memory

    def _reserve(self) -> None:
        """Take all pages, piece by piece: other ranks may be taking theirs."""
        try:
            for start in range(0, self.nbytes, _PIECE):
                if available_nbytes() < 2 * _PIECE:
                    raise MemoryError(f"no memory for the last {self.nbytes - start} of {self.nbytes} bytes")
                os.posix_fallocate(self.fd, start, min(_PIECE, self.nbytes - start))
        except (OSError, MemoryError) as error:
            self.close()
            raise MemoryError(str(error)) from error

    @classmethod
    def open(cls, exported: bytes) -> SharedMemory:
        """A peer's. Raises OSError or ValueError if it is not there, not this user's, or not what was exported."""
        if len(exported) != _EXPORT.size:
            raise ValueError(f"an export has {_EXPORT.size} bytes, not {len(exported)}")
        pid, remote_fd, inode, nbytes = _EXPORT.unpack(exported)
        fd, address = ffi.new("int*"), ffi.new("void**")
        error = lib.cr_memory_open(f"/proc/{pid}/fd/{remote_fd}".encode(), nbytes, inode, fd, address)
        if error:
            raise OSError(-error, os.strerror(-error))
        return cls(int(ffi.cast("uintptr_t", address[0])), nbytes, fd[0], pid)

    def exported(self) -> bytes:
        """What `open` takes, in any process that may look into this one."""
        return _EXPORT.pack(self.owner_pid, self.fd, os.fstat(self.fd).st_ino, self.nbytes)

    def retain(self) -> SharedMemory:
        """One more holder."""
        with self._lock:
            self._holders += 1
        return self

    def close(self) -> None:
        """One holder less; the last one unmaps."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                lib.cr_memory_close(ffi.cast("void*", self.address), self.nbytes, self.fd)

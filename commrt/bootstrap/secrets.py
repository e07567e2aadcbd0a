"""Where the job's secret comes from. Secrets are never put in arguments, variables, logs or messages."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from commrt.bootstrap.auth import MIN_SECRET_NBYTES
from commrt.bootstrap.net import Address
from commrt.errors import ConfigError

MAX_SECRET_NBYTES = 4096


def check_secret(secret: bytes, source: str) -> bytes:
    """The secret as bytes, if it is long enough to be one; `ConfigError` naming `source` otherwise."""
    if not MIN_SECRET_NBYTES <= len(secret) <= MAX_SECRET_NBYTES:
        raise ConfigError(
            f"{source} holds {len(secret)} bytes; a secret has {MIN_SECRET_NBYTES} to {MAX_SECRET_NBYTES}"
        )
    return bytes(secret)


def require_secret(secret: bytes, place: object, addresses: Iterable[Address], remedy: str) -> None:
    """Ranks may meet without a secret on this host only. `ConfigError` saying what to do, otherwise."""
    if not secret and not all(address.is_loopback for address in addresses):
        raise ConfigError(f"{place} is not a loopback address and there is no secret: {remedy}")


class NotPrivate(Exception):
    """The file is not a regular one that only this user can read or write; the message says what it is."""


def read_private_file(path: str, most: int, flags: int = 0) -> bytes:
    """At most `most` bytes of a file that is this user's alone. Raises OSError if it can't be read, `NotPrivate`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise NotPrivate(
                f"must be a regular file of mode 0600 owned by user {os.geteuid()}; "
                f"it has mode {stat.filemode(info.st_mode)} and owner {info.st_uid}"
            )
        return os.read(fd, most)
    finally:
        os.close(fd)


def read_secret_file(path: str) -> bytes:
    """The file's bytes without trailing line ends. `ConfigError` if it is not this user's alone, or can't be read."""
    source = f"COMMRT_SECRET_FILE={path}"
    try:
        data = read_private_file(path, MAX_SECRET_NBYTES + 3)
    except NotPrivate as error:
        raise ConfigError(f"{source} {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} can't be read: {error}") from None
    return check_secret(data.rstrip(b"\r\n"), source)


def read_secret_fd(fd: int) -> bytes:
    """The secret that the launcher put in an inherited memory file. The descriptor is the caller's to close.

    Read at offset 0, since all ranks share one file position.
    """
    source = f"COMMRT_SECRET_FD={fd}"
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{source} is not the launcher's descriptor")
        return check_secret(os.pread(fd, MAX_SECRET_NBYTES + 1, 0), source)
    except OSError as error:
        raise ConfigError(f"{source} can't be read: {error.strerror}") from None

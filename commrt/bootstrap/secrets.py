"""Where the job's secret comes from. Secrets are never put in arguments, variables, logs or messages."""

from __future__ import annotations

import os
import stat

from commrt.bootstrap.auth import MIN_SECRET_NBYTES
from commrt.errors import ConfigError

MAX_SECRET_NBYTES = 4096


def check_secret(secret: bytes, source: str) -> bytes:
    """The secret as bytes, if it is long enough to be one; `ConfigError` naming `source` otherwise."""
    if not MIN_SECRET_NBYTES <= len(secret) <= MAX_SECRET_NBYTES:
        raise ConfigError(
            f"{source} holds {len(secret)} bytes; a secret has {MIN_SECRET_NBYTES} to {MAX_SECRET_NBYTES}"
        )
    return bytes(secret)


def is_private_file(info: os.stat_result) -> bool:
    """A regular file that only this user can read or write."""
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def read_secret_file(path: str) -> bytes:
    """The file's bytes without trailing line ends. `ConfigError` if it is not this user's alone, or can't be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"COMMRT_SECRET_FILE={path} can't be read: {error}") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not is_private_file(info):
            raise ConfigError(
                f"COMMRT_SECRET_FILE={path} must be a regular file of mode 0600 owned by user {os.geteuid()}; "
                f"it has mode {stat.filemode(info.st_mode)} and owner {info.st_uid}"
            )
        return check_secret(file.read(MAX_SECRET_NBYTES + 2).rstrip(b"\r\n"), f"COMMRT_SECRET_FILE={path}")


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

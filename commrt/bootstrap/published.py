"""The file through which ranks of one user meet: rank 0's address and a fresh secret, in a file that nobody else can
read or plant.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from typing import Annotated

import msgspec

from commrt.bootstrap.secrets import NotPrivate, read_private_file
from commrt.errors import BootstrapError, ConfigError

_MAX_NBYTES = 4096


class Published(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What rank 0 writes. `secret` is hexadecimal."""

    host: Annotated[str, msgspec.Meta(max_length=256)]
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    secret: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def check_directory(path: str, *, private: bool) -> None:
    """A directory where nobody else can put or replace this user's files. `private`: made for this user alone if
    missing.
    """
    directory = os.path.dirname(path) or "."
    if private:
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    try:
        info = os.lstat(directory) if private else os.stat(directory)
    except OSError as error:
        raise ConfigError(f"the rendezvous directory {directory} can't be used: {error.strerror}") from None
    mine, sticky = info.st_uid == os.geteuid(), bool(info.st_mode & stat.S_ISVTX)
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"the rendezvous directory {directory} is not a directory")
    if private and not (mine and not info.st_mode & 0o077):
        raise ConfigError(f"{directory} must have mode 0700 and be owned by user {os.geteuid()}")
    if not (sticky or not info.st_mode & 0o022) or not (mine or info.st_uid == 0):
        raise ConfigError(f"other users can change files in the rendezvous directory {directory}")


def publish(path: str, published: Published) -> os.stat_result:
    """Put the file in place, at once and whole, over whatever an earlier run left there. Returns its identity, for
    `withdraw`.
    """
    temporary = f"{path}.{secrets.token_hex(8)}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(published))
                info = os.fstat(fd)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BootstrapError(f"rank 0 can't publish its address in {path}: {error.strerror}", rank=0) from None
    return info


def withdraw(path: str, identity: os.stat_result) -> None:
    """Remove the file if it is still the one that was published."""
    with suppress(OSError):
        if os.path.samestat(os.lstat(path), identity):
            os.unlink(path)


def read(path: str) -> Published | None:
    """What is published now; None where there is nothing. `ConfigError` for a file that another user could have
    written.
    """
    try:
        data = read_private_file(path, _MAX_NBYTES, os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except NotPrivate as error:
        raise ConfigError(f"the rendezvous file {path} {error}") from None
    except OSError as error:
        raise ConfigError(f"the rendezvous file {path} can't be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=Published)
    except (msgspec.MsgspecError, RecursionError):
        # Whole files are put in place at once, so this is none of ours; rank 0 is about to replace it.
        return None

"""Secret files and the rendezvous file: what is refused, what is replaced, what is left."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commrt.bootstrap import Store, detect, join, published
from commrt.bootstrap.published import Published
from commrt.bootstrap.secrets import read_secret_fd, read_secret_file
from commrt.errors import BootstrapError, BootstrapTimeout, ConfigError

SECRET = b"sixteen bytes or more of it"
STALE_SECRET = "ab" * 32


@pytest.fixture
def private(tmp_path: Path) -> Path:
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    return directory


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_a_secret_file(private: Path, ending: bytes) -> None:
    assert read_secret_file(str(write(private / "s", SECRET + ending))) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o666])
def test_a_secret_file_that_others_can_reach(private: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"COMMRT_SECRET_FILE.*0600") as caught:
        read_secret_file(str(write(private / "s", SECRET, mode)))
    assert SECRET.decode() not in str(caught.value)


def test_a_secret_file_of_another_owner(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(private / "s", SECRET)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="owner"):
        read_secret_file(str(path))


@pytest.mark.parametrize("data", [b"", b"short", b"x" * 5000], ids=["empty", "short", "long"])
def test_a_secret_of_the_wrong_length(private: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="bytes"):
        read_secret_file(str(write(private / "s", data)))


def test_no_secret_file(private: Path) -> None:
    with pytest.raises(ConfigError):
        read_secret_file(str(private / "none"))
    with pytest.raises(ConfigError):
        read_secret_file(str(private))
    os.mkfifo(private / "fifo", 0o600)
    with pytest.raises(ConfigError):
        read_secret_file(str(private / "fifo"))


def test_a_secret_descriptor_is_read_from_its_start() -> None:
    fd = os.memfd_create("test")
    try:
        os.write(fd, SECRET)
        assert [read_secret_fd(fd), read_secret_fd(fd)] == [SECRET, SECRET]
    finally:
        os.close(fd)
    with pytest.raises(ConfigError, match="COMMRT_SECRET_FD"):
        read_secret_fd(fd)


def test_a_descriptor_that_is_no_secret() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConfigError, match="COMMRT_SECRET_FD"):
        read_secret_fd(ours.fileno())


def enter(path: Path, rank: int, size: int, *, timeout_s: float = 20, secret: bytes | None = None) -> Store:
    return join(detect({}, rank=rank, size=size, rendezvous=f"file://{path}"), secret=secret, timeout_s=timeout_s)


def meet(path: Path, size: int = 3, secret: bytes | None = None) -> None:
    """Rank 0 last, so that the others find what was there before."""
    with ThreadPoolExecutor(size) as pool:
        stores = list(pool.map(lambda rank: enter(path, rank, size, secret=secret), reversed(range(size))))
        assert list(pool.map(lambda s: s.exchange("k", b"%d" % s.rank), stores)) == [[b"0", b"1", b"2"][:size]] * size
        list(pool.map(lambda s: s.close(), stores))


def test_ranks_meet_by_a_file_and_leave_none(private: Path) -> None:
    for _ in range(5):
        meet(private / "r")
        assert list(private.iterdir()) == []


def test_a_secret_on_top_of_the_files(private: Path) -> None:
    meet(private / "r", secret=SECRET)


def stale(path: Path, port: int) -> None:
    published.publish(str(path), Published("127.0.0.1", port, STALE_SECRET))


def test_a_stale_file_whose_port_is_closed(private: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    stale(private / "r", port)
    meet(private / "r")


@pytest.fixture
def silent() -> Iterator[int]:
    """A service that took over the port of the earlier run, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_a_stale_file_whose_port_belongs_to_another(
    private: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commrt.bootstrap.rendezvous._FILE_ANSWER_S", 0.3)
    stale(private / "r", silent)
    meet(private / "r")


def test_a_stale_file_whose_port_is_another_jobs_store(private: Path) -> None:
    """It proves another secret, so that the reader looks at the file again."""
    with ThreadPoolExecutor(2) as pool:
        other = list(pool.map(lambda rank: enter(private / "other", rank, 2), range(2)))
        stale(private / "r", other[0]._link.sock.getpeername()[1])  # type: ignore[attr-defined]
        meet(private / "r")
        list(pool.map(lambda s: s.close(), other))


def test_a_broken_file_is_replaced(private: Path) -> None:
    write(private / "r", b"\x91" * 100_000)
    meet(private / "r", 2)


def test_the_file_is_private_while_it_is_there(private: Path) -> None:
    path = private / "r"
    identity = published.publish(str(path), Published("127.0.0.1", 1, STALE_SECRET))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert published.read(str(path)) == Published("127.0.0.1", 1, STALE_SECRET)
    published.publish(str(path), Published("127.0.0.1", 2, STALE_SECRET))
    published.withdraw(str(path), identity)
    assert path.exists()


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_file_that_others_can_reach_is_refused(private: Path, mode: int) -> None:
    path = private / "r"
    stale(path, 1)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="0600"):
        enter(path, 1, 2, timeout_s=5)


def test_a_planted_link_is_not_followed(private: Path) -> None:
    stale(private / "target", 1)
    (private / "r").symlink_to(private / "target")
    with pytest.raises(ConfigError):
        enter(private / "r", 1, 2, timeout_s=5)
    meet_after = private / "r"
    (private / "r").unlink()
    meet(meet_after, 2)
    assert (private / "target").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write(private: Path, mode: int) -> None:
    private.chmod(mode)
    for rank in range(2):
        with pytest.raises(ConfigError, match="directory"):
            enter(private / "r", rank, 2, timeout_s=5)


def test_a_directory_that_is_not_there(private: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        enter(private / "none" / "r", 0, 2, timeout_s=5)


def test_a_private_directory_is_made_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "own" / "r"
    published.check_directory(str(path), private=True)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        published.check_directory(str(path), private=True)
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        published.check_directory(str(linked / "r"), private=True)


def test_a_directory_without_room_for_the_file(private: Path) -> None:
    (private / "r").mkdir()
    with pytest.raises(BootstrapError, match="publish"):
        enter(private / "r", 0, 2, timeout_s=5)


def test_rank_0_never_publishes(private: Path) -> None:
    with pytest.raises(BootstrapTimeout, match="nothing is published") as caught:
        enter(private / "r", 1, 2, timeout_s=0.3)
    assert caught.value.missing == [0]

"""The ib transport where there is no InfiniBand: what it says, what it believes, and what it takes the ABI to be.

The libraries here are fake; what runs on real verbs is in tests/rdma.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from commrt.errors import ConfigError, TransportError
from commrt.plugins import Plugin, Registry, discover
from commrt.testing.world import World
from commrt.transports.ib import devices
from commrt.transports.ib.link import End, Key
from commrt.transports.ib.transport import Address, IbTransport, _decode

ROOT = Path(__file__).resolve().parents[2]
ROCE = devices.Port("rxe0", 1, devices.ETHERNET, 4)
INFINIBAND = devices.Port("mlx5_0", 1, 1, 4)


def fake(folder: Path, *definitions: str) -> str:
    """A library of its own for each test: the dynamic linker remembers names."""
    path = folder / f"libfake{len(os.listdir(folder))}.so"
    command = ["cc", "-shared", "-fPIC", *(f"-D{each}" for each in definitions), "-o", str(path)]
    subprocess.run([*command, str(Path(__file__).parent / "fake_verbs.c")], check=True, timeout=60)
    return str(path)


def reason(library: str) -> str:
    probe = IbTransport(library).probe()
    assert not probe.devices and "\n" not in probe.reason
    return probe.reason


def test_a_probe_says_what_is_missing(tmp_path: Path) -> None:
    torn = tmp_path / "torn.so"
    torn.write_bytes(b"\x7fELF and no more")
    assert "no libibverbs" in reason("libno_such_verbs.so.1") and "libno_such_verbs.so.1" in reason(
        "libno_such_verbs.so.1"
    )
    assert "no libibverbs" in reason(str(torn))
    assert "is broken: it has no ibv_create_qp" in reason(fake(tmp_path, "BROKEN"))
    assert reason(fake(tmp_path, "NODE=0")).startswith("no verbs device")
    assert reason(fake(tmp_path, "NODE=4")).startswith("no verbs device")  # iWARP
    assert reason(fake(tmp_path, "STATE=1")) == "no active port: fake0 is down"
    assert reason(fake(tmp_path, "OPENS=0")) == "no active port: fake0 can't be opened: Permission denied"


def test_a_probe_finds_active_ports(tmp_path: Path) -> None:
    probe = IbTransport(fake(tmp_path)).probe()
    assert probe.devices == ("fake0:1",) and probe.level == "real verbs"


def test_one_that_fails_to_open_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    """The fake device has no GID."""
    failing = Plugin("transports", "ib", "a test", __name__, _loaded=IbTransport(fake(tmp_path)))
    registry = Registry([failing, *(plugin for plugin in discover() if plugin.name != "ib")])
    with World(2, None, registry=registry) as world:
        assert set(world.communicators[0].links.values()) == {"shm"}
    with pytest.raises(TransportError, match="no GID"):
        World(2, "ib", registry=registry)


def test_the_device_of_the_setting() -> None:
    ports = [devices.Port("a", 1, 1, 1), devices.Port("b", 1, 1, 1), devices.Port("b", 2, 1, 1)]
    assert devices.choose_port(ports, None) is ports[0]
    assert devices.choose_port(ports, "b") is ports[1]
    assert devices.choose_port(ports, "b:2") is ports[2]
    with pytest.raises(ConfigError, match=r"COMMRT_IB_DEVICE=c .*a:1, b:1, b:2"):
        devices.choose_port(ports, "c")


def test_of_roce_a_routed_ipv4_address_is_best() -> None:
    local, ipv4, ipv6 = b"\xfe\x80" + bytes(13) + b"\1", bytes(10) + b"\xff\xff\x0a\0\0\1", b"\x20" + bytes(15)
    table = [
        devices.Gid(0, local, "IB/RoCE v1"),
        devices.Gid(1, local, "RoCE v2"),
        devices.Gid(2, ipv4, "IB/RoCE v1"),
        devices.Gid(3, ipv6, "RoCE v2"),
        devices.Gid(4, ipv4, "RoCE v2"),
    ]
    assert devices.choose_gid(ROCE, table, None) == 4
    assert devices.choose_gid(ROCE, table[:4], None) == 3
    assert devices.choose_gid(ROCE, table[:3], None) == 1
    assert devices.choose_gid(INFINIBAND, table, None) == 0
    assert devices.choose_gid(ROCE, table, 2) == 2
    with pytest.raises(ConfigError, match="COMMRT_IB_GID_INDEX=9"):
        devices.choose_gid(ROCE, table, 9)
    with pytest.raises(TransportError, match="no GID"):
        devices.choose_gid(ROCE, [], None)


@pytest.mark.parametrize("garbage", [b"", b"\0", b"\xff" * 300, bytes(range(40)), b"\x81\xa4ends\xc0"])
def test_garbage_is_no_address_and_no_key(garbage: bytes) -> None:
    for kind in (Address, Key):
        with pytest.raises(TransportError, match="malformed"):
            _decode(garbage, kind)


@pytest.mark.parametrize(("field", "value"), [("qpn", 1 << 24), ("psn", -1), ("mtu", 6), ("gid", bytes(15))])
def test_an_address_out_of_range_is_malformed(field: str, value: object) -> None:
    end = {"qpn": 1, "psn": 2, "ring": bytes(8), "ring_key": 3, "link_layer": 2, "lid": 0, "mtu": 5, "gid": bytes(16)}
    assert _decode(msgspec.msgpack.encode({"ends": [end, None]}), Address).ends == [End(**end), None]
    with pytest.raises(TransportError, match=field):
        _decode(msgspec.msgpack.encode({"ends": [{**end, field: value}]}), Address)


@pytest.mark.skipif(not Path("/usr/include/infiniband/verbs.h").exists(), reason="libibverbs' own header is not here")
def test_the_abi_is_that_of_the_header() -> None:
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    subprocess.run([compiler, "-std=c++17", "-fsyntax-only", str(ROOT / "tests/rdma/abi.cpp")], check=True, timeout=60)

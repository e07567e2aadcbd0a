"""A queue pair of pyverbs joined to an endpoint of ours: each reads and writes the other's memory as the other says."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
from typing import Any

import msgspec

from commrt.native import ffi
from commrt.plugins import default_registry
from commrt.transport import Context as OurContext
from commrt.transports.ib import plugin
from commrt.transports.ib.link import End, Key, from_u64, to_u64
from commrt.transports.ib.transport import Address

sys.path.append("/usr/lib/python3/dist-packages")

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

DEVICE, GID_INDEX = os.environ["RDMA_DEVICE"], int(os.environ["RDMA_GID_INDEX"])
SIZE, RING_AT, SEGMENT = 1 << 16, 1 << 15, 1 << 16
MTU = e.IBV_MTU_1024
RECORD = struct.Struct("<QQ")
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class Peer:
    """Rank 1, in pyverbs alone. Its ring lies in its one memory, behind what we may put to."""

    def __init__(self) -> None:
        self.ctx = Context(name=DEVICE)
        self.pd = PD(self.ctx)
        self.cq = CQ(self.ctx, 64)
        self.mr = MR(self.pd, SIZE, ACCESS)
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1))
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        self.qp.to_init(attr)
        for _ in range(8):
            self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, 0, self.mr.lkey)]))

    def address(self) -> bytes:
        gid = socket.inet_pton(socket.AF_INET6, str(self.ctx.query_gid(1, GID_INDEX).gid))
        end = End(self.qp.qp_num, 7, to_u64(self.mr.buf + RING_AT), self.mr.rkey, 2, 0, MTU, gid)
        return msgspec.msgpack.encode(Address([end, None]))

    def key(self) -> bytes:
        return msgspec.msgpack.encode(Key(0, to_u64(self.mr.buf), to_u64(RING_AT), self.mr.rkey))

    def join(self, end: End) -> None:
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = end.qpn, end.psn, 7
        attr.path_mtu, attr.max_rd_atomic, attr.max_dest_rd_atomic = MTU, 1, 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 16, 6, 7
        gid = ":".join(end.gid[at : at + 2].hex() for at in range(0, 16, 2))
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=GlobalRoute(dgid=GID(gid), sgid_index=GID_INDEX))
        self.qp.to_rts(attr)

    def request(self, opcode: int, at: int, nbytes: int, key: int, address: int, immediate: int = 0) -> None:
        sge = SGE(self.mr.buf + at, nbytes, self.mr.lkey)
        wr = SendWR(opcode=opcode, num_sge=1, sg=[sge], imm_data=socket.htonl(immediate))
        wr.set_wr_rdma(key, address)
        self.qp.post_send(wr)
        self.completion()

    def completion(self) -> Any:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            count, completions = self.cq.poll(1)
            if count:
                assert completions[0].status == e.IBV_WC_SUCCESS, completions[0]
                return completions[0]
            os.sched_yield()
        raise AssertionError("no completion")

    def signal(self, number: int) -> tuple[int, int]:
        """The next one that has come: offset and value."""
        completion = self.completion()
        assert completion.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM, completion
        assert completion.imm_data in (number, socket.htonl(number)), completion
        offset, value = RECORD.unpack(self.mr.read(RECORD.size, RING_AT + number * RECORD.size))
        return offset, value


def main() -> None:
    backend, peer = default_registry().require("backends", "cpu"), Peer()
    ours = plugin.open(OurContext(0, 2, bytes(16), backend))
    memory = backend.allocate(SEGMENT)
    key = msgspec.msgpack.decode(ours.register(memory), type=Key)
    end = msgspec.msgpack.decode(ours.address, type=Address).ends[1]
    assert end is not None
    port = ours.connect(1, peer.address(), peer.key()).port
    peer.join(end)

    # It writes our registered memory, and reads it back.
    data = os.urandom(4096)
    peer.mr.write(data, 4096, 0)
    peer.request(e.IBV_WR_RDMA_WRITE, 0, 4096, key.key, from_u64(key.address) + 512)
    assert ctypes.string_at(memory.address + 512, 4096) == data, "a write of pyverbs"
    peer.request(e.IBV_WR_RDMA_READ, 8192, 4096, key.key, from_u64(key.address) + 512)
    assert peer.mr.read(4096, 8192) == data, "a read of pyverbs"

    # It takes our puts, long and short, and the signal behind them.
    source = ctypes.create_string_buffer(os.urandom(5000), 5000)
    value = 0x1122334455667788
    assert port.put(port.context, 16384, ffi.from_buffer(source), 5000) == 1
    assert port.put(port.context, 24000, ffi.from_buffer(source), 100) == 1
    assert port.signal(port.context, 32000, value) == 1
    deadline = time.monotonic() + 10
    while not port.flush(port.context):
        assert time.monotonic() < deadline
        os.sched_yield()
    assert peer.signal(0) == (32000, value), "our signal"
    assert peer.mr.read(5000, 16384) == source.raw and peer.mr.read(100, 24000) == source.raw[:100], "our put"

    # Its signal is stored by our poll alone.
    peer.mr.write(RECORD.pack(1024, value), RECORD.size, 64)
    word = ctypes.c_uint64.from_address(memory.address + 1024)
    word.value = 0
    peer.request(e.IBV_WR_RDMA_WRITE_WITH_IMM, 64, RECORD.size, end.ring_key, from_u64(end.ring), immediate=0)
    assert word.value == 0, "stored before the completion was taken"
    deadline = time.monotonic() + 10
    while port.poll(port.context) >= 0 and word.value != value:
        assert time.monotonic() < deadline
        os.sched_yield()

    ours.close()
    assert peer.signal(1)[0] == (1 << 64) - 1, "our goodbye"
    memory.close()
    print("pyverbs: agreed", flush=True)


if __name__ == "__main__":
    main()

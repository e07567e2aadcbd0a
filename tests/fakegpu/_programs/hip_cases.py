"""hip_cases.py NAME: what the tests of the HIP backend run in processes of their own. One line of JSON, a list."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import threading
from collections.abc import Callable
from typing import Any

import commrt
from commrt.plugins import default_registry
from commrt.transport import Context

BACKEND = default_registry().require("backends", "hip")
ADD = """
#include "kernel.h"
CR_KERNEL add(u64* to, const u64* from, u64 n) {
  u64 step = commrt::nblocks() * commrt::nthreads();
  for (u64 i = commrt::block_id() * commrt::nthreads() + commrt::tid(); i < n; i += step) to[i] += from[i];
}
"""
TWICE = """
#include "platform.h"
CR_KERNEL twice(u64* word) {
  if (commrt::tid() == 0) commrt::store_release(word, 2 * commrt::load_acquire(word));
}
"""
EXECUTOR = '#include "run_plan.h"\nCR_RUN_PLAN(float32, sum)\n'


def said(call: Callable[[], Any]) -> str:
    """What it raises, or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def probe() -> list[str]:
    """The reason, and that of the transport; then what asking for either raises, and what asking for nothing does."""
    reasons = [BACKEND.probe().reason, default_registry().require("transports", "xgmi").probe().reason]
    forced = [lambda: BACKEND.allocate(1), lambda: commrt.init(transport="xgmi"), lambda: commrt.init().close()]
    return [*reasons, *map(said, forced)]


def add() -> list[Any]:
    """A kernel that reads pinned memory of someone else's, and adds to memory of the device."""
    host = mmap.mmap(-1, 8192)
    words = (ctypes.c_uint64 * 1024).from_buffer(host)
    words[:] = range(1024)
    pinned = BACKEND.pin(ctypes.addressof(words), 8192)
    twice = said(lambda: BACKEND.pin(ctypes.addressof(words), 8192))
    memory, kernel, stream = BACKEND.allocate(8192, "coarse"), BACKEND.build(ADD, "add"), BACKEND.stream()
    resident = BACKEND.resident_blocks(kernel)
    arguments = (ctypes.c_void_p(memory.address), ctypes.c_void_p(pinned), ctypes.c_uint64(1024))
    for _ in range(3):
        kernel.launch(4, arguments, stream)
    outcome = said(stream.synchronize)
    BACKEND.unpin(ctypes.addressof(words))
    copied = said(lambda: BACKEND.copy(ctypes.addressof(words), memory.address, 8192))
    memory.close()
    return [twice, outcome, copied, list(words) == [3 * i for i in range(1024)], resident]


def executor() -> list[int]:
    """The plan executor's kernel, built, loaded and found to take what the CPU's takes."""
    return [BACKEND.resident_blocks(BACKEND.build(EXECUTOR, "run_plan_float32_sum"))]


def twice() -> list[Any]:
    """By what compiler, what came of it, and what it says of what is no source."""
    from commrt.backends.hip import compile

    memory, word = BACKEND.allocate(8, "pinned"), ctypes.c_uint64(21)
    ctypes.memmove(memory.address, ctypes.addressof(word), 8)
    BACKEND.build(TWICE, "twice").launch(1, (ctypes.c_void_p(memory.address),))
    result = ctypes.c_uint64.from_address(memory.address).value
    return [compile._compiler()[0], result, said(lambda: BACKEND.build("not C++", "twice"))]


def build_add() -> list[str]:
    return [said(lambda: BACKEND.build(ADD, "add"))]


def foreign() -> list[str]:
    """Code that was compiled for another GPU than the one that is here."""
    from commrt.backends.hip import compile

    code = compile.code_object("int x;", "gfx90a")
    return [BACKEND._opened().driver.attempt("hipModuleLoadData", code)[0].name]


def refusals() -> list[str]:
    """What can't be had: memory, work that calls the driver, exports that are not what they claim to be."""
    found = [said(lambda: BACKEND.allocate(1 << 40))]
    stream = BACKEND.stream()
    stream.submit(lambda: BACKEND.allocate(1))
    found.append(said(stream.synchronize))
    found.append(said(lambda: BACKEND.export(BACKEND.allocate(1, "pinned"))))
    memory = BACKEND.allocate(1)
    exported = BACKEND.export(memory)
    found.append(said(lambda: BACKEND.open(bytes(16) + exported[16:])))
    memory.close()
    return [*found, said(lambda: BACKEND.open(exported))]


def streams() -> list[str]:
    """Threads that come and go, events and streams that are dropped: the driver is left with no more than it needs."""
    memory = BACKEND.allocate(4096)
    stream = BACKEND.stream()

    def work() -> None:
        for _ in range(5):
            BACKEND.copy(memory.address, memory.address + 2048, 8)
            BACKEND.stream().submit(lambda: None).wait()
            stream.submit(lambda: None)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome = said(stream.synchronize)
    BACKEND.stream()
    return [outcome]


def graph() -> list[Any]:
    """A captured kernel runs whenever the graph is launched, and not before; work of Python is not captured."""
    from hip import hip

    one, memory, stream = BACKEND.allocate(8, "pinned"), BACKEND.allocate(8, "pinned"), BACKEND.stream()
    word = ctypes.c_uint64.from_address(memory.address)
    ctypes.c_uint64.from_address(one.address).value, word.value = 1, 0
    kernel = BACKEND.build(ADD, "add")
    hip.hipStreamBeginCapture(stream.handle, hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal)
    capturing = stream.capturing
    kernel.launch(1, (ctypes.c_void_p(memory.address), ctypes.c_void_p(one.address), ctypes.c_uint64(1)), stream)
    refused = said(lambda: stream.submit(print))
    _, captured = hip.hipStreamEndCapture(stream.handle)
    before = word.value
    _, executable = hip.hipGraphInstantiateWithFlags(captured, 0)
    for _ in range(1000):
        hip.hipGraphLaunch(executable, stream.handle)
    stream.synchronize()
    return [capturing, stream.capturing, refused, before, word.value]


def device() -> list[int]:
    """Which GPU is this rank's, and that the calling thread's own stays what it was."""
    from hip import hip

    hip.hipSetDevice(int(sys.argv[2]))
    BACKEND.allocate(1)
    return [BACKEND._opened().driver.device, hip.hipGetDevice()[1]]


def reach() -> list[Any]:
    """A rank on another backend is not reached."""
    transport, cpu = default_registry().require("transports", "xgmi"), default_registry().require("backends", "cpu")
    ends = [transport.open(Context(rank, 3, b"token", backend)) for rank, backend in enumerate((BACKEND, BACKEND, cpu))]
    reached = [(i, j) for i in range(3) for j in range(3) if i != j and ends[i].reach(j, ends[j].address)]
    for end in ends:
        end.close()
    return reached


def locations() -> list[bool]:
    """Whether it reaches itself, a GPU beside it, one that this process does not see, and nonsense."""
    own = BACKEND.location()
    return [BACKEND.reaches(one) for one in (own, own[:15] + bytes([1]), own[:15] + bytes([9]), b"nonsense")]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))

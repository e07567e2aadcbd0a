"""An all_reduce of one's own: kernels of all_reduce.cpp on channels of the communicator.

commrt run -n 4 examples/custom_kernel/custom_kernel.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import commrt

SOURCE = (Path(__file__).parent / "all_reduce.cpp").read_text()
BLOCKS = 2


def main(comm: commrt.Communicator, count: int = 1000, launches: int = 3) -> None:
    """Run both kernels on numbers whose sum is exact. Raises AssertionError at a wrong one."""
    array = comm.empty((1 + comm.size) * count, "float32")
    channels = comm.channels(array, blocks=BLOCKS, packet_nbytes=4 * count)
    for symbol in ("all_reduce_puts", "all_reduce_packets"):
        kernel = comm.backend.build(SOURCE, symbol)
        for launch in range(launches):
            array[:count] = np.arange(count) * (comm.rank + 1) + launch
            comm.launch(kernel, BLOCKS, channels, count)
            expected = np.arange(count) * (comm.size * (comm.size + 1) // 2) + launch * comm.size
            wrong = int(np.count_nonzero(array[:count] != expected))
            assert not wrong, f"{symbol}: {wrong} of {count} elements are wrong on rank {comm.rank}"
        if comm.rank == 0:
            print(f"{symbol}: {count} elements on {comm.size} ranks and {BLOCKS} blocks, 0 wrong")


if __name__ == "__main__":
    with commrt.init() as communicator:
        main(communicator)

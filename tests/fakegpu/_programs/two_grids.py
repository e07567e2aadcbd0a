"""two_grids.py BLOCKS BACKEND: two grids on two streams of one device exchange; the code that each ended with."""

from __future__ import annotations

import json
import sys
from typing import Any

import exchange

from commrt.plugins import default_registry

TIMEOUT_S = 0.5


def main() -> None:
    blocks, backend = int(sys.argv[1]), default_registry().require("backends", sys.argv[2])
    exchange.TIMEOUT_S = TIMEOUT_S
    kernel: Any = backend.build(exchange.SOURCE, "exchange")
    ranks, streams = [exchange.Rank(backend) for _ in range(2)], [backend.stream() for _ in range(2)]
    for rank, stream in enumerate(streams):
        kernel.launch(blocks, ranks[rank].arguments(ranks[1 - rank].memory.address, 1), stream)
    for stream in streams:
        stream.synchronize()
    codes = [rank.failed() & 0xFFFFFFFF for rank in ranks]
    print(json.dumps({"resident": backend.resident_blocks(kernel), "codes": codes}))


if __name__ == "__main__":
    main()

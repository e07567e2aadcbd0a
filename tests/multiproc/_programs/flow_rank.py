"""A rank that all-reduces until an error comes. Says in JSON that it flows, and why not. See the arguments below."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import commrt
from commrt.errors import CommrtError

ENOUGH = 20


def say(**facts: object) -> None:
    print(json.dumps({"at": time.monotonic(), **facts}), flush=True)


rank, size = map(int, sys.argv[1:3])
comm = commrt.init(rank, size, sys.argv[3], timeout=float(sys.argv[4]))
try:
    for turn in range(1 << 30):
        x = np.full(50_000, rank + 1, np.int64)
        comm.all_reduce(x)
        assert (x == size * (size + 1) // 2).all()
        if turn == ENOUGH:
            say(flows=True)
except CommrtError as error:
    say(error=type(error).__name__, peer=error.context.peer, message=str(error))

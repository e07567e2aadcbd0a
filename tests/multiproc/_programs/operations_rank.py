"""A rank that runs random operations: how many, and the seed they follow from."""

from __future__ import annotations

import sys

import commrt
from commrt.group import Options
from commrt.testing import operations

number, seed, epoch, lap = map(int, sys.argv[1:])
with commrt.init(options=Options(epoch=epoch, lap=lap)) as comm:
    print(f"{operations.run(comm, number, seed)} operations right, seed {seed}")

"""A rank that runs a part of the list of all collectives: how many calls, seed, where the epochs start and wrap."""

from __future__ import annotations

import sys

import commrt
from commrt.group import Options
from commrt.testing import matrix

most, seed, epoch, lap = map(int, sys.argv[1:])
with commrt.init(options=Options(epoch=epoch, lap=lap)) as comm:
    whole = matrix.variants(comm.size, comm.capabilities)
    chosen = matrix.sample(whole, most or len(whole), seed)
    print(f"{matrix.run(comm, chosen)} calls right over {set(comm.links.values()) or 'no link'}")

"""A rank that runs every case, against Gloo in the same processes: cases_rank.py STORE. Prints what fails."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta

import torch.distributed as dist
from cases import CASES

limit = timedelta(seconds=20)
rank, size = int(os.environ["COMMRT_RANK"]), int(os.environ["COMMRT_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size, timeout=limit)
ours = dist.new_group(backend="commrt", timeout=limit)
for name, run in CASES.items():
    try:
        run(dist.group.WORLD, ours)
    except Exception:
        print(f"{name} failed: {traceback.format_exc().encode()!r}")
    else:
        print(f"{name} right")
dist.barrier()
dist.destroy_process_group()
print("left in good order")

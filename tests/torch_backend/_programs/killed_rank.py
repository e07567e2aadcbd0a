"""Rank 1 is killed, and rank 0 finds out in every way there is: killed_rank.py STORE RANK. Prints what each told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

rank = int(sys.argv[2])
limit = timedelta(seconds=30)
dist.init_process_group("commrt", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2, timeout=limit)
blocking, waited, asked, functionally, trained = (dist.new_group() for _ in range(5))
network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 100), process_group=trained)
x = torch.ones(100)


def step() -> None:
    network(torch.ones(2, 1000)).sum().backward()


for _ in range(2):
    step()
killed = Path(f"{sys.argv[1]}.killed")


def die(_: object) -> None:
    killed.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


if rank == 1:
    network.module.weight.register_hook(die)
    step()


def future() -> None:
    dist.all_reduce(x, group=asked, async_op=True).get_future().wait()


WAYS: dict[str, Callable[[], object]] = {
    "backward": step,
    "forward": step,
    "blocking": lambda: dist.all_reduce(x, group=blocking),
    "afterwards": lambda: dist.barrier(group=blocking),
    "waited": lambda: dist.all_reduce(x, group=waited, async_op=True).wait(),
    "future": future,
    "functional": lambda: functional.all_reduce(x, "sum", functionally) + 0,
}
for name, way in WAYS.items():
    began = time.monotonic()
    try:
        way()
    except Exception as error:
        began = max(began, float(killed.read_text()))  # one clock for both: nobody can know before
        took_s, text = time.monotonic() - began, str(error).splitlines()[0]
        print(f"{name}: {type(error).__name__} after {took_s:.1f} s: {text}", flush=True)
    else:
        print(f"{name}: nothing", flush=True)
dist.destroy_process_group()
print("left in good order")

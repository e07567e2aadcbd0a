"""Trains a small model on every rank's own data, the gradients averaged by commrt.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, then check that the ranks agree."""
    dist.init_process_group("commrt")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # every rank has data of its own, and starts with rank 0's model

    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(101):
        x = torch.randn(32, 8)
        loss = torch.nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            average = loss.detach()
            dist.all_reduce(average, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step}: loss {average:.2f}")

    everyones = [torch.empty(8) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, model.module[0].weight.detach()[0])
    assert all(torch.equal(row, everyones[0]) for row in everyones)
    if rank == 0:
        print("the ranks have the same parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

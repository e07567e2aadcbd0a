"""A rank of torchrun that trains the same model over Gloo and over commrt, and compares every bit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

STEPS = 5


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    hidden = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50), torch.nn.ReLU())
    return torch.nn.Sequential(hidden, torch.nn.Linear(50, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))


def train(network: torch.nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers after some steps on this rank's data."""
    source = torch.Generator().manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x, y = torch.randn(16, 20, generator=source), torch.randn(16, 4, generator=source)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()
    return [whole(value) for value in network.state_dict().values()]


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def equal(name: str, expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    assert expected and len(expected) == len(got)
    assert all(map(torch.equal, expected, got)), f"{name} differs"
    print(f"{name} equal", flush=True)


def ddp(group: Any, **options: Any) -> list[torch.Tensor]:
    # Buckets of 10 kB: several reductions are under way at once.
    network = torch.nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01, **options)
    return train(network)


def sharded(mesh: Any) -> list[torch.Tensor]:
    network = model()
    for part in (network[0], network):
        fully_shard(part, mesh=mesh)
    return train(network)


def check_mesh(gloo: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    assert dist.get_backend(mesh.get_group("inner")) == "commrt"
    full = torch.arange(12.0).reshape(6, 2)
    split = distribute_tensor(full, mesh["inner"], [Shard(0)])
    assert torch.equal(split.redistribute(placements=[Replicate()]).to_local(), full)
    assert torch.equal(split.redistribute(placements=[Shard(1)]).full_tensor(), full)
    equal("FSDP", sharded(init_device_mesh_over(gloo)), sharded(mesh["inner"]))


def init_device_mesh_over(group: Any) -> Any:
    return dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("gloo",))


def check_hooks(gloo: Any, ours: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    results = []
    for group in (gloo, ours):
        network = torch.nn.parallel.DistributedDataParallel(model(), process_group=group)
        network.register_comm_hook(group, default_hooks.fp16_compress_hook)
        results.append(train(network))
    equal("DDP with a hook", *results)


dist.init_process_group("commrt", timeout=timedelta(seconds=30))
ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
equal("DDP", ddp(gloo), ddp(ours))
equal("DDP with views", ddp(gloo, gradient_as_bucket_view=True), ddp(ours, gradient_as_bucket_view=True))
check_hooks(gloo, ours)
check_mesh(gloo)
dist.destroy_process_group()

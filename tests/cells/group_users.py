"""What torch builds on process groups: each function runs on every rank and returns what it computed."""

import torch
import torch.distributed as dist
from torch import nn


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4) * (dist.get_rank() + 1)


def torch_ddp():
    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(batch()).sum().backward()
    for _ in range(2):
        model(batch()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch()).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()], norm.full_tensor()


def dtensor():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (4,))
    whole = torch.arange(16.0).view(8, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
    product = (sharded @ sharded.T.redistribute(mesh, [Replicate()])).full_tensor()
    return [
        sharded.redistribute(mesh, [Replicate()]).to_local(),
        distribute_tensor(torch.arange(32.0).view(4, 8), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)]).to_local(),
        partial.redistribute(mesh, [Shard(0)]).to_local(),
        partial.full_tensor(),
        product,
    ]


def pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = nn.Linear(4, 4)
    stage = PipelineStage(layer, rank, world, torch.device("cpu"))
    got = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        schedule = kind(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
        losses: list = []
        if rank == 0:
            schedule.step(torch.ones(8, 4))
        elif rank == world - 1:
            schedule.step(target=torch.ones(8, 4), losses=losses)
        else:
            schedule.step()
        got.append([loss.detach() for loss in losses])
    return got, layer.weight.grad


USERS = [torch_ddp, fsdp2, dtensor, pipeline]

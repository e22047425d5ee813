"""What a process group must carry: each function runs on every rank of a default group and returns what it got."""

import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn

F32 = torch.float32


def numbers(count: int, shift: int = 0) -> torch.Tensor:
    """Different on every rank, and the same on every run."""
    return torch.arange(count, dtype=F32) * (dist.get_rank() + 1) + shift


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4) * (dist.get_rank() + 1)


def collectives():
    world, rank = dist.get_world_size(), dist.get_rank()
    got = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        tensor = numbers(5, 1)
        dist.all_reduce(tensor, op=op)
        got.append(tensor)
    tensor = numbers(3)
    dist.broadcast(tensor, src=1)
    got.append(tensor)
    tensor = numbers(3)
    dist.reduce(tensor, dst=1)
    got.append(tensor if rank == 1 else None)
    pieces = [torch.empty(3) for _ in range(world)]
    dist.all_gather(pieces, numbers(3))
    got.append(torch.stack(pieces))
    dist.gather(numbers(2), [torch.empty(2) for _ in range(world)] if rank == 0 else None, dst=0)
    mine = torch.empty(3)
    dist.scatter(mine, pieces if rank == 0 else None, src=0)
    return [*got, mine]


def scattering():
    world = dist.get_world_size()
    whole, part = torch.empty(2 * world), torch.empty(2)
    dist.all_gather_into_tensor(whole, numbers(2))
    dist.reduce_scatter_tensor(part, numbers(2 * world))
    listed = torch.empty(3)
    dist.reduce_scatter(listed, list(numbers(3 * world).chunk(world)))
    received = [torch.empty(2) for _ in range(world)]
    dist.all_to_all(received, list(numbers(2 * world).chunk(world)))
    exchanged = torch.empty(world)
    dist.all_to_all_single(exchanged, numbers(world))
    dist.barrier()
    return whole, part, listed, torch.stack(received), exchanged


def asynchronous():
    tensors = [numbers(3, shift) for shift in range(4)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    work = dist.all_reduce(tensors[0], async_op=True)
    work.get_future().wait()
    work.wait()
    return tensors, work.is_completed()


def sub_groups():
    rank = dist.get_rank()
    got = []
    for members in ([0, 1], [0, 2, 3], [3]):
        group = dist.new_group(members)
        tensor = numbers(2)
        if rank in members:
            dist.all_reduce(tensor, group=group)
            got.append((dist.get_process_group_ranks(group), dist.get_rank(group)))
        got.append(tensor)
    mine, _ = dist.new_subgroups(2)
    tensor = numbers(2)
    dist.all_reduce(tensor, group=mine)
    return got, tensor


def plain_gloo_sub_group():
    group = dist.new_group([0, 1], backend="gloo")
    tensor = numbers(2)
    if dist.get_rank() < 2:
        dist.all_reduce(tensor, group=group)
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    return tensor


def meshes():
    line = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    got = []
    for group in (line.get_group(), square["outer"].get_group(), square["inner"].get_group()):
        tensor = numbers(2)
        dist.all_reduce(tensor, group=group)
        got.append(tensor)
    return got, square.get_coordinate()


def point_to_point():
    rank, world = dist.get_rank(), dist.get_world_size()
    got = torch.empty(3)
    operations = [
        dist.P2POp(dist.isend, numbers(3), (rank + 1) % world),
        dist.P2POp(dist.irecv, got, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    tagged, anybody = torch.zeros(2), torch.zeros(1)
    if rank == 0:
        dist.send(numbers(2, 7), dst=1, tag=5)
        dist.send(torch.ones(1), dst=2)
        return got
    if rank == 1:
        dist.recv(tagged, src=0, tag=5)
    source = dist.recv(anybody) if rank == 2 else None
    return got, tagged, anybody, source


def objects():
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone, gathered = [None] * world, [None] * world if rank == 0 else None
    dist.all_gather_object(everyone, {"rank": rank, "text": "é" * rank})
    dist.gather_object((rank, "x"), gathered, dst=0)
    told, mine = [rank, "from"], [None]
    dist.broadcast_object_list(told, src=1)
    dist.scatter_object_list(mine, [{"for": peer} for peer in range(world)] if rank == 0 else None, src=0)
    sent = [{"a": 1}, 2] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(sent, dst=1)
    elif rank == 1:
        dist.recv_object_list(sent, src=0)
    return everyone, gathered, told, mine, sent


def coalesced():
    world = dist.get_world_size()
    first, second = numbers(2), numbers(3)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    wide, wider = torch.empty(2 * world), torch.empty(3 * world)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(wide, numbers(2))
        dist.all_gather_into_tensor(wider, numbers(3))
    manager.wait()
    return first, second, wide, wider


def functional():
    import torch.distributed._functional_collectives as functional

    world, group = dist.get_world_size(), dist.group.WORLD
    got = [
        functional.all_reduce(numbers(2), "sum", group) + 0,
        functional.all_gather_tensor(numbers(2), 0, group) + 0,
        functional.reduce_scatter_tensor(numbers(2 * world), "sum", 0, group) + 0,
        functional.all_to_all_single(numbers(world), None, None, group) + 0,
        functional.broadcast(numbers(2), 1, group) + 0,
    ]
    got += [part + 0 for part in functional.all_reduce_coalesced([numbers(2), numbers(3)], "sum", group)]
    got += [part + 0 for part in functional.all_gather_into_tensor_coalesced([numbers(2), numbers(3)], group)]
    return got


def differentiable():
    from torch.distributed.nn.functional import all_reduce

    value = numbers(2).requires_grad_()
    (all_reduce(value) ** 2).sum().backward()
    return value.grad


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


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (4,))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = model(torch.ones(2, 4))
    out.sum().backward()
    return out.detach(), model[0].weight.grad.full_tensor()


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


def checkpointing():
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place, src=0)
    model = net()
    fully_shard(model)
    state = model.state_dict()
    checkpoint.save({"model": state}, checkpoint_id=place[0])
    other = net()
    nn.init.zeros_(other[0].weight)
    fully_shard(other)
    loaded = {"model": other.state_dict()}
    checkpoint.load(loaded, checkpoint_id=place[0])
    return loaded["model"]["0.weight"].full_tensor()


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()
    return [parameter.detach() for parameter in model.parameters()]


def uneven_join():
    from torch.distributed.algorithms import Join

    model = nn.parallel.DistributedDataParallel(net())
    with Join([model]):
        for _ in range(1 + dist.get_rank()):
            model(batch()).sum().backward()
    return model.module[0].weight.grad


CASES = [
    *(collectives, scattering, asynchronous, sub_groups, plain_gloo_sub_group, meshes, point_to_point, objects),
    *(coalesced, functional, differentiable, torch_ddp, fsdp2, dtensor, tensor_parallel, pipeline, checkpointing),
    *(zero_redundancy, uneven_join),
]


def run_all() -> dict:
    """Every case; an entry is what it returned, or the error that it raised."""
    warnings.simplefilter("ignore")
    results = {}
    for case in CASES:
        try:
            results[case.__name__] = case()
        except Exception as error:
            results[case.__name__] = f"{type(error).__name__}: {error}"
    return results

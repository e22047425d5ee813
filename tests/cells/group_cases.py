"""What a process group must carry: each function runs on every rank of a default group and returns what it got."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

F32 = torch.float32


def numbers(count: int, shift: int = 0) -> torch.Tensor:
    """Different on every rank, and the same on every run."""
    return torch.arange(count, dtype=F32) * (dist.get_rank() + 1) + shift


def summed(group: dist.ProcessGroup | None = None) -> torch.Tensor:
    tensor = numbers(2)
    dist.all_reduce(tensor, group=group)
    return tensor


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
    got = []
    for members in ([0, 1], [0, 2, 3], [3]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            got.append((summed(group), dist.get_process_group_ranks(group), dist.get_rank(group)))
    mine, _ = dist.new_subgroups(2)
    return got, summed(mine)


def plain_gloo_sub_group():
    group = dist.new_group([0, 1], backend="gloo")
    got = summed(group) if dist.get_rank() < 2 else None
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    return got


def meshes():
    line = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    groups = line.get_group(), square["outer"].get_group(), square["inner"].get_group()
    return [summed(group) for group in groups], square.get_coordinate()


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


COLLECTIVES = [
    *(collectives, scattering, asynchronous, sub_groups, plain_gloo_sub_group, meshes, point_to_point, objects),
    *(coalesced, functional, differentiable),
]


def run_cases(cases: list[Callable[[], Any]]) -> dict[str, Any]:
    """{name of the case: what it returned, or the error that it raised as text}"""
    warnings.simplefilter("ignore")
    results = {}
    for case in cases:
        try:
            results[case.__name__] = case()
        except Exception as error:
            results[case.__name__] = f"{type(error).__name__}: {error}"
    return results

"""What the tests of traffic share: every collective with its bytes by hand, and a group written in Python."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_earlier

from scratch_ddp.instruments.traffic import traffic


class PythonGroup(dist.ProcessGroup):
    """A group written in Python around gloo, as simulated links and rank cells use."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def allreduce(self, tensors, opts=None):
        return self.inner.allreduce(tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors, opts):
        return self.inner.broadcast(tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        return self.inner.allgather(outputs, inputs, opts or dist.AllgatherOptions())

    def send(self, tensors, dst, tag):
        return self.inner.send(tensors, dst, tag)

    def recv(self, tensors, src, tag):
        return self.inner.recv(tensors, src, tag)


dist.Backend.register_backend("python_group", PythonGroup, devices=["cpu"])


def count(function):
    with warnings.catch_warnings(), traffic() as counted:
        warnings.simplefilter("ignore")  # torch renames its functions; the older names are meant to be seen too
        function()
    return counted


def wire(function):
    """(calls, payload bytes, wire bytes) of this rank."""
    counted = count(function)
    return counted.calls, counted.payload_bytes, counted.wire_bytes


def uneven_all_to_alls(rank):
    """Rank 0 gets all three rows of each rank, and sends none: rows of 8 bytes. (name, call, payload, wire bytes)"""
    rows, sent = torch.zeros(3, 2), [3, 0, 0, 0]
    arriving = torch.zeros(12 if rank == 0 else 0, 2)
    received = [3] * 4 if rank == 0 else [0] * 4
    wire = 0 if rank == 0 else 24
    yield "all_to_all", lambda: dist.all_to_all_single(arriving, rows, received, sent), 24, wire
    yield "all_to_all", lambda: functional.all_to_all_single(rows, received, sent, dist.group.WORLD) + 0, 24, wire


def every_collective(rank, n):
    """(name, call, payload, wire bytes) with the bytes worked out by hand: 12 elements of 4 bytes, 4 ranks."""
    x, four = torch.zeros(12), [torch.zeros(12) for _ in range(4)]
    long = torch.zeros(48)
    at_0 = four if rank == 0 else None
    yield "all_reduce", lambda: dist.all_reduce(x), 48, 72
    yield "all_reduce", lambda: imported_earlier(x), 48, 72
    yield "all_reduce", lambda: dist.all_reduce(x, async_op=True).wait(), 48, 72
    yield "all_reduce", lambda: dist.all_reduce_coalesced([x, x]), 96, 144
    yield "broadcast", lambda: dist.broadcast(x, 2), 48, 0 if rank == 1 else 48
    yield "reduce", lambda: dist.reduce(x, 2), 48, 0 if rank == 2 else 48
    yield "all_gather", lambda: dist.all_gather(four, x), 48, 144
    yield "all_gather", lambda: dist.all_gather_into_tensor(long, x), 48, 144
    yield "gather", lambda: dist.gather(x, at_0, 0), 48, 0 if rank == 0 else 48
    yield "scatter", lambda: dist.scatter(x, at_0, 0), 192 if rank == 0 else 0, 144 if rank == 0 else 0
    yield "reduce_scatter", lambda: dist.reduce_scatter(x, four), 192, 144
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(x, long), 192, 144
    yield "all_to_all", lambda: dist.all_to_all([torch.zeros(12) for _ in range(4)], four), 192, 144
    yield "all_to_all", lambda: dist.all_to_all_single(long, torch.zeros(48)), 192, 144
    yield from uneven_all_to_alls(rank)
    yield "barrier", lambda: dist.barrier(), 0, 0
    world = dist.group.WORLD
    yield "all_reduce", lambda: functional.all_reduce(x, "sum", world) + 0, 48, 72
    yield "all_gather", lambda: functional.all_gather_tensor(x, 0, world) + 0, 48, 144
    yield "reduce_scatter", lambda: functional.reduce_scatter_tensor(long, "sum", 0, world) + 0, 192, 144
    yield "all_to_all", lambda: functional.all_to_all_single(long, None, None, world) + 0, 192, 144
    yield "broadcast", lambda: functional.broadcast(x, 0, world) + 0, 48, 0 if rank == 3 else 48

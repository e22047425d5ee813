"""Calls, messages, bytes and rounds of what runs inside a block."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_earlier
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.instruments.traffic import Counts, Message, traffic
from tests.ranks import run_ranks


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


def coalesced():
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(8))
    both.wait()


def every_collective(rank, n):
    """(name, call, payload, wire bytes) with the bytes worked out by hand: 12 elements of 4 bytes, 4 ranks."""
    x, four = torch.zeros(12), [torch.zeros(12) for _ in range(4)]
    long = torch.zeros(48)
    at_0 = four if rank == 0 else None
    yield "all_reduce", lambda: dist.all_reduce(x), 48, 72
    yield "all_reduce", lambda: imported_earlier(x), 48, 72
    yield "all_reduce", lambda: dist.all_reduce(x, async_op=True).wait(), 48, 72
    yield "all_reduce", lambda: dist.all_reduce_coalesced([x, x]), 96, 144
    yield "all_reduce", coalesced, 48, 72
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


def test_torchs_collectives_by_the_rings_formula():
    def ranks():
        for name, call, payload, sent in every_collective(dist.get_rank(), 4):
            assert wire(call) == ({name: 1}, payload, sent), name

    run_ranks(4, ranks)


def test_messages_of_every_form():
    def ranks():
        rank, other = dist.get_rank(), 1 - dist.get_rank()
        x, y = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)

        def blocking():
            dist.send(x, 1) if rank == 0 else dist.recv(y, 0)

        def both_ways():
            sent = dist.isend(x, other)
            dist.irecv(y, other).wait()
            sent.wait()

        def batch():
            ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
            [work.wait() for work in dist.batch_isend_irecv(ops)]

        def from_anyone():
            dist.send(x, 1, tag=7) if rank == 0 else dist.recv(y, tag=7)

        answers = []
        for form in (blocking, both_ways, batch, from_anyone):
            counted = count(form)
            assert counted.over_ranks().depth == 1 and not counted.payload_bytes
            assert counted.wire_bytes == counted.bytes_sent
            answers.append((counted.calls, counted.messages, counted.bytes_sent))
        return answers

    sender, receiver, both = ({"send": 1}, 1, 40), ({"recv": 1}, 0, 0), ({"send": 1, "recv": 1}, 1, 40)
    assert run_ranks(2, ranks) == [[sender, both, both, sender], [receiver, both, both, receiver]]


def test_totals_and_who_sent_to_whom_in_which_round():
    def ranks():
        rank, x = dist.get_rank(), torch.zeros(3)
        with traffic() as counted:
            if rank == 0:
                dist.send(x, 1)
                dist.send(x, 2)
            elif rank == 1:
                dist.recv(x, 0)
                dist.send(x, 3)
            else:
                dist.recv(x)  # from whoever comes
            dist.all_reduce(x)
        return counted.over_ranks()

    for whole in run_ranks(4, ranks):
        assert (whole.messages, whole.bytes_sent, whole.max_bytes_sent, whole.max_wire_bytes) == (3, 36, 24, 24 + 18)
        assert whole.log == [Message(1, 0, 1), Message(2, 0, 2), Message(2, 1, 3)]
        assert whole.depth == 2 + 6  # then an all-reduce on a ring of four


def test_nested_blocks_and_exceptions():
    def ranks():
        x = torch.zeros(1)
        early = dist.all_reduce(x, async_op=True)
        with traffic() as outer:
            early.wait()
            with traffic() as empty:  # counts the same as outer so far, and must not be taken for it
                pass
            with pytest.raises(KeyError), traffic() as inner:
                dist.all_reduce(x)
                raise KeyError
            with pytest.raises(RuntimeError, match="invalid root"):
                dist.broadcast(x, src=99)  # a call that raises is not counted
            dist.all_reduce(x)
            asked = outer.over_ranks()
        dist.all_reduce(x)
        assert outer.calls == {"all_reduce": 2} and inner.calls == {"all_reduce": 1}
        assert empty.calls == {} and empty.setup == Counts() and outer.setup.calls == {"all_gather": 2}
        assert asked.per_rank[0].calls == {"all_reduce": 2} and asked.depth == 4

    run_ranks(2, ranks)


@pytest.mark.parametrize("backend", ["gloo", interruptible_group.BACKEND])
def test_groups_of_both_kinds_under_torchs_own_classes(backend):
    def ranks():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        assert wire(lambda: model(torch.ones(1, 3)).sum().backward()) == ({"all_reduce": 1}, 32, 32)
        x, other = torch.zeros(4), 1 - dist.get_rank()

        def messages():
            work = dist.isend(x, other)
            dist.recv(torch.zeros(4), other)
            work.wait()

        counted = count(messages)
        assert (counted.calls, counted.bytes_sent) == ({"send": 1, "recv": 1}, 16)
        assert counted.over_ranks().depth == 1
        assert wire(lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 0) == ({"all_reduce": 1}, 16, 16)
        if backend == "gloo":
            mesh = DeviceMesh("cpu", [0, 1])
            shards = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
            assert wire(lambda: shards.redistribute(mesh, [Replicate()]).to_local()) == ({"all_gather": 1}, 16, 16)

    run_ranks(2, ranks, backend=backend)


def test_depth_of_what_waits_and_what_does_not():
    def ranks():
        rank, n, x = dist.get_rank(), dist.get_world_size(), torch.zeros(1)

        def star_at_once():
            works = [dist.isend(x, i) for i in range(1, n)] if rank == 0 else [dist.irecv(x, 0)]
            [work.wait() for work in works]

        def from_anyone():  # from 2 over 1 and 0 back to 2; 0 doesn't know who will send
            if rank == 2:
                dist.send(x, 1)
                dist.recv(x, 0)
            elif rank < 2:
                dist.recv(x, 2 if rank == 1 else None)
                dist.send(x, (rank - 1) % 3)

        def two_groups():
            dist.all_reduce(x, group=pair)
            dist.all_reduce(x)

        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        return [count(form).over_ranks().depth for form in (star_at_once, from_anyone, two_groups)]

    assert run_ranks(4, ranks) == [[1, 3, 2 + 6]] * 4

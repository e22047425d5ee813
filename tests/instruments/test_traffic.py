"""Calls, messages, bytes and rounds of what runs inside a block; and bytes that a simulated link carries."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_earlier
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.instruments.network import Link, linked_group, lone_rank
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


def coalesced(group):
    with dist._coalescing_manager(group, async_ops=True) as both:
        dist.all_reduce(torch.ones(4), group=group)
        dist.all_reduce(torch.ones(8), group=group)
    both.wait()


def every_collective(rank, group):
    """(name, call, payload, bytes sent, bytes at this rank's end of a link if those are not the same).

    Worked out by hand: 12 elements of 4 bytes, 4 ranks.
    """
    x, four = torch.zeros(12), [torch.zeros(12) for _ in range(4)]
    long = torch.zeros(48)
    at_0 = four if rank == 0 else None
    in_group = {"group": group}
    yield "all_reduce", lambda: dist.all_reduce(x, **in_group), 48, 72
    yield "all_reduce", lambda: imported_earlier(x, **in_group), 48, 72
    yield "all_reduce", lambda: dist.all_reduce(x, **in_group, async_op=True).wait(), 48, 72
    yield "all_reduce", lambda: dist.all_reduce_coalesced([x, x], **in_group), 96, 144
    yield "all_reduce", lambda: coalesced(group), 48, 72
    yield "broadcast", lambda: dist.broadcast(x, 2, **in_group), 48, 0 if rank == 1 else 48, 48
    yield "reduce", lambda: dist.reduce(x, 2, **in_group), 48, 0 if rank == 2 else 48, 48
    yield "all_gather", lambda: dist.all_gather(four, x, **in_group), 48, 144
    yield "all_gather", lambda: dist.all_gather_into_tensor(long, x, **in_group), 48, 144
    figures = (48, 0, 144) if rank == 0 else (48, 48)  # the root receives three
    yield "gather", lambda: dist.gather(x, at_0, 0, **in_group), *figures
    figures = (192, 144) if rank == 0 else (0, 0, 48)
    yield "scatter", lambda: dist.scatter(x, at_0, 0, **in_group), *figures
    yield "reduce_scatter", lambda: dist.reduce_scatter(x, four, **in_group), 192, 144
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(x, long, **in_group), 192, 144
    yield "all_to_all", lambda: dist.all_to_all([torch.zeros(12) for _ in range(4)], four, **in_group), 192, 144
    yield "all_to_all", lambda: dist.all_to_all_single(long, torch.zeros(48), **in_group), 192, 144
    # Rank 0 gets all three rows of each rank, of 8 bytes, and sends none.
    rows, sent, received = torch.zeros(3, 2), [3, 0, 0, 0], [3] * 4 if rank == 0 else [0] * 4
    arriving, figures = torch.zeros(sum(received), 2), (24, 0, 72) if rank == 0 else (24, 24)
    yield "all_to_all", lambda: dist.all_to_all_single(arriving, rows, received, sent, **in_group), *figures
    yield "all_to_all", lambda: functional.all_to_all_single(rows, received, sent, group) + 0, *figures
    yield "barrier", lambda: dist.barrier(**in_group), 0, 0
    yield "all_reduce", lambda: functional.all_reduce(x, "sum", group) + 0, 48, 72
    yield "all_gather", lambda: functional.all_gather_tensor(x, 0, group) + 0, 48, 144
    yield "reduce_scatter", lambda: functional.reduce_scatter_tensor(long, "sum", 0, group) + 0, 192, 144
    yield "all_to_all", lambda: functional.all_to_all_single(long, None, None, group) + 0, 192, 144
    yield "broadcast", lambda: functional.broadcast(x, 0, group) + 0, 48, 0 if rank == 3 else 48, 48


def counted_and_carried(group):
    for name, call, payload, sent, *at_link in every_collective(dist.get_rank(group), group):
        assert wire(call) == ({name: 1}, payload, sent), name
        if hasattr(group, "transfers"):
            (transfer,) = group.transfers
            group.transfers.clear()
            assert [transfer.nbytes] == (at_link or [sent]), name
            assert transfer.ended - transfer.started == pytest.approx(transfer.nbytes * 1e-6, rel=1e-3)


def test_collectives_by_the_rings_formula():
    """Of torch's own groups and on a link; a lone rank as one of four."""

    def ranks():
        counted_and_carried(dist.group.WORLD)
        counted_and_carried(linked_group(Link(0, 1e-6)))

    run_ranks(4, ranks)
    try:
        counted_and_carried(lone_rank(4, Link(0, 1e-6), 3))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", interruptible_group.BACKEND])
def test_messages_in_pairs_and_torchs_own_classes(backend):
    def ranks():
        other = 1 - dist.get_rank()
        x, y = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)

        def both_ways():
            sent = dist.isend(x, other, tag=7)
            dist.irecv(y, other, tag=7).wait()
            sent.wait()

        def batch():
            ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
            [work.wait() for work in dist.batch_isend_irecv(ops)]

        for form in (both_ways, batch):
            counted = count(form)
            assert (counted.calls, counted.messages, counted.bytes_sent) == ({"send": 1, "recv": 1}, 1, 40), form
            assert counted.over_ranks().depth == 1 and not counted.payload_bytes
            assert counted.wire_bytes == counted.bytes_sent

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        assert wire(lambda: model(torch.ones(1, 3)).sum().backward()) == ({"all_reduce": 1}, 32, 32)
        assert wire(lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 0) == ({"all_reduce": 1}, 40, 40)
        if backend == "gloo":
            mesh = DeviceMesh("cpu", [0, 1])
            shards = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
            assert wire(lambda: shards.redistribute(mesh, [Replicate()]).to_local()) == ({"all_gather": 1}, 16, 16)

    run_ranks(2, ranks, backend=backend)


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


def test_depth_and_who_sent_to_whom_in_which_round():
    def ranks():
        rank, n, x = dist.get_rank(), dist.get_world_size(), torch.zeros(3)

        def mixed():
            if rank == 0:
                dist.send(x, 1)
                dist.send(x, 2)
            elif rank == 1:
                dist.recv(x, 0)
                dist.send(x, 3)
            else:
                dist.recv(x)  # from whoever comes
            dist.all_reduce(x)

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
        whole, *others = [count(form).over_ranks() for form in (mixed, star_at_once, from_anyone, two_groups)]
        assert (whole.messages, whole.bytes_sent, whole.max_bytes_sent, whole.max_wire_bytes) == (3, 36, 24, 24 + 18)
        assert whole.log == [Message(1, 0, 1), Message(2, 0, 2), Message(2, 1, 3)]
        assert whole.depth == 2 + 6  # then an all-reduce on a ring of four
        assert [each.depth for each in others] == [1, 3, 2 + 6]

    run_ranks(4, ranks)

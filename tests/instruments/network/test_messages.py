"""What crosses the link: the bytes of each collective, and messages between two ranks, to the moment."""

import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.collectives import ring_all_reduce
from scratch_ddp.instruments.network import Link, linked_group, lone_rank
from scratch_ddp.instruments.network.nic import Nic
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks

ALPHA, BETA = 0.004, 1e-7
COST = ALPHA + BETA * 40_000  # of a message of 10,000 elements


def collectives(rank, group):
    """(call, bytes at this rank's end), worked out by hand: 12 elements of 4 bytes, 4 ranks."""
    x, four, long = torch.zeros(12), [torch.zeros(12) for _ in range(4)], torch.zeros(48)
    at_0 = four if rank == 0 else None
    on_it = functools.partial
    yield on_it(dist.all_reduce, x, group=group), 72
    yield on_it(dist.all_reduce_coalesced, [x, x], group=group), 144
    yield on_it(dist.broadcast, x, 2, group=group), 48
    yield on_it(dist.reduce, x, 2, group=group), 48
    yield on_it(dist.all_gather, four, x, group=group), 144
    yield on_it(dist.all_gather_into_tensor, long, x, group=group), 144
    yield on_it(dist.gather, x, at_0, 0, group=group), 144 if rank == 0 else 48  # the root receives three
    yield on_it(dist.scatter, x, at_0, 0, group=group), 144 if rank == 0 else 48
    yield on_it(dist.reduce_scatter, x, four, group=group), 144
    yield on_it(dist.reduce_scatter_tensor, x, long, group=group), 144
    yield on_it(dist.all_to_all, [torch.zeros(12) for _ in range(4)], four, group=group), 144
    yield on_it(dist.all_to_all_single, long, torch.zeros(48), group=group), 144
    arriving, received = (torch.zeros(12, 1), [3] * 4) if rank == 0 else (torch.zeros(0, 1), [0] * 4)
    to_rank_0 = on_it(dist.all_to_all_single, arriving, torch.zeros(3, 1), received, [3, 0, 0, 0], group=group)
    yield to_rank_0, 36 if rank == 0 else 12  # rank 0 receives from three ranks, and keeps its own rows
    yield on_it(dist.barrier, group=group), 0


def bytes_of_each(group):
    for call, nbytes in collectives(dist.get_rank(group), group):
        group.transfers.clear()
        call()
        assert [transfer.nbytes for transfer in group.transfers] == [nbytes], call.func.__name__
        assert group.transfers[0].ended - group.transfers[0].started == pytest.approx(nbytes * 1e-6, rel=1e-3)


@pytest.mark.filterwarnings("ignore")  # torch renames some; the older names are meant to work too
def test_bytes_of_each_collective():
    run_ranks(4, lambda: bytes_of_each(linked_group(Link(0, 1e-6))))
    for rank in (0, 3):
        try:
            bytes_of_each(lone_rank(4, Link(0, 1e-6), rank))
        finally:
            dist.destroy_process_group()


def test_a_single_rank_sends_nothing():
    group = lone_rank(1, Link(100, 1))
    try:
        dist.all_reduce(torch.ones(4))
        assert group.transfers == []
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_counted_once():
    def counts():
        rank, group = dist.get_rank(), linked_group(Link(1e-5, 0))
        found = []
        for given in (None, group):
            calls = [call for call, _ in collectives(rank, given)]
            with traffic() as counted:
                for call in calls:
                    call()
            found.append((counted.calls, counted.payload_bytes, counted.wire_bytes))
        return found

    for plain, linked in run_ranks(4, counts):
        assert plain == linked


def spans(group, call):
    return [(each.started, each.ended) for each in group.transfers if each.call == call]


def run_pair(function, size=2):
    """Run `function(rank, group, x)` on linked ranks and return each rank's spans: {"send": […], "recv": […]}."""

    def ranks():
        group = linked_group(Link(ALPHA, BETA))
        dist.barrier(group=group)
        function(dist.get_rank(), group, torch.ones(10_000))
        return {call: spans(group, call) for call in ("send", "recv")}

    return run_ranks(size, ranks)


def same(one, other):
    return all(abs(a - b) < 1e-6 for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("late", [0, 1])
def test_a_message_begins_when_both_ends_are_ready(late):
    def one_message(rank, group, x):
        if rank == late:
            time.sleep(0.05)
        dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)

    sender, receiver = run_pair(one_message)
    assert same(sender["send"], receiver["recv"])
    ((started, ended),) = sender["send"]
    assert ended - started == pytest.approx(COST)


def test_from_whoever_comes():
    def anyone(rank, group, x):
        if rank == 2:
            time.sleep(0.05)
            dist.send(x, 0, group=group)
        elif rank == 0:
            assert dist.recv(x, group=group) == 2

    receiver, _, sender = run_pair(anyone, size=3)
    assert same(sender["send"], receiver["recv"])


def test_both_directions_at_once():
    def exchange(rank, group, x):
        sent = dist.isend(x, 1 - rank, group=group)
        dist.irecv(torch.empty(10_000), 1 - rank, group=group).wait()
        sent.wait()

    for log in run_pair(exchange):
        (sent,), (received,) = log["send"], log["recv"]
        assert max(sent[1], received[1]) - min(sent[0], received[0]) < 1.9 * COST  # side by side, not in turn


def test_messages_of_one_rank_go_one_after_the_other():
    """A star: the source's wire is taken by one message after the other, though all receivers wait."""

    def star(rank, group, x):
        if rank == 0:
            time.sleep(0.05)
            for work in [dist.isend(x, peer, group=group) for peer in (1, 2, 3)]:
                work.wait()
        else:
            dist.recv(x, 0, group=group)

    source, *others = run_pair(star, size=4)
    ends = [0.0, *(ended for _, ended in source["send"])]
    assert all(later - earlier >= 0.999 * COST for earlier, later in zip(ends, ends[1:], strict=False))
    assert all(same([mine], other["recv"]) for mine, other in zip(source["send"], others, strict=True))


def test_messages_to_one_rank_come_one_after_the_other():
    """Also where the sender that is waited for first comes last: its message then has the wire after the others."""

    def gather(rank, group, x):
        if rank == 0:
            for work in [dist.irecv(torch.empty(10_000), peer, group=group) for peer in (1, 2, 3)]:
                work.wait()
        else:
            time.sleep(0.15 if rank == 1 else 0.1)  # until all receives have been posted
            dist.send(x, 0, group=group)

    sink = sorted(run_pair(gather, size=4)[0]["recv"])
    assert all(two[0] >= one[1] - 1e-6 for one, two in itertools.pairwise(sink))


def test_a_message_finds_the_wire_taken_by_any_of_those_before():
    nic = Nic()
    transfers = [nic.book("recv", 0, 0.0, 2.0) for _ in range(4)]
    for transfer, ready in zip(transfers, (10.0, 6.0, 11.0, 5.0), strict=True):
        nic.delay(transfer, ready)
    assert [each.started for each in transfers] == [10, 6, 12, 8]


def test_our_ring_takes_its_rounds():
    def ring(rank, group, x):
        ring_all_reduce(x, group=group)
        assert x[0] == 4

    for log in run_pair(ring, size=4):
        assert [ended - started for started, ended in log["send"]] == pytest.approx([ALPHA + BETA * 10_000] * 6)
        first, last = log["send"][0], log["send"][-1]
        assert last[1] - first[0] >= 6 * (ALPHA + BETA * 10_000) - 1e-6


def test_a_call_that_fails_takes_no_link():
    def mistaken():
        group, x = linked_group(Link(10, 0)), torch.ones(2)
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather([torch.ones(2)] * 2, torch.ones(3), group=group)
        assert group.transfers == []
        group.link = Link(ALPHA, 0)
        dist.all_reduce(x, group=group)
        return x.tolist(), [round(each.ended - each.posted, 3) < 1 for each in group.transfers]

    assert run_ranks(2, mistaken) == [([2, 2], [True])] * 2

"""How many rounds follow one another, and who sent to whom in which of them."""

import torch
import torch.distributed as dist

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.instruments.traffic.rounds import Message, Start, Wait, depth
from tests.instruments.traffic_cases import count
from tests.ranks import run_ranks


def test_depth_of_what_waits_and_what_does_not():
    def ranks():
        rank, n, x = dist.get_rank(), dist.get_world_size(), torch.zeros(1)

        def star():
            [dist.send(x, i) for i in range(1, n)] if rank == 0 else dist.recv(x, 0)

        def star_at_once():
            works = [dist.isend(x, i) for i in range(1, n)] if rank == 0 else [dist.irecv(x, 0)]
            [work.wait() for work in works]

        def chain():
            if rank:
                dist.recv(x, rank - 1)
            if rank < n - 1:
                dist.send(x, rank + 1)

        def chain_downwards():
            if rank < n - 1:
                dist.recv(x, rank + 1)
            if rank:
                dist.send(x, rank - 1)

        def from_anyone():  # from 2 over 1 and 0 back to 2; 0 doesn't know who will send
            if rank == 2:
                dist.send(x, 1)
                dist.recv(x, 0)
            elif rank < 2:
                dist.recv(x, 2 if rank == 1 else None)
                dist.send(x, (rank - 1) % 3)

        def exchange_by_parity():  # both neighbours in turn: two rounds though nothing depends on the first
            for first in (0, 1):
                pair = rank ^ 1 if first == 0 else (rank + 1 if rank % 2 else rank - 1) % n
                ops = [dist.P2POp(dist.isend, x, pair), dist.P2POp(dist.irecv, torch.zeros(1), pair)]
                [work.wait() for work in dist.batch_isend_irecv(ops)]

        def two_groups():
            dist.all_reduce(x, group=pair)
            dist.all_reduce(x)

        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        forms = (star, star_at_once, chain, chain_downwards, from_anyone, exchange_by_parity, two_groups)
        return [count(form).over_ranks().depth for form in forms]

    assert run_ranks(4, ranks) == [[3, 1, 3, 3, 3, 2, 2 + 6]] * 4


def message(number, a, b):
    """A message from rank a to rank b: two parties, one round."""
    return Start(number, (a, b), 2, 1)


def test_depth_of_logs():
    ring = [[message(0, r, (r + 1) % 3), message(1, (r - 1) % 3, r), Wait(0), Wait(1)] for r in range(3)]
    assert depth(ring) == 1
    assert depth([]) == depth([[], []]) == 0
    never_waited = [[message(0, 0, 1), message(1, 0, 1)], [message(0, 0, 1), message(1, 0, 1)]]
    assert depth(never_waited) == 1
    # The second message on a channel is the second receive's, also when they are waited for in another order.
    crossed = [
        [message(0, 0, 1), Wait(0), message(1, 0, 1), Wait(1)],
        [message(0, 0, 1), message(1, 0, 1), Wait(1), Wait(0)],
    ]
    assert depth(crossed) == 2
    assert depth([[message(0, 5, 0), Wait(0), message(1, 5, 0), Wait(1)]]) == 2  # from a rank without a log
    assert depth([[Start(0, "all", 2, 6), Wait(0), message(1, 0, 1)], [Start(0, "all", 2, 6), message(1, 0, 1)]]) == 7


def test_depth_after_waiting_for_the_older_message_last():
    sender = [message(0, 0, 1), Wait(0), message(1, 0, 1), Wait(1)]
    between = [message(0, 0, 1), message(1, 0, 1), Wait(1), Wait(0), message(2, 1, 2)]
    assert depth([sender, between, [message(0, 1, 2)]]) == 3


def test_log_says_who_sent_to_whom_in_which_round():
    def ranks():
        rank, x = dist.get_rank(), torch.zeros(1)

        def tree_then_sum():
            if rank == 0:
                dist.send(x, 1)
                dist.send(x, 2)
            elif rank == 1:
                dist.recv(x, 0)
                dist.send(x, 3)
            else:
                dist.recv(x)  # from whoever comes
            dist.all_reduce(x)

        return count(tree_then_sum).over_ranks().log

    assert run_ranks(4, ranks) == [[Message(1, 0, 1), Message(2, 0, 2), Message(2, 1, 3)]] * 4


def test_a_wait_outside_the_block_and_a_block_in_the_middle():
    def ranks():
        early = dist.all_reduce(torch.zeros(2), async_op=True)
        with traffic() as counted:
            early.wait()
            late = dist.all_reduce(torch.zeros(2), async_op=True)
        late.wait()
        return counted.calls, counted.over_ranks().depth

    assert run_ranks(2, ranks) == [({"all_reduce": 1}, 2)] * 2

"""Calls, messages and bytes of what runs inside a block, and that counting changes nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from scratch_ddp.common.accounting import set_up
from scratch_ddp.instruments.traffic import Counts, ring_bytes, ring_rounds, traffic
from scratch_ddp.instruments.traffic.calls import METHODS
from scratch_ddp.instruments.traffic.intercept import listening
from tests.instruments.traffic_cases import PythonGroup, count, every_collective, wire
from tests.ranks import run_ranks


def test_torchs_collectives_by_the_rings_formula():
    def ranks():
        for name, call, payload, sent in every_collective(dist.get_rank(), 4):
            assert wire(call) == ({name: 1}, payload, sent), name

    run_ranks(4, ranks)


def coalesced():
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))
    both.wait()


def test_coalesced_calls_are_one_and_object_collectives_are_what_they_are_made_of():
    def ranks():
        assert wire(coalesced) == ({"all_reduce": 1}, 20, 20)
        small = count(lambda: dist.all_gather_object([None, None], "x"))
        large = count(lambda: dist.all_gather_object([None, None], "x" * 1000))
        assert small.calls == large.calls == {"all_gather": 2}  # the sizes, then the pickles
        assert 990 < large.payload_bytes - small.payload_bytes < 1010

    run_ranks(2, ranks)


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
            whole = counted.over_ranks()
            assert whole.depth == 1 and not counted.payload_bytes
            assert counted.wire_bytes == counted.bytes_sent
            answers.append((counted.calls, counted.messages, counted.bytes_sent, counted.bytes_received))
            assert whole.messages == whole.bytes_sent // 40 and whole.per_rank[rank].calls == counted.calls
        return answers

    sender, receiver = ({"send": 1}, 1, 40, 0), ({"recv": 1}, 0, 0, 40)
    both = ({"send": 1, "recv": 1}, 1, 40, 40)
    assert run_ranks(2, ranks) == [[sender, both, both, sender], [receiver, both, both, receiver]]


def test_totals():
    def ranks():
        rank = dist.get_rank()
        with traffic() as counted:
            for _ in range(rank):
                dist.send(torch.zeros(3), 0)
            if rank == 0:
                for sender in (1, 2, 2):
                    dist.recv(torch.zeros(3), sender)
            dist.all_reduce(torch.zeros(3))
        return counted.over_ranks()

    totals = run_ranks(3, ranks)
    assert totals[0] == totals[1] == totals[2]
    whole = totals[0]
    assert (whole.messages, whole.bytes_sent, whole.max_messages, whole.max_bytes_sent) == (3, 36, 2, 24)
    assert (whole.wire_bytes, whole.max_wire_bytes) == (36 + 3 * 16, 24 + 16)
    assert [counts.messages_received for counts in whole.per_rank] == [3, 0, 0]
    assert whole.depth == 3 + 4  # three receives one after the other, then an all-reduce on a ring of three


def test_set_up_is_counted_apart():
    def ranks():
        with traffic() as counted:
            dist.all_reduce(torch.zeros(2))
            with set_up():
                dist.all_reduce(torch.zeros(3))
                with set_up():
                    dist.barrier()
                with pytest.raises(ZeroDivisionError), set_up():
                    raise ZeroDivisionError
                dist.barrier()
            dist.all_reduce(torch.zeros(2))
        return (
            counted.calls,
            counted.payload_bytes,
            counted.setup.calls,
            counted.setup.payload_bytes,
            counted.over_ranks(),
        )

    for calls, payload, setup_calls, setup_payload, whole in run_ranks(2, ranks):
        assert (calls, payload) == ({"all_reduce": 2}, 16)
        assert (setup_calls, setup_payload) == ({"all_reduce": 1, "barrier": 2}, 12)
        assert whole.depth == 4


def test_nested_blocks_exceptions_and_what_is_put_back():
    owners = dist.ProcessGroup, dist.Work, PythonGroup, torch.futures, torch._C.Future
    names = *METHODS, "wait", "then", "wait_all"
    before = [{name: vars(owner).get(name) for name in names} for owner in owners]

    def ranks():
        x = torch.zeros(1)
        with traffic() as outer:
            with traffic() as empty:  # counts the same as outer so far, and must not be taken for it
                pass
            dist.all_reduce(x)
            with pytest.raises(KeyError), traffic() as inner:
                dist.all_reduce(x)
                raise KeyError
            with pytest.raises(RuntimeError, match="invalid root"):
                dist.broadcast(x, src=99)  # a call that raises is not counted
            dist.all_reduce(x)
            asked = outer.over_ranks()
        dist.all_reduce(x)
        after = [{name: vars(owner).get(name) for name in names} for owner in owners]
        assert all(a == b for a, b in zip(before, after, strict=True))
        assert outer.calls == {"all_reduce": 3} and inner.calls == {"all_reduce": 1}
        assert empty.calls == {} and empty.setup == Counts()
        assert asked.per_rank[0].calls == {"all_reduce": 3} and outer.setup.calls == {"all_gather": 2}
        assert asked.depth == 6

    run_ranks(2, ranks)


def test_waiting_for_a_future_or_for_what_follows_it_is_waiting_for_the_call():
    class Waits:
        def __init__(self):
            self.seen = []

        def started(self, call):
            pass

        def waited(self, call):
            self.seen.append(call.name)

    def ranks():
        waits, numbers = Waits(), []
        with listening(waits):

            def future():  # a tensor each: nobody waits for the first before the second starts
                return dist.all_reduce(torch.ones(1), async_op=True).get_future()

            never = future().then(lambda done: done.value())
            numbers.append(len(waits.seen))
            future().wait()
            numbers.append(len(waits.seen))
            result = future().then(lambda done: done.value()[0] + 1).then(lambda done: done.value() * 3).wait()
            numbers.append(len(waits.seen))
            torch.futures.wait_all([future(), future()])
            numbers.append(len(waits.seen))
        never.wait()
        dist.barrier()
        return numbers, result

    for numbers, result in run_ranks(2, ranks):
        assert numbers == [0, 1, 2, 4]
        assert result == (2 + 1) * 3


def ddp_step(group=None):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    with traffic() as counted:
        model(torch.ones(1, 3)).sum().backward()
    return counted


@pytest.mark.parametrize("backend", ["gloo", "python_group"])
def test_groups_of_both_kinds_under_torchs_own_classes(backend):
    def ranks():
        step = ddp_step()
        assert (step.calls, step.payload_bytes, step.wire_bytes) == ({"all_reduce": 1}, 32, 32)
        x, other = torch.zeros(4), 1 - dist.get_rank()

        def messages():
            work = dist.isend(x, other)
            dist.recv(torch.zeros(4), other)
            work.wait()

        counted = count(messages)
        assert (counted.calls, counted.bytes_sent) == ({"send": 1, "recv": 1}, 16)
        assert counted.over_ranks().depth == 1
        assert wire(lambda: dist.all_reduce(x)) == ({"all_reduce": 1}, 16, 16)
        assert wire(lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 0) == ({"all_reduce": 1}, 16, 16)
        if backend == "gloo":
            mesh = DeviceMesh("cpu", [0, 1])
            shards = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
            assert wire(lambda: shards.redistribute(mesh, [Replicate()]).to_local()) == ({"all_gather": 1}, 16, 16)

    run_ranks(2, ranks, backend=backend)


def test_several_groups():
    def ranks():
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = pairs[rank % 2]
        with traffic() as counted:
            dist.all_reduce(torch.zeros(8), group=mine)
            dist.all_reduce(torch.zeros(8))
            dist.broadcast(torch.zeros(8), src=rank % 2 + 2, group=mine)
        assert counted.wire_bytes == 32 + 48 + (32 if rank >= 2 else 0)  # the source sends, the last does not
        whole = counted.over_ranks(mine)
        assert len(whole.per_rank) == 2 and whole.wire_bytes == 2 * 80 + 32

    run_ranks(4, ranks)


def test_the_value_is_what_it_would_be_without_counting():
    def ranks():
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        x = torch.ones(1, 3) * dist.get_rank()
        model(x).sum().backward()
        plain = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        with traffic():
            model(x).sum().backward()
        return all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters(), strict=True))

    assert run_ranks(2, ranks) == [True, True]


@pytest.mark.parametrize(
    ("call", "payload", "n", "sent", "rounds"),
    [
        ("all_reduce", 100, 4, 150, 6),
        ("all_gather", 25, 4, 75, 3),
        ("reduce_scatter", 100, 4, 75, 3),
        ("barrier", 0, 3, 0, 4),
    ],
)
def test_formulas(call, payload, n, sent, rounds):
    assert ring_bytes(call, payload, n, 0) == sent and ring_rounds(call, n) == rounds
    assert ring_bytes(call, payload, 1, 0) == 0 == ring_rounds(call, 1)


def test_no_formula_for_an_unknown_call():
    with pytest.raises(ValueError, match="gossip"):
        ring_bytes("gossip", 1, 2, 0)

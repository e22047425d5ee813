"""Renewal of process groups after operations that never ended: the same groups go on, or refuse clearly."""

import datetime
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.rank.interruptible_work import Connections
from tests.cells.cases import on_interruptible_ranks


def _ones_everywhere(*groups):
    sums = []
    for group in groups:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        sums.append(tensor[0].item())
    return sums


def test_renewal_frees_the_default_group_and_every_other():
    """Rank 0 starts what nobody answers, in three groups; after renewal the very same groups and the mesh work."""

    def abandoned():
        rank = dist.get_rank()
        both, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        groups = [dist.group.WORLD, both, mesh.get_group()]
        assert _ones_everywhere(*groups) == [3, 3, 3]
        if rank == 0:
            stuck = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
            stuck += [dist.irecv(torch.ones(2), src=1, group=group) for group in (None, pair)]
            time.sleep(0.1)
            assert not any(work.is_completed() for work in stuck)
        assert interruptible_group.renew_groups(timeout=10) == []
        sums = _ones_everywhere(*groups)
        if rank < 2:
            sums += _ones_everywhere(pair)
        return sums, _ones_everywhere(mesh.get_group()), dist.get_rank(both)

    assert on_interruptible_ranks(3, abandoned) == [
        ([3, 3, 3, 2], [3], 0),
        ([3, 3, 3, 2], [3], 1),
        ([3, 3, 3], [3], 2),
    ]


def test_renewed_groups_serve_functional_collectives_and_a_wrapped_model():
    """Both reach gloo on ways of their own, past the methods of the group."""

    def after_renewal():
        import torch.distributed._functional_collectives as functional
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        sharded = fully_shard(torch.nn.Linear(4, 4))
        results = []
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
            sharded(torch.ones(1, 4)).sum().backward()
            gathered = functional.all_gather_tensor(torch.ones(1) * dist.get_rank(), 0, dist.group.WORLD) + 0
            results.append((model.module.weight.grad[0, 0].item(), gathered.tolist()))
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1), async_op=True)
            interruptible_group.renew_groups(timeout=10)
        return results

    assert on_interruptible_ranks(2, after_renewal) == [[(0.5, [0, 1])] * 3] * 2


def test_an_operation_that_does_not_notice_the_end_of_its_connection_keeps_nobody(monkeypatch):
    """As now and then a send of gloo's: nobody waits until the time limit of the group for it."""

    def renew():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            stuck = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        else:
            stuck = dist.irecv(torch.ones(1), src=0, group=group)
        began = time.monotonic()
        interruptible_group.renew_groups(timeout=10)
        took = time.monotonic() - began
        return _ones_everywhere(dist.group.WORLD, group), stuck.is_completed(), took

    monkeypatch.setattr(Connections, "end", lambda self: None)
    for sums, ended, took in on_interruptible_ranks(2, renew):
        assert sums == [2, 2] and not ended
        assert 1 <= took < 5


@pytest.mark.skipif(sys.platform == "darwin", reason="gloo's sockets can't be told from others there")
def test_a_connection_of_the_learners_own_that_is_made_meanwhile_outlives_the_group():
    def end_with_company():
        store, company = dist.PrefixStore("company", dist.distributed_c10d._get_default_store()), []

        def make():
            server = socket.create_server(("127.0.0.1", 0))
            company.extend([socket.create_connection(server.getsockname()), server.accept()[0]])
            return dist.ProcessGroupGloo(store, dist.get_rank(), 2, timeout=datetime.timedelta(seconds=60))

        connections = Connections(make)
        dist.barrier()
        work = connections.made.allreduce([torch.ones(1)]) if dist.get_rank() == 0 else None
        connections.end()
        if work is not None:
            with pytest.raises(RuntimeError):
                work.wait()
        company[0].sendall(b"still here")
        return company[1].recv(100)

    assert on_interruptible_ranks(2, end_with_company) == [b"still here"] * 2


def test_a_group_that_one_rank_has_lost_refuses_clearly():
    def lose_it():
        group = dist.new_group([0, 1])
        dist.barrier(group)  # rank 0 must have made it
        if dist.get_rank() == 1:
            group.retire()  # as if rank 1 had been replaced and had never known it
        retired = interruptible_group.renew_groups(timeout=10)
        assert _ones_everywhere(dist.group.WORLD) == [2]
        with pytest.raises(RuntimeError, match="made before a rank was replaced.*make the group"):
            dist.all_reduce(torch.ones(1), group=group)
        return len(retired)

    assert on_interruptible_ranks(2, lose_it) == [1, 0]


def test_groups_of_one_name_and_other_members_are_not_joined():
    """Ranks that have counted groups differently name them alike: [0, 1] on ranks 0 and 1, [2] on rank 2."""

    def made_unevenly():
        alike, rank = dist.new_group([0, 1, 2]), dist.get_rank()
        dist.distributed_c10d._store_based_barrier = lambda *_: None  # which would wait for those that never come
        odd = dist.new_group([0, 1]) if rank < 2 else None
        dist.barrier()  # made at once they would mix up already in torch's own store
        odd = odd or dist.new_group([2])
        retired = interruptible_group.renew_groups(timeout=10)
        return retired, _ones_everywhere(dist.group.WORLD, alike, odd)

    assert on_interruptible_ranks(3, made_unevenly) == [([], [3, 3, 2]), ([], [3, 3, 2]), ([], [3, 3, 1])]

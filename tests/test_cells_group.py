"""The process group of rank cells: everything that plain gloo carries, and renewal after what never ended."""

import datetime
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from group_cases import CASES, run_all
from ranks import RankFailed, run_ranks

from scratch_ddp.cells import watched_group, watched_work


def on_watched_ranks(world_size, function, *args, timeout=30):
    return run_ranks(world_size, function, *args, backend=watched_group.BACKEND, timeout=timeout)


@pytest.fixture(scope="module")
def both():
    """{backend: [what rank 0 got in each case, rank 1, …]}"""
    return {backend: run_ranks(4, run_all, backend=backend, timeout=100) for backend in ("gloo", watched_group.BACKEND)}


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_gives_what_plain_gloo_gives(both, case):
    for rank, (plain, watched) in enumerate(zip(both["gloo"], both[watched_group.BACKEND], strict=True)):
        assert not isinstance(plain[case], str), f"the case itself is wrong: {plain[case]}"
        assert _same(plain[case], watched[case]), f"rank {rank}: gloo gave {plain[case]}, watched {watched[case]}"


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


def test_is_watched_in_every_kind_of_group():
    def kinds():
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        groups = [dist.group.WORLD, dist.new_group([0, 1]), mesh["a"].get_group(), mesh["b"].get_group()]
        return [type(group).__name__ for group in groups], dist.get_backend()

    assert on_watched_ranks(2, kinds) == [(["WatchedGroup"] * 4, "watched")] * 2


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
        assert watched_group.renew_groups(timeout=10) == []
        sums = _ones_everywhere(*groups)
        if rank < 2:
            sums += _ones_everywhere(pair)
        return sums, _ones_everywhere(mesh.get_group()), dist.get_rank(both)

    assert on_watched_ranks(3, abandoned) == [
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
            watched_group.renew_groups(timeout=10)
        return results

    assert on_watched_ranks(2, after_renewal) == [[(0.5, [0, 1])] * 3] * 2


def test_thirty_renewals():
    def renew_often():
        group = dist.new_group([0, 1])
        sums = []
        for round_ in range(30):
            if round_ % 3 == 0 and dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1), group=group, async_op=True)
            watched_group.renew_groups(timeout=10)
            sums += _ones_everywhere(dist.group.WORLD, group)
        return set(sums), threading.active_count()

    for sums, threads in on_watched_ranks(2, renew_often):
        assert sums == {2}
        assert threads < 20  # the helpers that are stuck, and a few more


def test_a_group_that_one_rank_has_lost_refuses_clearly():
    def lose_it():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            group.retire()  # as if rank 1 had been replaced and had never known it
        retired = watched_group.renew_groups(timeout=10)
        assert _ones_everywhere(dist.group.WORLD) == [2]
        with pytest.raises(RuntimeError, match="made before a rank was replaced.*make the group"):
            dist.all_reduce(torch.ones(1), group=group)
        return len(retired)

    assert on_watched_ranks(2, lose_it) == [1, 0]


def test_renewal_names_the_ranks_that_did_not_come():
    def alone():
        if dist.get_rank() == 1:
            time.sleep(2)
            return None
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not renew their process groups within 0.5 s"):
            watched_group.renew_groups(timeout=0.5)

    on_watched_ranks(2, alone)


def test_wait_with_a_time_limit_raises_and_names_the_operation():
    def impatient():
        tensor = torch.ones(2)
        if dist.get_rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(RuntimeError, match="all_reduce: not through after 0.2 s"):
                work.wait(datetime.timedelta(seconds=0.2))
            dist.barrier(group=other)
            work.wait()
        else:
            dist.barrier(group=other)
            dist.all_reduce(tensor)
        return tensor.tolist()

    def with_group():
        global other
        other = dist.new_group([0, 1])
        return impatient()

    assert on_watched_ranks(2, with_group) == [[2, 2]] * 2


def test_a_peer_that_dies_is_gloos_error_in_the_waiting_rank():
    def outlive():
        if dist.get_rank() == 1:
            os._exit(0)
        with pytest.raises(RuntimeError, match="closed by peer|reset by peer|Connection"):
            dist.all_reduce(torch.ones(1))
        raise ValueError("rank 0 went on")

    with pytest.raises(RankFailed) as failed:
        on_watched_ranks(2, outlive)
    assert "rank 0 went on" in failed.value.failures[0]


def test_errors_of_gloo_arrive_at_the_call():
    def mistakes():
        with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
            dist.all_gather([torch.ones(2)] * 2, torch.ones(3))
        dist.barrier()
        return str(raised.value)

    for watched, plain in zip(on_watched_ranks(2, mistakes), run_ranks(2, mistakes), strict=True):
        assert watched.split("\n")[0] == plain.split("\n")[0]


def test_the_main_thread_says_what_it_waits_in():
    def watch_it():
        seen = []
        if dist.get_rank() == 0:
            reader = threading.Thread(target=lambda: (time.sleep(0.3), seen.append(watched_work.waiting_in())))
            reader.start()
            dist.all_reduce(torch.ones(4, dtype=torch.float64))
            reader.join()
            return seen[0], watched_work.waiting_in()
        time.sleep(0.8)
        dist.all_reduce(torch.ones(4, dtype=torch.float64))

    call, afterwards = on_watched_ranks(2, watch_it)[0]
    assert (call["operation"], call["given"]) == ("all_reduce", "4 × float64")
    assert afterwards is None


def test_threads_may_use_groups_of_their_own_at_once():
    def both_at_once():
        groups = [dist.new_group([0, 1]) for _ in range(4)]
        tensors = [torch.ones(1000) * (i + 1) for i in range(4)]

        def work(i):
            for _ in range(20):
                dist.all_reduce(tensors[i], op=dist.ReduceOp.AVG, group=groups[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [tensor[0].item() for tensor in tensors]

    assert on_watched_ranks(2, both_at_once) == [[1, 2, 3, 4]] * 2

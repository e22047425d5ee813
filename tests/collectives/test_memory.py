"""Memory that collectives receive into is kept from call to call, and never handed out twice at a time."""

import threading

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from scratch_ddp.collectives import scratch
from scratch_ddp.collectives.scratch import scratch_like, scratch_memory
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def nothing_kept():
    scratch._pool.block = torch.empty(0, dtype=torch.uint8)


def taken(*likes):
    with scratch_memory():
        return [scratch_like(like) for like in likes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_memory_again_and_apart_within_a_call(dtype):
    one, other, none = torch.empty(5, 3, dtype=dtype), torch.empty(7, dtype=dtype), torch.empty(0, 2, dtype=dtype)
    taken(one, none, other)
    second, third = taken(one, none, other), taken(one, none, other)
    for like, a, b in zip((one, none, other), second, third, strict=True):
        assert a.shape == like.shape and a.dtype == dtype
        assert a.data_ptr() == b.data_ptr() or not like.numel()
    assert second[0].data_ptr() + second[0].nbytes <= second[2].data_ptr()
    assert scratch_like(one).data_ptr() != third[0].data_ptr()  # outside of a call


def test_each_thread_has_its_own():
    elsewhere, like = [], torch.empty(100)
    thread = threading.Thread(target=lambda: elsewhere.extend([*taken(like), *taken(like)]))
    taken(like)
    thread.start()
    thread.join()
    assert elsewhere[1].data_ptr() != taken(like)[0].data_ptr()


def test_no_more_is_kept_than_is_said(monkeypatch):
    monkeypatch.setattr(scratch, "MOST", 1000)
    taken(torch.empty(1000, dtype=torch.uint8))
    assert len(scratch._pool.block) == 0
    taken(torch.empty(900, dtype=torch.uint8))
    assert 900 <= len(scratch._pool.block) <= 1000


def test_after_an_error_nothing_is_used_again():
    like = torch.empty(100)
    taken(like)
    (before,) = taken(like)
    with pytest.raises(KeyboardInterrupt), scratch_memory():
        scratch_like(like)
        raise KeyboardInterrupt  # a receive may still be writing
    taken(like)
    assert taken(like)[0].data_ptr() != before.data_ptr()


def test_results_are_the_callers_own():
    def ranks():
        results = []
        for call in range(3):
            mine = torch.full((1001,), 10.0**call * (dist.get_rank() + 1))
            ours.reduce_scatter(part := torch.empty(1001), [mine] * 3)
            results += [ours.ring_all_reduce(mine.clone()), ours.false_ring_all_reduce(mine.clone()), part]
        assert [each.unique().tolist() for each in results] == [[6.0 * 10 ** (i // 3)] for i in range(9)]

    run_ranks(3, ranks)

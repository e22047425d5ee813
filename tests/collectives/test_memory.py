"""Memory that collectives receive into is kept from call to call, and never handed out twice at a time."""

import threading

import pytest
import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from scratch_ddp.collectives import scratch
from scratch_ddp.collectives.scratch import scratch_like, scratch_memory
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.bool, torch.int16, torch.complex128, torch.bfloat16, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def nothing_kept():
    scratch._pool.block = torch.empty(0, dtype=torch.uint8)


def taken(*likes):
    with scratch_memory():
        return [scratch_like(like) for like in likes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_memory_again_and_apart_within_a_block(dtype):
    one, other, none = torch.empty(5, 3, dtype=dtype), torch.empty(7, dtype=dtype), torch.empty(0, 2, dtype=dtype)
    first = taken(one, none, other)
    second, third = taken(one, none, other), taken(one, none, other)
    for like, a, b, c in zip((one, none, other), first, second, third, strict=True):
        assert a.shape == b.shape == like.shape and a.dtype == b.dtype == dtype
        assert b.data_ptr() == c.data_ptr() or not like.numel()
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in second if each.numel())
    assert spans[0][1] <= spans[1][0]


def test_a_block_in_a_block_takes_other_memory():
    like = torch.empty(100)
    taken(like, like)
    with scratch_memory():
        outer = scratch_like(like)
        (inner,) = taken(like)
        (again,) = taken(like)
        assert outer.data_ptr() != inner.data_ptr() == again.data_ptr()


def test_what_is_not_kept():
    like = torch.empty(100)
    (first,) = taken(like)
    taken(like)
    with scratch_memory():
        assert torch.empty_like(like, dtype=torch.float64).dtype == torch.float64
        assert scratch_like(like.view(10, 10).t()).stride() == (1, 10)
        assert torch.zeros_like(like).equal(torch.zeros(100))
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.extend([*taken(like), *taken(like)]))
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
        rank, results = dist.get_rank(), []
        for call in range(3):
            mine = torch.full((1001,), 10.0**call * (rank + 1))
            results.append(ours.ring_all_reduce(mine.clone()))
            results.append(ours.false_ring_all_reduce(mine.clone()))
            ours.reduce_scatter(part := torch.empty(1001), [mine] * 3)
            results.append(part)
            ours.reduce(whole := mine.clone(), 0)
            results += [whole] if rank == 0 else []
        return all(
            torch.unique(each).tolist() == [6.0 * 10 ** (i // (len(results) // 3))] for i, each in enumerate(results)
        )

    assert run_ranks(3, ranks) == [True] * 3


def test_an_input_that_is_another_place_of_the_list():
    """It must be sent as it was, not as it becomes."""

    def ranks():
        rank = dist.get_rank()
        places = [torch.full((4,), float(rank)) for _ in range(3)]
        ours.all_gather(places, places[(rank + 1) % 3])
        return [place[0].item() for place in places]

    assert run_ranks(3, ranks) == [[0.0, 1.0, 2.0]] * 3

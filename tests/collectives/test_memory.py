"""Memory that collectives receive into is kept from call to call, and never handed out twice at a time."""

import concurrent.futures

import pytest
import torch

from scratch_ddp.collectives import scratch
from scratch_ddp.collectives.scratch import scratch_like, scratch_memory


def taken(nbytes: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """Where a call's memory of two places is."""
    with scratch_memory():
        found = [scratch_like(torch.empty(nbytes // dtype.itemsize, dtype=dtype), place) for place in (0, 1)]
    assert all(each.nbytes == nbytes and each.dtype == dtype for each in found)
    return [each.data_ptr() for each in found]


def test_the_same_memory_again_and_apart_within_a_call():
    first = taken(400)
    assert len(set(first)) == 2 and taken(320, torch.complex128) == first
    with concurrent.futures.ThreadPoolExecutor() as threads:
        assert not set(threads.submit(taken, 400).result()) & set(first)
    with pytest.raises(KeyboardInterrupt), scratch_memory():
        raise KeyboardInterrupt
    assert not scratch._kept.blocks, "a receive may still be writing"

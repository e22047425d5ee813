"""Messages, bytes and depth of the collectives are those that their docstrings say."""

import math

import pytest
import torch

from scratch_ddp import collectives as ours
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks


def costs(n, elements):
    """Of each collective: (messages, bytes sent, of the rank that sends most, depth), with what it should be."""
    size = 4 * elements
    parts = [torch.zeros(elements) for _ in range(n)]
    tensor, last, log = torch.zeros(elements), n - 1, math.ceil(math.log2(n))
    everyone = (n * (n - 1), n * (n - 1) * size, (n - 1) * size, min(1, n - 1))
    ring = (2 * n * (n - 1), 2 * (n - 1) * size, None, 2 * (n - 1))
    steps = [
        (ours.star_broadcast, (tensor, last), (n - 1, (n - 1) * size, (n - 1) * size, n - 1)),
        (ours.tree_broadcast, (tensor, last), (n - 1, (n - 1) * size, log * size, log)),
        (ours.reduce, (tensor, last), (n - 1, (n - 1) * size, min(1, n - 1) * size, log)),
        (ours.all_gather, (parts, tensor), everyone),
        (ours.reduce_scatter, (tensor, parts), everyone),
        (ours.ring_all_reduce, (tensor,), ring),
        (ours.false_ring_all_reduce, (tensor,), (2 * n * (n - 1), n * ring[1], 2 * (n - 1) * size, 2 * (n - 1))),
    ]
    for function, args, expected in steps:
        with traffic() as counted:
            function(*args)
        whole = counted.over_ranks()
        most = None if expected[2] is None else whole.max_bytes_sent
        yield function.__name__, (whole.messages, whole.bytes_sent, most, whole.depth), expected
        assert counted.setup.calls == {"all_reduce": 1} and counted.setup.payload_bytes == 24
        assert not set(counted.calls) - {"send", "recv"}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_costs_are_those_of_the_docstrings(n):
    def ranks():
        for elements in (840, 3, 0):
            for name, counted, expected in costs(n, elements):
                assert counted == expected, (name, elements)
        with traffic() as counted:
            ours.ring_all_reduce(torch.zeros(840))
        assert counted.bytes_sent == 2 * (n - 1) * 840 * 4 // n  # 840 can be divided by all these n

    run_ranks(n, ranks)

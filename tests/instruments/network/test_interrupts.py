"""An interrupt in plain Python: the wait ends at once, and the next operation has the link for itself."""

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.instruments.network import Link, linked_group, lone_rank
from tests.ranks import run_ranks

pytestmark = pytest.mark.measures_time


def all_reduce(group):
    dist.all_reduce(torch.ones(1), group=group)


def all_reduce_with_a_limit(group):
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(datetime.timedelta(seconds=60))


def messages(group):
    """To the next rank, and from the one before it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = dist.isend(torch.ones(1), group=group, group_dst=(rank + 1) % size)
    dist.recv(torch.ones(1), group=group, group_src=(rank - 1) % size)
    sent.wait()


OPERATIONS = [all_reduce, all_reduce_with_a_limit, messages]


def interrupted(operation, group) -> tuple[float, float]:
    """Seconds in an operation of a minute that is interrupted after 0.3 s, and then in the same on a quick link."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    group.link = Link(60, 0)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        operation(group)
    ended = time.monotonic()
    group.link = Link(0.001, 0)
    operation(group)
    return ended - began, time.monotonic() - ended


@pytest.mark.parametrize("operation", OPERATIONS)
def test_alone(operation):
    stopped, after = interrupted(operation, lone_rank(2, None))
    dist.destroy_process_group()
    assert stopped < 2 and after < 1


def on_a_link(operation):
    return interrupted(operation, linked_group(None))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_a_peer(operation):
    """All ranks are interrupted, as by Ctrl-C."""
    assert all(stopped < 2 and after < 1 for stopped, after in run_ranks(2, on_a_link, operation))

"""What torch allocates, against tensors of known size; and a limit that really refuses."""

import os
import threading

import pytest
import torch
from torch import nn

from scratch_ddp.instruments.memory import memory_use, process_limit
from scratch_ddp.instruments.profiler import _quietly
from tests.ranks import RankFailed, run_ranks

MEGA = 1_000_000


def test_every_figure_of_known_tensors():
    with memory_use() as used:
        kept = torch.empty(250_000)  # 1 MB
        passing = torch.empty(1_000_000, dtype=torch.int16)  # 2 MB
        del passing
        torch.empty(500_000)  # 2 MB, held for no time
    assert used.peak_bytes == 3 * MEGA
    assert used.kept_bytes == kept.nbytes == 1 * MEGA
    assert used.allocated_bytes == 5 * MEGA
    assert used.allocations == 3
    assert [held for _, held in used.over_time] == [1 * MEGA, 3 * MEGA, 1 * MEGA, 3 * MEGA, 1 * MEGA]
    times = [seconds for seconds, _ in used.over_time]
    assert times == sorted(times) and 0 <= times[0] < times[-1] < 60


def test_what_an_operation_allocates_inside_itself_counts():
    rows = torch.randn(1000, 256)
    with memory_use() as used:
        rows.logsumexp(dim=1)  # its exponentials are never seen in Python
    assert used.peak_bytes > rows.nbytes
    assert used.kept_bytes == 0


def test_freeing_an_older_tensor_makes_room():
    old = torch.empty(250_000)
    storage = torch.empty(500_000)
    with memory_use() as used:
        del old
        storage.untyped_storage().resize_(0)
        new = torch.empty(500_000)
    assert used.peak_bytes == 0  # 3 MB were given back before 2 MB were taken
    assert used.kept_bytes == new.nbytes - 3 * MEGA


def test_backward_and_optimizer_state():
    model = nn.Linear(500, 500, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    with memory_use() as used:
        model(torch.ones(1, 500)).sum().backward()
        optimizer.step()
    gradient_and_state = 3 * model.weight.nbytes
    assert gradient_and_state <= used.kept_bytes < gradient_and_state + 1000


def test_another_threads_tensors_are_seen():
    made = []
    with memory_use() as used:
        thread = threading.Thread(target=lambda: made.append(torch.empty(250_000)))
        thread.start()
        thread.join()
    assert used.kept_bytes == used.peak_bytes == 1 * MEGA


def test_an_empty_block_uses_nothing_and_an_exception_leaves_the_figures():
    with memory_use() as used:
        pass
    assert (used.peak_bytes, used.kept_bytes, used.allocations, used.over_time) == (0, 0, 0, [])
    with pytest.raises(ZeroDivisionError), memory_use() as used:
        torch.empty(250_000)
        1 / 0  # noqa: B018
    assert used.peak_bytes == 1 * MEGA


def test_one_at_a_time():
    with memory_use(), pytest.raises(RuntimeError, match="profiler is on already"), memory_use():
        pass
    with memory_use() as used:
        torch.empty(25)
    assert used.peak_bytes == 100


def test_a_device_without_figures():
    with pytest.raises(ValueError, match="not on 'mps'"), memory_use("mps"):
        pass


def test_the_profiler_is_quiet_and_others_are_heard(capfd):
    with memory_use():
        os.write(2, b"inside\n")
    assert capfd.readouterr().err == "inside\n"
    with _quietly():
        os.write(2, b"USDT:2026-01-31 12:00:00 17:17 SyncActivityProfilerHandler.cpp:52] profiler_start\n")
        os.write(2, b"ERROR:2026-01-31 12:00:00 17:17 DeviceProperties.cpp:48] gpuGetDeviceCount failed\n")
        os.write(2, b"ERROR: mine\nand no end of line")
    assert capfd.readouterr().err == "ERROR: mine\nand no end of line"


@pytest.mark.parametrize("size", [4_000_000, 500_000, 80_000])
def test_the_limit_holds_to_within_one_tensor(size):
    def fill_up():
        left_over = [torch.ones(300_000) for _ in range(40)][::2]  # malloc keeps the gaps for later
        held = []
        refused = pytest.raises(torch.OutOfMemoryError, match=f"rank 0: no room for a tensor of {size:,} bytes")
        with refused as caught, process_limit(20 * MEGA):
            while len(held) < 1000:
                held.append(torch.ones(size // 4))
        taken = len(held) * size
        held.clear()
        return taken, len(left_over), torch.ones(100 * MEGA // 4).sum().item(), str(caught.value)

    ((taken, _, summed, text),) = run_ranks(1, fill_up)
    assert 20 * MEGA - size - MEGA <= taken <= 21 * MEGA
    assert summed == 25 * MEGA  # the process goes on, and may take what it likes
    assert "this process may take 20,000,000 bytes" in text


def test_what_is_freed_may_be_taken_again_and_numpy_is_refused_too():
    def take_turns():
        import numpy

        with process_limit(20 * MEGA):
            for _ in range(10):
                torch.ones(4 * MEGA)
        with pytest.raises(torch.OutOfMemoryError, match="no room"), process_limit(20 * MEGA):
            numpy.ones(4 * MEGA)

    run_ranks(1, take_turns)


def test_the_limit_is_lifted_for_other_errors_and_a_rank_is_named():
    def other_error():
        with pytest.raises(RuntimeError, match="^mine$"), process_limit(MEGA):
            raise RuntimeError("mine")
        torch.ones(25 * MEGA)
        with process_limit(MEGA):
            torch.ones(25 * MEGA if torch.distributed.get_rank() == 1 else 1)

    with pytest.raises(RankFailed) as failed:
        run_ranks(2, other_error)
    assert "rank 1: no room for a tensor of 100,000,000 bytes" in failed.value.failures[1]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_bad_limits(limit):
    with pytest.raises(ValueError, match="positive whole number"), process_limit(limit):
        pass

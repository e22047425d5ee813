"""What torch allocates, against tensors of known size; a limit that really refuses; what a rank holds, by name."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import scratch_ddp.cells.rank.interruptible_group  # noqa: F401  (registers the backend)
from scratch_ddp.instruments.memory import Held, MemoryLedger, process_limit
from scratch_ddp.instruments.memory.use import memory_use
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


def test_an_exception_leaves_the_figures():
    with pytest.raises(ZeroDivisionError), memory_use() as used:
        torch.empty(250_000)
        1 / 0  # noqa: B018
    assert used.peak_bytes == 1 * MEGA


FILL_UP = """
import torch
from scratch_ddp.instruments.memory import process_limit
size, held = {size}, []
torch.ones(5_000_000)  # freed at once: from now on malloc keeps blocks up to this size
kept, freed = [], []
for _ in range(30):
    freed.append(torch.ones(400_000))
    kept.append(torch.ones(20_000))
del freed
try:
    with process_limit(20_000_000):
        while len(held) < 1000:
            held.append(torch.ones(size // 4))
except torch.OutOfMemoryError as error:
    print(len(held) * size, error)
held.clear()
print(torch.ones(25_000_000).sum().item())
"""


@pytest.mark.parametrize("size", [4_000_000, 500_000])
def test_the_limit_holds(size):
    """Also where malloc has kept 48 MB of tensors that were freed before."""
    ended = subprocess.run(
        [sys.executable, "-c", FILL_UP.format(size=size)], capture_output=True, text=True, timeout=60
    )
    refused, summed = ended.stdout.splitlines()
    taken, words = refused.split(" ", 1)
    assert 20 * MEGA - size - MEGA <= int(taken) <= 20 * MEGA
    assert words.startswith(f"no room for a tensor of {size:,} bytes: this process may take 20,000,000 bytes")
    assert float(summed) == 25 * MEGA  # the process goes on, and may take what it likes


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


KINDS = {"own": "w1 w2", "borrowed": "W1", "gradients": "G g1"}


def weight(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 4, dtype=torch.float64)


def gathered(shard: torch.Tensor) -> torch.Tensor:
    whole = shard.new_empty(dist.get_world_size() * len(shard), 4)
    dist.all_gather(list(whole.split(len(shard))), shard)
    return whole


def one_layer():
    """Gather, use, free, reduce-scatter: what the ledger says, and the most that was held in each moment."""
    m = SimpleNamespace(w1=weight(1), w2=weight(1))
    ledger = MemoryLedger(m, **KINDS)
    with ledger("gather"):
        m.W1 = gathered(m.w1)
    with ledger("gradient"):
        m.G = m.W1 * 2
    with ledger("free"):
        del m.W1
    with ledger("reduce-scatter"):
        m.g1 = torch.empty_like(m.w1)
        dist.reduce_scatter(m.g1, list(m.G.split(1)))
        del m.G
    told = [str(moment) for moment in ledger.moments], [moment.peak for moment in ledger.moments], ledger.sent
    again = MemoryLedger(m, **KINDS)
    for _ in range(50):
        with again("gather and free"):
            m.W1 = gathered(m.w1)
            del m.W1
    return *told, {(moment.elements("borrowed"), moment.peak) for moment in again.moments}


@pytest.mark.parametrize("backend", ["interruptible", "gloo"])
def test_a_layer_on_four_ranks(backend):
    """The same on every rank and backend: what gloo copies on its own is not counted, nor what it lets go of late."""
    lines, peaks, sent, freed = run_ranks(4, one_layer, backend=backend)[0]
    assert lines == [
        "gather             sent 12  own 8 (w1 w2), borrowed 16 (W1)",
        "gradient                    own 8 (w1 w2), borrowed 16 (W1), gradients 16 (G)",
        "free                        own 8 (w1 w2), gradients 16 (G)",
        "reduce-scatter     sent 12  own 8 (w1 w2), gradients 4 (g1)",
    ]
    assert peaks == [24, 40, 40, 28] and sent == 24
    assert freed == {(0, 8 + 4 + 16)}  # fifty times, and never more


def test_views_what_has_no_name_and_what_autograd_keeps_are_held():
    m = SimpleNamespace(W1=weight(), w1=weight(1).requires_grad_())
    ledger, hidden = MemoryLedger(m, **KINDS), []
    with ledger("look at a row"):
        m.row = m.W1[0]
    with ledger("free"):
        del m.W1
    assert [moment.held[1:] for moment in ledger.moments] == [
        (Held("W1", "borrowed", 16),),
        (Held("row", "other", 16),),
    ]
    with ledger("hide"):
        del m.row
        hidden.append(weight() + 1)
    with ledger("let go"):
        hidden.clear()
    assert [moment.held[1:] for moment in ledger.moments[2:]] == [(Held("unnamed", "other", 16),), ()]
    with ledger("forward"):
        m.loss = (m.w1 * 2).exp().sum()
    with ledger("backward"):
        m.loss.backward()
    with ledger("the graph is gone"):
        del m.loss
    others = [moment.elements("other") for moment in ledger.moments[4:]]
    assert others == [1 + 4, 1 + 4, 4]  # loss, exp; loss, .grad; .grad


def test_the_peak_is_between_the_ends_of_blocks():
    m = SimpleNamespace(x=weight())
    ledger = MemoryLedger(m, data="x")
    with ledger("two temporaries"):
        m.y = ((m.x + 1) * 2).sum()
    assert ledger.peak() == 16 + 16 + 16 and ledger.peak("data") == 16 and ledger.peak("other") == 1

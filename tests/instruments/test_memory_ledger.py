"""The ledger of what a rank holds and sends: from the memory that is there, whatever the code says of it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import scratch_ddp.cells.rank.interruptible_group  # noqa: F401  (registers the backend)
from scratch_ddp.instruments.memory.ledger import Held, MemoryLedger
from tests.ranks import run_ranks

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
    return [str(moment) for moment in ledger.moments], [moment.peak for moment in ledger.moments], ledger.sent


@pytest.mark.parametrize("backend", ["interruptible", "gloo"])
def test_a_layer_on_four_ranks(backend):
    """The same on every rank and backend: what gloo copies on its own is not counted, nor what it lets go of late."""
    lines, peaks, sent = run_ranks(4, one_layer, backend=backend)[0]
    assert lines == [
        "gather             sent 12  own 8 (w1 w2), borrowed 16 (W1)",
        "gradient                    own 8 (w1 w2), borrowed 16 (W1), gradients 16 (G)",
        "free                        own 8 (w1 w2), gradients 16 (G)",
        "reduce-scatter     sent 12  own 8 (w1 w2), gradients 4 (g1)",
    ]
    assert peaks == [24, 40, 40, 28] and sent == 24


@pytest.mark.parametrize("backend", ["interruptible", "gloo"])
def test_what_is_freed_is_gone_at_once_fifty_times(backend):
    def ranks():
        m = SimpleNamespace(w1=weight(1))
        ledger = MemoryLedger(m)
        for _ in range(50):
            with ledger("gather and free"):
                m.W1 = gathered(m.w1)
                del m.W1
        return {(moment.elements(), moment.peak) for moment in ledger.moments}

    assert run_ranks(2, ranks, backend=backend) == [{(4, 12)}] * 2


def test_a_view_keeps_all_of_its_memory():
    m = SimpleNamespace(W1=weight())
    ledger = MemoryLedger(m, **KINDS)
    with ledger("look at a row"):
        m.row = m.W1[0]
    with ledger("free"):
        del m.W1
    assert ledger.moments[0].held == (Held("W1", "borrowed", 16),)
    assert ledger.moments[1].held == (Held("row", "other", 16),)


def test_memory_without_a_name_is_listed():
    ledger = MemoryLedger(SimpleNamespace())
    with ledger("hide"):
        hidden = [weight() + 1]
    with ledger("let go"):
        hidden.clear()
    assert ledger.moments[0].held == (Held("unnamed", "other", 16),) and not ledger.moments[1].held


def test_memory_taken_from_under_a_tensor_is_gone():
    m = SimpleNamespace(W1=weight())
    ledger = MemoryLedger(m, **KINDS)
    with ledger("resize"):
        m.W1.untyped_storage().resize_(0)
    assert ledger.moments[0].held == (Held("W1", "borrowed", 0),)


def test_what_autograd_keeps_is_counted():
    m = SimpleNamespace(w1=weight(1).requires_grad_())
    ledger = MemoryLedger(m, own="w1")
    with ledger("forward"):
        m.loss = (m.w1 * 2).exp().sum()
    with ledger("backward"):
        m.loss.backward()
    with ledger("the graph is gone"):
        del m.loss
    assert [moment.elements("other") for moment in ledger.moments] == [1 + 4, 1 + 4, 4]  # loss, exp; loss, .grad; .grad


def test_the_peak_is_between_the_ends_of_blocks():
    m = SimpleNamespace(x=weight())
    ledger = MemoryLedger(m, data="x")
    with ledger("two temporaries"):
        m.y = ((m.x + 1) * 2).sum()
    assert ledger.peak() == 16 + 16 + 16 and ledger.peak("data") == 16 and ledger.peak("other") == 1


def test_lists_have_one_name_and_elements_have_one_size():
    m = SimpleNamespace(shards=[weight(1), weight(2)], half=torch.ones(4, dtype=torch.float32), n=3)
    ledger = MemoryLedger(m, own="shards")
    with ledger("look"):
        pass
    assert ledger.moments[0].held == (Held("shards", "own", 12), Held("half", "other", 2))  # 16 bytes: two of float64


def test_misuse_is_refused_in_words():
    with pytest.raises(ValueError, match="each name has one kind, but w1 is given twice"):
        MemoryLedger(SimpleNamespace(), own="w1", borrowed="W1 w1")
    ledger = MemoryLedger(SimpleNamespace(), own="w1")
    with pytest.raises(ValueError, match="no kind is called owned; there are own, other"):
        ledger.peak("owned")
    with pytest.raises(RuntimeError, match="'inner' begins inside 'outer'"), ledger("outer"), ledger("inner"):
        pass


def test_a_block_that_raises_leaves_no_moment_and_the_ledger_goes_on():
    ledger = MemoryLedger(SimpleNamespace())
    with pytest.raises(ZeroDivisionError), ledger("fails"):
        raise ZeroDivisionError
    with ledger("works"):
        pass
    assert [moment.name for moment in ledger.moments] == ["works"]

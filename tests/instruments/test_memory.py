"""What torch allocates, against tensors of known size; a limit that really refuses; what a rank holds, by name."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.instruments.memory import Held, MemoryLedger, process_limit
from scratch_ddp.instruments.memory.use import memory_use
from tests.ranks import run_ranks

MEGA = 1_000_000


def test_every_figure_of_known_tensors():
    with memory_use() as used:
        kept = torch.empty(250_000)  # 1 MB
        passing = torch.empty(1_000_000, dtype=torch.int16)  # 2 MB
        del passing
        torch.empty(500_000)  # 2 MB, held for no time
    assert used.kept_bytes == kept.nbytes == 1 * MEGA
    assert (used.peak_bytes, used.allocated_bytes) == (3 * MEGA, 5 * MEGA)
    assert [held for _, held in used.over_time] == [1 * MEGA, 3 * MEGA, 1 * MEGA, 3 * MEGA, 1 * MEGA]
    rows = torch.randn(1000, 256)
    with memory_use() as used:
        rows.logsumexp(dim=1)  # its exponentials are never seen in Python
    assert used.peak_bytes > rows.nbytes and used.kept_bytes == 0


def test_the_limit_holds():
    """Also where malloc has kept 48 MB of tensors that were freed before."""

    def fill_up():
        torch.ones(5_000_000)  # freed at once: from now on malloc keeps blocks up to this size
        kept, freed, held = [], [], []
        for _ in range(30):
            freed.append(torch.ones(400_000))
            kept.append(torch.ones(20_000))
        freed.clear()
        words = "rank 0: no room for a tensor of 500,000 bytes: this process may take 20,000,000 bytes"
        with pytest.raises(torch.OutOfMemoryError, match=words), process_limit(20 * MEGA):
            while len(held) < 1000:
                held.append(torch.ones(125_000))
        assert 18 * MEGA <= len(held) * held[0].nbytes <= 20 * MEGA
        return torch.ones(25 * MEGA).sum().item()  # the process goes on, and may take what it likes

    assert run_ranks(1, fill_up) == [25 * MEGA]


KINDS = {"own": "w1 w2", "borrowed": "W1", "gradients": "G g1"}


def weight(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 4, dtype=torch.float64)


def gathered(shard: torch.Tensor) -> torch.Tensor:
    whole = shard.new_empty(dist.get_world_size() * len(shard), 4)
    dist.all_gather(list(whole.split(len(shard))), shard)
    return whole


def test_a_layer_on_four_ranks(monkeypatch):
    """Gather, use, free, reduce-scatter: what gloo copies is not counted, nor what it lets go of late."""
    monkeypatch.setattr("scratch_ddp.instruments.memory.ledger._PATIENCE", 500)  # on a busy machine, much later

    def ranks():
        m = SimpleNamespace(w1=weight(1), w2=weight(1))
        ledger, again = MemoryLedger(m, **KINDS), MemoryLedger(m, **KINDS)
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
        assert [str(moment) for moment in ledger.moments] == [
            "gather             sent 12  own 8 (w1 w2), borrowed 16 (W1)",
            "gradient                    own 8 (w1 w2), borrowed 16 (W1), gradients 16 (G)",
            "free                        own 8 (w1 w2), gradients 16 (G)",
            "reduce-scatter     sent 12  own 8 (w1 w2), gradients 4 (g1)",
        ]
        assert [moment.peak for moment in ledger.moments] == [24, 40, 40, 28] and ledger.sent == 24
        for _ in range(5):
            with again("gather and free"):
                m.W1 = gathered(m.w1)
                del m.W1
            assert again.moments[-1].elements("borrowed") == 0 and again.peak() == 8 + 4 + 16

    run_ranks(4, ranks)


def test_views_what_has_no_name_and_what_autograd_keeps_are_held():
    m = SimpleNamespace(W1=weight(), w1=weight(1).requires_grad_())
    ledger, hidden = MemoryLedger(m, **KINDS), []
    with ledger("look at a row"):
        m.row = m.W1[0]
    with ledger("free"):
        del m.W1
    with ledger("hide"):
        del m.row
        hidden.append(weight() + 1)
    with ledger("let go"):
        hidden.clear()
    named = [(Held("W1", "borrowed", 16),), (Held("row", "other", 16),), (Held("unnamed", "other", 16),), ()]
    assert [moment.held[1:] for moment in ledger.moments] == named
    with ledger("forward"):
        m.loss = (m.w1 * 2).exp().sum()
    with ledger("backward"):
        m.loss.backward()
    with ledger("the graph is gone"):
        del m.loss
    others = [moment.elements("other") for moment in ledger.moments[4:]]
    assert others == [1 + 4, 1 + 4, 4]  # loss, exp; loss, .grad; .grad

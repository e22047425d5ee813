"""What torch allocates, against tensors of known size; a limit that really refuses; what a rank holds, by name."""

from types import SimpleNamespace

import pytest
import torch

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


def weight(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 4, dtype=torch.float64)


def test_views_what_has_no_name_and_what_autograd_keeps_are_held():
    m = SimpleNamespace(W1=weight(), w1=weight(1).requires_grad_())
    ledger, hidden = MemoryLedger(m, own="w1", borrowed="W1"), []
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
    assert [moment.peak for moment in ledger.moments] == [4 + 16, 4 + 16, 4 + 2 * 16, 4 + 16]
    with ledger("forward"):
        m.loss = (m.w1 * 2).exp().sum()
    with ledger("backward"):
        m.loss.backward()
    with ledger("the graph is gone"):
        del m.loss
    others = [moment.elements("other") for moment in ledger.moments[4:]]
    assert others == [1 + 4, 1 + 4, 4]  # loss, exp; loss, .grad; .grad

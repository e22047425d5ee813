"""Bad input is one sentence on every rank, before anything is sent."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.context_parallel import contiguous_positions, ring_attention, ulysses_attention, zigzag_positions
from tests.context_parallel.cases import inputs
from tests.ranks import run_ranks

MUST = "rank 1: positions must be int64 (2, 4), a row for each rank, each position once, not"


def _parts(heads=4, tokens=4):
    return [each[:, :heads, :tokens].clone() for each in inputs(16)[:3]]


def _on_rank_1(kind, change):
    """Let rank 1 alone call with changed arguments; return what both ranks raise, and check that they can go on."""

    def ranks():
        arguments = dict(zip("qkv", _parts(), strict=True))
        if kind is ring_attention:
            arguments["positions"] = zigzag_positions(8, 2)
        right = dict(arguments)
        if dist.get_rank() == 1:
            change(arguments)
        with pytest.raises(ValueError) as raised:
            kind(**arguments)
        kind(**right)
        return str(raised.value)

    first, second = run_ranks(2, ranks, timeout=30)
    assert first == second
    return first


@pytest.mark.parametrize("kind", [ring_attention, ulysses_attention])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda a: a.update(k=a["k"][:, :2]),
            "rank 1: k is float64 (2, 2, 4, 8) on cpu, but q is float64 (2, 4,",
        ),
        (lambda a: a.update(v=a["v"].float()), "rank 1: v is float32 (2, 4, 4, 8) on cpu, but q is float64"),
        (lambda a: a.update(q=a["q"][0]), "rank 1: q must be a floating tensor (batch, heads, tokens, head size)"),
        (lambda a: a.update(q=None), "rank 1: q must be a floating tensor (batch, heads, tokens, head size), not None"),
        (lambda a: a.update({name: a[name][:1] for name in "qkv"}), "rank 1: entry 0 is q, k and v: torch.float64 (1,"),
        (
            lambda a: a.update(k=a["k"].clone().requires_grad_()),
            "rank 1: entry 1 is requires_grad of q, k",
        ),
    ],
)
def test_what_one_rank_has_wrong_all_ranks_say(kind, change, says):
    assert says in _on_rank_1(kind, change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda positions: contiguous_positions(8, 2), "positions that begin [[0, 1, 2, 3], [4, 5, 6, 7]]"),
        (lambda positions: [0], f"{MUST} list"),
        (lambda positions: positions * 0.5, f"{MUST} float32 (2, 4) on cpu"),
        (lambda positions: positions[1], f"{MUST} int64 (4,) on cpu"),
        (lambda positions: positions // 2, f"{MUST} int64 (2, 4) on cpu"),
    ],
)
def test_positions_are_checked(change, says):
    assert says in _on_rank_1(ring_attention, lambda a: a.update(positions=change(a["positions"])))


def test_heads_that_do_not_divide():
    def ranks():
        parts = _parts(heads=3)
        with pytest.raises(ValueError, match="3 heads can't be shared out to 2 ranks equally"):
            ulysses_attention(*parts)
        return ring_attention(*parts, zigzag_positions(8, 2)).shape

    assert run_ranks(2, ranks) == [torch.Size([2, 3, 4, 8])] * 2


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="there is no process group yet"):
        ulysses_attention(*_parts())

"""Attention over a sequence that the ranks share: values, gradients, calls and bytes; what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from scratch_ddp.context_parallel import ring_attention, ulysses_attention, zigzag_positions
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import assert_refused, in_turn, run_ranks

BATCH, HEADS, HEAD = 2, 4, 8
KINDS = ["contiguous", "zigzag", "ulysses"]


def contiguous_positions(tokens, n):
    return torch.arange(tokens).view(n, -1)


def inputs(tokens, seed=0):
    """q, k, v and a gradient of the output, for the whole sequence; equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, HEADS, tokens, HEAD, generator=generator, dtype=torch.float64) for _ in range(4)]


def one_process(q, k, v, gradient):
    """The output, and the gradients of q, k and v."""
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def attend(kind, q, k, v, positions=None, group=None):
    if kind == "ulysses":
        return ulysses_attention(q, k, v, group)
    return ring_attention(q, k, v, positions, group)


def compare(kind, tokens, group=None):
    """The largest error of output and gradients, and this rank's traffic in forward and in backward."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    positions = (zigzag_positions if kind == "zigzag" else contiguous_positions)(tokens, n)
    whole = inputs(tokens)
    *parts, gradient = [each[:, :, positions[rank]] for each in whole]
    leaves = [each.clone().requires_grad_() for each in parts]
    with traffic() as forward:
        output = attend(kind, *leaves, positions, group)
    with traffic() as backward:
        output.backward(gradient)
    found = [output.detach(), *(leaf.grad for leaf in leaves)]
    wanted = [each[:, :, positions[rank]] for each in one_process(*whole)]
    error = max((mine - right).abs().max().item() for mine, right in zip(found, wanted, strict=True))
    return error, forward, backward


@pytest.mark.parametrize("n", [1, 2, 4])
def test_equal_to_one_process_at_the_stated_cost(n):
    unit = BATCH * HEADS * 16 * HEAD * 8  # bytes of a rank's q
    posts = n - 1 and {"send": n - 1, "recv": n - 1}

    def ranks():
        for kind in KINDS:
            error, forward, backward = compare(kind, 16 * n)
            assert error <= 1e-12, kind
            swaps = kind == "ulysses"
            for counted in (forward, backward):
                assert counted.calls == ({"all_to_all": 2} if swaps else posts or {}), kind
                assert counted.wire_bytes * n == (4 * (n - 1) if swaps else 2 * (n - 1) * n) * unit, kind
            assert forward.setup.calls == {"all_reduce": 1} and forward.setup.payload_bytes == 24
            assert not backward.setup.calls

    run_ranks(n, ranks)


def test_a_dimension_of_a_mesh_and_half_precision():
    def ranks():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        for kind in KINDS:
            assert compare(kind, 16, mesh["cp"].get_group())[0] <= 1e-12
        parts = [each[:, :, contiguous_positions(8, 2)[mesh["cp"].get_local_rank()]] for each in inputs(8)[:3]]
        assert ulysses_attention(*parts, mesh["cp"]).equal(ulysses_attention(*parts, mesh["cp"].get_group()))
        positions = zigzag_positions(64, 4)
        whole, mine = [each.bfloat16() for each in inputs(64)], positions[dist.get_rank()]
        output = ring_attention(*(each[:, :, mine] for each in whole[:3]), positions)
        right = one_process(*(each.double() for each in whole))[0][:, :, mine]
        assert output.dtype == torch.bfloat16 and (output - right).abs().max() < 0.02  # as good as its inputs

    run_ranks(4, ranks)


def test_what_the_mask_hides_is_not_computed():
    """How many scores a rank computes in each batch entry and head, read off its multiplications."""
    from torch.utils.flop_counter import FlopCounterMode

    def scores(cut):
        positions = cut(64, 4)
        parts = [each[:, :, positions[dist.get_rank()]] for each in inputs(64)[:3]]
        with FlopCounterMode(display=False) as counter:
            ring_attention(*parts, positions)
        return counter.get_total_flops() // (BATCH * HEADS * 2 * (HEAD + HEAD + 1))  # with keys, values, a column of 1

    found = in_turn(4, scores, [(contiguous_positions,), (zigzag_positions,)])
    assert found == [[256, 640], [512, 640], [768, 640], [1024, 640]]


def test_positions():
    assert zigzag_positions(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match="6 tokens can't be cut into 4 pieces"):
        zigzag_positions(6, 2)


BOTH = ["zigzag", "ulysses"]
REFUSED = [  # what both ranks say, of which kinds, and what rank 1 has done to its arguments
    ("k is float64 (2, 2, 4, 8), but q is float64 (2, 4,", BOTH, lambda a: a | {"k": a["k"][:, :2]}),
    ("q must be a floating tensor (batch, heads, tokens", BOTH, lambda a: a | {"q": a["q"][0]}),
    ("entry 1 is requires_grad of q, k", BOTH, lambda a: a | {"k": a["k"].clone().requires_grad_()}),
    ("entry 2 is positions [[0, 1, 2, 3]", ["zigzag"], lambda a: a | {"positions": contiguous_positions(8, 2)}),
    ("positions must be (2, 4), a row for each", ["zigzag"], lambda a: a | {"positions": a["positions"] // 2}),
    ("entry 0 is q, k and v: float64 (1", ["ulysses"], lambda a: {name: each[:1] for name, each in a.items()}),
    ("3 heads can't be shared out to 2 ranks", ["ulysses"], lambda a: {name: each[:, :3] for name, each in a.items()}),
]


def attended(kind, change):
    def call():
        right = dict(zip("qkv", (each[:, :, :4].clone() for each in inputs(16)[:3]), strict=True))
        positions = {} if kind == "ulysses" else {"positions": zigzag_positions(8, 2)}
        attend(kind, **(change(right | positions) if dist.get_rank() else right | positions))

    return call


def test_what_one_rank_has_wrong_all_ranks_say():
    calls = [(f"rank 1: {says}", attended(kind, change)) for says, kinds, change in REFUSED for kind in kinds]
    assert_refused(2, calls)

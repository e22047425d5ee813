"""Attention over a sequence that the ranks share: values, gradients, calls and bytes."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.context_parallel import contiguous_positions, ring_attention, ulysses_attention, zigzag_positions
from scratch_ddp.instruments.network import linked_group
from tests.context_parallel.cases import BATCH, HEAD, HEADS, attend, compare, inputs, one_process
from tests.ranks import run_ranks

KINDS = ["contiguous", "zigzag", "ulysses"]


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


def test_a_subgroup_a_mesh_and_the_simulated_link():
    def ranks():
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        groups = [halves[dist.get_rank() % 2], mesh["cp"].get_group(), linked_group("Ethernet 100 Gb")]
        for group in groups:
            for kind in KINDS:
                assert compare(kind, 16, group)[0] <= 1e-12
        q, k, v, _ = inputs(8)
        mine = contiguous_positions(8, 2)[dist.get_rank(groups[1])]
        parts = [each[:, :, mine] for each in (q, k, v)]
        assert ulysses_attention(*parts, mesh["cp"]).equal(ulysses_attention(*parts, groups[1]))
        with pytest.raises(ValueError, match="the mesh has 2 dimensions"):
            ulysses_attention(*parts, mesh)

    run_ranks(4, ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_as_good_as_its_inputs(kind):
    def ranks():
        rank, positions = dist.get_rank(), zigzag_positions(64, 2)
        if kind != "zigzag":
            positions = contiguous_positions(64, 2)
        whole = [each.bfloat16() for each in inputs(64)]
        output = attend(kind, *(each[:, :, positions[rank]] for each in whole[:3]), positions)
        right = one_process(*(each.double() for each in whole))[0][:, :, positions[rank]]
        assert output.dtype == torch.bfloat16 and (output - right).abs().max() < 0.02

    run_ranks(2, ranks)


def test_gradients_of_keys_and_values_alone():
    def ranks():
        rank, positions = dist.get_rank(), zigzag_positions(16, 2)
        whole = inputs(16)
        *parts, gradient = [each[:, :, positions[rank]].clone() for each in whole]
        parts[2].requires_grad_()
        ring_attention(*parts, positions).backward(gradient)
        assert (parts[2].grad - one_process(*whole)[3][:, :, positions[rank]]).abs().max() <= 1e-12
        with torch.no_grad():
            assert not ring_attention(*parts, positions).requires_grad

    run_ranks(2, ranks)


def test_who_has_how_much_to_do():
    def pairs(positions):  # that a query and a key make, where the mask lets it see the key
        return [(mine[:, None] >= positions.flatten()).sum().item() for mine in positions]

    assert pairs(contiguous_positions(64, 4)) == [136, 392, 648, 904]
    assert pairs(zigzag_positions(64, 4)) == [520] * 4


def test_what_the_mask_hides_is_not_computed():
    """How many scores a rank computes in each batch entry and head, read off its multiplications."""
    from torch.utils.flop_counter import FlopCounterMode

    def ranks(cut):
        positions = cut(64, 4)
        parts = [each[:, :, positions[dist.get_rank()]] for each in inputs(64)[:3]]
        with FlopCounterMode(display=False) as counter:
            ring_attention(*parts, positions)
        return counter.get_total_flops() // (BATCH * HEADS * 2 * (HEAD + HEAD + 1))  # with keys, values, a column of 1

    assert run_ranks(4, ranks, contiguous_positions) == [256, 512, 768, 1024]
    assert run_ranks(4, ranks, zigzag_positions) == [640] * 4


def test_positions():
    assert contiguous_positions(8, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert zigzag_positions(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match="6 tokens can't be cut into 4 ranks"):
        contiguous_positions(6, 4)
    with pytest.raises(ValueError, match="6 tokens can't be cut into 4 pieces"):
        zigzag_positions(6, 2)

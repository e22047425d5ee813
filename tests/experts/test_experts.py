"""A mixture of experts over ranks: values, gradients, calls and bytes."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.experts import ExpertParallel, exchange_rows
from scratch_ddp.instruments.network import linked_group
from scratch_ddp.instruments.traffic import traffic
from tests.experts.cases import D, build, step, tokens
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("n", "n_experts", "k", "counts", "alike"),
    [
        (1, 3, 2, [7], False),
        (2, 4, 1, [5, 9], False),
        (2, 4, 2, [12, 12], True),  # all tokens go to two experts: the others, perhaps all of a rank's, are idle
        (2, 2, 1, [6, 6], True),
        (4, 8, 2, [12, 0, 3, 8], False),  # a rank without tokens
        (4, 4, 4, [3, 3, 3, 3], False),  # every token to every expert
    ],
)
def test_equal_to_one_process(n, n_experts, k, counts, alike):
    def ranks():
        error, layer = step(n_experts, k, counts, alike)
        assert error <= 1e-12
        assert [*layer.experts] == [str(i) for i in range(n_experts)][dist.get_rank() * n_experts // n :][
            : n_experts // n
        ]
        return layer.rows

    rows = [count for part in run_ranks(n, ranks) for count in part]
    assert sum(rows) == k * sum(counts)
    if alike:
        assert sorted(rows)[-k:] == [sum(counts)] * k


def test_calls_and_bytes():
    """Three all-to-alls in forward, two in backward; the bytes are those of the rows."""

    def ranks():
        n, k, n_experts, mine = 4, 2, 8, tokens([12] * 4)[dist.get_rank()]
        layer = ExpertParallel(*build(n_experts), k)
        for trained in (True, False):
            x = mine.clone().requires_grad_(trained)
            with traffic() as forward:
                y = layer(x)
            with traffic() as backward:
                y.sum().backward()
            leaving, arriving = k * len(x) * D * 8, sum(layer.rows) * D * 8
            assert forward.calls == {"all_to_all": 3} and forward.setup.calls == {"all_reduce": 1}
            assert forward.payload_bytes == n_experts * 8 + leaving + arriving
            assert backward.calls == {"all_to_all": 1 + trained} and not backward.setup.calls
            assert backward.payload_bytes == leaving + trained * arriving
            own = (layer.router(x).topk(k).indices // (n_experts // n) == dist.get_rank()).sum().item() * D * 8
            assert forward.wire_bytes == (n - 1) / n * n_experts * 8 + leaving + arriving - 2 * own

    run_ranks(4, ranks)


def test_a_subgroup_a_mesh_and_the_simulated_link():
    def ranks():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        for group in (mesh["ep"].get_group(), mesh["dp"].get_group(), linked_group("Ethernet 100 Gb")):
            counts = [4, 7, 2, 3][: dist.get_world_size(group)]
            assert step(4, 2, counts, group=group)[0] <= 1e-12
        assert ExpertParallel(*build(4), 1, mesh["ep"])(tokens([3])[0]).shape == (3, D)

    run_ranks(4, ranks)


def test_an_input_of_any_shape():
    def ranks():
        layer, x = ExpertParallel(*build(4), 2), tokens([12])[0]
        assert layer(x.view(2, 2, 3, D)).equal(layer(x).view(2, 2, 3, D))
        assert layer(x[0]).shape == (D,)

    run_ranks(2, ranks)


def test_rows_travel_there_and_their_gradients_back():
    """Rank r sends r + 1 rows to rank 0 and one to rank 1; a gradient comes back to the row that it belongs to."""

    def ranks():
        rank = dist.get_rank()
        rows = torch.arange(rank + 2.0).view(-1, 1).add(10 * rank).requires_grad_()
        sent, received = [rank + 1, 1], [[1, 2], [1, 1]][rank]
        arrived = exchange_rows(rows, sent, received)
        (arrived * (rank + 1)).sum().backward()
        return arrived.flatten().tolist(), rows.grad.flatten().tolist()

    assert run_ranks(2, ranks) == [([0, 10, 11], [1, 2]), ([1, 12], [1, 1, 2])]

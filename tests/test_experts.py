"""A mixture of experts over ranks: values, gradients, calls and bytes; what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.experts import ExpertParallel
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks

D = 6


def build(n_experts, seed=0):
    """A router and experts, equal on every rank, in float64."""
    torch.manual_seed(seed)
    experts = [nn.Sequential(nn.Linear(D, 8), nn.SiLU(), nn.Linear(8, D)) for _ in range(n_experts)]
    return nn.Linear(D, n_experts, bias=False).double(), [expert.double() for expert in experts]


def tokens(counts, alike=False):
    """A tensor of tokens for each rank; `alike`: all prefer the same experts, so that others are idle."""
    drawn = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list((drawn[:1].expand_as(drawn).clone() if alike else drawn).split(counts))


def one_process(router, experts, k, x):
    """The mixture expert by expert, without any exchange."""
    weight, choice = router(x).softmax(-1).topk(k, -1)
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = (choice == number).nonzero(as_tuple=True)
        y = y.index_add(0, token, expert(x[token]) * weight[token, place][:, None])
    return y


def step(n_experts, k, counts, alike=False, group=None):
    """Forward and backward over the ranks: the largest error of output and gradients, and the layer."""
    rank, parts = dist.get_rank(group), tokens(counts, alike)
    router, experts = build(n_experts)
    whole = torch.cat(parts).requires_grad_()
    right = one_process(router, experts, k, whole)
    right.square().sum().backward()
    layer = ExpertParallel(*build(n_experts), k, group)
    mine = parts[rank].clone().requires_grad_()
    output = layer(mine)
    output.square().sum().backward()
    errors = [output - right.split(counts)[rank], mine.grad - whole.grad.split(counts)[rank]]
    for number, expert in layer.experts.items():
        pairs = zip(expert.parameters(), experts[int(number)].parameters(), strict=True)
        errors += [ours.grad - (0 if his.grad is None else his.grad) for ours, his in pairs]
    dist.all_reduce(layer.router.weight.grad, group=group)
    errors.append(layer.router.weight.grad - router.weight.grad)
    return max(error.abs().max().item() for error in errors if error.numel()), layer


@pytest.mark.parametrize(
    ("n", "n_experts", "k", "counts", "alike"),
    [
        (2, 4, 1, [5, 9], False),
        (2, 4, 2, [12, 12], True),  # all tokens go to two experts: the others, perhaps all of a rank's, are idle
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


def test_a_mesh_and_inputs_of_any_shape():
    def ranks():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        for name, counts in (("ep", [4, 7]), ("dp", [2, 3])):
            assert step(4, 2, counts, group=mesh[name].get_group())[0] <= 1e-12
        layer, x = ExpertParallel(*build(4), 2, mesh["ep"]), tokens([12])[0]
        assert layer(x.view(2, 2, 3, D)).equal(layer(x).view(2, 2, 3, D))
        assert layer(x[0]).shape == (D,)

    run_ranks(4, ranks)


BUILT = [  # experts and k on each rank, and what both say
    ((3, 3), (1, 1), "ranks 0, 1: 3 experts can't be shared out to 2 ranks equally"),
    ((4, 4), (1, 5), "rank 1: k must be a number of experts from 1 to 4, not 5"),
    ((4, 4), (1, 2), "rank 1: entry 0 is k=2, but k=1 on rank 0"),
    ((4, 2), (1, 1), "rank 1: entry 1 is router [(2, 6)], but router [(4, 6)] on rank 0"),
]
GIVEN = [  # to rank 1
    (torch.zeros(3, 2).double(), "rank 1: entry 0 is torch.float64, d = 2, but torch.float64, d = 6 on rank 0"),
    (torch.zeros(3, D).double().requires_grad_(), "rank 1: entry 1 is requires_grad True"),
]


def test_what_is_refused_on_every_rank():
    def ranks():
        rank = dist.get_rank()
        calls = [(lambda n=n, k=k: ExpertParallel(*build(n[rank]), k[rank]), says) for n, k, says in BUILT]
        calls += [(lambda x=x: ExpertParallel(*build(4), 2)(x if rank else GOOD), says) for x, says in GIVEN]
        other = ExpertParallel(nn.Linear(D, 6).double(), build(4)[1], 2)
        calls.append((lambda: other(GOOD), "the router gives 6 columns for 4 experts"))
        for call, says in calls:
            with pytest.raises(ValueError) as raised:
                call()
            assert says in str(raised.value), raised.value

    run_ranks(2, ranks)


GOOD = torch.zeros(3, D).double()

"""A mixture of experts over ranks: values, gradients, calls and bytes; what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.experts import ExpertParallel
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import assert_refused, in_turn, run_ranks

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
    layer = ExpertParallel(*build(n_experts, seed=rank), k, group)  # the first rank's router wins
    for number, expert in layer.experts.items():
        expert.load_state_dict(experts[int(number)].state_dict())
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


def compare(n_experts, k, counts, alike):
    n, rank = dist.get_world_size(), dist.get_rank()
    error, layer = step(n_experts, k, counts, alike)
    assert error <= 1e-12
    assert [*layer.experts] == [str(i) for i in range(n_experts) if i * n // n_experts == rank]
    whole = [None] * n
    dist.all_gather_object(whole, list(layer.rows))
    rows = sum(whole, [])
    assert sum(rows) == k * sum(counts)
    assert not alike or sorted(rows)[-k:] == [sum(counts)] * k


CASES = {  # ranks: experts, experts a token, tokens of each rank, whether all prefer the same ones
    2: [
        (4, 1, [5, 9], False),
        (4, 2, [12, 12], True),
    ],  # two experts get all: the others, perhaps all of a rank's, idle
    4: [(8, 2, [12, 0, 3, 8], False), (4, 4, [3] * 4, False)],  # a rank without tokens; every token to every expert
}


@pytest.mark.parametrize("n", CASES)
def test_equal_to_one_process(n):
    in_turn(n, compare, CASES[n])


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


def test_one_rank_has_frozen_experts():
    """The others go back through it all the same, to the inputs of their experts."""

    def ranks():
        layer = ExpertParallel(*build(4), 2)
        layer.experts.requires_grad_(dist.get_rank() > 0)
        layer(tokens([4, 4])[dist.get_rank()]).sum().backward()
        assert all((each.grad is None) == (dist.get_rank() == 0) for each in layer.experts.parameters())

    run_ranks(2, ranks)


def test_a_mesh_and_inputs_of_any_shape():
    def ranks():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        for name, counts in (("ep", [4, 7]), ("dp", [2, 3])):
            assert step(4, 2, counts, group=mesh[name].get_group())[0] <= 1e-12
        layer, x = ExpertParallel(*build(4), 2, mesh["ep"]), tokens([12])[0]
        assert layer(x.view(2, 2, 3, D)).equal(layer(x).view(2, 2, 3, D))
        assert layer(x[0]).shape == (D,)

    run_ranks(4, ranks)


def built(counts, k):
    """Of this many experts and `k` on each rank."""
    return lambda: ExpertParallel(*build(counts[dist.get_rank()]), k[dist.get_rank()])


def called(x):
    """With another input on rank 1."""
    return lambda: ExpertParallel(*build(4), 2)(x if dist.get_rank() else GOOD)


GOOD = torch.zeros(3, D).double()
REFUSED = [
    ("ranks 0, 1: 3 experts can't be shared out to 2 ranks equally", built((3, 3), (1, 1))),
    ("rank 1: k must be a number of experts from 1 to 4, not 5", built((4, 4), (1, 5))),
    ("rank 1: entry 0 is k=2, but k=1 on rank 0", built((4, 4), (1, 2))),
    ("rank 1: entry 1 is router ['float64 (2, 6)'], but router ['float64 (4, 6)'] on rank 0", built((4, 2), (1, 1))),
    ("rank 1: entry 0 is torch.float64, d = 2, but torch.float64, d = 6 on", called(torch.zeros(3, 2).double())),
    ("rank 1: entry 1 is requires_grad True", called(GOOD.clone().requires_grad_())),
    (
        "the router gives 6 columns for 4 experts",
        lambda: ExpertParallel(nn.Linear(D, 6).double(), build(4)[1], 2)(GOOD),
    ),
]


def test_what_is_refused_on_every_rank():
    assert_refused(2, REFUSED)

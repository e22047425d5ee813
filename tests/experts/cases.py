"""A mixture of experts in one process and over ranks."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.experts import ExpertParallel

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

"""When messages start, and in which order: during backward, and the same on every rank whatever it does."""

import copy
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import gathered, started
from tests.ranks import run_ranks

A_BUCKET_EACH = functools.partial(BucketedDDP, bucket_mb=1e-6)
hooked = pytest.mark.parametrize("strategy", [OverlappedDDP, A_BUCKET_EACH], ids=["OverlappedDDP", "BucketedDDP"])


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n, bias=False) for n in (2, 3, 4))

    def forward(self, order) -> torch.Tensor:
        """Layer after layer in this order; backward reaches them in the opposite one."""
        total = torch.zeros(1)
        for number in order:
            layer = self.layers[number]
            total = (total + layer(torch.ones(1, layer.in_features)).sum()) * 0.5
        return total


def sizes_of_a_step(strategy, orders) -> tuple:
    wrapped = strategy(Heads())
    with started() as sizes:
        if order := orders[dist.get_rank()]:
            wrapped(order).backward()
        in_backward = len(sizes)
        wrapped.sync_gradients()
    return in_backward, sizes


ORDER = [16, 9, 4]  # elements of the weights, the last registered first


@pytest.mark.parametrize(
    "orders, in_backward",
    [
        ([[0, 1, 2], [0, 1, 2]], [3, 3]),
        ([[0, 1, 2], [2, 1, 0]], [3, 3]),  # on rank 1 all wait for the one that comes last
        ([[0, 1, 2], [0, 2]], [3, 1]),  # rank 1 has no gradient for the second message, so the third waits as well
        ([[0, 1, 2], []], [3, 0]),
        ([[1], [2]], [0, 1]),
    ],
)
@hooked
def test_the_same_order_on_every_rank(strategy, orders, in_backward):
    found = run_ranks(2, sizes_of_a_step, strategy, orders)
    assert found == [(during, ORDER) for during in in_backward]


def frozen_in_the_middle(strategy) -> tuple:
    wrapped = strategy(Heads())
    wrapped.module.layers[1].requires_grad_(False)
    with started() as sizes:
        wrapped([0, 1, 2]).backward()
    in_backward = list(sizes)
    wrapped.sync_gradients()
    return in_backward, [layer.weight.grad is None for layer in wrapped.module.layers]


@hooked
def test_what_was_frozen_meanwhile_is_not_waited_for(strategy):
    assert run_ranks(2, frozen_in_the_middle, strategy) == [(ORDER, [False, True, False])] * 2


def no_sync_is_read_when_a_gradient_arrives(strategy) -> tuple:
    wrapped, counts = strategy(Heads()), []
    with wrapped.no_sync():
        inside = wrapped([0, 1, 2])
    with started() as sizes:
        inside.backward()  # outside: travels
        with wrapped.no_sync():
            wrapped.sync_gradients()  # what is under way arrives
        counts.append((len(sizes), wrapped.module.layers[0].weight.grad is not None))
        outside = wrapped([0, 1, 2])
        with wrapped.no_sync():
            outside.backward()  # inside: stays
            wrapped.sync_gradients()
        counts.append((len(sizes), wrapped.module.layers[0].weight.grad is not None))
    return counts


@hooked
def test_no_sync_is_read_when_a_gradient_arrives(strategy):
    assert run_ranks(2, no_sync_is_read_when_a_gradient_arrives, strategy) == [[(3, True), (3, True)]] * 2


def gradients_between(strategy) -> tuple:
    wrapped = strategy(Heads())
    wrapped([0, 1, 2]).backward()
    between = [layer.weight.grad for layer in wrapped.module.layers]
    with torch.no_grad():
        wrapped([0])  # a look at the model is no new step
    wrapped.sync_gradients()
    return between, [layer.weight.grad is not None for layer in wrapped.module.layers]


@hooked
def test_a_gradient_that_travels_is_nobodys(strategy):
    assert run_ranks(2, gradients_between, strategy) == [([None] * 3, [True] * 3)] * 2


def without_hooks(strategy) -> tuple:
    model = Heads()
    wrapped = strategy(model)
    wrapped([0, 1, 2]).backward()
    wrapped.remove_hooks()  # in the middle of a step: it is given up
    wrapped.zero_grad()
    with started() as sizes:
        model([0, 1, 2]).backward()
        during = len(sizes)
        mine = model.layers[0].weight.grad.clone()
        wrapped.sync_gradients()  # goes on averaging
    dist.barrier()
    return during, sizes, torch.equal(mine, model.layers[0].weight.grad), wrapped.hook_handles


@hooked
def test_without_its_hooks_the_model_is_an_ordinary_one(strategy):
    assert run_ranks(2, without_hooks, strategy) == [(0, ORDER, True, [])] * 2


def wrapped_again(strategy) -> list:
    model, counts = Heads(), []
    first = strategy(model)
    for again in (FlatDDP, strategy):
        second = again(model)
        with started() as sizes:
            second([0, 1, 2]).backward()
            second.sync_gradients()
        second.zero_grad()
        counts.append(sizes)
    with pytest.raises(ValueError, match="^ranks 0, 1: the model was wrapped again in .*, whose hooks take its grad"):
        first.sync_gradients()
    del second
    gc.collect()
    first([0, 1, 2]).backward()
    first.sync_gradients()  # it has no hooks any more, but averages
    del first
    gc.collect()
    with started() as sizes:
        model([0, 1, 2]).backward()
    return [*counts, sizes]


@hooked
def test_the_newest_wrapper_works_from_hooks(strategy):
    assert run_ranks(2, wrapped_again, strategy) == [[[sum(ORDER)], ORDER, []]] * 2


def copied(strategy, folder) -> None:
    wrapped = strategy(Heads())
    wrapped([0, 1, 2]).backward()
    wrapped.sync_gradients()
    twin = copy.deepcopy(wrapped)
    torch.save(wrapped.module, f"{folder}/{dist.get_rank()}")
    loaded = torch.load(f"{folder}/{dist.get_rank()}", weights_only=False)
    for model in (twin, wrapped, copy.deepcopy(wrapped.module), loaded):
        model.zero_grad()
        (model([0, 1, 2]) * (1 + dist.get_rank())).backward()
        mine = 1 + dist.get_rank()
        if model in (twin, wrapped):
            model.sync_gradients()
            mine = 1.5
        heads = getattr(model, "module", model)
        assert heads.layers[2].weight.grad[0, 0].item() == 0.5 * mine


@hooked
def test_a_wrapper_and_its_model_can_be_copied(strategy, tmp_path):
    run_ranks(2, copied, strategy, str(tmp_path))


def on_a_group_of_its_own(strategy) -> tuple:
    group = dist.new_group([1, 2]) if dist.get_rank() else None
    if group is None:
        dist.new_group([1, 2])
        return None
    wrapped = strategy(Heads(), group=group)
    (wrapped([0, 1, 2]) * dist.get_rank()).backward()
    wrapped.sync_gradients()
    return wrapped.world_size, wrapped.module.layers[2].weight.grad[0, 0].item()


@hooked
def test_a_group_without_rank_0(strategy):
    assert run_ranks(3, on_a_group_of_its_own, strategy) == [None, (2, 0.75), (2, 0.75)]


def without_parameters(strategy) -> list:
    wrapped = strategy(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2, affine=False)))
    with traffic() as counts:
        wrapped(torch.full((3, 2), float(dist.get_rank())))
        wrapped.sync_gradients()
    means = gathered(wrapped.module[1].running_mean.tolist())
    return counts.calls.get("all_reduce", 0), len(set(map(tuple, means)))


@hooked
def test_a_model_without_parameters(strategy):
    assert run_ranks(2, without_parameters, strategy) == [(0, 1)] * 2


def test_what_a_step_costs():
    """A message per parameter, or per bucket; besides, one exchange of bytes, counted apart."""

    def count(strategy):
        wrapped = strategy(Heads())
        with traffic() as counts:
            wrapped([0, 1, 2]).backward()
            wrapped.sync_gradients()
        return counts.calls, counts.payload_bytes, counts.setup.calls

    for strategy, messages in ((OverlappedDDP, 3), (functools.partial(BucketedDDP, bucket_mb=60 / 2**20), 2)):
        expected = ({"all_reduce": messages}, 4 * sum(ORDER), {"all_reduce": 1})
        assert run_ranks(2, count, strategy) == [expected] * 2

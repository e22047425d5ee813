"""n ranks do what one process would have done: step by step, in float64, whatever the model is like."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.ddp import SimpleDistributedDataParallelism
from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES, STRATEGIES, bits, compare_with_one_process, gathered
from tests.ranks import in_turn


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 1), (2, 2), (3, 1)])
def test_equals_one_process(world_size, micro_batches):
    def compare(strategy, case, frozen_from=None):
        compare_with_one_process(strategy, case, micro_batches=micro_batches, frozen_from=frozen_from)

    cases = [*((case,) for case in CASES), ("mlp", 1)]
    in_turn(world_size, compare, [(strategy, *case) for strategy in STRATEGIES for case in cases])


def awkward_numbers(strategy) -> tuple:
    """Gradients with NaN, infinities, -0.0 and values that overflow half precision when they are summed."""
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 2, bias=False).half()
    torch.nn.init.ones_(model.weight)
    wrapped = strategy(model)
    mine = torch.tensor([[60000.0, -0.0, 1.0, float("inf")], [float("nan") if rank == 1 else 1, 3, -60000, -1]])
    mine = mine if rank else mine.t().contiguous().t()  # column by column in memory
    model.weight.grad = mine.half()
    model.weight.grad[0, 3] *= 1 if rank else -1  # inf - inf
    wrapped.sync_gradients()
    return bits(model), model.weight.grad.tolist()


def test_the_same_bits_everywhere_and_no_overflow():
    for results in zip(*in_turn(3, awkward_numbers, [(strategy,) for strategy in STRATEGIES]), strict=True):
        assert len({digest for digest, _ in results}) == 1
        (first, zero, one, not_a_number), (nan, three, last, _) = results[0][1]
        assert abs(first - 60000) < 100 and abs(last + 60000) < 100, "the sum overflowed before it was divided"
        assert zero == 0 and abs(one - 1) < 0.01 and abs(three - 3) < 0.01
        assert not_a_number != not_a_number and nan != nan


class Buffers(torch.nn.Module):
    """Statistics that are this rank's, what the first forward makes, and a cache that grows with the batch."""

    def __init__(self, persistent: bool):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("seen", torch.full((), dist.get_rank()))
        self.register_buffer("table", torch.full((2,), dist.get_rank(), dtype=torch.int16))  # gloo has no such numbers
        self.register_buffer("made", None, persistent)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x):
        self.seen = self.seen + x.detach().sum()
        self.seen.data.mul_(2)  # a change that torch does not count
        self.made = torch.ones(6) if self.made is None else self.made
        self.cache = torch.ones(len(x))
        return self.layer(x) * self.made * self.cache[:, None]


def values_and_buffers(wrap) -> None:
    """Each rank begins with values of its own, but for the strategy that refuses them."""
    torch.manual_seed(dist.get_rank() if wrap is not SimpleDistributedDataParallelism else 0)
    model = Buffers(persistent=wrap is not FSDP)
    for buffer in (model.seen, model.table):
        buffer *= wrap is not SimpleDistributedDataParallelism
    weights = gathered(model.layer.weight.detach().clone())
    wrapped = wrap(model)
    whole = wrapped.gather_full_params()["layer.weight"] if wrap is FSDP else model.layer.weight
    assert torch.equal(whole, weights[0]) and model.seen == 0 and not model.table.any()
    for rows in ((3, 3), (3, 5), (4, 7), (7, 4)):
        wrapped(torch.full((rows[dist.get_rank()], 6), dist.get_rank() + 1.0)).sum().backward()
        wrapped.sync_gradients()
        assert len(set(gathered(model.seen.item()))) == 1
        assert len(model.cache) == rows[dist.get_rank()], "a cache is each rank's own"
        gradients = wrapped.gather_full_grads() if wrap is FSDP else {"layer.weight": model.layer.weight.grad}
        assert len(set(gathered(gradients["layer.weight"].sum().item()))) == 1


def test_the_first_rank_s_values_win_and_buffers_may_grow_and_appear():
    in_turn(2, values_and_buffers, [(wrap,) for wrap in (*STRATEGIES, FSDP)])

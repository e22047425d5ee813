"""n ranks do what one process would have done: step by step, in float64, whatever the model is like."""

import pytest
import torch
import torch.distributed as dist

from tests.ddp.cases import CASES, STRATEGIES, batches, bits, build, gathered, one_process_step, shard
from tests.ranks import run_ranks

STEPS = 4
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)


def assert_equal(mine: torch.nn.Module, expected: torch.nn.Module, about: str) -> None:
    for (name, a), b in zip(mine.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{about}: gradient of {name} is {a.grad} for {b.grad}"
        for one, other in ((a, b), (a.grad, b.grad)):
            if one is not None:
                tolerance = 1e-12 if a.dtype == torch.float64 else 1e-6
                torch.testing.assert_close(
                    one, other, rtol=0, atol=tolerance, msg=lambda text, n=name: about + n + text
                )
    for (name, a), b in zip(mine.named_buffers(), expected.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12), about + name


def compare_with_one_process(strategy, set_to_none: bool) -> None:
    """Train each case; every second step is one of two micro-batches; the first layer of some is frozen halfway."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, case in CASES.items():
        alone, wrapped = build(case), strategy(build(case))
        assert list(wrapped.state_dict()) == ["module." + key for key in alone.state_dict()], "as torch's class"
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (alone, wrapped)]
        data = batches(STEPS, world_size)
        for step, (x, y) in enumerate(data):
            if name == "mlp" and step == 2:
                for model in (alone, wrapped.module):
                    model[0].requires_grad_(False)
            if step % 2 and case.whole_batch:
                earlier = data[step - 1]
                one_process_step(case, alone, *earlier, world_size)
                with wrapped.no_sync():
                    case.loss(wrapped, *(shard(each, rank) for each in earlier)).backward()
                    wrapped.sync_gradients()
            one_process_step(case, alone, x, y, world_size)
            case.loss(wrapped, shard(x, rank), shard(y, rank)).backward()
            wrapped.sync_gradients()
            for optimizer in optimizers:
                optimizer.step()
            assert_equal(wrapped.module, alone, f"{name}, step {step}: ")
            assert len(set(gathered(bits(wrapped.module)))) == 1, f"{name}: replicas differ after step {step}"
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("world_size, set_to_none", [(2, True), (3, False), (1, True)])
@each_strategy
def test_equals_one_process(strategy, world_size, set_to_none):
    run_ranks(world_size, compare_with_one_process, strategy, set_to_none, timeout=60)


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


@each_strategy
def test_the_same_bits_everywhere_and_no_overflow(strategy):
    results = run_ranks(3, awkward_numbers, strategy)
    assert len({digest for digest, _ in results}) == 1
    (first, zero, one, not_a_number), (nan, three, last, _) = results[0][1]
    assert abs(first - 60000) < 100 and abs(last + 60000) < 100, "the sum overflowed before it was divided"
    assert zero == 0 and abs(one - 1) < 0.01 and abs(three - 3) < 0.01
    assert not_a_number != not_a_number and nan != nan


class Buffers(torch.nn.Module):
    """Statistics that are this rank's, what the first forward makes, and a cache that grows with the batch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("made", None)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x):
        self.seen = self.seen + x.detach().sum()
        self.seen.data.mul_(2)  # a change that torch does not count
        self.made = torch.ones(6) if self.made is None else self.made
        self.cache = torch.ones(len(x))
        return self.layer(x) * self.made * self.cache[:, None]


def buffers_that_change(strategy) -> None:
    wrapped = strategy(Buffers())
    for rows in ((3, 3), (3, 5), (4, 7), (7, 4)):
        wrapped(torch.full((rows[dist.get_rank()], 6), dist.get_rank() + 1.0)).sum().backward()
        if dist.get_rank() == 1:  # the first rank's statistics win, also where they can't be written to otherwise
            with torch.inference_mode():
                wrapped(torch.ones(rows[1], 6))
        wrapped.sync_gradients()
        assert len(set(gathered(wrapped.module.seen.item()))) == 1
        assert len(wrapped.module.cache) == rows[dist.get_rank()], "a cache is each rank's own"
        assert len(set(gathered(wrapped.module.layer.weight.grad.sum().item()))) == 1


@each_strategy
def test_buffers_may_grow_and_appear(strategy):
    run_ranks(2, buffers_that_change, strategy)


def starts_as_rank_0s(strategy) -> str:
    torch.manual_seed(dist.get_rank())
    wrapped = strategy(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    return bits(wrapped.module)


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=lambda strategy: strategy.__name__)
def test_the_first_rank_s_values_win(strategy):
    assert len(set(run_ranks(3, starts_as_rank_0s, strategy))) == 1

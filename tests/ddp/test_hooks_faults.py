"""Steps that go wrong while gradients travel: what is said, on which rank, and that the next step is right."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.ddp import BucketedDDP, FlatDDP
from scratch_ddp.ddp.base import WrappedParameter
from tests.ddp.cases import HOOKED
from tests.ranks import RankFailed, run_ranks

hooked = pytest.mark.parametrize("strategy", HOOKED.values(), ids=HOOKED)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))


def a_right_step(wrapped) -> bool:
    """Whether a step of the wrapped layers gives the mean that the flat strategy gives."""
    x = torch.full((2, 4), dist.get_rank() + 1.0)
    expected = FlatDDP(layers())
    for model in (expected, wrapped):
        model.zero_grad()
        model(x).sum().backward()
        model.sync_gradients()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(wrapped.parameters(), expected.parameters(), strict=True))


def said_by(action) -> str:
    """What `action` raises."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Broken(RuntimeError):
    pass


def raises(_):
    raise Broken("this hook is broken")


def sync_forgotten(strategy) -> tuple:
    wrapped = strategy(layers())
    wrapped(torch.ones(1, 4)).sum().backward()
    return said_by(lambda: wrapped(torch.ones(1, 4))), a_right_step(wrapped)


@hooked
def test_a_backward_that_was_not_synchronised(strategy):
    for message, right in run_ranks(2, sync_forgotten, strategy):
        assert message.startswith("ValueError: ranks 0, 1: sync_gradients() was not called after the last backward")
        assert right


def forgotten_by_rank_1(strategy) -> tuple:
    wrapped = strategy(layers())
    wrapped(torch.ones(1, 4)).sum().backward()
    next_thing = wrapped.sync_gradients if dist.get_rank() == 0 else lambda: wrapped(torch.ones(1, 4))
    return said_by(next_thing), a_right_step(wrapped)


@hooked
def test_a_synchronisation_that_one_rank_leaves_out(strategy):
    for message, right in run_ranks(2, forgotten_by_rank_1, strategy):
        assert message.startswith("ValueError: rank 1: sync_gradients() was not called after the last backward")
        assert right


def leaves_out_a_step(strategy) -> None:
    wrapped = strategy(layers())
    for step in range(3):
        if dist.get_rank() == 0 or step != 1:
            wrapped(torch.ones(1, 4)).sum().backward()
            wrapped.sync_gradients()


@hooked
def test_a_step_that_one_rank_leaves_out_is_reported_by_the_process_group(strategy):
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, leaves_out_a_step, strategy, timeout=3)
    assert list(failed.value.failures) == [0]


def backward_raises(strategy, who) -> list:
    wrapped, said = strategy(layers()), []
    for synchronise in (True, False):
        broken = wrapped.module[1].weight.register_hook(raises) if dist.get_rank() in who else None
        loss = wrapped(torch.ones(1, 4)).sum()
        said.append(said_by(loss.backward))
        if broken:
            broken.remove()
        if synchronise or dist.get_rank() not in who:
            said.append(said_by(wrapped.sync_gradients))
        elif len(who) == 1:  # and goes on without the others: they must hear of it
            said.append(said_by(lambda: wrapped(torch.ones(1, 4))))
        said.append(a_right_step(wrapped))
    return said


@hooked
def test_a_hook_that_raises_on_every_rank(strategy):
    broken = "Broken: this hook is broken"
    told = "ValueError: ranks 0, 1: backward did not reach its end, so not all gradients are complete: repeat the step"
    assert run_ranks(2, backward_raises, strategy, [0, 1]) == [[broken, told, True, broken, True]] * 2


@hooked
def test_a_hook_that_raises_on_one_rank(strategy):
    told = "ValueError: rank 1: backward did not reach its end, so not all gradients are complete: repeat the step"
    whole, broken = run_ranks(2, backward_raises, strategy, [1])
    assert whole == ["nothing", told, True] * 2
    assert broken == ["Broken: this hook is broken", told, True] * 2


def refused_then_right(strategy) -> list:
    wrapped, found = strategy(layers()), []
    for guilty in (0, 1):
        loss = wrapped(torch.ones(1, 4)).pow(2).sum()
        loss.backward(create_graph=dist.get_rank() == guilty)
        found += [said_by(wrapped.sync_gradients), a_right_step(wrapped)]
    return found


@hooked
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_after_a_refusal_the_next_step_is_right(strategy):
    say = "ValueError: rank {}: the gradient of '3.weight' has a graph of its own: no double backward"
    for first, right, second, also_right in run_ranks(2, refused_then_right, strategy):
        assert first.startswith(say.format(0).replace("3.weight", "0.weight")) and right
        assert second.startswith(say.format(1).replace("3.weight", "0.weight")) and also_right


def test_a_parameter_that_was_moved():
    weight = nn.Parameter(torch.ones(2))
    as_wrapped = WrappedParameter("0.weight", weight, weight.dtype, weight.shape, torch.device("cuda", 0))
    problem = as_wrapped.device_problem()
    assert problem == "'0.weight' was on cuda:0 when the model was wrapped and is on cpu now: wrap it again"
    assert as_wrapped._replace(device=weight.device).device_problem() is None


def test_ranks_that_wrap_differently():
    def differently(bucket_mb):
        build = FlatDDP if bucket_mb is None else lambda model: BucketedDDP(model, bucket_mb)
        return said_by(lambda: build(layers()))

    def each_in_turn():
        return [differently(values[dist.get_rank()]) for values in ([25.0, None], [25.0, 10.0])]

    told = "ValueError: the ranks wrap their models differently; do the same everywhere\nrank 1: entry 0 is "
    for flat, other_size in run_ranks(2, each_in_turn):
        assert flat == told + "FlatDDP(), but BucketedDDP(bucket_mb=25.0) on rank 0"
        assert other_size == told + "BucketedDDP(bucket_mb=10.0), but BucketedDDP(bucket_mb=25.0) on rank 0"

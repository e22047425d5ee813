"""What an error or a load leaves behind, buffers, clipping; after each the next step is one process's."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from scratch_ddp.fsdp import FSDP, passes
from scratch_ddp.fsdp.comm import Ranks
from tests.ddp.cases import CASES, Made, assert_equal, batches, build, one_process_step, shard
from tests.fsdp.cases import segments
from tests.ranks import in_turn, message_of, run_ranks

MLP = CASES["mlp"]


def pair(**settings) -> tuple[nn.Module, FSDP]:
    return build(MLP), FSDP(build(MLP), **settings)


def loss_of(sharded: FSDP, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return MLP.loss(sharded, shard(x, dist.get_rank()), shard(y, dist.get_rank()))


def assert_step_right(alone: nn.Module, sharded: FSDP, x: torch.Tensor, y: torch.Tensor) -> None:
    """One more step of both; gradients add up."""
    one_process_step(MLP, alone, x, y, dist.get_world_size())
    loss_of(sharded, x, y).backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)


def buffers_of_other_shapes() -> None:
    """They can't become the first rank's, and are refused as often as it is tried; nothing else is lost."""
    alone, plain = build(MLP), build(MLP)
    for model in (alone, plain):
        model.register_buffer("seen", torch.zeros(1))
    sharded, (x, y) = FSDP(plain), batches(1, 2)[0]
    loss_of(sharded, x, y).backward()
    one_process_step(MLP, alone, x, y, 2)
    plain.seen = torch.zeros(1 + dist.get_rank())
    for _ in range(2):
        assert message_of(sharded.sync_gradients).startswith("the ranks hold different buffers")
    plain.seen = torch.zeros(1)
    sharded.sync_gradients()
    assert_equal(sharded, alone)


def loaded_in_between() -> None:
    """Parameters are loaded between backward and synchronisation: gradients stay, as under torch."""
    alone, sharded = pair()
    x, y = batches(1, 2)[0]
    before = loss_of(sharded, x, y)
    loss_of(sharded, x, y).backward()
    sharded.load_state_dict(sharded.state_dict())
    sharded.sync_gradients()
    one_process_step(MLP, alone, x, y, 2)
    assert_equal(sharded, alone)
    assert message_of(before.backward).startswith("this loss is from before an error (which drops gradients), a load,")


def shards_everywhere(*modules: nn.Module) -> None:
    """What the modules show is this rank's shards."""
    for module in modules:
        assert all(isinstance(each, DTensor) for each in module.state_dict().values())


def kept_units() -> None:
    """Units that stay gathered between forward and backward; backward gathers again what was shown."""
    alone, sharded = pair(free_after_forward=False)
    x, y = batches(1, 2)[0]
    for module in (sharded.module[2], sharded.module, sharded):
        loss = loss_of(sharded, x, y)
        shards_everywhere(module)
        one_process_step(MLP, alone, x, y, 2)
        loss.backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)


def frozen_between_passes() -> None:
    """After a forward pass without a backward pass, which leaves the last layer gathered."""
    alone, sharded = pair()
    x, y = batches(1, 2)[0]
    shards = dict(sharded.named_parameters())
    loss_of(sharded, x, y)
    sharded.module[2].weight.requires_grad_(False), shards["2.bias"].requires_grad_(False)
    alone[2].requires_grad_(False)
    assert_step_right(alone, sharded, x, y)


def recomputed_in_part() -> None:
    """Nothing is held of inputs of units whose recomputation was cut short."""
    sharded = FSDP(segments(reentrant=False))
    sharded(torch.ones(2, 6)).sum().backward()
    assert not sharded._runtime._given


def gradients_switched_on_in_a_model() -> None:
    """The very first pass, under no_grad; the model has a gradient inside, and its input comes back."""

    def forward(self, x):
        with torch.enable_grad():
            return self.inner(x), x

    alone, x = build(MLP), torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    sharded = FSDP(Made(forward, inner=build(MLP)))
    others = x.cos()  # of another graph, perhaps of another model's
    with torch.no_grad():
        energy, _ = sharded(x)
        _, same = sharded(others)
    same.sum().backward()
    assert all(each.grad is None for each in sharded.parameters())
    torch.testing.assert_close(torch.autograd.grad(energy.sum(), x), torch.autograd.grad(alone(x).sum(), x))


def test_what_happens_between_passes():
    happenings = [buffers_of_other_shapes, loaded_in_between, kept_units, frozen_between_passes, recomputed_in_part]
    happenings.append(gradients_switched_on_in_a_model)
    in_turn(2, lambda happens: happens(), [(each,) for each in happenings])


def clip() -> None:
    x, y = batches(1, dist.get_world_size())[0]
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        alone, sharded = pair()
        assert_step_right(alone, sharded, x, y)
        for most in (0.1, 0.01):
            clipped = nn.utils.clip_grad_norm_(sharded.parameters(), most, norm_type).full_tensor()
            norm = sharded.clip_grad_norm_(most / 2, norm_type)
            torch.testing.assert_close(clipped, nn.utils.clip_grad_norm_(alone.parameters(), most, norm_type))
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), most / 2, norm_type))
            assert_equal(sharded, alone)
    norms = [each.grad.norm().full_tensor() for each in sharded.parameters()]
    torch.testing.assert_close(norms, [each.grad.norm() for each in alone.parameters()])
    if dist.get_rank() == 1:
        next(sharded.parameters()).grad.to_local().fill_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of order 2.0 .* is non-finite"):
        sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norm_of_gradients_in_shards(world_size):
    run_ranks(world_size, clip)


UNFINISHED = "a backward pass did not reach its end"


def interrupted(where: str, failing: list[int]) -> None:
    """An error in a step, on all ranks or on one of them, that is caught; then an evaluation and a step."""
    alone, sharded = pair()
    x, y = batches(1, 2)[0]
    fails = dist.get_rank() in failing

    def fail(*_) -> None:
        if fails:
            raise RuntimeError("planted")

    def fail_in_backward(module, args, output) -> None:
        output.register_hook(fail) if output.requires_grad else None

    if where == "forward":
        sharded.module[1].register_forward_pre_hook(fail)
    else:
        sharded.module[1].register_forward_hook(fail_in_backward)
    told = message_of(lambda: loss_of(sharded, x, y).backward())
    assert told == ("planted" if fails else "nothing was raised"), told
    fails = False
    shards_everywhere(sharded, sharded.module)
    assert all(isinstance(each.data, DTensor) for each in sharded.parameters())
    if failing == [1]:
        assert message_of(sharded.sync_gradients).startswith(f"rank 1: {UNFINISHED}")
    with torch.no_grad(), mock.patch.object(passes.log, "warning") as warning:
        torch.testing.assert_close(sharded(x), alone(x))
    assert warning.called == (where == "backward" and failing == [0, 1])
    assert not any(unit.is_gathered for unit in sharded._runtime.units)
    assert all(parameter.grad is None for parameter in sharded.parameters())
    assert_step_right(alone, sharded, x, y)


def test_after_an_error_the_next_step_is_right():
    in_turn(2, interrupted, [("forward", [0, 1]), ("backward", [0, 1]), ("backward", [1])])


def two_losses() -> None:
    """The backward pass of one loss fails, and that of another one follows, of a forward pass from before."""
    alone, sharded = pair()
    (x, y), failing = batches(1, 2)[0], True

    def fail(_) -> None:
        if failing:
            raise RuntimeError("planted")

    sharded.module[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    first, second = (loss_of(sharded, x, y) for _ in range(2))
    assert message_of(first.backward) == "planted"
    failing = False
    assert message_of(second.backward).startswith(f"ranks 0, 1: {UNFINISHED}")
    assert_step_right(alone, sharded, x, y)


def test_a_backward_pass_after_one_that_failed():
    run_ranks(2, two_losses)


def out_of_memory(collective: str) -> None:
    """One rank can't start a collective, once: the others get its message all the same, and the next step is right."""
    over_copies, n = collective == "all_reduce_over_copies", dist.get_world_size()
    alone, sharded = pair(group=init_device_mesh("cpu", (2, 2)) if over_copies else None)
    (x, y), start = batches(1, n)[0], getattr(Ranks, collective)

    def fail(*_) -> None:
        setattr(Ranks, collective, start)
        raise RuntimeError("planted")

    if dist.get_rank() == 1:
        setattr(Ranks, collective, fail)
    said = [message_of(do) for do in (lambda: loss_of(sharded, x, y).backward(), sharded.sync_gradients)]
    assert said[over_copies] == ("planted" if dist.get_rank() == 1 else "nothing was raised"), said
    if over_copies:  # after all have met: the others have their means
        sharded(x)
    else:
        in_forward = collective == "all_gather"  # its gradients are missing
        assert said[1].startswith("nothing was raised" if in_forward else f"rank 1: {UNFINISHED}"), said
    sharded.zero_grad()
    assert_step_right(alone, sharded, x, y)


def test_a_collective_that_one_rank_can_not_start():
    in_turn(2, out_of_memory, [("all_gather",), ("reduce_scatter",)])
    run_ranks(4, out_of_memory, "all_reduce_over_copies")

"""When gradients are synchronised, what is thrown away, what an error leaves behind, and clipping."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from scratch_ddp.fsdp import FSDP, passes
from scratch_ddp.fsdp.comm import Ranks
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import CASES, batches, build, one_process_step, shard
from tests.fsdp.cases import WithHead, assert_equal, message_of
from tests.ranks import run_ranks

MLP, X = CASES["mlp"], torch.ones(1, 6, dtype=torch.float64)


def pair(**settings) -> tuple[nn.Module, FSDP]:
    return build(MLP), FSDP(build(MLP), **settings)


def loss_of(sharded: FSDP, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return MLP.loss(sharded, shard(x, dist.get_rank()), shard(y, dist.get_rank()))


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def interleaved() -> None:
    """Forward, forward, then backward of the second and of the first; one graph backwards twice; then once more."""
    alone, sharded = pair()
    (x1, y1), (x2, y2), (x3, y3) = batches(3, 2)
    for model, rows in ((alone, lambda t: t), (sharded, lambda t: shard(t, dist.get_rank()))):
        first, second = (MLP.loss(model, rows(x), rows(y)) for x, y in ((x1, y1), (x2, y2)))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        MLP.loss(model, rows(x3), rows(y3)).backward()  # forward and backward several times, then one synchronisation
    sharded.sync_gradients()
    assert_equal(sharded, alone)
    one_process_step(MLP, alone, x3, y3, 2)
    loss_of(sharded, x3, y3).backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)


def test_gradients_add_up():
    run_ranks(2, interleaved)


def switches() -> None:
    alone, sharded = pair()
    x, y = batches(1, 2)[0]
    with sharded.no_sync():
        with sharded.no_sync():
            assert not sharded.do_sync
        assert not sharded.do_sync  # nested: off again, not on
    sharded.disable_grad_sync()
    with traffic() as counted:
        loss_of(sharded, x, y).backward()
        sharded.sync_gradients()
    assert "reduce_scatter" not in counted.calls
    sharded.enable_grad_sync()
    sharded.sync_gradients()  # what has accumulated
    one_process_step(MLP, alone, x, y, 2)
    assert_equal(sharded, alone)
    assert sharded.eval() is sharded and not (sharded.module.training or sharded.module[0].training)
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            torch.testing.assert_close(sharded(x), alone.eval()(x))


def test_the_switches():
    run_ranks(2, switches)


def skipped_batch(under_no_sync: bool, late: bool) -> None:
    """A batch whose gradients are NaN is thrown away by the optimizer's `zero_grad`; the next step is as without it.

    `late`: only after the next forward pass.
    """
    alone, sharded = pair()
    optimizer, plain = sgd(sharded.parameters()), sgd(alone.parameters())
    for step, (x, y) in enumerate(batches(3, 2)):
        with sharded.no_sync() if under_no_sync else contextlib.nullcontext():
            (float("nan") * loss_of(sharded, x, y)).backward()
        if not late:
            optimizer.zero_grad()
        loss = loss_of(sharded, x, y)
        if late:
            optimizer.zero_grad()
        loss.backward()
        sharded.sync_gradients()
        one_process_step(MLP, alone, x, y, 2)
        optimizer.step(), plain.step()
        assert_equal(sharded, alone, step)
        optimizer.zero_grad(), plain.zero_grad()


def test_zero_grad_throws_gradients_away():
    run_ranks(2, lambda: [skipped_batch(*how) for how in itertools.product((False, True), repeat=2)])


def nothing_left() -> None:
    """All gradients are thrown away before the synchronisation: as under torch there is none, not zeros."""
    _, sharded = pair()
    (x, y), optimizer = batches(1, 2)[0], sgd(sharded.parameters())
    loss_of(sharded, x, y).backward()
    optimizer.zero_grad()
    sharded.sync_gradients()
    assert all(each.grad is None for each in sharded.parameters())


def test_thrown_away_gradients_are_none():
    run_ranks(2, nothing_left)


def other_buffers() -> None:
    """Buffers that can't become the first rank's are refused, as often as it is tried; nothing else is lost."""
    alone, plain = build(MLP), build(MLP)
    for model in (alone, plain):
        model.register_buffer("seen", torch.zeros(1))
    sharded, (x, y) = FSDP(plain), batches(1, 2)[0]
    loss_of(sharded, x, y).backward()
    plain.seen = torch.zeros(1 + dist.get_rank())
    for _ in range(2):
        assert message_of(sharded.sync_gradients).startswith("the ranks hold different buffers")
    plain.seen = torch.zeros(1)
    sharded.sync_gradients()
    one_process_step(MLP, alone, x, y, 2)
    assert_equal(sharded, alone)


def test_buffers_of_other_shapes():
    run_ranks(2, other_buffers)


def loaded_in_between() -> str:
    """Parameters are loaded between backward and synchronisation: gradients stay, as under torch."""
    alone, sharded = pair()
    x, y = batches(1, 2)[0]
    before = loss_of(sharded, x, y)
    loss_of(sharded, x, y).backward()
    sharded.load_state_dict(sharded.state_dict())
    sharded.sync_gradients()
    one_process_step(MLP, alone, x, y, 2)
    assert_equal(sharded, alone)
    return message_of(before.backward)


def test_a_load_leaves_gradients_as_they_are():
    for said in run_ranks(2, loaded_in_between):
        assert said.startswith("this loss is from before an error (which drops gradients), a load, or a step of the")


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


def test_a_state_dict_of_any_module_has_shards():
    run_ranks(2, kept_units)


def stale_loss(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """A backward pass through a forward pass from before a step."""
    model.sync_gradients()
    loss = model(X).sum()
    optimizer.param_groups[0]["lr"] = 0.0  # the comparison that follows starts from the same parameters
    optimizer.step()
    loss.backward()


MISTAKES = {  # whether the backward before was under no_sync; and what the two ranks do
    "step": (False, lambda model, optimizer: optimizer.step()),
    "step under no_sync": (True, lambda model, optimizer: optimizer.step()),
    "read": (False, lambda model, _: next(model.parameters()).grad.norm()),
    "clip": (False, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    "stale loss": (False, stale_loss),
    "clip on one rank": (
        False,
        lambda model, _: (model.sync_gradients(), (model.clip_grad_norm_(1.0) if dist.get_rank() else model.eval()(X))),
    ),
    "cleared on one rank": (
        True,
        lambda model, optimizer: (optimizer.zero_grad() if dist.get_rank() else None, model.sync_gradients()),
    ),
}


def forgotten() -> dict[str, str]:
    """What is said where a synchronisation is left out; each time, it goes on from there."""
    said, (x, y) = {}, batches(1, 2)[0]
    for case, (under_no_sync, do) in MISTAKES.items():
        alone, sharded = pair()
        optimizer = sgd(sharded.parameters())
        sgd(nn.Linear(2, 2).parameters()).step()  # of another model
        with sharded.no_sync() if under_no_sync else contextlib.nullcontext():
            loss_of(sharded, x, y).backward()
        said[case] = message_of(lambda do=do, given=(sharded, optimizer): do(*given))
        optimizer.zero_grad()
        loss_of(sharded, x, y).backward()
        sharded.sync_gradients()
        one_process_step(MLP, alone, x, y, 2)
        assert_equal(sharded, alone)
    return said


def test_a_synchronisation_that_was_left_out():
    for said in run_ranks(2, forgotten):
        assert said["step"].startswith("ranks 0, 1: the optimizer steps with gradients that were not synchronised")
        assert said["step under no_sync"] == said["step"]
        assert said["read"] == said["clip"]
        assert "a load, or a step of the optimizer: run the forward pass again" in said["stale loss"]
        assert "on their way between backward and sync_gradients(): use them after it" in said["read"]
        assert "is calls clip_grad_norm_(), but begins a forward pass" in said["clip on one rank"]
        assert "gradients cleared since backward: 0.weight" in said["cleared on one rank"]


def clip() -> None:
    world_size = dist.get_world_size()
    x, y = batches(1, world_size)[0]
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        alone, sharded = pair()
        one_process_step(MLP, alone, x, y, world_size)
        loss_of(sharded, x, y).backward()
        sharded.sync_gradients()
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


def frozen_backbone() -> list[dict[str, int]]:
    """What travels in backward with a trained head on frozen blocks, and with one trained block of three."""
    found = []
    for trained in ("last", "blocks.1"):
        model = WithHead(*(nn.Linear(6, 6) for _ in range(3))).requires_grad_(False)
        model.get_submodule(trained).requires_grad_(True)
        sharded = FSDP(model)
        loss = sharded(torch.ones(2, 6)).sum()
        with traffic() as counted:
            loss.backward()
            sharded.sync_gradients()
        found.append(counted.calls)
    return found


def test_backward_gathers_no_unit_that_it_does_not_need():
    for head, middle in run_ranks(2, frozen_backbone):
        assert head == {"reduce_scatter": 1}
        assert middle == {"all_gather": 1, "reduce_scatter": 1}  # of itself; the last one stays gathered after forward


def interrupted(where: str) -> tuple[list[str], list[str]]:
    """An error in a step, on all ranks or on one of them, that is caught; then an evaluation and a step."""
    alone, sharded = pair()
    x, y = batches(1, 2)[0]
    failing, said = True, []

    def fail(*_) -> None:
        if failing and (where != "backward of one rank" or dist.get_rank() == 1):
            raise RuntimeError("planted")

    def fail_in_backward(module, args, output) -> None:
        output.register_hook(fail) if output.requires_grad else None

    if where == "forward":
        sharded.module[1].register_forward_pre_hook(fail)
    else:
        sharded.module[1].register_forward_hook(fail_in_backward)
    if (told := message_of(lambda: loss_of(sharded, x, y).backward())) != "nothing was raised":
        said.append(told)
    failing = False
    shards_everywhere(sharded, sharded.module)
    assert all(isinstance(each.data, DTensor) for each in sharded.parameters())
    if where == "backward of one rank":
        said.append(message_of(sharded.sync_gradients))
    with torch.no_grad(), mock.patch.object(passes.log, "warning") as warning:
        torch.testing.assert_close(sharded(x), alone(x))
    assert warning.called == (where == "backward")
    assert not any(unit.is_gathered for unit in sharded._runtime.units)
    assert all(parameter.grad is None for parameter in sharded.parameters())
    one_process_step(MLP, alone, x, y, 2)
    loss_of(sharded, x, y).backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)
    return said


def test_after_an_error_the_next_step_is_right():
    for where in ("forward", "backward"):
        assert run_ranks(2, interrupted, where) == [["planted"]] * 2
    (first,), (planted, second) = run_ranks(2, interrupted, "backward of one rank")
    assert planted == "planted" and first == second
    assert first == "rank 1: a backward pass did not reach its end; all gradients since the last step are dropped"


def two_losses() -> list[str]:
    """The backward pass of one loss fails, and that of another one follows, of a forward pass from before."""
    alone, sharded = pair()
    (x, y), failing = batches(1, 2)[0], True

    def fail(_) -> None:
        if failing:
            raise RuntimeError("planted")

    sharded.module[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    first, second = (loss_of(sharded, x, y) for _ in range(2))
    said = [message_of(first.backward)]
    failing = False
    said.append(message_of(second.backward))
    one_process_step(MLP, alone, x, y, 2)
    loss_of(sharded, x, y).backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)
    return said


def test_a_backward_pass_after_one_that_failed():
    for first, second in run_ranks(2, two_losses):
        assert first == "planted" and second.startswith("ranks 0, 1: a backward pass did not reach its end")


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
    elif collective == "all_gather":  # in forward: its gradients are missing
        assert said[1] == "nothing was raised"
    else:
        assert said[1].startswith("rank 1: a backward pass did not reach its end"), said
    sharded.zero_grad()
    one_process_step(MLP, alone, x, y, n)
    loss_of(sharded, x, y).backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)


@pytest.mark.parametrize(("collective", "n"), [("all_gather", 2), ("reduce_scatter", 2), ("all_reduce_over_copies", 4)])
def test_a_collective_that_one_rank_can_not_start(collective, n):
    run_ranks(n, out_of_memory, collective, timeout=30)

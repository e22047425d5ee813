"""Lesson 10, FSDP by hand: a step with one whole matrix at a time, uneven rows, and a unit with four hooks."""

import weakref

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise, Wrong


def sharded_step(shards, inputs, targets, lr):
    """One step of SGD on linear layers with a relu between them.

    shards: this rank's rows of each weight, first layer first, updated in place. The
    loss is half the sum of the squared errors over all ranks' items.
    Cost: for each layer two all-gathers and one reduce-scatter. Memory: never two whole
    matrices, be they weights or gradients.
    """
    # Which line is the last that needs the weight? Which first needs the gradient?
    n = dist.get_world_size()

    def gather(shard):
        whole = shard.new_empty(n * len(shard), shard.shape[1])
        dist.all_gather(list(whole.split(len(shard))), shard)
        return whole

    kept = [inputs]
    for shard in shards:
        outputs = kept[-1] @ gather(shard).T  # the whole weight has no name, so the line's end frees it
        kept.append(outputs.relu())
    delta = outputs - targets
    for shard, below in zip(reversed(shards), reversed(kept[:-1]), strict=True):
        whole = gather(shard)
        handed_down = delta @ whole
        del whole
        gradient = delta.T @ below
        mine = torch.empty_like(shard)
        dist.reduce_scatter(mine, list(gradient.split(len(shard))))
        del gradient
        shard -= lr * mine
        delta = handed_down * below.sign()


def _layers(at):
    rows = 32
    shards = torch.randn(at.n, 2, rows, rows * at.n).double()[at.rank] / rows
    inputs, targets = torch.randn(at.n, 2, 2, rows * at.n).double()[at.rank]
    yield "2 layers", ([*shards], inputs, targets, 0.1)


def _one_matrix(_at, shards, inputs, *_):  # whole, two shards, and what goes through the layers, several times
    return shards[0].shape[1] ** 2 + 2 * shards[0].numel() + 4 * (len(shards) + 1) * inputs.numel()


def gather_uneven(shard, rows):
    """Return the whole weight of `rows` rows, which are split among the ranks.

    With k = rows / n rounded up, rank 0 has the first k rows, rank 1 the next k, and so
    on. The last ranks may have fewer than k, or none: a shard of shape (0, columns).
    Cost: one all-gather, of k rows from each rank.
    """
    # All ranks must send equally many rows. Where in the result is the padding?
    n = dist.get_world_size()
    k = -(-rows // n)
    padded = shard.new_zeros(k, shard.shape[1])
    padded[: len(shard)] = shard
    whole = shard.new_empty(n * k, shard.shape[1])
    dist.all_gather(list(whole.split(k)), padded)
    return whole[:rows]


def _rows(at):
    for rows in (3 * at.n, 2 * at.n - 1, 2 * at.n + 1, 1):
        weight, k = torch.arange(5.0 * rows).view(rows, 5), -(-rows // at.n)
        yield f"{rows} row{'s' * (rows > 1)}", (weight[at.rank * k : (at.rank + 1) * k].clone(), rows)


def shard_unit(module):
    """Make the module a unit of FSDP; return this rank's shard, a parameter to train.

    After backward, shard.grad is its part of the mean gradient, the parameters' own
    .grad is None. Cost: an all-gather in forward, an all-gather and a reduce-scatter in
    backward, each of ⌈elements / n⌉ elements a rank. Memory: but for forward and
    backward the parameters take 0 bytes, and nothing else keeps them.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    parameters = list(module.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    # One flat tensor for all parameters, and four hooks. What does each of them do?
    part = -(-sum(sizes) // n)
    padding = n * part - sum(sizes)

    def flatten(tensors):
        return nn.functional.pad(torch.cat([each.detach().flatten() for each in tensors]), (0, padding))

    whole = flatten(parameters)
    shard = nn.Parameter(whole.view(n, part)[rank].clone())
    for parameter, view in zip(parameters, whole.split([*sizes, padding]), strict=False):
        parameter.data = view.view_as(parameter)

    def gather():
        whole.untyped_storage().resize_(whole.nbytes)  # the views are valid again
        dist.all_gather(list(whole.split(part)), shard.detach())

    def free():
        whole.untyped_storage().resize_(0)

    def reduce():
        free()
        gradients = flatten(parameter.grad for parameter in parameters) / n
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter(shard.grad, list(gradients.split(part)))
        for parameter in parameters:
            parameter.grad = None

    free()
    module.register_forward_pre_hook(lambda *_: gather())
    module.register_forward_hook(lambda *_: free())
    module.register_full_backward_pre_hook(lambda *_: gather())
    module.register_full_backward_hook(lambda *_: reduce())
    return shard


def _units(at):
    for hidden in (at.n, at.n + 1):
        unit = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 4)).double()
        yield f"a unit of {9 * hidden + 4} elements", (unit, torch.randn(at.n, 2, 3, 4).double()[at.rank])


def _steps(answer, unit, batches):
    seen = weakref.WeakSet()  # the parameters' memory in forward and backward

    def look(when):  # reading freed memory is a crash
        for name, parameter in unit.named_parameters():
            if parameter.untyped_storage().nbytes() < parameter.nbytes:
                raise RuntimeError(f"in {when} '{name}' has no memory: gather the unit before")
            seen.add(parameter.untyped_storage())

    def held():
        return sum(each.nbytes() for each in {*seen, *(each.untyped_storage() for each in unit.parameters())})

    unit[0].register_forward_pre_hook(lambda *_: look("forward"))
    unit[2].register_full_backward_pre_hook(lambda *_: look("backward"))
    shard = answer(unit)
    if shard.untyped_storage().nbytes() < shard.nbytes:
        raise Wrong("memory", "the shard has no memory of its own: it was freed with the unit's")
    yield "value", "the shard", shard
    yield "memory", "the parameters' memory in bytes before the first step", held()
    for number, batch in enumerate(batches):
        with torch.no_grad():
            yield "value", f"step {number}: the output under no_grad", unit(batch)
        output = unit(batch.requires_grad_())
        yield "memory", f"step {number}: the parameters' memory in bytes after forward", held()
        output.square().sum().backward()
        yield "memory", f"step {number}: the parameters' memory in bytes after backward", held()
        yield "value", f"step {number}: shard.grad", shard.grad
        whole = [name for name, parameter in unit.named_parameters() if parameter.grad is not None]
        yield "memory", f"step {number}: the list of parameters that have a .grad", whole
        shard.data -= 0.1 * shard.grad
        shard.grad = None


EXERCISES = (
    Exercise(sharded_step, _layers, close=1e-9, room=_one_matrix),
    Exercise(gather_uneven, _rows),
    Exercise(shard_unit, _units, use=_steps, close=1e-9, given="from torch import nn"),
)

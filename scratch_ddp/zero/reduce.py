"""ZeRO-2: gradients are shared out too. Their mean is left on the rank that updates the parameter, and only there."""

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import compare, message_device, raise_everywhere
from scratch_ddp.common.clip_grad import clip_to_norm, total_norm
from scratch_ddp.common.optimizer_steps import REDUCED
from scratch_ddp.common.replicas import complete_gradient
from scratch_ddp.common.tensors import copy_back, flatten
from scratch_ddp.zero.optimizer import ShardedOptimizer
from scratch_ddp.zero.owners import split_into_messages


@torch.no_grad()
def reduce_gradients(optimizer: ShardedOptimizer) -> None:
    """Leave each gradient's mean over the ranks on its owner, and free it everywhere else: in place of an all-reduce.

    Call it on every rank after the last backward before `optimizer.step()`. A rank without a gradient counts as zeros;
    one that is None everywhere stays None. Raises ValueError on every rank for a sparse gradient, and for one that was
    reduced already. To clip the gradients afterwards use `clip_grad_norm_` of this module: torch's sees only a share.

    Cost: for each owner a reduce of every gradient of 1 MB or more, and one per dtype of all smaller ones. Together
    that is a reduce-scatter whose pieces have any size: on a ring a rank sends (n - 1)/n of the bytes. Besides, one
    all-reduce of a byte per parameter. Memory while it runs: one message of small gradients.
    """
    group, me = optimizer.group, dist.get_rank(optimizer.group)
    shares = optimizer.owners.shares_of(_with_gradient_anywhere(optimizer))
    for owner, parameters in enumerate(shares):
        for message in split_into_messages([complete_gradient(parameter) for parameter in parameters]):
            flat = flatten(message).div_(dist.get_world_size(group))  # before the sum, which could overflow
            dist.reduce(flat, group=group, group_dst=owner)
            if owner == me:
                copy_back(flat, message)
        for parameter in parameters:
            if owner == me:
                setattr(parameter.grad, REDUCED, True)
            else:
                parameter.grad = None


def _with_gradient_anywhere(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """The trained parameters that have a gradient on any rank, in the same order on every rank. One all-reduce."""
    names = {parameter: name for name, parameter in optimizer.presence.named}
    problem = optimizer.presence.problem()
    for parameter, name in names.items():
        if problem is None and hasattr(parameter.grad, REDUCED):
            problem = f"the gradient of {name} is a mean already, with more added to it: step and clear it before"
    here = [p.requires_grad and p.grad is not None for p in names]
    found = compare(optimizer.group, {}, {"refused": problem is not None}, flags=here, dtype=torch.uint8)
    if found.largest["refused"]:
        raise_everywhere(problem, optimizer.group)
    return [parameter for parameter, present in zip(names, found.flags, strict=True) if present]


@torch.no_grad()
def clip_grad_norm_(optimizer: ShardedOptimizer, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their 2-norm, over all parameters, is at most `max_norm`; return the norm before.

    Each rank counts what it owns, so it is right after `reduce_gradients` and after an all-reduce. Every rank calls it.
    Returns a float64 scalar, the same on every rank. Costs one all-reduce of one number.
    """
    present = [parameter for _, parameter in optimizer.presence.named if parameter.grad is not None]
    own = [parameter.grad for parameter in present if optimizer.owns(parameter)]
    norm = total_norm(own, [], 2.0, message_device(optimizer.group), optimizer.group)
    clip_to_norm([parameter.grad for parameter in present], norm, max_norm)
    return norm

"""ZeRO-2: gradients are shared out too. Their mean is left on the rank that updates the parameter, and only there."""

from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import compare, message_device, raise_everywhere
from scratch_ddp.common.optimizer_steps import REDUCED
from scratch_ddp.common.replicas import broadcast_shares, complete_gradient
from scratch_ddp.common.tensors import copy_back, flatten, split_into_messages
from scratch_ddp.zero import checks
from scratch_ddp.zero.optimizer import ShardedOptimizer


class Mean(torch.Tensor):
    """A mean gradient that other ranks lack: an ordinary tensor that torch's clip_grad_norm_ can't take for all."""

    is_reduced = True  # see `REDUCED`

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.linalg.vector_norm, torch._foreach_norm):
            raise RuntimeError(
                "the norm of the gradients on this rank is not the norm of all, and would scale them differently on "
                "each rank: use scratch_ddp.zero.clip_grad_norm_(optimizer, …) in place of torch.nn.utils's"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@torch.no_grad()
def reduce_gradients(optimizer: ShardedOptimizer) -> None:
    """Leave each gradient's mean over the ranks on its owner, and free it everywhere else: in place of an all-reduce.

    Call it on every rank after the last backward before `optimizer.step()`. A rank without a gradient counts as zeros;
    one that is None everywhere stays None. A mean that is not finite stays on every rank, so that each rank's
    GradScaler sees it, and so does the smallest one if a rank would have none. Raises ValueError on every rank for a
    sparse gradient, and for one that was reduced already. To clip the gradients use `clip_grad_norm_` of this module.

    Cost: for each owner a reduce of every gradient of 1 MB or more, and one per dtype of all smaller ones. Together
    that is a reduce-scatter whose pieces have any size: on a ring a rank sends (n - 1)/n of the bytes. Besides, two
    all-reduces of 8 bytes per parameter. Memory while it runs: one message of small gradients.
    """
    group, me = optimizer.group, dist.get_rank(optimizer.group)
    named = checks.named_parameters(optimizer.param_groups)
    problem = checks.gradients_problem(optimizer.param_groups)
    for name, parameter in named:
        if problem is None and hasattr(parameter.grad, REDUCED):
            problem = f"the gradient of {name} is a mean already, with more added to it: step and clear it before"
    here = [parameter.requires_grad and parameter.grad is not None for _, parameter in named]
    found = compare(group, {}, {"refused": problem is not None}, flags=here)
    if found.largest["refused"]:
        raise_everywhere(problem, group)
    present = [parameter for (_, parameter), anywhere in zip(named, found.flags, strict=True) if anywhere]
    shares = optimizer.owners.shares_of(present)
    for owner, parameters in enumerate(shares):
        for message in split_into_messages([complete_gradient(parameter) for parameter in parameters]):
            flat = flatten(message).div_(dist.get_world_size(group))  # before the sum, which could overflow
            dist.reduce(flat, group=group, group_dst=owner)
            if owner == me:
                copy_back(flat, message)
        if owner != me:
            for parameter in parameters:
                parameter.grad = None
    overflows = [each.grad is not None and not each.grad.isfinite().all() for each in present]
    found = compare(group, {}, {}, flags=overflows)
    everywhere = [parameter for parameter, overflow in zip(present, found.flags, strict=True) if overflow]
    if not all(shares) and present:
        everywhere.append(min(present, key=torch.Tensor.numel))
    for parameter in everywhere:
        complete_gradient(parameter)
    broadcast_shares([[each.grad for each in share] for share in optimizer.owners.shares_of(everywhere)], group)
    for parameter in present:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.as_subclass(Mean)
    optimizer.reduced.update(present)


@torch.no_grad()
def clip_grad_norm_(optimizer: ShardedOptimizer, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their 2-norm, over all parameters, is at most `max_norm`; return the norm before.

    Each rank counts what it owns, so it is right after `reduce_gradients` and after an all-reduce. Every rank calls it.
    Returns a float64 scalar, the same on every rank. Costs one all-reduce of one number.
    """
    own = [each.grad.detach() for each in optimizer.parameters if each.grad is not None and optimizer.owns(each)]
    total = torch.zeros((), dtype=torch.float64, device=message_device(optimizer.group))
    for gradient in own:  # the ranks' sums of squares add up, but their norms don't
        wide = torch.promote_types(gradient.dtype, torch.float64)  # perhaps complex
        total += torch.linalg.vector_norm(gradient, dtype=wide).square().to(total.device)
    dist.all_reduce(total, group=optimizer.group)
    norm = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_(optimizer.parameters, max_norm, norm)
    return norm

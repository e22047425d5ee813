"""Batch normalization over the batches of all ranks, as if one process had them all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from scratch_ddp.common.wrapper import Group, process_group


def sync_batch_norm(x, norm, group=None):
    """Return norm(x) as in one process with all ranks' rows; x's gradient is as there.

    x: (rows, features, …), perhaps no rows. norm: nn.BatchNorm1d, 2d or 3d. Its
    statistics are updated as in one process, or used, in eval mode. The gradients of
    its weight and bias stay this rank's part of a sum.
    Cost: in training one all-reduce of 2 · features + 1 numbers, and one in backward.
    """
    features = x.shape[1]
    others = [dim for dim in range(x.dim()) if dim != 1]

    def per_feature(values):  # of shape (features,), to be multiplied with x
        return values.view(1, features, *[1] * (x.dim() - 2))

    # From which three sums follow mean and variance? What is the gradient of a sum over
    # all ranks?

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, mine):
            total = mine.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx, gradient):
            total = gradient.clone()
            dist.all_reduce(total, group=group)  # each rank's result depends on the total
            return total

    if norm.training:
        exact = x.double()  # the difference of two large sums needs all digits
        count = exact.new_full((1,), x.numel() / features)
        total = Total.apply(torch.cat([exact.sum(others), exact.square().sum(others), count]))
        count = total[-1].detach()
        if count <= 1:  # on all ranks: the variance of one value is no estimate
            raise ValueError("Expected more than 1 value per channel when training, over all ranks")
        mean = total[:features] / count
        variance = (total[features:-1] / count - mean.square()).clamp(min=0)
        with torch.no_grad():
            norm.num_batches_tracked += 1
            share = norm.momentum
            for running, value in (
                (norm.running_mean, mean),
                (norm.running_var, variance * count / (count - 1)),
            ):
                running.lerp_(value.to(running.dtype), share)
    else:
        mean, variance = norm.running_mean, norm.running_var
    scale = (variance + norm.eps).rsqrt()
    wide = torch.promote_types(x.dtype, norm.weight.dtype)  # x may be in half precision
    mean, scale = mean.to(wide), scale.to(wide)
    return ((x - per_feature(mean)) * per_feature(scale * norm.weight) + per_feature(norm.bias)).to(x.dtype)
    # end of the answer


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm of any number of dimensions whose statistics are those of all ranks' batches.

    Made by `SyncBatchNorm.convert(model, group)` from the norms of a model. See `sync_batch_norm` for the cost.
    """

    group: dist.ProcessGroup | None = None

    @classmethod
    def convert(cls, model: nn.Module, group: Group = None) -> nn.Module:
        """Make every BatchNorm in `model` such a norm, with all that it holds; return the model.

        No communication. Raises ValueError, before anything is changed, for a norm without weight, running statistics
        or momentum, and for one of a class with a `forward` of its own.
        """
        found = [each for each in model.named_modules() if isinstance(each[1], _BatchNorm)]
        for name, each in found:
            plain = type(each).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward, cls.forward)
            if not plain or each.weight is None or each.running_mean is None or each.momentum is None:
                needs = "it needs BatchNorm's forward, a weight, running statistics and a momentum"
                raise ValueError(f"the norm {name!r} can't be synchronized: {needs}")
        for _, each in found:
            each.__class__, each.group = cls, group and process_group(group)
        return model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As BatchNorm's; every rank of the group calls it."""
        return sync_batch_norm(x, self, self.group)

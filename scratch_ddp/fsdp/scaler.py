"""Loss scaling for float16, where every rank sees only its own rows of the gradients."""

from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import message_device


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a sharded model: a gradient that overflowed on one rank makes all ranks skip the step.

    Used as torch's; `device` is "cpu" or "cuda". Each `unscale_` (or the `step` that calls it) costs one all-reduce of
    one number over `group`.
    """

    def __init__(self, device: str = "cuda", group: dist.ProcessGroup | None = None, **settings: Any):
        super().__init__(device, **settings)
        self.group = group

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)  # by device: 1 if a gradient is not finite
        place = message_device(self.group)
        anywhere = torch.stack(
            [torch.zeros((), device=place), *(each.to(place).squeeze() for each in found.values())]
        ).max()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.group)
        devices = list(found) or [torch.device(self._device)]  # a rank may have no gradient of its own
        return {device: anywhere.to(device).reshape(1) for device in devices}

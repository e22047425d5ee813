"""Parameters that are not sharded: every rank has them whole, and their gradients are averaged as in data parallelism.

Worth it for small parameters that are read often or need more precision, such as norms and routers.
"""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp.freed_parameter import mark
from scratch_ddp.fsdp.gradients import why_not_averaged


class Replicated:
    """The replicated parameters by name. `masters` are what an optimizer works on.

    In a compute dtype of their own, the model's parameters are copies of the masters, made for every forward pass.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None, compute_dtype: torch.dtype | None
    ):
        self.group, self.world_size = group, dist.get_world_size(group)
        self.parameters, self.masters = parameters, dict(parameters)
        for name, parameter in parameters.items():
            if compute_dtype not in (None, parameter.dtype) and parameter.is_floating_point():
                self.masters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                parameter.data = parameter.data.to(compute_dtype)
                mark(parameter, name)

    def refresh(self) -> None:
        """Give the model's parameters the masters' values."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.data.copy_(self.masters[name].detach())

    def collect(self) -> None:
        """Hand the gradients that backward has left to the masters."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.to(master.dtype), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def reduce(self, present: set[str]) -> None:
        """Average the gradients of the parameters that have one on any rank: one all-reduce a dtype."""
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for name, master in self.masters.items():
            if name in present and master.numel():
                alike.setdefault((master.dtype, master.device), []).append(master)
        for masters in alike.values():
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in masters]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            flat /= self.world_size
            dist.all_reduce(flat, group=self.group)
            for master, mean in zip(masters, flat.split([each.numel() for each in masters]), strict=True):
                master.grad = mean.view(master.shape)

    def present(self) -> list[bool]:
        """Say for each parameter whether it has a gradient here."""
        return [master.requires_grad and master.grad is not None for master in self.masters.values()]

    def problem(self) -> str | None:
        """Say what keeps the gradients from being averaged, or return None."""
        for name, master in self.masters.items():
            if master.grad is not None and (why := why_not_averaged(name, master.grad)):
                return why
        return None

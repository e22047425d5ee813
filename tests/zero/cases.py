"""Models, optimizers and gradients that a sharded optimizer must get right, and the plain optimizer beside them."""

import torch
import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, RMSprop

from scratch_ddp.zero import ShardedOptimizer

OPTIMIZERS = {
    "SGD": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "momentum, foreach": (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "momentum, fused": (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam, tensor lr": (Adam, {"lr": torch.tensor(0.01)}),
    "AdamW, one by one": (AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW, foreach": (AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW, fused": (AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (Adagrad, {"lr": 0.1}),
    "RMSprop": (RMSprop, {"lr": 0.01, "centered": True}),
    "Adafactor": (Adafactor, {"lr": 0.1}),
    "Muon": (Muon, {"lr": 0.1}),
}


class Everything(nn.Module):
    """Frozen, tied, empty, scalar and transposed parameters, of three dtypes; one of more than 1 MB travels alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(513, 512), nn.Linear(512, 513, bias=False)
        self.head.weight = self.embed.weight
        self.wide, self.narrow = nn.Linear(7, 5).double(), nn.Linear(33, 3).bfloat16()
        self.frozen = nn.Parameter(torch.randn(11, 13), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(4, 9).t())
        self.nothing, self.scalar = nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))


def everything() -> nn.Module:
    torch.manual_seed(0)
    return Everything()


def give_gradients(step: int, *models: nn.Module, all_have: bool = False) -> None:
    """The same random gradients to each model; unless `all_have`, some parameters have none, others at each step."""
    for model in models:
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = gradient if parameter.requires_grad and (all_have or (number + step) % 5) else None


def two_groups(model: nn.Module) -> list[dict]:
    """Half of the parameters with other options."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2], "weight_decay": 0.1}]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon and Adafactor can update: they look at a whole matrix."""
    return [each for each in model.parameters() if each.dim() == 2 and each.numel()]


def full_state_dict(optimizer: ShardedOptimizer) -> dict:
    """The shares of all ranks put together: the plain optimizer's state dict."""
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, optimizer.state_dict())
    state = dict(sorted(item for share in shares for item in share["state"].items()))
    return {"state": state, "param_groups": shares[0]["param_groups"]}


def same(a: object, b: object) -> bool:
    """Whether two nested structures hold the same values; tensors the same bytes and dtype."""
    if isinstance(a, torch.Tensor):
        pair = [each.detach().cpu().reshape(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*pair)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b

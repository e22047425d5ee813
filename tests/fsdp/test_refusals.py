"""What can't be sharded, or must not be done with a sharded model, is refused in a sentence on every rank alike."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.fsdp import FSDP
from scratch_ddp.tensor_parallel import ColumnParallelLinear
from tests.ranks import assert_refused, in_turn

X = torch.ones(1, 2)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))


class Writes(nn.Linear):
    """A layer that constrains its weight in forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(max=0.1)
        return super().forward(x)


def sharded(model: nn.Module | None = None, x: torch.Tensor = X) -> FSDP:
    """A model after a step."""
    model = FSDP(model or nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model(x).sum().backward()
    model.sync_gradients()
    return model


def after(change) -> None:
    """A step, a change of the wrapped model, another forward pass."""
    model = sharded()
    change(model)
    model(X)


def adafactor_step(model: FSDP) -> None:
    torch.optim.Adafactor(model.parameters()).step()


def hooked() -> nn.Module:
    plain = model()
    plain[0].weight.register_hook(print)
    return plain


def sliced() -> nn.Module:
    tp = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))["tp"]
    return nn.Sequential(ColumnParallelLinear.from_linear(nn.Linear(2, 4), tp))


def stale_optimizer() -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    sharded(plain)
    optimizer.step()


def optimizer_of_a_pass() -> None:
    """Made while the last unit waits for its backward pass."""
    wrapped = FSDP(model())
    wrapped(X)
    torch.optim.SGD(wrapped.module.parameters(), lr=0.1).step()


def new_head() -> None:
    wrapped = sharded()
    wrapped.module[1] = nn.Linear(2, 2)
    torch.optim.SGD(wrapped.module[1].parameters(), lr=0.1).step()


def second_derivative() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(sharded()(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 2))


class Slope(nn.Sequential):
    """A model that computes a gradient in forward."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x)[0]


def rank() -> int:
    return dist.get_rank()


REPLACED = "'0.weight' was replaced, moved or converted"
REFUSED = [
    ("'0.weight' has hooks, of another wrapper perhaps", lambda: FSDP(hooked())),
    ("'0.weight' is a DTensor, and only plain tensors can be sharded", lambda: FSDP(FSDP(model()).module)),
    ("'0.weight' is a slice of a tensor-parallel layer", lambda: FSDP(sliced())),
    ("rank 1: units overlap: '1.0' lies in '1'", lambda: FSDP(model(), units=[nn.Sequential, nn.Linear][: 1 + rank()])),
    ("units: Conv2d is no module of the model, nor the type of one", lambda: FSDP(model(), units=[nn.Conv2d])),
    ("units: Linear is no module of the model", lambda: FSDP(model(), units=[nn.Linear(2, 2)])),
    ("'type' object is not iterable", lambda: FSDP(model(), units=nn.Linear)),
    (
        "rank 1: entry 0 is parameter '0.weight': float32 (3, 2), but",
        lambda: FSDP(nn.Sequential(nn.Linear(2, 2 + rank()))),
    ),
    (
        "is the root with 0.weight, 0.bias, 2.weight, 2.bias, but",
        lambda: FSDP(model(), units=[[nn.ReLU], [nn.Sequential]][rank()]),
    ),
    ("prefetch 1, free", lambda: FSDP(model(), prefetch=rank())),
    ("compute_dtype torch.bfloat16", lambda: FSDP(model(), compute_dtype=[None, torch.bfloat16][rank()])),
    ("no attribute 'reset_parameters'", lambda: FSDP(on_meta())),
    ("without values, or NaN", lambda: FSDP(on_meta(), init=lambda module: None)),
    ("an FSDP can't be pickled or copied", lambda: pickle.dumps(sharded())),
    ("an FSDP can't be pickled or copied", lambda: copy.deepcopy(sharded())),
    ("that the model had before it was wrapped, or in a pass: make it from the parameters()", stale_optimizer),
    ("'2.bias' that the model had before it was wrapped, or in a pass: make it from", optimizer_of_a_pass),
    ("'1.weight' was added after the model was wrapped", new_head),
    ("second derivatives (create_graph=True) need parameters that are freed", second_derivative),
    ("ranks 0, 1: a forward pass did not reach its end", lambda: FSDP(Slope(nn.Linear(2, 2)))(X)),
    ("'0.weight' is sparse", lambda: sharded(nn.Sequential(nn.Embedding(4, 2, sparse=True)), torch.tensor([1]))),
    ("the model writes to its parameter '0.weight'", lambda: sharded(nn.Sequential(Writes(2, 2)))(X)),
    (REPLACED, lambda: after(lambda model: model.to(torch.float64))),
    (REPLACED, lambda: after(lambda model: setattr(model.module[0], "weight", model.module[1].weight))),
    ("a hook on '0.weight' is never called", lambda: after(lambda m: m.module[0].weight.register_hook(print))),
    ("in-place operations that require placement changes", lambda: after(adafactor_step)),
]


def test_what_is_refused():
    assert_refused(2, REFUSED)


def lists_in_a_list() -> None:
    """Their elements are units: the lists themselves are never called."""
    layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    units = FSDP(nn.ModuleDict({"layers": layers}))._runtime.units
    assert [unit.module_name for unit in units] == ["layers.0.0", "layers.0.1"]


def read_by_its_parent() -> None:
    """A module that reads its children's parameters itself is one unit with them."""
    x = torch.ones(1, 3, 4)
    FSDP(nn.MultiheadAttention(4, 2))(x, x, x)[0].sum().backward()


def test_which_modules_are_units():
    in_turn(2, lambda check: check(), [(lists_in_a_list,), (read_by_its_parent,)])

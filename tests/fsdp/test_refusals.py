"""What can't be sharded, or must not be done with a sharded model, is refused in a sentence on every rank alike."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.fsdp import FSDP
from scratch_ddp.tensor_parallel import ColumnParallelLinear
from tests.fsdp.cases import message_of
from tests.ranks import run_ranks

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


def second_derivative() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(sharded()(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


REFUSED = [
    ("'0.weight' has hooks, of another wrapper perhaps", lambda: FSDP(hooked())),
    ("'0.weight' is a DTensor, and only plain tensors can be sharded", lambda: FSDP(FSDP(model()).module)),
    ("'0' holds slices of a tensor-parallel layer", lambda: FSDP(sliced())),
    ("units overlap: '1.0' lies in '1'", lambda: FSDP(model(), units=[nn.Sequential, nn.Linear])),
    ("units: Conv2d is no module of the model, nor the type of one", lambda: FSDP(model(), units=[nn.Conv2d])),
    ("units: Linear is no module of the model", lambda: FSDP(model(), units=[nn.Linear(2, 2)])),
    ("'type' object is not iterable", lambda: FSDP(model(), units=nn.Linear)),
    ("an FSDP can't be pickled or copied", lambda: pickle.dumps(sharded())),
    ("an FSDP can't be pickled or copied", lambda: copy.deepcopy(sharded())),
    ("a unit is called by itself: call the whole model", lambda: sharded().module[0](X)),
    ("that the model had before it was wrapped: make it from the parameters()", stale_optimizer),
    ("second derivatives (create_graph=True) need parameters that are freed", second_derivative),
    ("'0.weight' is sparse", lambda: sharded(nn.Sequential(nn.Embedding(4, 2, sparse=True)), torch.tensor([1]))),
    ("the model writes to its parameter '0.weight'", lambda: sharded(nn.Sequential(Writes(2, 2)))(X)),
    ("'0.weight' was replaced, moved or converted", lambda: after(lambda model: model.to(torch.float64))),
    (
        "'0.weight' was replaced, moved or converted",
        lambda: after(lambda m: setattr(m.module[0], "weight", m.module[1].weight)),
    ),
    ("a hook on '0.weight' is never called", lambda: after(lambda m: m.module[0].weight.register_hook(print))),
]


def test_what_is_refused():
    def ranks():
        return [message_of(do, (ValueError, TypeError, RuntimeError, AttributeError)) for _, do in REFUSED]

    for messages in run_ranks(2, ranks, timeout=120):
        for message, (expected, _) in zip(messages, REFUSED, strict=True):
            assert expected in message, message


def on_one_rank() -> list[str]:
    """The same on the second rank alone, and arguments that differ."""
    rank = dist.get_rank()
    refused = [message_of(do if rank else lambda: FSDP(model())) for _, do in REFUSED[3:7]]
    return refused, [
        message_of(lambda: FSDP(nn.Sequential(nn.Linear(2, 2 + rank)))),
        message_of(lambda: FSDP(model(), units=[nn.Sequential] if rank else [nn.ReLU])),
        message_of(lambda: FSDP(model(), prefetch=rank)),
        message_of(lambda: FSDP(model(), compute_dtype=torch.bfloat16 if rank else None)),
    ]


def test_what_one_rank_does_otherwise():
    for refused, (size, units, prefetch, dtype) in run_ranks(2, on_one_rank):
        for message, (expected, _) in zip(refused, REFUSED[3:7], strict=True):
            assert message.startswith("rank 1: ") and expected in message, message
        assert "rank 1: entry 0 is parameter '0.weight': float32 (3, 2), but" in size and "(2, 2) on rank 0" in size
        assert "is the root with 0.weight, 0.bias, 2.weight, 2.bias, but the root with 0.weight, 0.bias, 1.0" in units
        assert "prefetch 1, free" in prefetch and "compute_dtype torch.bfloat16" in dtype


def test_a_module_that_reads_its_childrens_parameters_itself():
    def ranks():
        x = torch.ones(1, 3, 4)
        FSDP(nn.MultiheadAttention(4, 2))(x, x, x)[0].sum().backward()

    run_ranks(2, ranks)

"""torch.compile of the wrapper, of the wrapped model and of single units: the values of one process that compiles
nothing. Graphs break where a unit is gathered or freed."""

import torch
from torch import nn

from scratch_ddp import FSDP, BucketedDDP
from tests.ddp.cases import compare_with_one_process
from tests.ranks import in_turn


def compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")  # the graphs of forward and backward, without machine code
    return model


WAYS = {
    "wrapper": lambda model: compiled(FSDP(model)),
    "model": lambda model: FSDP(compiled(model)),
    "units": lambda model: FSDP(nn.Sequential(*map(compiled, model))),
    "BucketedDDP": lambda model: compiled(BucketedDDP(model)),
}


def trained(way: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compare_with_one_process(WAYS[way], "mlp")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_compiled_models_train_as_one_process_does():
    in_turn(2, trained, [(way,) for way in WAYS])

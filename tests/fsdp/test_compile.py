"""torch.compile of the wrapper, of the wrapped model and of single units: the values of one process that compiles
nothing. Graphs break where a unit is gathered or freed."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp import FSDP, BucketedDDP
from tests.ddp.cases import CASES, batches, build, one_process_step, shard
from tests.ranks import run_ranks

MLP = CASES["mlp"]
BACKEND = "aot_eager"  # the graphs of forward and backward, without machine code


def compiled(how: str) -> tuple[nn.Module, nn.Module]:
    """The wrapper, and what is called."""
    model = build(MLP)
    if how == "units":
        sharded = FSDP(model)
        for unit in model:
            unit.compile(backend=BACKEND)
        return sharded, sharded
    wrap = BucketedDDP if how == "BucketedDDP" else FSDP
    wrapped = wrap(torch.compile(model, backend=BACKEND) if how == "model" else model)
    return wrapped, wrapped if how == "model" else torch.compile(wrapped, backend=BACKEND)


def trained() -> None:
    for how in ("wrapper", "model", "units", "BucketedDDP"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        alone, (wrapped, called) = build(MLP), compiled(how)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, wrapped)]
        for x, y in batches(3, 2):
            one_process_step(MLP, alone, x, y, 2)
            MLP.loss(called, shard(x, dist.get_rank()), shard(y, dist.get_rank())).backward()
            wrapped.sync_gradients()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        mine = wrapped.gather_full_params() if isinstance(wrapped, FSDP) else dict(wrapped.named_parameters())
        for one, right in zip(mine.values(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, right, rtol=0, atol=1e-12, msg=how)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, how


def test_compiled_models_train_as_one_process_does():
    run_ranks(2, trained, timeout=150)

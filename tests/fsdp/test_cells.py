"""In rank cells: a sharded model trains over their process group, outlives a Stop, and the rank that dies is named."""

import time

import pytest

TRAIN = """
import os, time
import torch._dynamo
from scratch_ddp.fsdp import FSDP

torch.manual_seed(0)
model = FSDP(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
x = torch.ones(3, 8)
slow = ""

def wait(where):
    time.sleep(60 if rank == 1 and slow == where else 0)

def step():
    loss = model(x).square().mean()
    loss.backward()
    model.sync_gradients()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

losses = [step() for _ in range(5)]
assert losses[-1] < losses[0]
before = model.gather_full_params()
model.module[2].register_forward_pre_hook(lambda *_: wait("forward"))
model.module[1].register_full_backward_hook(lambda *_: wait("backward"))
optimizer.register_step_pre_hook(lambda *_: wait("optimizer"))
"""


@pytest.fixture
def training(four_ranks):
    ran(four_ranks, TRAIN, timeout=120)
    return four_ranks


def ran(kernel, code: str, **settings):
    result = kernel.run(code, **settings)
    assert not result.error, result.traceback
    return result


def stopped(kernel, where: str) -> None:
    """Rank 1 gets stuck somewhere in a step, and the others wait for it, until Stop is pressed."""
    cell = kernel.start(f"slow = {where!r}\nstep(), step()")
    time.sleep(1.5)
    began = time.monotonic()
    kernel.interrupt()
    message = kernel.finish(cell).message
    assert "All variables are kept" in message and time.monotonic() - began < 3, message
    ran(kernel, "slow = ''")


SHARDS = """
assert all(type(each.data).__name__ == "DTensor" for each in [*model.state_dict().values(), *model.parameters()])
"""
AS_BEFORE = """
after = model.gather_full_params()
assert all(torch.equal(before[name], after[name]) for name in before), "as before the step"
"""
GOES_ON = """
losses = [step() for _ in range(5)]
assert losses[-1] < losses[0]
"""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stop_in_the_middle_of_a_step_leaves_the_model_usable(training, where):
    stopped(training, where)
    no_gradients = "assert all(parameter.grad is None for parameter in model.parameters())"
    result = ran(training, SHARDS + AS_BEFORE + no_gradients + GOES_ON)
    assert "did not reach its end; all gradients since the last step are dropped" in result.text("stderr")


def test_a_stop_in_the_optimizer_says_what_is_lost(training, tmp_path):
    ran(training, f"model.save({str(tmp_path / 'saved')!r}, optimizer)")
    stopped(training, "optimizer")
    refused = training.run("step()").message
    assert "one was interrupted, and a checkpoint must be loaded" in refused
    load = f"model.load({str(tmp_path / 'saved')!r}, optimizer); optimizer.zero_grad()"
    ran(training, load + AS_BEFORE + GOES_ON)

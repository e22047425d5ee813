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
before = model.gather_full_params()
model.module[2].register_forward_pre_hook(lambda *_: wait("forward"))
model.module[1].register_full_backward_hook(lambda *_: wait("backward"))
optimizer.register_step_pre_hook(lambda *_: wait("optimizer"))
"""


@pytest.fixture
def training(four_ranks):
    result = four_ranks.run(TRAIN, timeout=120)
    assert not result.error, result.traceback
    return four_ranks


def ran(kernel, code: str):
    result = kernel.run(code)
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


def test_training_saving_and_loading(training, tmp_path):
    result = ran(
        training,
        f"""
assert losses[-1] < losses[0]
model.save({str(tmp_path / "saved")!r}, optimizer, len(losses))
step()
assert model.load({str(tmp_path / "saved")!r}, optimizer) == 5
after = model.gather_full_params()
assert all(torch.equal(before[name], after[name]) for name in before)
from scratch_ddp.instruments.traffic import traffic
with traffic() as counted:
    step()
print(counted.calls)
""",
    )
    assert "{'all_gather': 7, 'reduce_scatter': 4}   ← ranks 0–3" in result.text()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stop_in_the_middle_of_a_step_leaves_the_model_usable(training, where):
    stopped(training, where)
    result = ran(
        training,
        """
after = model.gather_full_params()
assert all(torch.equal(before[name], after[name]) for name in before), "as before the step"
assert all(parameter.grad is None for parameter in model.parameters())
losses = [step() for _ in range(5)]
assert losses[-1] < losses[0]
""",
    )
    assert "did not reach its end; all gradients since the last step are dropped" in result.text("stderr")


def test_a_stop_in_the_optimizer_says_what_is_lost(training, tmp_path):
    ran(training, f"model.save({str(tmp_path / 'saved')!r}, optimizer)")
    stopped(training, "optimizer")
    refused = training.run("step()").message
    assert "one was interrupted, and a checkpoint must be loaded" in refused
    ran(
        training,
        f"""
model.load({str(tmp_path / "saved")!r}, optimizer)
optimizer.zero_grad()
after = model.gather_full_params()
assert all(torch.equal(before[name], after[name]) for name in before), "as saved"
losses = [step() for _ in range(5)]
assert losses[-1] < losses[0]
""",
    )

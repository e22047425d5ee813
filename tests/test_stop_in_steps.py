"""Stop in a rank cell in the middle of a step: the next step is right, or what was cut off is refused."""

import time

import pytest

SET_UP = """
import time
import torch._dynamo
from scratch_ddp import FSDP, BucketedDDP, Pipeline

torch.manual_seed(0)
layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(8)))
x, slow = torch.full((9, 8), rank + 1.0), ""


def wait(where):
    time.sleep(60 if slow == where else 0)


def step():
    model.zero_grad()
    model(x).sum().backward()
    model.sync_gradients()
    return [each.clone() for each in gradients()]


def gradients():
    return [parameter.grad for parameter in model.parameters()]

"""
PIPELINE = """
model, x = Pipeline(layers, 4, "zb_h1", torch.nn.functional.mse_loss), torch.ones(9, 8)

def step():
    model.zero_grad()
    model.step(x, x)
    return gradients()
"""
MODELS = {
    "BucketedDDP": "model = BucketedDDP(layers, bucket_mb=300 / 2**20)",
    "FSDP": "model = FSDP(layers)\ngradients = lambda: [*model.gather_full_grads().values()]",
    "Pipeline": PIPELINE,
}
EXPECTED = """
expected = step()
for number, layer in enumerate(layers):
    layer.register_forward_pre_hook(lambda *_, number=number: wait(f"forward {number}"))
    layer.register_full_backward_hook(lambda *_, number=number: wait(f"backward {number}"))
"""
STOPPED = {  # cells that are stopped; the layers 4 and 5 of a pipeline are on rank 2
    "BucketedDDP": [
        "slow = 'backward 1' if rank == 2 else ''\nstep()",
        "slow = f'backward {rank}'\nstep()",
        "if rank != 2:\n    step()",
    ],
    "FSDP": [f"slow = '{where} 1' if rank == 1 else ''\nstep()" for where in ("forward", "backward")],
    "Pipeline": ["slow = 'backward 4'\nstep()"],
}
DROPPED = "assert all(each.grad is None for each in model.parameters())"
AFTER = """
slow = ""
for _ in range(2):
    assert all(torch.equal(mine, right) for mine, right in zip(step(), expected, strict=True))
"""


def ran(kernel, code: str):
    result = kernel.run(code, timeout=120)
    assert not result.error, result.traceback
    return result


def stop(kernel, code: str) -> None:
    running = kernel.start(code)
    time.sleep(0.7)
    began = time.monotonic()
    kernel.interrupt()
    message = kernel.finish(running).message
    assert "All variables are kept" in message and time.monotonic() - began < 6, message


@pytest.mark.parametrize("kind", MODELS)
def test_the_next_step_is_right(four_ranks, kind):
    ran(four_ranks, SET_UP + MODELS[kind] + EXPECTED)
    for cell in STOPPED[kind]:
        stop(four_ranks, cell)
        if kind != "BucketedDDP":
            ran(four_ranks, DROPPED)
        after = ran(four_ranks, AFTER)
        said = "did not reach its end; all gradients since the last step are dropped" in after.text("stderr")
        assert said == (kind == "FSDP")


def test_a_synchronisation_that_was_cut_off_is_refused(four_ranks):
    ran(four_ranks, SET_UP + MODELS["BucketedDDP"] + EXPECTED)
    stop(four_ranks, "model(x).sum().backward()\nif rank != 2:\n    model.sync_gradients()\ntime.sleep(60)")
    refused = four_ranks.run("model.sync_gradients()").traceback
    assert "the process group was renewed while gradients were on their way: repeat the step" in refused
    ran(four_ranks, AFTER)


def test_a_stop_in_the_optimizer_says_what_is_lost(four_ranks, tmp_path):
    ran(four_ranks, SET_UP + MODELS["FSDP"] + EXPECTED)
    ran(
        four_ranks,
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n"
        "optimizer.register_step_pre_hook(lambda *_: wait('optimizer'))\n"
        f"model.save({str(tmp_path / 'saved')!r}, optimizer)",
    )
    stop(four_ranks, "slow = 'optimizer' if rank == 1 else ''\nstep()\noptimizer.step()\nstep()")
    assert "one was interrupted, and a checkpoint must be loaded" in four_ranks.run("step()").message
    ran(four_ranks, f"slow = ''\nmodel.load({str(tmp_path / 'saved')!r}, optimizer)" + AFTER)

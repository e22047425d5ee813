"""Stop in a rank cell while gradients travel: the wrapped model goes on with the next step as if nothing had been."""

import time

import pytest

_SET_UP = """
import time
from scratch_ddp.ddp import BucketedDDP
from scratch_ddp.instruments.network import Link, linked_group

torch.manual_seed(0)
layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
x = torch.full((1, 8), rank + 1.0)


def step():
    model.zero_grad()
    model(x).sum().backward()
    model.sync_gradients()


def sleep(_):
    time.sleep(60)


model = {model}
step()
expected = [parameter.grad.clone() for parameter in layers.parameters()]
"""
_AFTER = """
{before}
step()
same = all(torch.equal(a.grad, b) for a, b in zip(layers.parameters(), expected))
step()
print(same, all(torch.equal(a.grad, b) for a, b in zip(layers.parameters(), expected)))
"""
MODELS = {
    "buckets": "BucketedDDP(layers, bucket_mb=300 / 2**20)",
    "buckets on a link": "BucketedDDP(layers, bucket_mb=300 / 2**20, group=linked_group(Link(0.001, 0)))",
}
IN_BACKWARD = """
broken = layers[1].weight.register_hook(sleep) if rank == 2 else None
step()
"""
IN_BACKWARD_OF_ALL = """
broken = layers[rank].weight.register_hook(sleep)
step()
"""
NO_STEP = """
broken = None
if rank != 2:
    step()
"""
BEFORE_SYNC = """
broken = None
model(x).sum().backward()
if rank != 2:
    model.sync_gradients()
time.sleep(60)
"""
STOPPED = [IN_BACKWARD, IN_BACKWARD_OF_ALL, NO_STEP, BEFORE_SYNC]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_next_step_is_right(four_ranks, model):
    set_up = four_ranks.run(_SET_UP.format(model=model))
    assert not set_up.error, set_up.traceback
    for cell in STOPPED:
        running = four_ranks.start(cell)
        time.sleep(0.7)
        four_ranks.interrupt()
        stopped = four_ranks.finish(running)
        assert stopped.error and "All variables are kept" in stopped.message, stopped.message
        after = four_ranks.run(_AFTER.format(before="if broken: broken.remove()"))
        assert not after.error, cell + after.traceback
        assert after.text().startswith("True True   ← ranks 0–3"), cell + after.text()


def test_synchronising_what_a_stop_has_cut_off_is_refused(four_ranks):
    assert not four_ranks.run(_SET_UP.format(model=MODELS["buckets"])).error
    running = four_ranks.start(BEFORE_SYNC)
    time.sleep(0.7)
    four_ranks.interrupt()
    four_ranks.finish(running)
    refused = four_ranks.run("model.sync_gradients()")
    assert "the process group was renewed while gradients were on their way: repeat the step" in refused.traceback
    after = four_ranks.run(_AFTER.format(before=""))
    assert after.text().startswith("True True   ← ranks 0–3"), after.traceback

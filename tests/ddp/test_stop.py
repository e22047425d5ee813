"""Stop in a rank cell while gradients travel: the wrapped model goes on with the next step as if nothing had been."""

import time

SET_UP = """
import time
from scratch_ddp.ddp import BucketedDDP

torch.manual_seed(0)
layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
x, broken = torch.full((1, 8), rank + 1.0), None


def step():
    model.zero_grad()
    model(x).sum().backward()
    model.sync_gradients()


model = BucketedDDP(layers, bucket_mb=300 / 2**20)
step()
expected = [parameter.grad.clone() for parameter in layers.parameters()]
"""
AFTER = """
if broken: broken.remove()
for _ in range(2):
    step()
    print(all(torch.equal(a.grad, b) for a, b in zip(layers.parameters(), expected)))
"""
STOPPED = {
    "in the backward of one rank": """
broken = layers[1].weight.register_hook(lambda _: time.sleep(60)) if rank == 2 else None
step()
""",
    "in the backward of all": """
broken = layers[rank].weight.register_hook(lambda _: time.sleep(60))
step()
""",
    "while one rank does not step": """
broken = None
if rank != 2:
    step()
""",
    "before one rank synchronises": """
model(x).sum().backward()
if rank != 2:
    model.sync_gradients()
time.sleep(60)
""",
}


def test_the_next_step_is_right_and_what_was_cut_off_is_refused(four_ranks):
    set_up = four_ranks.run(SET_UP)
    assert not set_up.error, set_up.traceback
    for where, cell in STOPPED.items():
        running = four_ranks.start(cell)
        time.sleep(0.7)
        four_ranks.interrupt()
        stopped = four_ranks.finish(running)
        assert stopped.error and "All variables are kept" in stopped.message, stopped.message
        if where == "before one rank synchronises":
            refused = four_ranks.run("model.sync_gradients()").traceback
            assert "the process group was renewed while gradients were on their way: repeat the step" in refused
        after = four_ranks.run(AFTER)
        assert not after.error, where + after.traceback
        assert after.text().startswith("True\nTrue"), after.text()

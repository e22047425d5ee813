"""Stop: ranks leave together where they can, are freed where they wait, and the next cell works."""

import re
import signal
import sys
import threading
import time

import pytest

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.rank.stop import Interrupts
from tests.cells.cases import assert_next_works, stopped

# Ranks that can go on leave together

TRAINING = """
import time
from scratch_ddp import BucketedDDP
torch.manual_seed(0)
net = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())])
model, steps = BucketedDDP(net, bucket_mb=0.02), 0
optimizer = torch.optim.AdamW(model.parameters())
def step():
    global steps
    x = torch.randn(8, 64)
    (model(x) - x).square().mean().backward()
    model.sync_gradients()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
def equal():
    mine = torch.cat([each.detach().flatten() for each in model.parameters()] + [torch.tensor([float(steps)])])
    everybody = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everybody, mine)
    return all(torch.equal(mine, other) for other in everybody)
"""
MESH = """
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
steps, x = 0, torch.ones(10)
def step():
    global steps
    for dimension in ("row", "column"):
        dist.all_reduce(x, group=mesh.get_group(dimension))
    steps += 1
def equal():
    everybody = [None] * 4
    dist.all_gather_object(everybody, steps)
    return len(set(everybody)) == 1
"""
CHAIN = """
steps, x = 0, torch.ones(10)
def step():
    global steps
    if rank: dist.recv(x, rank - 1)
    if rank < 3: dist.send(x, rank + 1)
    dist.barrier()
    steps += 1
def equal():
    everybody = [None] * 4
    dist.all_gather_object(everybody, steps)
    return max(everybody) - min(everybody) <= 1  # those that have passed the message on may be in the next
"""
HANDLED = """
try:
    while True: step()
except KeyboardInterrupt:
    together = equal()
    time.sleep(seconds)
    print("saved", together)
"""


@pytest.mark.parametrize("program", [TRAINING, MESH, CHAIN], ids=["training", "mesh", "chain"])
def test_a_loop_ends_in_the_same_step_on_all_ranks(four_ranks, program):
    assert not four_ranks.run(f"import time\nseconds = 0\n{program}\nstep()").error
    for after in (0.2, 0.33):
        handled = stopped(four_ranks, HANDLED, after, error=False)
        assert handled.status == "ok" and handled.text() == "saved True   ← ranks 0–3\n", handled.traceback
        bare = stopped(four_ranks, "while True: step()", after)
        assert "All variables are kept" in bare.message and "differ" not in bare.message
        assert "renewed" not in bare.message
        again = four_ranks.run("together = equal()\nstep()\nprint(together)")
        assert again.text() == "True   ← ranks 0–3\n", again.traceback or again.text("stderr")


def test_who_handles_a_stop_has_time_until_the_second(four_ranks):
    four_ranks.run(f"import time\nseconds = 3\n{MESH}")
    handled = stopped(four_ranks, HANDLED, error=False, limit=9)
    assert handled.status == "ok" and handled.text() == "saved True   ← ranks 0–3\n"
    four_ranks.run("seconds = 600")
    cell = four_ranks.start(HANDLED)
    for _ in range(2):
        time.sleep(1)
        four_ranks.interrupt()
    ended = four_ranks.finish(cell)
    assert ended.error["ename"] == "RankInterrupt" and "All variables are kept" in ended.message
    assert_next_works(four_ranks)


def test_ranks_that_come_too_late_are_stopped_where_they_are(four_ranks):
    """What they call in a handler would not fit together, and is refused."""
    code = "try:\n    dist.barrier()\n    if rank == 3: time.sleep(60)\n    dist.barrier()\n"
    code += "except KeyboardInterrupt:\n    dist.barrier()"
    message = stopped(four_ranks, f"import time\n{code}", limit=9).message
    assert "raised RuntimeError: the ranks were stopped at different places" in message
    assert_next_works(four_ranks)


# Ranks that wait for one that never comes are freed where they are


WAITS = {
    "all_reduce": ("if rank == 0:\n    dist.all_reduce(torch.ones(4))", "rank 0 waits in all_reduce (line 2)"),
    "recv": ("if rank == 1:\n    dist.recv(torch.ones(4), src=2)", "rank 1 waits in recv from rank 2 (line 2)"),
    "new_group": ("if rank == 0:\n    dist.new_group([0, 1])", "rank 0 waits in new_group (line 2)"),
    "all_gather_object": (
        "if rank < 2:\n    dist.all_gather_object([None] * 4, rank)",
        "ranks 0–1 wait in all_gather_object (line 2)",
    ),
    "functional": (
        "if rank == 3:\n    functional.all_reduce(torch.ones(2), 'sum', dist.group.WORLD) + 0",
        "rank 3 waits in all_reduce (line 2)",
    ),
    "isend": ("if rank == 0:\n    dist.isend(torch.ones(10_000_000), 1).wait()", "rank 0 waits in send to rank 1"),
    "sub-group": (
        "pair = dist.new_group([0, 1])\nif rank == 1:\n    dist.all_reduce(torch.ones(1), group=pair)",
        "rank 1 waits in all_reduce (line 3)",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_stop_frees_who_waits_and_keeps_the_variables(four_ranks, name):
    code, told = WAITS[name]
    imports = "import torch.distributed._functional_collectives as functional"
    first = "functional.all_reduce(torch.ones(2), 'sum', dist.group.WORLD) + 0"  # imports more
    four_ranks.run(f"{imports}\n{first if name == 'functional' else ''}\nkept = rank + 0.5")
    message = stopped(four_ranks, code).message
    assert told in message and "never came (finished the cell)" in message
    assert "All variables are kept" in message
    assert four_ranks.run("assert kept == rank + 0.5").status == "ok"
    assert_next_works(four_ranks)


def test_stop_inside_torchs_ddp_and_fully_shard(four_ranks):
    prepared = four_ranks.run(
        "from torch.distributed.fsdp import fully_shard\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "sharded = fully_shard(torch.nn.Linear(4, 4))\n"
        "for model in (ddp, ddp, sharded):\n    model(torch.ones(2, 4)).sum().backward()",
        timeout=90,
    )
    assert not prepared.error, prepared.traceback
    message = stopped(four_ranks, "if rank != 3:\n    ddp(torch.ones(2, 4)).sum().backward()", after=1).message
    assert "ranks 0–2 wait in all_reduce (line 2); rank 3 never came (finished the cell)" in message
    assert "All variables are kept" in message
    assert_next_works(four_ranks)
    message = stopped(four_ranks, "if rank != 1:\n    sharded(torch.ones(2, 4))", after=1).message
    assert re.search(r"ranks 0, 2–3 wait in all_gather\w* \(line 2\); rank 1 never came", message)
    code = "sharded(torch.ones(2, 4)).shape, torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)) is None"
    again = four_ranks.run(code)
    assert "(torch.Size([2, 4]), False)   ← ranks 0–3" in again.text(), again.traceback


@pytest.mark.parametrize(
    "code",
    ["import time\ntime.sleep(60)", "while True:\n    pass", "import subprocess\nsubprocess.run(['sleep', '60'])"],
)
def test_stop_ends_work_that_waits_for_nobody(four_ranks, code):
    four_ranks.run("kept = 1")
    message = stopped(four_ranks, code).message
    assert re.match(r"stopped: ranks 0–3 are in line [12]\.", message) and "All variables are kept" in message
    assert four_ranks.run("assert kept").status == "ok"


def test_ranks_that_will_not_stop_are_replaced(four_ranks):
    four_ranks.run("kept = 1\npair = dist.new_group([0, 2])\nother = dist.new_group([0, 1])")
    locked = "import ctypes\nif rank == 2:\n    ctypes.PyDLL(None).sleep(60)\ndist.barrier()"
    message = stopped(four_ranks, locked).message
    assert "ranks 0–1, 3 wait in barrier (line 4)" in message
    assert "Rank 2 could not be freed and was replaced: its variables are gone." in message
    assert "Process groups and meshes made before must be made again." in message
    assert_next_works(four_ranks)
    assert "Run again on all ranks the cells whose variables are needed." in message
    missing = four_ranks.run("print(kept)").message
    assert "rank 2 raised NameError" in missing
    assert four_ranks.run("'kept' in globals()").text() == "True   ← ranks 0–1, 3\nFalse   ← rank 2\n"
    refused = four_ranks.run("%%rank [0]\ndist.barrier(group=pair)")
    assert "made before a rank was replaced" in refused.message
    assert four_ranks.run("%%rank [0,1]\ndist.barrier(group=other)").status == "ok"
    group = "trio = dist.new_group([1, 2, 3])\nif rank: dist.barrier(group=trio)\nprint('met')"
    assert four_ranks.run(group).text() == "met   ← ranks 0–3\n"
    cell = four_ranks.start("import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass")
    for _ in range(3):
        time.sleep(0.7)
        four_ranks.interrupt()
    message = four_ranks.finish(cell).message
    assert "Ranks 0–3 could not be freed and were replaced: their variables are gone." in message
    assert_next_works(four_ranks)


def test_whoever_presses_stop_again_and_again_keeps_the_variables(four_ranks):
    four_ranks.run("import ctypes, time\nkept = 1\nbroken = type('Broken', (), {'__repr__': None})()")
    cell = four_ranks.start("display(broken)\nctypes.PyDLL(None).sleep(1)\ntime.sleep(60)")
    for _ in range(5):
        time.sleep(0.1)
        four_ranks.interrupt()
    assert "All variables are kept" in four_ranks.finish(cell).message
    assert four_ranks.run("kept").text() == "1   ← ranks 0–3\n"
    assert_next_works(four_ranks)


def test_a_stop_that_comes_as_the_cell_ends_hurts_nobody(four_ranks):
    for limit in (0.048, 0.049, 0.05, 0.051, 0.052) * 3:
        result = four_ranks.run(f"%%distributed --stop-after {limit}\nimport time\ntime.sleep(0.05)")
        assert result.status == "ok" or result.error["ename"] == "RankInterrupt"
    assert_next_works(four_ranks)


def test_an_interrupt_at_any_moment_of_a_hold_leaves_the_second_thread_free(monkeypatch):
    """Python may notice a signal between any two of its steps, also inside of what the main thread waits with."""
    monkeypatch.setattr(interruptible_group, "place", lambda: {"begun": {}, "members": {}})
    monkeypatch.setattr(interruptible_group, "gates", [])
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(lambda: (), lambda said: said["held"] and interrupts.hold({}))  # there is always news
    signal.signal(signal.SIGINT, before)
    interrupts.interruptible = True
    for moment in range(150):
        steps = iter(range(moment))

        def look(frame, event, argument, steps=steps):
            if frame.f_code is not Interrupts.hold.__code__ and next(steps, None) is None:
                raise KeyboardInterrupt
            return look

        interrupts.hold({})
        with pytest.raises(KeyboardInterrupt):
            sys.settrace(look)  # until it raises
            interrupts.before_call(collective=True)
        second = threading.Thread(target=interrupts.hold, args=({},), daemon=True)
        second.start()
        second.join(10)
        assert not second.is_alive(), f"it waits for ever, after an interrupt at step {moment}"

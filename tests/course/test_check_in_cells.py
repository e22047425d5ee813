"""`check` in the cells of real ranks: mistakes that stop ranks are named, and the next cell and the next check work."""

import re
import textwrap

import pytest

from scratch_ddp.course.exercise import all_exercises
from tests.course.answers import read

EXERCISE = all_exercises()["average_gradients"]
CHECK = "from scratch_ddp.course import check\ncheck(average_gradients, seconds={})"
MISTAKES = read(r"""
average_gradients
  ✗ raises on one rank | runs: Rank 2, .*everything: raised ZeroDivisionError.*\(in line 2, `1 / \(rank - 2\)`\)
    1 / (rank - 2)
    dist.barrier()
  ✗ skips a call on one rank | runs: Ranks 0, 2–3 did not come back: .*`\. Rank 1 had returned
    if rank != 1: dist.barrier()
  ✗ all wait for each other | runs: after 1 s still in line 2, `dist\.recv.*Rank 0 waits for a message
    dist.recv(torch.zeros(1), (rank + 1) % 4)
  ✗ computes for ever | runs: did not come back: after 1 s
    while True:
        try: pass
        except Exception: pass
  ✗ sends what nobody receives | group: all ranks use everything: Rank 0 sent to rank 1 once, rank 1 received nothing
    rank or dist.isend(torch.zeros(9), 1)
  ✗ does not wait for the end | waits: all_reduce was started and never waited for
    dist.all_reduce(torch.zeros(1), async_op=True)
  ✗ sends another dtype | runs: rank 0 sends 9 × float32, rank 1 receives into 9 × float64
    if rank == 0: dist.send(torch.zeros(9), 1)
    if rank == 1: dist.recv(torch.zeros(9).double(), 0)
  ✗ makes another collective | runs: called broadcast of 9 × float32 from rank 0
    dist.all_reduce(torch.zeros(9)) if rank else dist.broadcast(torch.zeros(9), 0)
""")


def judged(kernel, answer: str, seconds: int = 1) -> str:
    """What the check says of the answer, once for all ranks, if a call may take so long."""
    assert not kernel.run(answer).error
    result = kernel.run(CHECK.format(seconds), timeout=30)
    assert not result.error, result.traceback
    return result.text()


def then_cells_work(kernel) -> None:
    """A collective, messages, and another check, of an answer that would destroy the process group."""
    ring = "sent = dist.isend(x, (rank + 1) % 4)\ndist.recv(y, (rank - 1) % 4)\nsent.wait()"
    ring = f"x, y = torch.ones(1), torch.zeros(1)\n{ring}\ndist.all_reduce(x)\nprint(int(x), int(y))"
    result = kernel.run(ring, timeout=20)
    assert not result.error and "4 1" in result.text(), result.text()
    said = judged(kernel, f"{EXERCISE.answer_cell()}\n    dist.destroy_process_group()", seconds=20)
    assert "✓ value" in said and "✗" not in said


@pytest.fixture(scope="module", params=["", " --backend gloo"], ids=["own group", "gloo"])
def ranks(request, _shared_kernel):
    """Four ranks, also with plain gloo, where a wait in the learner's own group can't be ended."""
    started = _shared_kernel.run(f"%dist_init -n 4{request.param}", timeout=120)
    assert not started.error, started.traceback
    yield _shared_kernel
    _shared_kernel.run("%dist_shutdown")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_a_mistake_is_named_and_the_next_cell_and_the_next_check_work(ranks, mistake):
    said = judged(ranks, "def average_gradients(model, rank=rank):\n" + textwrap.indent(mistake.text, "    "))
    assert re.search(f"✗ {mistake.fails:<7} .*{mistake.says}", said), said
    assert said.count("✗") == 1
    then_cells_work(ranks)


def test_ranks_that_do_not_come_are_named_and_come_to_the_next_check(ranks):
    assert not ranks.run(EXERCISE.answer_cell()).error
    grace = "%%rank 0\nfrom scratch_ddp.course import arena\narena.GRACE = {}\n"
    result = ranks.run(grace.format(1.0) + CHECK.format(1), timeout=30)
    assert "ranks 1–3 did not come within 1 s. Run the cell without %%rank" in result.traceback
    assert not ranks.run(grace.format(5.0)).error
    then_cells_work(ranks)


def test_nothing_is_left_of_a_check(ranks):
    """Neither threads nor descriptors, groups or another state of the random numbers."""
    state = (
        "import gc, os, threading\ngc.collect()\n"
        "print(len(os.listdir('/proc/self/fd')), len(dist.distributed_c10d._world.pg_names), torch.initial_seed())"
    )
    judged(ranks, EXERCISE.answer_cell())
    before = ranks.run(state).text()
    for _ in range(3):
        judged(ranks, EXERCISE.answer_cell())
    assert ranks.run(state).text() == before

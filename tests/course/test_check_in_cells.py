"""`check` in the cells of real ranks: mistakes that stop ranks are named, and the next cell and the next check work."""

import re

import pytest

from scratch_ddp.course.exercise import all_exercises

EXERCISE = all_exercises()["average_gradients"]
HEAD = "def average_gradients(model):\n    first, rank = next(model.parameters()).grad, dist.get_rank()\n"
CHECK = "from scratch_ddp.course import check\ncheck(average_gradients, seconds=1)"
WAIT = r"did not come back: after 1 s still in line \d, `dist\.\w+\(.*\)`\."
CASE = "all ranks use everything: "
MISTAKES = {
    "raises on one rank": (
        "1 / (rank - 2)\ndist.all_reduce(first)",
        rf"✗ runs    {CASE}Rank 2 raised ZeroDivisionError.*\(in line 3, `1 / \(rank - 2\)`\)",
    ),
    "skips a call on one rank": (
        "if rank != 1:\n    dist.all_reduce(first)",
        f"Ranks 0, 2 and 3 {WAIT} Rank 1 had returned",
    ),
    "all wait for each other": (
        "dist.recv(first, (rank + 1) % 4)",
        f"Ranks 0, 1, 2 and 3 {WAIT} Rank 0 waits for a message",
    ),
    "computes for ever": (
        "while True:\n    try:\n        pass\n    except Exception:\n        pass",
        "did not come back: after 1 s",
    ),
    "sends what nobody receives": (
        "if rank == 0:\n    dist.isend(first, 1).wait() if first.numel() < 5 else dist.isend(first, 1)",
        f"✗ group   {CASE}Rank 0 sent to rank 1 once, rank 1 received nothing",
    ),
    "does not wait for the end": ("dist.all_reduce(first, async_op=True)", "never waited for"),
    "sends more than fits": (
        "if rank < 2:\n    (dist.send if rank else dist.recv)(first.flatten()[: 4 + rank], 1 - rank)",
        r"rank 1 sends 5 × float32, rank 0 receives into 4 × float32",
    ),
    "sends another dtype": (
        "if rank < 2:\n    (dist.send(first, 1) if rank == 0 else dist.recv(first.double(), 0))",
        r"rank 0 sends 9 × float32, rank 1 receives into 9 × float64",
    ),
    "gives another size to a collective": (
        "dist.all_reduce(first.flatten()[rank:])",
        "All ranks must make the same call",
    ),
    "makes another collective": (
        "dist.all_reduce(first) if rank else dist.broadcast(first, 0)",
        "called broadcast of 9 × float32 from rank 0",
    ),
    "destroys the process group": ("dist.destroy_process_group()", "would end the process group that all cells share"),
}


def judged(kernel, answer: str) -> str:
    """What the check says of the answer, once for all ranks."""
    assert not kernel.run(answer).error
    result = kernel.run(CHECK, timeout=30)
    assert not result.error, result.traceback
    return result.text()


def then_cells_work(kernel) -> None:
    """A collective, messages, and another check."""
    ring = "sent = dist.isend(x, (rank + 1) % 4)\ndist.recv(y, (rank - 1) % 4)\nsent.wait()"
    ring = f"x, y = torch.ones(1), torch.zeros(1)\n{ring}\ndist.all_reduce(x)\nprint(int(x), int(y))"
    result = kernel.run(ring, timeout=20)
    assert not result.error and "4 1" in result.text(), result.text()
    assert "✓ value" in (said := judged(kernel, EXERCISE.answer_cell())) and "✗" not in said


@pytest.fixture(scope="module", params=["", " --backend gloo"], ids=["own group", "gloo"])
def ranks(request, _shared_kernel):
    """Four ranks, also with plain gloo, where a wait in the learner's own group can't be ended."""
    started = _shared_kernel.run(f"%dist_init -n 4{request.param}", timeout=120)
    assert not started.error, started.traceback
    yield _shared_kernel
    _shared_kernel.run("%dist_shutdown")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_the_next_cell_and_the_next_check_work(ranks, mistake):
    body, says = MISTAKES[mistake]
    said = judged(ranks, HEAD + "    " + body.replace("\n", "\n    "))
    assert re.search(says, said), said
    assert said.count("✗") == 1
    then_cells_work(ranks)


def test_ranks_that_do_not_come_are_named_and_come_to_the_next_check(ranks):
    assert not ranks.run(EXERCISE.answer_cell()).error
    result = ranks.run("%%rank 0\n" + CHECK, timeout=30)
    assert "ranks 1, 2 and 3 did not come within 5 s. Run the cell without %%rank" in result.traceback
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

"""Answers that raise, hang, flood, or spoil the process group: told in a clear line, and the next cell works."""

import re
import sys
import time

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.course import attempt, check, examine, solution, trial
from scratch_ddp.course.exercise import Exercise, all_exercises
from tests.course.answers import BACKEND, examined, on_ranks, run_cell
from tests.ranks import RankFailed, run_ranks

EXERCISES = all_exercises()
HEAD = "def tree_broadcast(tensor, src=0, group=None):\n"
RIGHT = HEAD + "    dist.broadcast(tensor, src)"  # as far as its value goes
SECONDS = 1.0


def then_the_group_works() -> bool:
    """Everything that a later cell may do: a collective, messages, another check."""
    n, rank = dist.get_world_size(), dist.get_rank()
    total, arriving = torch.ones(3), torch.empty(1)
    dist.all_reduce(total)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % n)
    dist.recv(arriving, (rank - 1) % n)
    sent.wait()
    return bool((total == n).all()) and int(arriving) == (rank - 1) % n and not examined(RIGHT, "tree_broadcast").passed


def lines_of(body: str, n: int = 3, backend: str = BACKEND, per_rank: dict[int, str] | None = None) -> list[str]:
    """What the check says of tree_broadcast with this body (another one on some ranks), the same on all ranks."""

    def on_rank():
        mine = (per_rank or {}).get(dist.get_rank(), body)
        verdict = examined(HEAD + "    " + mine.replace("\n", "\n    "), "tree_broadcast", SECONDS)
        assert not verdict.passed
        return verdict.lines, then_the_group_works()

    lines, works = on_ranks(n, on_rank, backend=backend)
    assert works
    return lines


def test_an_error_on_one_rank_is_told_with_rank_line_and_code():
    (line,) = lines_of("if dist.get_rank() == 1:\n    tensor /= 0\n    1 / 0\ndist.all_reduce(tensor)")
    assert "✗ runs    src=0: Rank 1 raised ZeroDivisionError: division by zero (in line 4, `1 / 0`)." in line
    assert "Ranks 0 and 2 did not come back: after 1 s still in line 5, `dist.all_reduce(tensor)`." in line


def test_messages_through_all_ranks_keep_nobody_waiting():
    """Neither in the group of all but rank 0 nor in that of rank 0, which is tried at the same time."""
    body = """members = dist.get_process_group_ranks(group or dist.group.WORLD)
n, root = len(members), members.index(src)
place = (dist.get_rank(group) - root) % n
for reach in (1, 2, 4, 8):
    if place < reach and place + reach < n:
        dist.send(tensor, members[(place + reach + root) % n])
    elif reach <= place < 2 * reach:
        dist.recv(tensor, members[(place - reach + root) % n])"""
    answer, began = HEAD + "    " + body.replace("\n", "\n    "), time.monotonic()
    held, wrong = on_ranks(4, lambda: examined(answer, "tree_broadcast", 30.0).lines)
    assert held == "✓ value   ✓ agreement   ✓ cost"
    assert wrong.endswith(
        "in a group of ranks 1, 2 and 3 (numbered from 0): Ranks 0, 1 and 2: send and recv go through all ranks, "
        "should stay in `group`."
    )
    assert time.monotonic() - began < 20  # a rank that waited would have waited for 30 s


def test_an_error_on_every_rank_is_told_once():
    lines = lines_of("tensor.no_such_method()")
    assert lines == [
        "✗ runs    src=0: Ranks 0, 1 and 2 raised AttributeError: 'Tensor' object has no attribute 'no_such_method' "
        "(in line 2, `tensor.no_such_method()`)."
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import sys; sys.exit('enough')", "raised SystemExit: enough"),
        ("raise NotImplementedError", "raised NotImplementedError (in line 2"),
        (
            "dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())",
            "did not come back: after 1 s still in line 2",
        ),
        ("while True: pass", "did not come back: after 1 s still in line 2"),
        (
            "try:\n    dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())\nexcept Exception: pass",
            "did not come back",
        ),
        (
            "try:\n    dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())\nexcept BaseException: pass",
            "did not come back",
        ),
        (
            "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass",
            "did not come back: after 1 s",
        ),
        ("dist.destroy_process_group()", "would end the process group that all cells share (in line 2"),
        (
            "if dist.get_rank() == 0: dist.isend(tensor, 1)",
            "✗ group   src=0: Rank 0 sent to rank 1 once, rank 1 received never.",
        ),
        (
            "if dist.get_rank() == 0: dist.irecv(tensor, 1)",
            "✗ group   src=0: Rank 0 waits for a message that rank 1 never sent.",
        ),
        (
            "if dist.get_rank() == 1: dist.all_reduce(tensor, async_op=True)",
            "called no collective, rank 1 all_reduce once",
        ),
        ("import sys; sys.stdout = None", "tensor is [10, 11, 12, 13, 14], should be [0, 1, 2, 3, 4]"),
    ],
)
def test_a_faulty_answer_is_told(body, says):
    assert says in "\n".join(lines_of(body))


@pytest.mark.parametrize(
    "body",
    [
        "dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())",
        "if dist.get_rank() == 0: dist.isend(tensor, 1)",
    ],
)
def test_in_plain_gloo_a_hang_is_bounded_too_and_other_groups_go_on(body):
    def on_rank():
        mine = dist.new_group()
        lines = examined(HEAD + "    " + body, "tree_broadcast", SECONDS).lines
        dist.all_reduce(torch.ones(1), group=mine)
        assert dist.get_backend() == "gloo"
        return lines, then_the_group_works()

    (line,), works = on_ranks(3, on_rank, backend="gloo")
    assert works and ("did not come back: after 1 s" in line or "rank 1 received never" in line)


@pytest.mark.parametrize("backend", [BACKEND, "gloo"])
def test_a_process_group_that_was_destroyed_all_the_same_is_made_anew(backend):
    """Someone who imported the function by its name before is not kept from calling it."""

    def on_rank():
        cell = run_cell(
            "from torch.distributed import destroy_process_group\n" + HEAD + "    destroy_process_group()  # really"
        )
        lines = examine(cell["tree_broadcast"], SECONDS).lines
        return lines, then_the_group_works()

    lines, works = on_ranks(3, on_rank, backend=backend)
    assert works and "made anew" in lines[-1]


def test_a_time_limit_may_strike_where_no_line_is(monkeypatch):
    def answer():
        raise attempt.TimeIsUp

    frames = attempt.traceback.walk_tb
    monkeypatch.setattr(attempt.traceback, "walk_tb", lambda where: [*frames(where), (sys._getframe(), None)])
    _, outcome = attempt.attempt(answer, (), seconds=60)
    assert (outcome.how, outcome.code) == ("unfinished", "raise attempt.TimeIsUp")


def test_a_flood_is_cut_short_and_told():
    lines = lines_of("for i in range(20_000): print('line', i)\ndist.broadcast(tensor, src)")
    assert re.fullmatch(r"· Ranks 0, 1 and 2 printed \d{3},000 lines in all; the first 5:", lines[0])
    assert lines[1:3] == ["·   line 0", "·   line 1"]
    assert lines[-1].startswith("✗ cost") and len(lines) == 8


def test_what_an_answer_prints_is_shown_by_rank():
    lines = lines_of("print('at', dist.get_rank())\ndist.broadcast(tensor, src)", n=2)
    for rank in (0, 1):
        assert re.fullmatch(rf"· Rank {rank} printed \d+ lines in all; the first 5:", lines[6 * rank])
        assert lines[6 * rank + 1 : 6 * rank + 6] == [f"·   at {rank}"] * 5


def test_half_of_the_ranks_unwritten():
    stub = all_exercises()["tree_broadcast"].stub_cell()

    def on_rank():
        return examined(RIGHT if dist.get_rank() in (0, 2) else stub, "tree_broadcast").lines

    assert on_ranks(4, on_rank) == ["✗ written Ranks 1 and 3 still have the stub: run your cell on every rank."]


def test_ranks_that_check_different_functions_are_told():
    def on_rank():
        name = "reduce" if dist.get_rank() == 1 else "tree_broadcast"
        return examined(f"def {name}(tensor): pass", name).lines

    assert on_ranks(2, on_rank) == [
        "✗ runs    The ranks check different functions: rank 0 tree_broadcast, rank 1 reduce."
    ]


def test_a_check_on_some_ranks_only_fails_there_and_the_next_one_works():
    def on_rank():
        says = ""
        if dist.get_rank() == 0:
            try:
                examined(RIGHT, "tree_broadcast", seconds=-4.0)  # the other ranks may be a second late
            except RuntimeError as error:
                says = str(error)
        dist.barrier()
        return says, examined(RIGHT, "tree_broadcast").lines[0]

    (first, lines), (second, other_lines) = run_ranks(2, on_rank, backend=BACKEND)
    assert "check(tree_broadcast) runs on every rank: rank 1 did not come within 1 s" in first and not second
    assert lines == other_lines == "✓ value   ✓ agreement"


def test_messages_that_are_not_waited_for_leave_nothing_to_the_next_check():
    """Where a rank notices it in time, the others hang in the next message; else all go on with what has not come."""
    right = all_exercises()["shard_unit"].answer_cell()
    wrong = right.replace("list(gradients.split(part)))", "list(gradients.split(part)), async_op=True)")
    assert wrong != right

    def on_rank():
        return [examined(source, "shard_unit", SECONDS) for source in 3 * [wrong, right]]

    for number, verdict in enumerate(on_ranks(3, on_rank)):
        assert verdict.passed == bool(number % 2), verdict.lines
        assert verdict.passed or re.search("never waited for|wait for it", "\n".join(verdict.lines)), verdict.lines


def test_what_a_pool_of_threads_has_left_to_do_reaches_no_later_check():
    body = """from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
works = [pool.submit(dist.all_reduce, torch.zeros(2 + size)) for size in range(40)]
[work.result() for work in works]"""
    (line,) = lines_of(body)
    assert "calls all_reduce from another thread: then nothing keeps the order that all ranks share." in line


def test_a_test_that_fails_on_one_rank_keeps_none_waiting():
    """What an answer leaves behind may make the test itself fail, on some of the ranks."""

    def double(x):
        """Twice x."""
        # answer: begin
        y = 2 * x
        # answer: end
        return y

    def examine_wrongly(trial: trial.Trial) -> None:
        trial.value(trial.call(2), 4)
        if trial.rank == 1:
            raise KeyError("mine")
        trial.call(3)

    def on_rank():
        all_exercises()["double"] = Exercise(double, examine_wrongly)
        began = time.monotonic()
        lines = examine(double, SECONDS).lines
        return lines, time.monotonic() - began < 0.8, then_the_group_works()

    (line,), soon, works = on_ranks(2, on_rank)
    assert re.fullmatch(r"✗ runs    Rank 1: The check itself failed, in .*.py:\d+: KeyError: 'mine'.", line), line
    assert soon and works


def test_a_rank_that_dies_in_its_answer_does_not_keep_the_others():
    def on_rank():
        trial.GRACE = 1.0
        source = HEAD + "    import os\n    if dist.get_rank() == 1: os._exit(3)"
        lines = examined(source, "tree_broadcast", SECONDS).lines
        assert "Rank 1 did not come back, though told to stop after 1 s." in lines[0], lines

    with pytest.raises(RankFailed) as failed:
        run_ranks(3, on_rank, backend=BACKEND)
    assert list(failed.value.failures) == [1]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (3, TypeError, "give the function itself"),
        (
            print,
            ValueError,
            "no exercise is called 'print', and this is the function's own name",
        ),
    ],
)
def test_what_is_no_exercise_is_refused(given, error, says):
    for ask in (check, solution):
        with pytest.raises(error, match=says):
            ask(given)


def test_without_ranks_a_check_says_how_to_get_them():
    def tree_broadcast(tensor): ...

    with pytest.raises(RuntimeError, match="start them with %dist_init -n 4"):
        check(tree_broadcast)


def test_check_prints_the_same_on_every_rank_and_shows_nothing_else():
    def on_rank():
        return check(run_cell(RIGHT)["tree_broadcast"])

    result, printed = on_ranks(2, on_rank, capture=True)
    assert result is None
    assert printed == (
        "✓ value   ✓ agreement\n✗ cost    2 ranks, src=0: calls broadcast, should be made of send and recv only.\n"
    )


def test_solution_prints_the_reference(capsys):
    def tree_broadcast(tensor): ...

    solution(tree_broadcast)
    printed = capsys.readouterr().out
    assert printed.startswith("def tree_broadcast(") and "reach *= 2" in printed and "answer:" not in printed


def test_a_mesh_that_get_group_refuses_is_refused_by_get():
    """The first line of the stub sees to it; whoever has changed that hears of it."""
    given = "    group = dist.group.WORLD if dm is None else dm.get_group()\n"
    caught = "    try:\n        group = dm.get_group()\n    except Exception:\n        group = dist.group.WORLD\n"
    first = given.replace("get_group()", "get_group(0)")
    by_name = given.replace("dm.get_group()", "dm[dm.mesh_dim_names[0]].get_group() if dm.ndim > 1 else dm.get_group()")
    cell = EXERCISES["get"].answer_cell()
    assert given in cell
    for changed in (caught, first, by_name):
        verdict = on_ranks(2, examined, cell.replace(given, changed), "get")
        assert 'a square mesh: get("next", mesh) returned, should raise RuntimeError.' in verdict.criteria["value"]

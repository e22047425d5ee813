"""Ranks that raise and wait for each other: what the cell says, and that the next cell works."""

import pytest

from tests.cells.cases import assert_next_works, plain


def test_cells_and_lines_are_counted_as_in_the_notebook(four_ranks):
    """Before any cell says exit(), which IPython does not count in its history."""
    cell = four_ranks.start("# comment\n%%rank [2]\nx = 1\n1 / 0")
    while (message := four_ranks.client.get_iopub_msg(timeout=10))["msg_type"] != "execute_input":
        pass
    text = plain(four_ranks.finish(cell).traceback)
    assert f"In[{message['content']['execution_count']}], line 4" in text and "> 4 1 / 0" in text


# Ranks that raise


def test_each_distinct_traceback_is_shown_once_with_its_source_and_none_of_our_frames(four_ranks):
    code = """\
def divide(by):
    return 1 / by
if rank == 3:
    raise KeyError("three")
divide(0)
"""
    result = four_ranks.run(code)
    text = plain(result.traceback)
    assert result.error["ename"] == "RankError"
    assert result.message == "ranks 0–2 raised ZeroDivisionError: division by zero\nrank 3 raised KeyError: 'three'"
    assert text.count("── ranks 0–2 ──") == text.count("── rank 3 ──") == text.count("> 2     return 1 / by") == 1
    assert "scratch_ddp" not in text and "hidden" not in text
    assert "line 5" in text and "line 2, in divide(by)" in text
    assert_next_works(four_ranks)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = = 1", "ranks 0–3 raised SyntaxError: invalid syntax (line 1)"),
        ("if rank == 1:\n    import no_such_module", "rank 1 raised ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(2)", "ranks 0–3 raised SystemExit: 2"),
        ("exit()", "ranks 0–3 raised RuntimeError: exit() would end this rank"),
        ("name = input('Who? ')", "ranks 0–3 raised EOFError"),
        ("raise KeyboardInterrupt", "ranks 0–3 raised KeyboardInterrupt"),
        ("%%rank [2]\nprint(undefined)", "rank 2 raised NameError: name 'undefined' is not defined"),
        ("%%rank [2]\n%no_such_magic", "rank 2 raised UsageError"),
        ("dist.all_reduce('no tensor')", "ranks 0–3 raised TypeError"),
    ],
)
def test_mistakes_are_errors_of_the_cell(four_ranks, code, message):
    result = four_ranks.run(code)
    assert result.status == "error" and message in result.message
    assert "scratch_ddp/cells" not in plain(result.traceback)
    assert_next_works(four_ranks)


def test_one_raises_while_the_others_wait_for_it(four_ranks):
    four_ranks.run("kept = rank")
    result = four_ranks.run("if rank == 2:\n    raise ValueError('no batch')\ndist.barrier()")
    assert "rank 2 raised ValueError: no batch" in result.message
    assert "ranks 0–1, 3 wait in barrier (line 3); rank 2 never came (raised)" in result.message
    assert result.seconds < 8
    assert four_ranks.run("assert kept == rank").status == "ok"
    assert_next_works(four_ranks)


RENEWED = "The ranks had not all made the same calls, so their process groups were renewed"
RAISES = "\nif rank == 3:\n    raise ValueError('no batch')\n"
UNEVEN = {
    "a collective that one rank has not begun": (RAISES + "work = dist.all_reduce(x, async_op=True)", ""),
    "a message that nobody receives": ("if rank == 3:\n    work = dist.isend(x, 0)" + RAISES, ""),
    "a message that nobody sends": ("if rank == 0:\n    work = dist.irecv(x, 3)" + RAISES, ""),
    "different calls": (
        "if rank == 0:\n    work = dist.all_reduce(x, async_op=True)\n    time.sleep(0.5)\n"
        "else:\n    time.sleep(0.2)\n    dist.broadcast(x, 1)",
        "",
    ),
    "a group of some ranks": (
        "if rank == 1:\n    raise KeyError\nif rank == 2:\n    work = dist.all_reduce(x, group=pair, async_op=True)",
        "if rank in (1, 2):\n    dist.all_reduce(y, group=pair)\nelse:\n    y = y * 0 + 50",
    ),
    "a group of a mesh": (
        "if rank % 2:\n    raise KeyError\nwork = dist.all_reduce(x, group=mesh.get_group('column'), async_op=True)",
        "dist.all_reduce(y, group=mesh.get_group('column'))\ndist.all_reduce(y, group=mesh.get_group('row'))",
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_a_cell_that_fails_between_calls_leaves_no_wrong_values_behind(four_ranks, name):
    failing, then = UNEVEN[name]
    four_ranks.run(
        "import time\npair = dist.new_group([1, 2])\n"
        "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('row', 'column'))"
    )
    result = four_ranks.run(f"x = torch.full((4,), 1.0 + rank)\n{failing}")
    assert "raised" in result.message and result.message.count(RENEWED) == 1, result.traceback or result.text()
    then = then or "dist.all_reduce(y)"
    next_ = four_ranks.run(f"y = torch.full((4,), 10.0 * (rank + 1))\n{then}\nprint(y.tolist())")
    right = [50.0 if "pair" in then else 100.0] * 4
    assert next_.text() == f"{right}   ← ranks 0–3\n", next_.traceback
    assert_next_works(four_ranks)


@pytest.mark.parametrize(
    "code",
    [
        "dist.barrier()\n1 / 0",
        "work = dist.all_reduce(torch.ones(4), async_op=True)\n1 / 0",
        "work = dist.all_reduce(torch.ones(4), async_op=True)\nif rank == 1:\n    1 / 0\ntime.sleep(0.3)",
        "time.sleep(0.2 * rank)\nwork = dist.all_reduce(torch.ones(4), async_op=True)\n1 / 0",
    ],
)
def test_a_cell_that_fails_after_equal_calls_renews_nothing(four_ranks, code):
    result = four_ranks.run(f"import time\n{code}")
    assert result.message.endswith("raised ZeroDivisionError: division by zero") and not result.text()
    assert_next_works(four_ranks)


def test_what_the_notebook_can_not_show_is_said(four_ranks):
    result = four_ranks.run("display({'text/html': 'x'}, raw=True, metadata=[1])\nprint('went on')")
    assert "(a display can't be shown: TypeError" in result.text() and "went on" in result.text()
    assert_next_works(four_ranks)


def test_a_recursion_without_end_is_shown_with_its_line(four_ranks):
    text = plain(four_ranks.run("%%rank [1]\ndef f():\n    return f()\nf()").traceback)
    assert "> 3     return f()" in text and "> 4 f()" in text and "scratch_ddp" not in text


BROKEN = "class Broken:\n    def __repr__(self):\n        return self.nothing\n"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (BROKEN + "display(Broken())", "no attribute 'nothing'"),
        ("import matplotlib.pyplot as plt\nplt.title('$frac{$')", "Expected '}'"),
        ("%%rank [0]\n%%capture\n1 / 0", "division by zero"),
    ],
)
def test_what_fails_without_ending_the_cell_is_shown(four_ranks, code, why):
    result = four_ranks.run(code)
    assert result.status == "ok" and why in plain(result.text("stderr"))
    assert_next_works(four_ranks)


def test_half_a_character_is_shown_as_a_question_mark(four_ranks):
    four_ranks.run("from IPython.display import HTML")
    shown = four_ranks.run("%%rank [1]\ndisplay(HTML('a\\ud800b'))")
    assert shown.status == "ok" and [out["data"]["text/html"] for out in shown.outputs if "data" in out] == ["a?b"]
    assert four_ranks.run("%%rank [1]\nraise ValueError('\\ud800')").message == "rank 1 raised ValueError: ?"
    assert_next_works(four_ranks)

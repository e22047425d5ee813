"""What an engineer tries in rank cells: mistakes that were silent, editors' requests, widgets, what a Stop leaves."""

import threading

import pytest

from scratch_ddp.cells.kernel.reports import describe_open_calls
from tests.cells.cases import assert_next_works, plain, stopped

INT = "torch.ones(4, dtype=torch.int32 if rank == 3 else torch.float32)"
MISTAKES = {
    "dtypes": (f"dist.all_reduce({INT})", "all_reduce (SUM) of 4 × int32", "all_reduce (SUM) of 4 × float32"),
    "operations": (
        "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)",
        *("all_reduce (MAX) of 4 × float32", "all_reduce (SUM) of 4 × float32"),
    ),
    "roots": (
        "dist.broadcast(torch.ones(4), src=rank // 2)",
        *("broadcast of 4 × float32 from rank 0", "broadcast of 4 × float32 from rank 1"),
    ),
    "new groups": (
        "if rank == 0:\n    dist.new_group([0])\ndist.new_group()",
        *("new_group of ranks [0]", "new_group of ranks [0, 1, 2, 3]"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_calls_that_do_not_fit_together_are_named_before_values_go_on(four_ranks, name):
    code, one, other = MISTAKES[name]
    result = four_ranks.run(f"{code}\nprint('went on')")
    assert f"called {one}" in result.message and f"{other}" in result.message
    assert "ValueError" in result.message and result.seconds < 8
    assert "went on" not in result.text()
    assert_next_works(four_ranks)


def test_fifty_stops_leave_no_descriptors_and_no_threads(four_ranks):
    look = "import os\nprint(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"
    stopped(four_ranks, "if rank:\n    dist.barrier()", after=0.1)  # threads that wait are started by now

    def most() -> list[int]:
        four_ranks.run("import time\ndist.barrier()\ntime.sleep(0.1)")
        return [max(map(int, numbers)) for numbers in zip(*_pairs(four_ranks.run(look).text()), strict=True)]

    before = most()
    for turn in range(50):
        code = "dist.barrier()" if turn % 2 else "dist.recv(torch.ones(4), src=(rank + 1) % 4)"
        message = stopped(four_ranks, f"if rank != {turn % 4}:\n    {code}", after=0.03).message
        assert "All variables are kept" in message
    after = most()
    assert after[0] <= before[0] + 4 and after[1] <= before[1] + 2, f"{before} → {after}"


def _pairs(text: str) -> list[list[str]]:
    return [line.split("   ←")[0].split() for line in text.splitlines()]


def test_a_collective_that_one_rank_has_left_open_is_said_at_the_end_of_its_cell(four_ranks):
    text = four_ranks.run("if rank == 0:\n    work = dist.all_reduce(torch.ones(4), async_op=True)").text()
    assert text.startswith("(rank 0 has left all_reduce (SUM) of 4 × float32 open, which ranks 1–3 have not called.")
    finished = four_ranks.run("if rank:\n    dist.all_reduce(torch.ones(4))\nelse:\n    _ = work.wait()")
    assert finished.status == "ok" and not finished.text()


def test_a_collective_that_all_have_begun_is_not_left_open():
    call = {"group": "0", "number": 3, "words": "barrier", "ranks": [0, 1]}
    assert describe_open_calls({0: ([call], {"0": 4}), 1: ([], {"0": 4})}) == []
    assert len(describe_open_calls({0: ([call], {"0": 4}), 1: ([], {"0": 3})})) == 1


def test_an_error_in_a_folder_that_is_gone(four_ranks):
    code = "import os, tempfile\nhome, gone = os.getcwd(), tempfile.mkdtemp()\nos.chdir(gone)\nos.rmdir(gone)\n1 / 0"
    assert "ranks 0–3 raised ZeroDivisionError" in four_ranks.run(code).message
    assert four_ranks.run("os.chdir(home)").status == "ok"


def test_exception_groups_are_errors_as_others(four_ranks):
    result = four_ranks.run(
        "def fail():\n    raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])\nfail()"
    )
    text = plain(result.traceback)
    assert "ranks 0–3 raised ExceptionGroup: several (2 sub-exceptions)" in result.message
    assert "ValueError: a" in text and "line 3, in <module>" in text and "line 2, in fail" in text
    assert "interactiveshell.py" not in text and not result.text("stderr")


def test_what_editors_ask_silently_is_for_the_kernel(four_ranks):
    asked = four_ranks.client.execute("seen_by_editor = 1", silent=True)
    assert four_ranks.finish(asked).outputs == []
    assert four_ranks.run("'seen_by_editor' in globals()").text() == "False   ← ranks 0–3\n"


def test_widgets_show_their_text(four_ranks):
    pytest.importorskip("ipywidgets")
    shown = four_ranks.run("%%rank [1]\nfrom ipywidgets import IntSlider\nIntSlider(value=7)")
    assert "IntSlider(value=7)   ← rank 1" in shown.text() and not shown.data()


def test_bars_are_text_and_name_their_rank(four_ranks):
    bars = four_ranks.run("%%rank [1]\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(3)): pass")
    assert "rank 1: 100%" in bars.text("stderr") and not bars.data()

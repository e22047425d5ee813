"""What an engineer tries in rank cells: mistakes that were silent, editors' requests, widgets, what a Stop leaves."""

import re

import pytest

from tests.cells.cases import assert_next_works, plain, stopped

INT = "torch.ones(4, dtype=torch.int32 if rank == 3 else torch.float32)"
MISTAKES = {
    "sizes": (
        "dist.all_reduce(torch.ones(2 + rank // 2 * 1000))",
        *("all_reduce (SUM) of 2 × float32", "all_reduce (SUM) of 1002 × float32"),
    ),
    "dtypes": (f"dist.all_reduce({INT})", "all_reduce (SUM) of 4 × int32", "all_reduce (SUM) of 4 × float32"),
    "operations": (
        "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)",
        *("all_reduce (MAX) of 4 × float32", "all_reduce (SUM) of 4 × float32"),
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
    noticed, _ = result.message.split(". All ranks must", 1)
    calls = re.split(r"(?:; |: )ranks? [\d–, ]+ called ", noticed)[1:]
    assert set(calls) == {one, other}, result.message  # whichever rank was the first to notice
    assert "ValueError" in result.message and result.seconds < 8
    assert "went on" not in result.text()
    assert_next_works(four_ranks)


def test_a_group_that_torch_refuses_is_not_compared_with_the_next(four_ranks):
    assert "Rank 9 is out of range" in four_ranks.run("dist.new_group([0, 9])").message
    result = four_ranks.run("pair = dist.new_group([0, 1])\nif rank < 2: dist.barrier(group=pair)")
    assert result.status == "ok", result.message


def test_fifty_stops_leave_no_descriptors_and_no_threads(four_ranks):
    look = "import os\nprint(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"
    stopped(four_ranks, "if rank:\n    dist.barrier()", after=0.1)  # threads that wait are started by now

    def most() -> list[int]:
        four_ranks.run("import time\ndist.barrier()\ntime.sleep(0.1)")
        return [max(map(int, numbers)) for numbers in zip(*_pairs(four_ranks.run(look).text()), strict=True)]

    before = most()
    for turn in range(50):
        code = "dist.barrier()" if turn % 2 else "dist.recv(torch.ones(4), src=(rank + 1) % 4)"
        stop = "%%distributed --stop-after 0.03"
        message = four_ranks.run(f"{stop}\nif rank != {turn % 4}:\n    {code}").message
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


def test_completion_and_inspection_know_what_only_ranks_have(four_ranks):
    four_ranks.run("only_on_ranks = [1, 2]\nclass Holder:\n    inside_it = 3\nholder = Holder()")
    client = four_ranks.client
    assert "only_on_ranks" in client.complete("only_on_r", reply=True, timeout=10)["content"]["matches"]
    assert "inside_it" in str(client.complete("x = holder.ins", reply=True, timeout=10)["content"]["matches"])
    told = client.inspect("only_on_ranks", reply=True, timeout=10)["content"]
    assert told["found"] and "[1, 2]" in told["data"]["text/plain"]
    assert not client.inspect("nowhere_at_all", reply=True, timeout=10)["content"]["found"]
    assert "%dist_init" in client.complete("%dist_in", reply=True, timeout=10)["content"]["matches"]


def test_a_question_of_an_editor_calls_nothing_on_one_rank_alone(four_ranks):
    four_ranks.run("odd = type('Odd', (), {'__repr__': lambda self: str(dist.all_reduce(torch.ones(1)))})()")
    four_ranks.client.inspect("odd", reply=True, timeout=10)
    assert_next_works(four_ranks)


def test_a_script_runs_on_the_ranks(four_ranks, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport torch, torch.distributed as dist\nrank = device = 'mine'\nlearned = 1\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint(__name__, sys.argv[1:], int(x))\n"
        "dist.destroy_process_group()\nif '--fail' in sys.argv:\n    raise ValueError('as asked')\n"
    )
    told = four_ranks.run(f"%dist_run {script} --lr 0.1")
    assert told.text() == "__main__ ['--lr', '0.1'] 4\n↑ ranks 0–3\n" and "already" in told.text("stderr")
    failed = four_ranks.run(f"%dist_run {script} --fail")
    assert "ranks 0–3 raised ValueError: as asked" in failed.message and "> 11     raise" in plain(failed.traceback)
    assert four_ranks.run("import sys\n'--fail' in sys.argv").text() == "False   ← ranks 0–3\n"
    assert four_ranks.run("rank, str(device), learned").text().startswith("(0, 'cpu', 1)   ← rank 0\n")
    assert "no_such.py" in four_ranks.run("%dist_run no_such.py").message
    assert_next_works(four_ranks)


def test_cells_as_they_are_pasted(four_ranks):
    """Measured code, a script for torchrun, a task: as in a plain kernel, or a sentence says why not."""
    four_ranks.run("import asyncio\nx = torch.ones(4)")
    assert four_ranks.run("%time dist.all_reduce(x)").text().count("Wall time") >= 1
    assert four_ranks.run("%%time\ndist.all_reduce(x)").text().count("Wall time") >= 1
    assert "per loop" in four_ranks.run("%timeit -n 2 -r 3 dist.all_reduce(x)").text()
    assert four_ranks.run("%matplotlib inline\n__name__").text("stderr") == ""  # in the kernel, as before
    script = "import argparse\ndef main():\n    argparse.ArgumentParser().parse_args()\n"
    script += "    dist.init_process_group('gloo')\n    dist.barrier()\n    dist.destroy_process_group()"
    pasted = four_ranks.run(f"{script}\nif __name__ == '__main__':\n    main()\n    print('trained')")
    assert pasted.text().startswith("trained") and "already, and keeps it" in pasted.text("stderr")
    assert four_ranks.run("task = asyncio.create_task(asyncio.sleep(0, 7))\nawait task").text() == "7   ← ranks 0–3\n"
    stopped(four_ranks, "await asyncio.sleep(1)\nprint('a stopped cell goes on')")
    assert four_ranks.run("await asyncio.sleep(1)\nprint('next')").text() == "next   ← ranks 0–3\n"
    assert_next_works(four_ranks)


def test_a_deadlock_and_the_lowest_ranks_output_are_shown_while_the_cell_runs(four_ranks):
    code = "print('begun', rank)\nif rank == 1:\n    dist.barrier()"
    cell = four_ranks.start(code, attended=True)
    shown = ""
    while "Press ■ to stop" not in shown:
        arrived = four_ranks.client.get_iopub_msg(timeout=10)
        if arrived["msg_type"] == "stream" and arrived["parent_header"]["msg_id"] == cell:
            shown += arrived["content"]["text"]
    four_ranks.interrupt()
    assert "rank 1 waits in barrier (line 3); ranks 0, 2–3 never came" in shown and "begun 0" in shown
    shown += four_ranks.finish(cell).text()
    assert [shown.count(f"begun {rank}") for rank in range(4)] == [1] * 4
    assert_next_works(four_ranks)

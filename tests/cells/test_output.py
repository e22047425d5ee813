"""What ranks write, as it arrives in the notebook: complete, in order, labelled, and once where all write the same."""

import re
import time

import psutil
import pytest

from tests.cells.cases import assert_next_works, stopped
from tests.kernel import Result, wait_until_gone

TO_ONE_RANK = "%%rank [1]\n"


def shown(result: Result) -> list[tuple[str, str]]:
    """The outputs, with neighbouring texts of one stream joined, as a saved notebook has them."""
    told: list[tuple[str, str]] = []
    for out in result.outputs:
        if out["type"] == "stream" and told and told[-1][0] == out["name"]:
            told[-1] = (out["name"], told[-1][1] + out["text"])
        elif out["type"] == "stream":
            told.append((out["name"], out["text"]))
        else:
            told.append((out["type"], out.get("data", {}).get("text/html", out["type"])))
    return told


def say(kernel, code, **options) -> str:
    result = kernel.run(code, **options)
    assert not result.error, result.traceback
    return result.text()


EVERY_WAY = """
import ctypes, os, random, subprocess, sys, time
from IPython.display import HTML, display
def pause(): time.sleep(random.random() * 0.02)
print("one"); pause()
print("to stderr", file=sys.stderr); pause()
os.system("echo by a shell"); pause()
subprocess.run(["sh", "-c", "echo child; echo child to stderr >&2"]); pause()
display(HTML(f"<b>{rank // 2}</b>")); pause()
ctypes.CDLL(None).printf(b"from C\\n"); pause()
print("rank", rank // 2, end="")
"""


def test_twenty_runs_give_one_text(four_ranks):
    texts = [shown(four_ranks.run(EVERY_WAY)) for _ in range(20)]
    assert texts[0] == [
        *[("stdout", "one\n"), ("stderr", "to stderr\n"), ("stdout", "by a shell\nchild\nchild to stderr\n")],
        *[("display_data", "<b>0</b>"), ("stdout", "from C\nrank 0\n↑ ranks 0–1\none\n"), ("stderr", "to stderr\n")],
        *[("stdout", "by a shell\nchild\nchild to stderr\n"), ("display_data", "<b>1</b>")],
        ("stdout", "from C\nrank 1\n↑ ranks 2–3\n"),
    ]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('same')", "same   ← ranks 0–3\n"),
        ("print(rank)", "0   ← rank 0\n1   ← rank 1\n2   ← rank 2\n3   ← rank 3\n"),
        ("print(rank % 2)", "0   ← ranks 0, 2\n1   ← ranks 1, 3\n"),
        ("if rank == 2: print('only me')", "only me   ← rank 2\n"),
        ("rank * 0", "0   ← ranks 0–3\n"),
        ("rank;", ""),
        ("%%rank [0,3]\nrank", "0   ← rank 0\n3   ← rank 3\n"),
        ("%%rank[1-2]\nprint('x')", "x   ← ranks 1–2\n"),
        ("# a comment\n\n%%rank [1]\nprint(rank)", "1   ← rank 1\n"),
        ("%%distributed\nprint('x')", "x   ← ranks 0–3\n"),
    ],
)
def test_blocks_and_labels(four_ranks, code, text):
    assert say(four_ranks, code) == text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('no end', end='')", "no end   ← rank 1\n"),
        ("print()\nprint('after an empty line')", "\nafter an empty line\n↑ rank 1\n"),
        ("print('é→🎉' * 3)", "é→🎉é→🎉é→🎉   ← rank 1\n"),
        ("import os\nfor b in 'é→🎉\\n'.encode(): _ = os.write(1, bytes([b]))", "é→🎉   ← rank 1\n"),
        ("lines = !echo captured\nprint(lines[0])", "captured   ← rank 1\n"),
        ("for i in range(2): display(i)", "0\n1\n↑ rank 1\n"),
        ("%%capture held\nprint('x')", ""),
        (
            "def twice(x):\n    return 2 * x\nimport inspect\nprint(inspect.getsource(twice))",
            "def twice(x):\n    return 2 * x\n\n↑ rank 1\n",
        ),
        (
            "from torch.utils.data import DataLoader\n"
            "print(sum(int(b.sum()) for b in DataLoader(list(range(8)), batch_size=2, num_workers=2)))",
            "28   ← rank 1\n",
        ),
    ],
)
def test_nothing_is_lost_or_bent(four_ranks, code, text):
    assert say(four_ranks, TO_ONE_RANK + code) == text


def test_what_goes_to_stderr_arrives_there(four_ranks):
    code = """
import logging, sys, warnings
warnings.warn("careful")
logging.getLogger("mine").warning("logged")
from tqdm import tqdm
for _ in tqdm(range(3), desc="steps"): pass
"""
    errors = four_ranks.run(TO_ONE_RANK + code).text("stderr")
    assert "UserWarning: careful" in errors and "logged" in errors
    assert re.search(r"\rsteps: 100%.* 3/3 ", errors)


def growth_of(kernel) -> float:
    """Megabytes of memory that the kernel has taken since the last call."""
    memory = psutil.Process(kernel.pid).memory_info().rss / 1e6
    before, growth_of.before = getattr(growth_of, "before", memory), memory
    return memory - before


def test_of_more_output_than_anybody_reads_the_beginning_is_kept(four_ranks):
    growth_of(four_ranks)
    code = """
import os
for start in range(0, 4_000_000, 1000):
    os.write(1, b"".join(b"line %060d\\n" % i for i in range(start, start + 1000)))
"""
    text = say(four_ranks, TO_ONE_RANK + code)
    lines = text.splitlines()
    assert lines[:15_000] == [f"line {i:060d}" for i in range(15_000)] and lines[-1] == "↑ rank 1"
    told = re.search(r"\n… ([\d.]+) MB left out …\n", text)
    assert abs(float(told[1]) - (4_000_000 * 66 - 2**20) / 1e6) < 0.1
    assert growth_of(four_ranks) < 50


def test_a_cell_ends_though_a_process_that_it_leaves_behind_writes_without_end(four_ranks):
    growth_of(four_ranks)
    code = """
print("begun")
import subprocess, time
endless = [subprocess.Popen("yes", stdout=stream) for stream in (1, 2)]
time.sleep(0.5)
"""
    try:
        begun = say(four_ranks, TO_ONE_RANK + code, timeout=20)
        assert begun.startswith("begun\ny\n") and begun.endswith(" MB left out …\n↑ rank 1\n")
        assert len(begun) < 3_000_000
        for _ in range(3):
            time.sleep(0.5)
            text = say(four_ranks, "print('next')", timeout=20)
            assert "(late output of rank 1 from cell [" in text and "next   ← ranks 0–3\n" in text
            assert "left out …" in text and len(text) < 200_000
        assert "All variables are kept" in stopped(four_ranks, "while True: pass").message
        assert growth_of(four_ranks) < 50
    finally:
        four_ranks.run(TO_ONE_RANK + "for each in endless: each.kill(); each.wait()")
        four_ranks.run("pass")
    assert_next_works(four_ranks)


BESIDE = {
    "a shell loop": 'other = subprocess.Popen("while :; do echo x; done", shell=True)\ntime.sleep(0.3)',
    "a forked child": "other, child = None, os.fork()",
}


@pytest.mark.parametrize("beside", BESIDE)
def test_displays_arrive_whole_though_others_write_to_the_same_pipe(four_ranks, beside):
    code = f"""
import os, subprocess, time
from IPython.display import HTML
{BESIDE[beside]}
for i in range(5): display(HTML(f"<p>{{i}}" + "y" * 300_000))
if other: other.kill(); other.wait()
elif child: _ = os.waitpid(child, 0)
"""
    result = four_ranks.run(TO_ONE_RANK + code)
    assert not result.error, result.traceback
    expected = [f"<p>{i}" + "y" * 300_000 for i in range(5)] * (2 if "fork" in beside else 1)
    assert sorted(out["data"]["text/html"] for out in result.outputs if "data" in out) == sorted(expected)
    assert "y" not in result.text() and "can't be shown" not in result.text()


def test_a_cell_that_assigns_stdout_silences_no_later_cell(four_ranks):
    four_ranks.run("import io, sys\nsys.stdout = sys.stderr = io.StringIO()")
    assert say(four_ranks, "print('heard')") == "heard   ← ranks 0–3\n"


def test_late_output_says_whose_it_is(four_ranks, tmp_path):
    late = """
import threading, time
from IPython.display import HTML
go = threading.Event()
def speak():
    go.wait()
    print("from a thread")
    display(HTML("<i>figure</i>"))
speaker = threading.Thread(target=speak)
speaker.start()
"""
    say(four_ranks, late)
    text = say(four_ranks, "go.set()\nspeaker.join()\ntime.sleep(0.5)\nprint('the next cell')")
    label = re.search(r"\(late output of ranks 0–3 from cell \[(\d+)\]\)\nfrom a thread\n<a display>", text)
    assert label and text.startswith("the next cell   ← ranks 0–3\n")
    os_level = "import subprocess\nprint(subprocess.Popen(['sh', '-c', '{}; echo from a child']).pid)"
    os_level = os_level.format(f"until [ -e {tmp_path}/go ]; do sleep 0.1; done")
    child = int(say(four_ranks, TO_ONE_RANK + os_level).split()[0])
    (tmp_path / "go").touch()
    wait_until_gone([child], 10)
    time.sleep(0.3)
    text = say(four_ranks, "print('another')")
    assert "(late output of rank 1 from cell [" in text and "from a child" in text


def test_forked_children_speak_and_are_no_ranks(four_ranks):
    code = """
import os, sys, warnings
with warnings.catch_warnings(action="ignore"):  # from Python 3.12 on, one of the rank's threads
    child = os.fork()
if child:
    os.waitpid(child, 0)
print("child" if child == 0 else "parent")
print("child's error" if child == 0 else "", file=sys.stderr, end="")
"""
    result = four_ranks.run(TO_ONE_RANK + code)
    assert result.text().split("\n")[:2] == ["child", "parent"] and "child's error" in result.text("stderr")
    code = "import os\nif (child := os.fork()) == 0: raise ValueError('in the child')\nos.waitpid(child, 0)[1]"
    raises = four_ranks.run(TO_ONE_RANK + code)
    assert "256" in raises.text() and "ValueError: in the child" in re.sub(r"\x1b\[[\d;]*m", "", raises.text("stderr"))
    assert say(four_ranks, "print('alive')") == "alive   ← ranks 0–3\n"

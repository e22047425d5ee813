"""What a learner does, in a real JupyterLab: open a lesson, run it, press Stop, restart the kernel."""

import re
import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from scratch_ddp.commands.copies import copy_fresh
from scratch_ddp.commands.lessons import KERNEL_NAME, ROOT, find_lesson
from scratch_ddp.commands.outputs import KERNELSPEC, to_text
from tests.commands.jupyterlab import CHROMIUM, CHROMIUM_OPTIONS, Notebook, serve

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)")

START = ("import os\nprint('kernel', os.getpid())", "%load_ext scratch_ddp", "%dist_init -n 2")
ONLY_RANK_0 = "if rank == 0:\n    dist.all_reduce(torch.ones(1))"
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><rect width="40" height="20"/></svg>'


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    """A folder of copies beside one of pictures, as in a clone."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "assets", clone / "assets")
    (clone / "my_lessons").mkdir()
    (clone / "assets" / "a.svg").write_text(PICTURE)
    (clone / "my_lessons" / "glossary.md").write_text(
        "# Glossary\n" + "\nfiller\n" * 80 + "\n## world size\n\nHow many.\n"
    )
    return clone / "my_lessons"


@pytest.fixture(scope="module")
def address(copies):
    with serve(copies) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    yield page
    page.close()


def write(path: Path, *sources: str) -> str:
    """Save a notebook of code cells (markdown where a source begins with #); returns its address in the lab."""
    cells = [new_markdown_cell(text) if text.startswith("#") else new_code_cell(text) for text in sources]
    path.write_text(to_text(new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})))
    return f"{path.parent.name}/{path.name}"


def test_a_copy_shows_its_pictures_and_runs(page, address, copies):
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2]);"
    path = write(copies / "plain.ipynb", "# Hello\n\n![a](../assets/a.svg)", "import sys\nprint(sys.prefix)", plot)
    notebook = Notebook(page, address, path)
    notebook.run_all()
    notebook.wait_until_done(timeout=60)
    assert notebook.pictures(0) == 1
    assert notebook.output(1).strip() == sys.prefix
    assert notebook.pictures(2) == 1


def test_a_copy_that_is_opened_is_not_marked_unsaved(page, address, copies):
    lesson = find_lesson("06")
    copy_fresh(lesson, copies)
    Notebook(page, address, f"{copies.name}/{lesson.name}")
    page.wait_for_timeout(1000)
    assert page.locator(".lm-TabBar-tab.jp-mod-current", has_text=lesson.name).count() == 1
    assert page.locator(".jp-mod-dirty").count() == 0
    assert page.locator(".jp-KernelName").first.inner_text() == KERNEL_NAME


def test_a_link_to_the_glossary_opens_it_as_a_page_at_the_word(page, address, copies):
    notebook = Notebook(page, address, write(copies / "link.ipynb", "# See\n\n[words](glossary.md#world-size)"))
    notebook.cells.first.locator("a", has_text="words").click()
    heading = page.locator(".jp-MarkdownViewer h2", has_text="world size")
    heading.wait_for()
    page.wait_for_timeout(500)
    assert heading.bounding_box()["y"] < 1000


def test_stop_and_restart_of_a_plain_kernel(page, address, copies):
    path = write(copies / "stop.ipynb", "import time\nx = 7\nprint('begun')\ntime.sleep(60)", "print('x is', x)")
    notebook = Notebook(page, address, path)
    notebook.run_cell(0)
    # "Busy" would not do: a kernel that has just started is busy with the page's questions too.
    notebook.wait_for_output(0, "begun", timeout=30)
    notebook.stop()
    notebook.wait_for_output(0, "KeyboardInterrupt", timeout=10)
    notebook.run_cell(1)
    notebook.wait_for_output(1, "x is 7", timeout=10)
    notebook.restart()
    notebook.run_cell(1)
    notebook.wait_for_output(1, "NameError", timeout=30)


def test_lesson_00_runs_and_shows_its_ranks_and_pictures(page, address, copies):
    lesson = find_lesson("00")
    copy_fresh(lesson, copies)
    notebook = Notebook(page, address, f"{copies.name}/{lesson.name}")
    notebook.run_all()
    notebook.wait_until_done(timeout=180)
    cells = range(notebook.cells.count())
    assert notebook.not_run() == []
    assert re.search(r"rank 0\b", notebook.text()) and re.search(r"rank 3\b", notebook.text())
    assert sum(notebook.pictures(index) for index in cells) >= 1


def test_stop_frees_a_deadlocked_cell_and_the_next_cell_works(page, address, copies):
    after = "x = torch.full((1,), float(kept))\ndist.all_reduce(x)\nprint('sum', int(x))"
    path = write(copies / "deadlock.ipynb", *START, "kept = rank + 20", ONLY_RANK_0, after)
    notebook = Notebook(page, address, path)
    for index in range(4):
        notebook.run_cell(index)
    notebook.wait_for_output(2, "ready", timeout=60)
    notebook.wait_until_done(timeout=60)
    notebook.run_cell(4)
    notebook.wait_for_output(4, "all_reduce", timeout=20)  # the line that says where everyone is
    pressed = time.monotonic()
    notebook.stop()
    notebook.wait_for_output(4, "variables are kept", timeout=10)
    assert time.monotonic() - pressed < 3
    said = notebook.output(4)
    assert re.search(r"rank 0 waits in all_reduce .*rank 1 never came", said)
    assert said.count("rank 0") == 1  # the waiting line is gone
    notebook.run_cell(5)
    notebook.wait_for_output(5, "sum 41", timeout=10)


def test_a_restart_leaves_no_process_of_the_cluster(page, address, copies):
    path = write(copies / "restart.ipynb", *START, "import os\nprint('pid', os.getpid())", ONLY_RANK_0)
    notebook = Notebook(page, address, path)
    notebook.run_all()
    notebook.wait_for_output(4, "all_reduce", timeout=60)  # restarted in the middle of a deadlock
    kernel = psutil.Process(int(re.search(r"kernel (\d+)", notebook.output(0))[1]))
    ranks = {int(pid) for pid in re.findall(r"pid (\d+)", notebook.output(3))}
    cluster = kernel.children(recursive=True)
    assert len(ranks) == 2 and ranks <= {process.pid for process in cluster}
    notebook.press_restart()
    _, alive = psutil.wait_procs([kernel], timeout=10)
    assert not alive
    _, alive = psutil.wait_procs(cluster, timeout=2)
    assert not alive
    notebook.wait_for_status("Idle", timeout=60)

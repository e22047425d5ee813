"""What a learner does, in a real JupyterLab: open a lesson, run it, press Stop, restart the kernel."""

import contextlib
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from scratch_ddp.commands.copies import copy_fresh
from scratch_ddp.commands.notebooks import KERNEL_NAME, ROOT, find_lesson
from scratch_ddp.commands.outputs import KERNELSPEC, to_text
from tests.commands.jupyterlab import CHROMIUM, CHROMIUM_OPTIONS, Notebook, serve

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)")

START = ("import os\nprint('kernel', os.getpid())", "%load_ext scratch_ddp", "%dist_init -n 2")
ONLY_RANK_0 = "if rank == 0:\n    dist.all_reduce(torch.ones(1))"


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    """A folder of copies beside one of pictures, as in a clone."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "assets", clone / "assets")
    (clone / "my_lessons").mkdir()
    glossary = "# Glossary\n" + "\nfiller\n" * 80 + "\n## world size\n\nHow many.\n"
    (clone / "my_lessons" / "glossary.md").write_text(glossary)
    return clone / "my_lessons"


@pytest.fixture(scope="module")
def address(copies):
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has the port
            stack.enter_context(socket.create_server(("127.0.0.1", 8888)))
        yield stack.enter_context(serve(copies))


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


def test_lesson_00_is_a_saved_file_that_runs_and_shows_its_ranks_and_pictures(page, address, copies):
    assert not address.endswith(":8888")
    lesson = find_lesson("00")
    copy_fresh(lesson, copies)
    notebook = Notebook(page, address, f"{copies.name}/{lesson.name}")
    page.wait_for_timeout(1000)
    assert page.locator(".lm-TabBar-tab.jp-mod-current", has_text=lesson.name).count() == 1
    assert page.locator(".jp-mod-dirty").count() == 0
    assert page.locator(".jp-KernelName").first.inner_text() == KERNEL_NAME
    notebook.run_all()
    deadline = time.monotonic() + 180
    while notebook.not_run() and time.monotonic() < deadline:
        page.wait_for_timeout(200)
    assert notebook.not_run() == 0, notebook.text()
    assert re.search(r"rank 0\b", notebook.text()) and re.search(r"rank 3\b", notebook.text())
    assert notebook.pictures() >= 1


def test_a_link_to_the_glossary_opens_it_as_a_page_at_the_word(page, address, copies):
    notebook = Notebook(page, address, write(copies / "link.ipynb", "# See\n\n[words](glossary.md#world-size)"))
    notebook.cells.first.locator("a", has_text="words").click()
    heading = page.locator(".jp-MarkdownViewer h2", has_text="world size")
    heading.wait_for()
    page.wait_for_timeout(500)
    assert heading.bounding_box()["y"] < 1000


def test_stop_frees_a_deadlocked_cell_and_the_next_cell_works(page, address, copies):
    after = "x = torch.full((1,), float(kept))\ndist.all_reduce(x)\nprint('sum', int(x))"
    path = write(copies / "deadlock.ipynb", *START, "kept = rank + 20\nprint('kept')", ONLY_RANK_0, after)
    notebook = Notebook(page, address, path)
    for index in range(4):
        notebook.run_cell(index)
    notebook.wait_for_output(3, "kept", timeout=90)
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

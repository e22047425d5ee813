"""What a learner does, in a real JupyterLab: open a lesson, run it, press Stop, restart the kernel."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from scratch_ddp.commands.copies import copy_fresh
from scratch_ddp.commands.lab import lab_command, variables, write_settings
from scratch_ddp.commands.notebooks import KERNEL_NAME, ROOT, find_lesson
from scratch_ddp.commands.outputs import KERNELSPEC, to_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
TOKEN = "only-for-this-test"
WHOLE_NOTEBOOK = '{"windowingMode": "none"}'  # cells that are scrolled out of sight would otherwise not be in the page
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
    copy_fresh(lesson, copies / lesson.name)
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


@contextlib.contextmanager
def serve(copies: Path) -> Iterator[str]:
    """Run the lab on a folder of copies, as `python3 -m scratch_ddp lab` does; gives the address that it prints."""
    settings = copies / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(WHOLE_NOTEBOOK)
    write_settings()
    log = copies.parent / "server.log"
    with open(log, "w") as file:
        server = subprocess.Popen(
            lab_command(["--no-browser", f"--IdentityProvider.token={TOKEN}"], copies=copies),
            env=os.environ | variables(copies),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "is running at" in log.read_text() or server.poll() is not None, 60, log.read_text)
        yield re.search(r"http://(?:localhost|127\.0\.0\.1):\d+", log.read_text())[0]
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(reached, seconds: float, what_is_there) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not within {seconds} s:\n{what_is_there()}"
        time.sleep(0.02)


class Notebook:
    """One notebook open in JupyterLab; cells are numbered from 0, markdown cells counted."""

    def __init__(self, page, address: str, path: str):
        """Open `path`, relative to the folder that the lab shows, and wait for its kernel."""
        self.page = page
        page.goto(f"{address}/lab/tree/{path}?token={TOKEN}&reset")
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.cells = self.panel.locator(".jp-Notebook-cell")
        self.cells.first.wait_for(timeout=60_000)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        self.page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=60_000)

    def run_all(self) -> None:
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()

    def run_cell(self, index: int) -> None:
        """Select a cell and press Ctrl+Enter. An output that arrives moves the cells below it: a click may miss."""
        cell = self.cells.nth(index)

        def is_active() -> bool:
            cell.locator(".jp-InputPrompt").click()
            return cell.evaluate("cell => cell.classList.contains('jp-mod-active')")

        wait_for(is_active, 30, self.text)
        self.page.keyboard.press("Control+Enter")

    def wait_for_output(self, index: int, text: str, timeout: float) -> None:
        wait_for(lambda: self._sees(index, text), timeout, self.text)

    def _sees(self, index: int, text: str) -> bool:
        return self.cells.nth(index).locator(".jp-OutputArea", has_text=text).first.is_visible()

    def not_run(self) -> int:
        """How many code cells have no number."""
        prompts = self.panel.locator(".jp-CodeCell .jp-InputArea-prompt").all_inner_texts()
        return sum(not re.search(r"\d", prompt) for prompt in prompts)

    def output(self, index: int) -> str:
        """What a reader sees under a cell, as text."""
        return "\n".join(self.cells.nth(index).locator(".jp-OutputArea-output").all_inner_texts())

    def text(self) -> str:
        return "\n".join(f"[{index}] {self.output(index)}" for index in range(self.cells.count()))

    def pictures(self) -> int:
        """How many pictures the cells show, markdown's included, that were really loaded."""
        widths = self.cells.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
        return sum(width > 0 for width in widths)

    def stop(self) -> None:
        """Press the Stop button."""
        self.panel.locator("[data-command='notebook:interrupt-kernel']").click()

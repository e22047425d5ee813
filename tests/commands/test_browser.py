"""What a learner does, in a real JupyterLab: open a lesson, follow a link, run cells, press Stop."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scratch_ddp.commands.copies import copy
from scratch_ddp.commands.lab import lab_command, variables
from scratch_ddp.commands.notebooks import NOTEBOOKS, ROOT
from tests.notebooks.files import save

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
TOKEN = "only-for-this-test"
WHOLE_NOTEBOOK = '{"windowingMode": "none"}'  # cells that are scrolled out of sight would otherwise not be in the page
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)")

START = ("%load_ext scratch_ddp", "%dist_init -n 2")
ONLY_RANK_0 = "if rank == 0:\n    dist.all_reduce(torch.ones(1))"


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    """A folder of copies beside one of pictures, as in a clone."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "assets", clone / "assets")
    for name in ("00_ranks.ipynb", "glossary.md"):
        copy(NOTEBOOKS / name, clone / "my_lessons" / name)
    return clone / "my_lessons"


@pytest.fixture(scope="module")
def address(copies):
    """Of a lab on the folder of copies, run as `python3 -m scratch_ddp lab` does."""
    settings = copies / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(WHOLE_NOTEBOOK)
    command, log = lab_command(["--no-browser", f"--IdentityProvider.token={TOKEN}"], copies=copies), copies / "log"
    with open(log, "w") as file:
        server = subprocess.Popen(
            command, env=os.environ | variables(copies), stdout=file, stderr=file, start_new_session=True
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


def test_a_lesson_is_a_saved_file_with_pictures_whose_links_open_the_glossary_at_the_word(page, address, copies):
    notebook = Notebook(page, address, f"{copies.name}/00_ranks.ipynb")
    assert page.locator(".lm-TabBar-tab.jp-mod-current", has_text="00_ranks.ipynb").count() == 1
    assert page.locator(".jp-mod-dirty").count() == 0
    loaded = "images => images.some(image => image.naturalWidth > 0)"
    wait_for(lambda: notebook.cells.locator("img").evaluate_all(loaded), 30, notebook.text)
    notebook.cells.locator("a", has_text="world size").first.click()
    heading = page.locator(".jp-MarkdownViewer :is(h2, h3)", has_text=re.compile("^world size"))
    wait_for(lambda: heading.count() and 0 <= heading.bounding_box()["y"] < 1000, 30, notebook.text)


def test_stop_frees_a_deadlocked_cell_and_the_next_cell_works(page, address, copies):
    after = "x = torch.full((1,), float(kept))\ndist.all_reduce(x)\nprint('sum', int(x))"
    cells = save(copies.parent / "deadlock.ipynb", *START, "kept = rank + 20\nprint('kept')", ONLY_RANK_0, after)
    copy(cells, copies / "deadlock.ipynb")
    notebook = Notebook(page, address, f"{copies.name}/deadlock.ipynb")
    for index in range(3):
        notebook.run_cell(index)
    notebook.wait_for_output(2, "kept", timeout=90)
    notebook.run_cell(3)
    notebook.wait_for_output(3, "all_reduce", timeout=20)  # the line that says where everyone is
    pressed = time.monotonic()
    notebook.panel.locator("[data-command='notebook:interrupt-kernel']").click()  # the Stop button
    notebook.wait_for_output(3, "variables are kept", timeout=10)
    assert time.monotonic() - pressed < 3
    said = notebook.output(3)
    assert re.search(r"rank 0 waits in all_reduce .*rank 1 never came", said)
    assert said.count("rank 0") == 1  # the waiting line is gone
    notebook.run_cell(4)
    notebook.wait_for_output(4, "sum 41", timeout=10)


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
        page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=60_000)

    def run_cell(self, index: int) -> None:
        """Select a cell and press Ctrl+Enter. An output that arrives moves the cells below it: a click may miss."""
        cell = self.cells.nth(index)

        def is_active() -> bool:
            cell.locator(".jp-InputPrompt").click()
            return cell.evaluate("cell => cell.classList.contains('jp-mod-active')")

        wait_for(is_active, 30, self.text)
        self.page.keyboard.press("Control+Enter")

    def wait_for_output(self, index: int, text: str, timeout: float) -> None:
        place = self.cells.nth(index).locator(".jp-OutputArea", has_text=text).first
        wait_for(place.is_visible, timeout, self.text)

    def output(self, index: int) -> str:
        """What a reader sees under a cell, as text."""
        return "\n".join(self.cells.nth(index).locator(".jp-OutputArea-output").all_inner_texts())

    def text(self) -> str:
        return "\n".join(f"[{index}] {self.output(index)}" for index in range(self.cells.count()))

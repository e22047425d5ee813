"""What a learner does, in a real JupyterLab: open a lesson, follow a link, run cells, press Stop."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from scratch_ddp.commands.copies import copy
from scratch_ddp.commands.lab import lab_command, variables
from scratch_ddp.commands.notebooks import NOTEBOOKS, ROOT
from tests.notebooks.files import save

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
TOKEN = "only-for-this-test"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)")


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
    command, log = lab_command(["--no-browser", f"--IdentityProvider.token={TOKEN}"], copies=copies), copies / "log"
    with open(log, "w") as file:
        server = subprocess.Popen(command, env=os.environ | variables(copies), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while not (said := re.search(r"http://(localhost|127\.0\.0\.1):\d+(?=/)", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield said[0]
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture
def page():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield browser.new_page(viewport={"width": 1300, "height": 1000})
        browser.close()


def open_notebook(page, address: str, path: Path):
    """The panel of a notebook in the folder that the lab shows, once its kernel is ready."""
    page.goto(f"{address}/lab/tree/{path.parent.name}/{path.name}?token={TOKEN}&reset")
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=60_000)
    return page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")


def test_a_lesson_is_a_saved_file_with_pictures_whose_links_open_the_glossary_at_the_word(page, address, copies):
    panel = open_notebook(page, address, copies / "00_ranks.ipynb")
    expect(page.locator(".lm-TabBar-tab.jp-mod-current", has_text="00_ranks.ipynb")).to_have_count(1)
    expect(page.locator(".jp-mod-dirty")).to_have_count(0)
    page.wait_for_function("[...document.querySelectorAll('.jp-Cell img')].some(image => image.naturalWidth > 0)")
    panel.locator("a", has_text="world size").first.click()
    heading = page.locator(".jp-MarkdownViewer :is(h2, h3)", has_text=re.compile("^world size"))
    expect(heading).to_be_in_viewport(timeout=30_000)


def test_stop_frees_a_deadlocked_cell_and_the_next_cell_works(page, address, copies):
    deadlock = "if rank == 0:\n    dist.all_reduce(torch.ones(1))"
    after = "x = torch.full((1,), float(kept))\ndist.all_reduce(x)\nprint('sum', int(x))"
    cells = ["%load_ext scratch_ddp\n%dist_init -n 2", "kept = rank + 20\nprint('kept')", deadlock, after]
    copy(save(copies.parent / "deadlock.ipynb", *cells), copies / "deadlock.ipynb")
    panel = open_notebook(page, address, copies / "deadlock.ipynb")
    run = panel.locator("[data-command='notebook:run-cell-and-select-next']")
    outputs = panel.locator(".jp-Cell-outputArea")
    run.click()
    run.click()
    expect(outputs.nth(1)).to_contain_text("kept", timeout=90_000)
    run.click()
    expect(outputs.nth(2)).to_contain_text("all_reduce", timeout=20_000)  # the line that says where everyone is
    panel.locator("[data-command='notebook:interrupt-kernel']").click()  # the Stop button
    expect(outputs.nth(2)).to_contain_text("variables are kept", timeout=3_000)
    said = outputs.nth(2).inner_text()
    assert re.search(r"rank 0 waits in all_reduce .*rank 1 never came", said)
    assert said.count("rank 0") == 1  # the waiting line is gone
    run.click()
    expect(outputs.nth(3)).to_contain_text("sum 41", timeout=10_000)

"""A real JupyterLab in a real browser, for tests: start the server, open a notebook, press its buttons, read it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from scratch_ddp.commands.lab import lab_command, variables, write_settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
TOKEN = "only-for-this-test"
WHOLE_NOTEBOOK = '{"windowingMode": "none"}'  # cells that are scrolled out of sight would otherwise not be in the page


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

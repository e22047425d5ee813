"""A real JupyterLab in a real browser, for tests: start the server, open a notebook, press its buttons, read it."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from scratch_ddp.commands.lab import lab_command, variables, write_settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
CHROMIUM_OPTIONS += ["--disable-background-networking", "--disable-component-update"]
TOKEN = "only-for-this-test"
# Cells that are scrolled out of sight would otherwise not be in the page.
WHOLE_NOTEBOOK = '{"windowingMode": "none"}'


@contextlib.contextmanager
def serve(copies: Path) -> Iterator[str]:
    """Run the lab on a folder of copies, as `python3 -m scratch_ddp lab` does; gives its address.

    The server has settings of its own beside the folder, and is ended with its process group.
    """
    settings = copies / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(WHOLE_NOTEBOOK)
    folders = {f"JUPYTER_{kind.upper()}_DIR": str(copies.parent / "jupyter" / kind) for kind in ("data", "runtime")}
    write_settings()
    port = free_port()
    options = ["--no-browser", f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    with open(copies.parent / "server.log", "w") as log:
        server = subprocess.Popen(
            lab_command(options, copies=copies),
            env={**os.environ, **folders, **variables(copies)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_server(server, port, Path(log.name))
        yield f"http://127.0.0.1:{port}"
    finally:
        end(server)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_server(server: subprocess.Popen, port: int, log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server ended:\n{log.read_text()}"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={TOKEN}"):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server did not answer within {seconds} s:\n{log.read_text()}")


def end(server: subprocess.Popen) -> None:
    """Ask the server to end its kernels and itself; what is left of its process group after that is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


class Notebook:
    """One notebook open in JupyterLab; cells are numbered from 0, markdown cells counted."""

    def __init__(self, page, address: str, path: str):
        """Open `path`, relative to the folder that the lab shows, and wait for its kernel."""
        self.page = page
        page.goto(f"{address}/lab/tree/{path}?token={TOKEN}&reset")
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.cells = self.panel.locator(".jp-Notebook-cell")
        self.cells.first.wait_for(timeout=60_000)
        self.wait_for_status("Idle", timeout=60)

    def wait_for_status(self, status: str, timeout: float) -> None:
        """Wait until the status bar says `Idle` or `Busy`; `timeout` in seconds, as everywhere here."""
        self.page.locator("#jp-main-statusbar", has_text=f"| {status}").wait_for(timeout=timeout * 1000)

    def run_all(self) -> None:
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()

    def run_cell(self, index: int) -> None:
        """Select a cell and press Ctrl+Enter.

        An output that arrives meanwhile moves the cells below it, and a click may then miss: it is repeated until
        the cell is the active one.
        """
        cell = self.cells.nth(index)
        deadline = time.monotonic() + 30
        while True:
            cell.locator(".jp-InputPrompt").click()
            if cell.evaluate("cell => cell.classList.contains('jp-mod-active')"):
                break
            assert time.monotonic() < deadline, f"clicks do not make cell {index} the active one:\n{self.text()}"
        self.page.keyboard.press("Control+Enter")

    def wait_until_done(self, timeout: float) -> None:
        """Wait until no cell is running or queued: the kernel stays idle, and no cell shows [*], for half a second.

        A queued cell shows [ ] for a while, and between two cells the kernel is idle for a moment.
        """
        running = self.panel.locator(".jp-InputPrompt", has_text="[*]")
        busy = self.page.locator("#jp-main-statusbar", has_text="| Busy")
        deadline, quiet = time.monotonic() + timeout, 0
        while quiet < 5:
            assert time.monotonic() < deadline, f"still running after {timeout} s:\n{self.text()}"
            self.page.wait_for_timeout(100)
            quiet = 0 if running.count() or busy.count() else quiet + 1

    def not_run(self) -> list[int]:
        """Code cells that have no number: those after an error, when all were to be run."""
        prompts = self.panel.locator(".jp-Notebook-cell").evaluate_all(
            "cells => cells.map(cell => cell.querySelector('.jp-InputPrompt')?.innerText ?? '')"
        )
        code = self.panel.locator(".jp-Notebook-cell").evaluate_all(
            "cells => cells.map(cell => cell.classList.contains('jp-CodeCell'))"
        )
        return [index for index, is_code in enumerate(code) if is_code and not re.search(r"\d", prompts[index])]

    def wait_for_output(self, index: int, text: str, timeout: float) -> None:
        output = self.cells.nth(index).locator(".jp-OutputArea", has_text=text).first
        deadline = time.monotonic() + timeout
        while not output.is_visible():
            assert time.monotonic() < deadline, f"cell {index} did not show {text!r} in {timeout} s:\n{self.text()}"
            self.page.wait_for_timeout(20)

    def output(self, index: int) -> str:
        """What a reader sees under a cell, as text."""
        return "\n".join(self.cells.nth(index).locator(".jp-OutputArea-output").all_inner_texts())

    def text(self) -> str:
        return "\n".join(f"[{index}] {self.output(index)}" for index in range(self.cells.count()))

    def pictures(self, index: int) -> int:
        """How many pictures a cell shows, markdown's included, that were really loaded."""
        widths = self.cells.nth(index).locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
        return sum(width > 0 for width in widths)

    def stop(self) -> None:
        """Press the Stop button."""
        self.panel.locator("[data-command='notebook:interrupt-kernel']").click()

    def press_restart(self) -> None:
        """Press the Restart button and confirm; returns at once."""
        self.panel.locator("[data-command='notebook:restart-kernel']").click()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def restart(self, timeout: float = 60) -> None:
        """Restart the kernel; returns when the new one is idle."""
        self.press_restart()
        self.page.locator(".jp-Dialog").wait_for(state="detached")
        self.wait_for_status("Idle", timeout)

"""Drive a real kernel as a frontend does: run cells, collect their output, interrupt."""

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from scratch_ddp.commands.notebooks import SocketKernelManager


@dataclass
class Result:
    """The outputs of one cell, in the order in which they arrived."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    status: str = ""
    seconds: float = 0.0

    def text(self, name: str = "stdout") -> str:
        return "".join(out["text"] for out in self.outputs if out["type"] == "stream" and out["name"] == name)

    @property
    def error(self) -> dict[str, Any] | None:
        return next((out for out in self.outputs if out["type"] == "error"), None)

    @property
    def message(self) -> str:
        return self.error["evalue"] if self.error else ""

    @property
    def traceback(self) -> str:
        return "\n".join(self.error["traceback"]) if self.error else ""


class Kernel:
    """A kernel of this Python, with `cluster` ranks. `with Kernel() as kernel: kernel.run("1 + 1")`."""

    def __init__(self, cluster: int = 0):
        self.manager = SocketKernelManager()
        self.manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.dist_init = f"%dist_init -n {cluster}" if cluster else ""
        self.env = dict(os.environ)

    def __enter__(self) -> "Kernel":
        self.manager.start_kernel(env=self.env)
        self._connect()
        if self.dist_init:
            self.run("%load_ext scratch_ddp")
            started = self.run(self.dist_init, timeout=120)
            assert not started.error, started.traceback
        return self

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def __exit__(self, *_: Any) -> None:
        self.client.stop_channels()
        with contextlib.suppress(Exception):
            self.manager.shutdown_kernel(now=False)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def start(self, code: str) -> str:
        """Start a cell and return its message id."""
        return self.client.execute(code, allow_stdin=False)

    def finish(self, message_id: str, timeout: float = 60) -> Result:
        """Wait until a cell has ended, and return its output. Raises TimeoutError."""
        result, began = Result(), time.monotonic()
        while True:
            left = began + timeout - time.monotonic()
            try:
                message = self.client.get_iopub_msg(timeout=max(left, 0.01))
            except Exception:
                raise TimeoutError(f"the cell did not end within {timeout} s; so far: {result.outputs}") from None
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind in ("stream", "display_data", "execute_result", "error", "update_display_data", "clear_output"):
                result.outputs.append({"type": kind, **content})
        reply = self.client.get_shell_msg(timeout=10)
        while reply["parent_header"].get("msg_id") != message_id:  # a reply to the messages at the start
            reply = self.client.get_shell_msg(timeout=10)
        result.status = reply["content"]["status"]
        result.seconds = time.monotonic() - began
        return result

    def run(self, code: str, timeout: float = 60) -> Result:
        return self.finish(self.start(code), timeout)

    def interrupt(self) -> None:
        """Interrupt, as the Stop button does."""
        self.manager.interrupt_kernel()

    def stop(self, code: str, after: float = 1) -> tuple[str, float]:
        """Run a cell that does not end, and interrupt it. Returns its error's text and the seconds since then."""
        cell = self.start(code)
        time.sleep(after)
        began = time.monotonic()
        self.interrupt()
        message = self.finish(cell).message
        return message, time.monotonic() - began

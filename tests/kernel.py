"""The kernel driver of the benchmark, with what tests alone need (`from tests.kernel import Kernel`)."""

import os
import re
import signal
import time
from collections.abc import Sequence

from scratch_ddp.benchmark import kernel
from scratch_ddp.benchmark.kernel import Result
from tests.processes import alive, wait_until_gone

__all__ = ["Kernel", "Result", "alive", "wait_until_gone"]


class Kernel(kernel.Kernel):
    def __init__(
        self, cluster: int = 0, options: str = "", env: dict[str, str] | None = None, within: Sequence[str] = ()
    ):
        """`options` of %dist_init; `within`: a command that runs the kernel's command, such as `ip netns exec NAME`."""
        super().__init__(cluster)
        self.dist_init = f"{self.dist_init} {options}".strip()
        self.env |= env or {}
        self.manager.kernel_spec.argv = [*within, *self.manager.kernel_spec.argv]

    def start(self, code: str, attended: bool = False) -> str:
        """Start a cell and return its message id. `attended`: as a frontend that a person looks at."""
        return self.client.execute(code, allow_stdin=attended)

    def await_text(self, message_id: str, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Wait until a running cell has written a text. What it has written so far is not in its result any more."""
        text, until = "", time.monotonic() + timeout
        while (found := re.search(pattern, text)) is None:
            message = self.client.get_iopub_msg(timeout=max(until - time.monotonic(), 0.01))
            if message["parent_header"].get("msg_id") != message_id:
                continue
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
            elif message["msg_type"] == "error":
                raise RuntimeError(message["content"]["evalue"])
        return found

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=False, env=self.env)
        self._connect()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """The process ids of the ranks."""
        return [int(line.split()[0]) for line in self.run("import os; print(os.getpid())").text().splitlines()]

"""A store for torch.distributed whose keys the kernel keeps (`KeyBoard` in `host.py`). It listens on no port.

Who asks is known: the request travels over the rank's channel and the connection of its host. And the keys outlive
every rank, so a rank that replaces another finds the rest.
"""

import datetime
import itertools
import queue
import time
from typing import Any

import torch.distributed as dist

from scratch_ddp.cells.channel import Channel

_WAIT_LIMIT = 300.0  # seconds; torch's default for its own stores
_ASK_AGAIN_AFTER = 0.01  # seconds


class LinkStore(dist.Store):
    """Values are bytes; in messages each byte is a character (latin-1)."""

    def __init__(self, channel: Channel):
        super().__init__()
        self._channel = channel
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """An answer has come from the kernel (called by the thread that reads the channel)."""
        if (waiting := self._answers.get(message["number"])) is not None:
            waiting.put(message["answer"])

    def _ask(self, operation: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = answer = queue.SimpleQueue()
        self._channel.send({"type": "store", "number": number, "operation": operation, "arguments": arguments})
        try:
            return answer.get()
        finally:
            del self._answers[number]

    # torch's names

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value if isinstance(value, str) else bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask("get", [key])[0].encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount)[0])

    def check(self, keys: list[str]) -> bool:
        return None not in self._ask("get", list(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        limit = timeout.total_seconds() if timeout else _WAIT_LIMIT
        until = time.monotonic() + limit
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{list(keys)}: nobody has written this within {limit:g} s")
            time.sleep(_ASK_AGAIN_AFTER)

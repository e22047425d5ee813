"""What is still there some time later: gloo's threads hold a message's tensors a moment longer than it lasts."""

import time
from collections.abc import Callable
from typing import Any


def lasting(found: Callable[[], Any], seconds: float = 1.0) -> Any:
    """What found() says, once that is nothing or the time is over."""
    until = time.monotonic() + seconds
    while (there := found()) and time.monotonic() < until:
        time.sleep(0.002)
    return there

"""What tests of rank cells share: ranks in an interruptible group, Stop in a cell, and that the next cell works."""

import re
import threading

from scratch_ddp.cells.rank import interruptible_group
from tests.ranks import run_ranks


def on_interruptible_ranks(world_size, function, *args, timeout=30):
    return run_ranks(world_size, function, *args, backend=interruptible_group.BACKEND, timeout=timeout)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def stopped(kernel, code, after=0.5, error=True, limit=6):
    """Press Stop `after` seconds into a cell; it must end within `limit` seconds of that."""
    button = threading.Timer(after, kernel.interrupt)
    button.start()
    result = kernel.run(code)
    button.join()
    assert result.error or not error, "the cell ended by itself"
    assert result.seconds < after + limit, f"took {result.seconds - after:.1f} s to stop"
    return result


def assert_next_works(kernel):
    result = kernel.run("ones = torch.ones(1)\ndist.all_reduce(ones)\nones.item()")
    assert result.text() == "4.0   ← ranks 0–3\n", result.traceback or result.text()

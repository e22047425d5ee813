"""What tests of rank cells share: pressing Stop in a cell, and seeing that the next one works."""

import re
import threading


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def stopped(kernel, code, after=0.5):
    """Press Stop `after` seconds into a cell; it must end within 3 seconds of that."""
    button = threading.Timer(after, kernel.interrupt)
    button.start()
    result = kernel.run(code)
    button.join()
    assert result.error, "the cell ended by itself"
    assert result.seconds < after + 3, f"took {result.seconds - after:.1f} s to stop"
    return result


def assert_next_works(kernel):
    result = kernel.run("ones = torch.ones(1)\ndist.all_reduce(ones)\nones.item()")
    assert result.text() == "4.0   ← ranks 0–3\n", result.traceback or result.text()

"""Whether to show a progress bar."""

import os
import sys


def shows_progress(rank: int) -> bool:
    """True on the first rank, as SCRATCH_DDP_PROGRESS says (0, 1), else on a terminal.

    `python -m scratch_ddp lab` sets it to 1: a learner's cells show bars, but saved outputs have none.
    """
    setting = os.environ.get("SCRATCH_DDP_PROGRESS")
    return rank == 0 and (setting == "1" if setting else sys.stderr.isatty())

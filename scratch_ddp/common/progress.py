"""Whether to show a progress bar."""

import os
import sys


def shows_progress(rank: int, wanted: bool | None = None) -> bool:
    """True on the first rank if bars are `wanted`; by default as SCRATCH_DDP_PROGRESS says (0, 1), else on a terminal.

    `python -m scratch_ddp lab` sets it to 1: a learner's cells show bars, but saved outputs have none.
    """
    if wanted is None:
        setting = os.environ.get("SCRATCH_DDP_PROGRESS")
        wanted = setting == "1" if setting else sys.stderr.isatty()
    return rank == 0 and wanted

"""Whether to show a progress bar."""

import os
import sys


def shows_progress(rank: int, wanted: bool | None = None) -> bool:
    """On the first rank, if `wanted`; by default as SCRATCH_DDP_PROGRESS says (0, 1), else if stderr is a terminal.

    `python -m scratch_ddp lab` sets it to 1: a learner's cells show bars, while saved outputs have none.
    """
    if wanted is None:
        said = os.environ.get("SCRATCH_DDP_PROGRESS")
        wanted = said == "1" if said else sys.stderr.isatty()
    return rank == 0 and wanted

"""Bandwidth: how long collectives take on these ranks, and the α and β of their messages.

`measure()` times torch's collectives and ours over tensor sizes and numbers of ranks. Its `Results` print a table with
bandwidths as nccl-tests defines them, and fit T = α + β·S to each series. `save_machine` and `load_machine` keep such
fits for later lessons.
"""

from scratch_ddp.instruments.bandwidth.alpha_beta import AlphaBeta, fit, load_machine, save_machine
from scratch_ddp.instruments.bandwidth.measurement import SIZES, measure
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS
from scratch_ddp.instruments.bandwidth.results import Results, Row

__all__ = ["OPERATIONS", "SIZES", "AlphaBeta", "Results", "Row", "fit", "load_machine", "measure", "save_machine"]

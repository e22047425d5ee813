"""Pipelines: a model whose layers are spread over the ranks. Micro-batches pass from rank to rank as a schedule says.

A schedule is data: a row of actions for each rank. Read this folder from here:

    schedules    what an action is, and the schedules GPipe, 1F1B, interleaved 1F1B and ZB-H1
    simulate     what a schedule does, without running it: when actions run, deadlocks, activations held, the bubble
    execute      carry out a schedule on real stages
        messages     what travels between stages, of sizes that are agreed on once
        halves       a backward in two halves, so that the gradients of weights can wait
    module       the class Pipeline: everything that users call
        split        a model as a list of layers, cut into stages that take equally long
"""

from scratch_ddp.pipeline.execute import execute
from scratch_ddp.pipeline.module import Pipeline
from scratch_ddp.pipeline.schedules import Action, gpipe, interleaved, one_f_one_b, zb_h1
from scratch_ddp.pipeline.simulate import bubble, held, simulate, validate

__all__ = ["Action", "Pipeline", "bubble", "execute", "gpipe", "held", "interleaved", "one_f_one_b", "simulate"]
__all__ += ["validate", "zb_h1"]

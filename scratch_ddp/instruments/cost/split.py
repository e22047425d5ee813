"""The forecast of a step of a model that is split over the ranks: its matrices, or its layers.

As in `step`, copies, calls on the processor and the small messages of checks are left out.
"""

from scratch_ddp.instruments.cost.wire import Wire, refuse_unless_finite
from scratch_ddp.pipeline.schedules import Schedule
from scratch_ddp.pipeline.simulate import simulate


def tensor_parallel(compute: float, all_reduces: int, nbytes: float, wire: Wire) -> float:
    """Seconds of a step under tensor parallelism. Nothing hides an all-reduce: what comes next needs the sum.

    `compute`: seconds for which a rank computes in forward and backward; `all_reduces`: how many there are in both, of
    `nbytes` bytes each. Raises ValueError if a value is negative, infinite or NaN.
    """
    refuse_unless_finite(compute=compute, all_reduces=all_reduces, nbytes=nbytes)
    return compute + all_reduces * wire.all_reduce(nbytes)


def pipelined(schedule: Schedule, forward: float, backward: float, nbytes: float, wire: Wire) -> float:
    """Seconds of a step of a pipeline, from the first action to the end of the last one of all ranks.

    `forward`, `backward`: seconds of a stage for one micro-batch; either half of a backward takes half of it.
    `nbytes`: bytes of an output, and of its gradient. Messages don't queue for the wire. Raises ValueError if a value
    is negative, infinite or NaN, or if the schedule deadlocks.
    """
    refuse_unless_finite(forward=forward, backward=backward, nbytes=nbytes)
    cost = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return max(row[-1][2] for row in simulate(schedule, cost, wire.message(nbytes)) if row)

"""Fully sharded data parallelism (ZeRO-3): parameters, gradients and optimizer state are sharded over the ranks.

To learn the idea, read `scratch_ddp/minimal/fsdp.py`: the same in 150 lines, for a well-behaved model. A caller's unit
is a module; its parameters are a `Unit` here, or several, one for each dtype. One step:

    model(x)            the ranks meet; a schedule fixes the order of units; the root and the first units gather
      each unit         reached: the next units' gathers start, its own is waited for; left: freed, the last one stays
    loss.backward()     at the first gradient of an output the ranks meet; a schedule of the units in reverse order
      each unit         reached at its outputs' gradients: gathered; left at its inputs' gradients: freed, reduced
      its end           the root is freed and reduced
    sync_gradients()    the ranks meet; what is not reduced yet is reduced; the means become the shards' `.grad`

    module      the class FSDP: all that users call
    plan        which parameter belongs to which unit; the plain model becomes units
    unit        how parameters are cut into rows; gathered, freed, reduced
    comm        the ranks, and their collectives, started now and waited for later
    passes      hooks in the model: what happens before and after each forward and backward, once the ranks have met
    nests       tensors in what modules take, keep and return: where passes watch for gradients
    schedule    in which order a pass gathers and reduces, and how far ahead it gathers (prefetch)
    checkpoint  what is saved, and loaded on any number of ranks
"""

from scratch_ddp.fsdp.module import FSDP

__all__ = ["FSDP"]

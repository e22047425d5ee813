"""The end of a step's backward passes: every rank gets its rows of the mean, of all gradients that any rank has."""

from scratch_ddp.common.accounting import set_up
from scratch_ddp.fsdp.parts import Parts
from scratch_ddp.fsdp.runtime import Passes


class Synchronisation:
    """Finishes what the backward passes have begun, for all units, the replicated parameters and the buffers."""

    def __init__(self, parts: Parts, passes: Passes):
        self.parts, self.passes = parts, passes

    def run(self) -> None:
        """Leave the means in `.grad`. Every rank calls it; communicates as `FSDP.sync_gradients` says."""
        parts, all_gradients = self.parts, list(self.parts.gradients)
        parts.replicated.collect()
        flags = self.passes.synchronise(lambda: flags_of(parts))
        with self.passes.uninterrupted():
            late, flags = flags[: len(all_gradients)], flags[len(all_gradients) :]
            for gradients, is_late in zip(all_gradients, late, strict=True):
                if is_late:
                    gradients.reduce()
            for gradients in all_gradients:
                count = len(gradients.shards.names)
                present, flags = flags[:count], flags[count:]
                gradients.give({i for i, anywhere in enumerate(present) if anywhere})
            names = list(parts.replicated.masters)
            present, changed = flags[: len(names)], flags[len(names) :]
            parts.replicated.reduce({name for name, anywhere in zip(names, present, strict=True) if anywhere})
            with set_up():
                parts.buffers.copy_from_first(changed)


def flags_of(parts: Parts) -> list[int]:
    """What the ranks tell each other: gradients that wait to be reduced; who has a gradient; buffers that changed."""
    waiting = [gradients.waiting() for gradients in parts.gradients]
    present = [each for gradients in parts.gradients for each in gradients.present()]
    return [int(flag) for flag in [*waiting, *present, *parts.replicated.present(), *parts.buffers.changed()]]

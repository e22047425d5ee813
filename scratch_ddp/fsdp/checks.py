"""What may go wrong with a wrapped model between two passes, and what has to be the same on every rank."""

from torch import nn

from scratch_ddp.common.replicas import modules_of
from scratch_ddp.common.wrapper import SyncSwitch
from scratch_ddp.fsdp.parts import Parts


class Checks:
    """Looks at this rank's part of the wrapped model. No communication."""

    def __init__(self, model: nn.Module, parts: Parts, switch: SyncSwitch):
        self.model, self.parts, self.switch = model, parts, switch
        self._parameters = self._in_their_places()
        self._changes_before = 0

    def settle(self) -> None:
        """Take over what the caller may change between passes."""
        for part in (*self.parts.shards, *self.parts.gradients):
            part.settle()

    def problem(self) -> str | None:
        """Say what keeps this rank from a pass, or return None."""
        if self._in_their_places() != self._parameters:
            return "parameters were added, removed, replaced or tied after the model was wrapped: wrap it again"
        parts = self.parts
        each = [parts.buffers, *parts.shards, *parts.gradients, parts.replicated]
        return next(filter(None, (part.problem() for part in each)), None)

    def lines(self, passes: bool = True) -> list[str]:
        """What the ranks must have in common before a pass, and before anything else (`passes` False) less of it."""
        each = [pair for shards in self.parts.shards for pair in zip(shards.names, shards.trained, strict=True)]
        frozen = [name for name, trained in each if not trained]
        lines = [f"frozen: {', '.join(frozen) or 'nothing'}"]
        if passes:
            lines.append("gradients are synchronised" if self.switch.do_sync else "gradients are not synchronised")
            lines.append(
                f"parameters changed in place {self.changes() - self._changes_before} times (where ranks differ, a "
                "step of the optimizer was interrupted, and a checkpoint must be loaded)"
            )
        return lines

    def forget_changes(self) -> None:
        """The shards were loaded: they belong together again, whatever happened before."""
        self._changes_before = self.changes()

    def changes(self) -> int:
        """How many times the shards, or replicated parameters, were changed in place."""
        parts = sum(shards.part._version for shards in self.parts.shards)
        return parts + sum(master._version for master in self.parts.replicated.masters.values())

    def _in_their_places(self) -> list[int]:
        return [id(each) for module in modules_of(self.model) for each in module._parameters.values()]

"""Which parameters get a step: agreed upon by all ranks, who also learn there whether they disagree."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from scratch_ddp.agreement import check_same_lines, gather_rows, message_device, raise_everywhere, rank_numbers
from scratch_ddp.traffic import set_up
from scratch_ddp.zero import checks
from scratch_ddp.zero.partition import Owners


class Presence:
    """Asks before each step who has which gradients; before the first one, also whether they are the same."""

    def __init__(self, groups: checks.Groups, owners: Owners, group: dist.ProcessGroup | None):
        self.group, self.groups, self.owners = group, groups, owners
        self.named = checks.named_parameters(groups)
        self._kinds = [(parameter.dtype, tuple(parameter.shape)) for _, parameter in self.named]
        self._compared = False

    def with_gradient(self) -> list[torch.Tensor]:
        """Return the parameters that have a gradient on their owner: the same list on every rank.

        Raises ValueError on every rank if a gradient is sparse, if a parameter has become another one, if a rank has a
        gradient that its owner lacks, if ranks have other options, or if at the first step they have other gradients.
        Costs one all-reduce of two bytes a parameter and 65 more; at the first step an all-gather of 32 bytes each.
        """
        me = dist.get_rank(self.group)
        problem = self.refusal()
        here = [parameter.grad is not None for _, parameter in self.named]
        at_owner = [has and self.owners.of(p) == me for has, (_, p) in zip(here, self.named, strict=True)]
        options = hashlib.sha256("\n".join(map(checks.options_text, self.groups)).encode()).digest()
        complement = [255 - byte for byte in options]  # the largest options and the smallest, in one maximum
        refused, anywhere, at_owner, most, least = self._maximum([bool(problem)], here, at_owner, options, complement)
        if refused[0]:
            raise_everywhere(problem, self.group)
        if anywhere != at_owner:
            raise_everywhere(self._missing(here, at_owner), self.group)
        if any(a + b != 255 for a, b in zip(most, least, strict=True)):
            self._refuse_options()
        if not self._compared:
            raise_everywhere(self._other_gradient(here), self.group)
            self._compared = True
        return [parameter for (_, parameter), present in zip(self.named, at_owner, strict=True) if present]

    def refusal(self) -> str | None:
        """Say which parameter this rank can't step with or send, or return None."""
        for (name, parameter), then in zip(self.named, self._kinds, strict=True):
            now = (parameter.dtype, tuple(parameter.shape))
            if now != then:
                return (
                    f"{name} was {then[0]} {then[1]} when the optimizer was made and is {now[0]} {now[1]}: make it anew"
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                return f"the gradient of {name} is sparse; only dense ones can be averaged"
        return None

    def _maximum(self, *parts: Iterable[int]) -> list[list[int]]:
        """The largest value over the ranks, place by place. One all-reduce."""
        parts = [list(part) for part in parts]
        with set_up():
            message = torch.tensor(sum(parts, []), dtype=torch.uint8, device=message_device(self.group))
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)
        return [part.tolist() for part in message.split([len(part) for part in parts])]

    def _missing(self, here: Sequence[bool], at_owner: Sequence[int]) -> str | None:
        """What this rank has to say where it has a gradient and the owner has none."""
        for (name, parameter), mine, owners in zip(self.named, here, at_owner, strict=True):
            if mine and not owners:
                return (
                    f"{name} has a gradient here, but none on {self._owner(parameter)}, which updates it: "
                    "average the gradients before step(), as sync_gradients() does"
                )
        return None

    def _refuse_options(self) -> None:
        lines = [f"group {number}: {checks.options_text(group)}" for number, group in enumerate(self.groups)]
        complaint = "the ranks step with different options; give schedulers the same numbers on every rank"
        check_same_lines(lines, complaint, self.group)

    def _other_gradient(self, here: Sequence[bool]) -> str | None:
        """Say which gradient differs from its owner's, where both ranks have one. One all-gather."""
        with set_up():
            rows = gather_rows(checks.digests(parameter.grad for _, parameter in self.named), self.group)
        mine = rows[dist.get_rank(self.group)]
        for place, (name, parameter) in enumerate(self.named):
            if here[place] and not torch.equal(mine[place], rows[self.owners.of(parameter)][place]):
                return (
                    f"{name} has another gradient than on {self._owner(parameter)}, which updates it: "
                    "average the gradients before step(), as sync_gradients() does"
                )
        return None

    def _owner(self, parameter: torch.Tensor) -> str:
        return f"rank {rank_numbers(self.group)[self.owners.of(parameter)]}"

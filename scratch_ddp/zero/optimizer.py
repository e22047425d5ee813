"""ZeRO-1: every rank has all parameters and gradients, but optimizer state for a share of the parameters only.

Each parameter has one owner. In a step every rank updates what it owns, with an ordinary optimizer that knows of
nothing else, and then sends it to the others.

Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 5.1.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from scratch_ddp.common.agreement import check_same_lines, raise_everywhere
from scratch_ddp.common.optimizer_steps import REDUCED
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.zero import checkpoint as saving
from scratch_ddp.zero import checks
from scratch_ddp.zero.checks import Presence
from scratch_ddp.zero.owners import Owners, broadcast_shares


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **options)` with its state shared out over the ranks: the same updates, to the last bit.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Every rank gives the same parameters, with equal values. Before each `step()` every rank has the same mean gradients
    (`sync_gradients()`, torch's DDP), or their owners alone have them (`reduce_gradients`). `group` is a process group,
    a dimension of a mesh, or None for the default group. `param_groups` has all parameters, so that schedulers and
    `zero_grad` work on all of them. `state` has what this rank owns: 1/n of the whole, give or take the largest
    parameter.

    All ranks call the constructor, `step`, `add_param_group` and `load_state_dict` together. What can't be sharded, and
    ranks that disagree, raise ValueError (a wrong class: TypeError) on every rank, with the rank and the parameter in
    the message; pass `model.named_parameters()` to see names there.

    get_optimizer_state_dict of torch.distributed.checkpoint returns a rank's share, which dcp.save and dcp.load take
    on any number of ranks. set_optimizer_state_dict then needs StateDictOptions(strict=False), since it is a share.

    Cost of a step: broadcasts of the updated parameters, one for each parameter of 1 MB or more and one for all smaller
    ones of an owner and dtype; on a ring a rank sends (n - 1)/n of their bytes. Besides, one all-reduce of four bytes
    per parameter and 65 more; at the first step also an all-gather of 32 bytes per parameter, to check that gradients
    were averaged.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[Optimizer],
        group: Group = None,
        **options: Any,
    ):
        self.group = process_group(group)
        self.owners = Owners(dist.get_world_size(self.group))
        raise_everywhere(checks.class_problem(optimizer_cls, ShardedOptimizer), self.group, TypeError)
        groups = self._read(params, options)
        self.owners.add(parameter for each in groups for parameter in each["params"])
        self.own = self._call_together(lambda: optimizer_cls([self._share_of(each) for each in groups], **options))
        self._set_up = False
        super().__init__(groups, dict(self.own.defaults))
        self._set_up = True
        self.state = self.own.state

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank updates the parameter and has its state. No communication."""
        return self.owners.of(parameter) == dist.get_rank(self.group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, on every rank; return what the closure, if any, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = self.presence.with_gradient()
        self._copy_options(self.param_groups, self.own.param_groups)
        self.own.step()
        self._copy_options(self.own.param_groups, self.param_groups)
        broadcast_shares(self.owners.shares_of(updated), self.group)
        self._mark_state()
        return loss

    def _mark_state(self) -> None:
        """Leave an entry even on a rank that owns nothing: torch's get_state_dict lets an optimizer step that has none.

        One rank would step alone.
        """
        if not self.state:
            self.state[self.presence.named[0][1]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear every gradient, not only this rank's share: any other would be averaged into the next step's."""
        super().zero_grad(set_to_none)
        for _, parameter in self.presence.named:
            if hasattr(parameter.grad, REDUCED):  # with set_to_none=False it is kept, full of zeros
                delattr(parameter.grad, REDUCED)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch's optimizers; all other parameters keep their owners."""
        if self._set_up:
            (param_group,) = self._read([param_group], {})
            self.owners.add(param_group["params"])
            self._call_together(lambda: self.own.add_param_group(self._share_of(param_group)))
        super().add_param_group(param_group)
        self.presence = Presence(self.param_groups, self.owners, self.group)

    def state_dict(self) -> dict[str, Any]:
        """The state of what this rank owns, under the numbers of the plain optimizer; all groups. No communication."""
        return {
            **self._share(),
            "share": {"rank": dist.get_rank(self.group), "parameters": list(self._numbers())},
        }

    def _share(self) -> dict[str, Any]:
        mine = super().state_dict()
        return {**mine, "state": {number: entry for number, entry in mine["state"].items() if entry}}

    def gather_full_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Return the plain optimizer's state dict, in main memory, on rank `to` of the group; None on the others.

        Every rank calls it. Costs one message for each tensor of state that `to` does not own.
        """
        mine = self._share()
        whole = saving.gather_state(mine["state"], to, self.group)
        return {**mine, "state": whole} if dist.get_rank(self.group) == to else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a whole state dict (also the plain optimizer's), or the share that it saved itself.

        Every rank calls it. Raises ValueError on every rank if a state dict lacks something or is another model's. The
        parameters may have names, as in set_optimizer_state_dict of torch.distributed.checkpoint.
        """
        numbers = self._numbers()
        present = {number for number, parameter in numbers.items() if self.state.get(parameter)}
        state = self._call_together(lambda: saving.state_by_number(state_dict, self.param_groups, numbers, present))
        mine = {number: entry for number, entry in state.items() if number in numbers}
        groups = [
            {**saved, "params": group["params"]}
            for saved, group in zip(state_dict["param_groups"], super().state_dict()["param_groups"], strict=True)
        ]
        super().load_state_dict({"state": mine, "param_groups": groups})
        self._copy_options(self.param_groups, self.own.param_groups)
        self.own.__setstate__({"state": self.state, "param_groups": self.own.param_groups})  # older versions' state
        self._mark_state()
        self._copy_options(self.own.param_groups, self.param_groups)
        self.presence = Presence(self.param_groups, self.owners, self.group)

    def save(self, folder: str | Path) -> None:
        """Write every rank's share to a folder on a file system that all ranks share. Every rank calls it.

        An older checkpoint is replaced when the new one is complete. Raises OSError on every rank if the folder can't
        be written.
        """
        saving.save(self._share(), folder, self.group)

    def load(self, folder: str | Path) -> None:
        """Read what any number of ranks have saved; each rank reads only what it owns. Every rank calls it.

        Raises ValueError on every rank if the folder is incomplete or holds another model's state.
        """
        self.load_state_dict(saving.load(folder, self._numbers(), self.group))

    def _numbers(self) -> dict[int, torch.Tensor]:
        """The parameters that this rank owns, by their numbers in a state dict."""
        everything = [parameter for each in self.param_groups for parameter in each["params"]]
        return {number: parameter for number, parameter in enumerate(everything) if self.owns(parameter)}

    def _read(self, params: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
        """The parameters as groups. Raises on every rank unless they and their values are the same everywhere."""

        def read() -> list[dict[str, Any]]:
            groups = checks.read_groups(params)
            if problem := checks.parameters_problem(groups, self.owners, self.group):
                raise ValueError(problem)
            return groups

        groups = self._call_together(read)
        lines = [f"options {checks.options_text(options)}", *checks.describe(groups)]
        check_same_lines(lines, "the ranks give the optimizer different parameters or options", self.group)
        checks.check_same_values(groups, self.group)
        return groups

    def _call_together(self, attempt: Callable[[], Any]) -> Any:
        """Return what `attempt` returns. If it raises on one rank, all ranks raise."""
        result, problem = None, None
        try:
            result = attempt()
        except Exception as error:
            problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise_everywhere(problem, self.group)
        return result

    def _share_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group as this rank's own optimizer has it, with no parameters if other ranks own them all."""
        share = {name: value for name, value in group.items() if name != "param_names"}
        return {**share, "params": [parameter for parameter in group["params"] if self.owns(parameter)]}

    @staticmethod
    def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Copy learning rates and other options from one optimizer's groups to the other's."""
        for from_group, to_group in zip(source, target, strict=True):
            to_group.update((name, value) for name, value in from_group.items() if name not in checks.NO_OPTIONS)

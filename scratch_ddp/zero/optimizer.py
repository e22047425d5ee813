"""ZeRO-1: every rank has all parameters and gradients, but optimizer state for a share of the parameters only.

Each parameter has one owner. In a step every rank updates what it owns, with an ordinary optimizer that knows of
nothing else, and then sends it to the others.

Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 5.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from scratch_ddp.common.agreement import check_everywhere, together
from scratch_ddp.common.replicas import broadcast_shares
from scratch_ddp.common.tensors import checksum
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.zero import checks
from scratch_ddp.zero.owners import Owners

OTHER_PARAMETERS = (
    "the ranks give the optimizer different parameters or options: every rank must hold the same values (set the same "
    "seed, or wrap the model first; the shards of FSDP go to an ordinary optimizer)"
)
OTHER_GRADIENTS = (
    "the ranks step with different gradients or options: average the gradients before step(), as sync_gradients() and "
    "reduce_gradients() do (with a GradScaler, before unscale_()), and give schedulers the same numbers on every rank"
)


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **options)` with its state shared out over the ranks: the same updates, to the last bit.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Every rank gives the same parameters, with equal values. Before each `step()` every rank has the same mean gradients
    (`sync_gradients()`, torch's DDP), or their owners alone have them (`reduce_gradients`). `group` is a process group,
    a dimension of a mesh, or None for the default group. `param_groups` has all parameters, for schedulers; `state` has
    what this rank owns: 1/n of the whole, give or take the largest parameter.

    All ranks call the constructor, `step`, `add_param_group` and `load_state_dict` together. Ranks that disagree raise
    ValueError on every rank, with the rank and the parameter in the message; pass `model.named_parameters()` to see
    names there. An optimizer that looks at all parameters at once (LBFGS) can't be shared out.

    get_optimizer_state_dict of torch.distributed.checkpoint returns a rank's share, which dcp.save and dcp.load take
    on any number of ranks. set_optimizer_state_dict then needs StateDictOptions(strict=False), since it is a share.

    Cost of a step: broadcasts of the updated parameters, one for each parameter of 1 MB or more and one for all smaller
    ones of an owner and dtype; on a ring a rank sends (n - 1)/n of their bytes. Besides, one all-reduce of 24 bytes,
    which compares a few elements of each gradient.
    """

    _step_supports_amp_scaling = True  # so a GradScaler calls step() on every rank, and sets these:
    grad_scale: torch.Tensor | float = 1.0  # gradients are still to be divided by it
    found_inf: torch.Tensor | bool = False  # one is not finite, so there is no update

    def __init__(self, params: Any, optimizer_cls: type[Optimizer], group: Group = None, **options: Any):
        if optimizer_cls is LBFGS:
            raise ValueError(
                "LBFGS looks at all parameters at once: only optimizers that update each by itself can share"
            )
        self.group = process_group(group)
        self.owners = Owners(dist.get_world_size(self.group))
        self.reduced: set[torch.Tensor] = set()  # parameters whose owners alone have their gradients
        self.own = optimizer_cls(self._read(params, options), **options)
        super().__init__(self.own.param_groups, self.own.defaults)
        for parameter in [each for each in self.own.state if not self.owns(each)]:  # Adagrad makes it at once
            del self.own.state[parameter]
        self.state, self.param_groups = self.own.state, self.own.param_groups

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of their numbers in a state dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank updates the parameter and has its state. No communication."""
        return self.owners[parameter] == dist.get_rank(self.group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, on every rank; return what the closure, if any, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        problem, lines = checks.gradients_problem(self.param_groups), []
        if problem is None:
            text = partial(checks.gradient_text, reduced=self.reduced)
            lines = [f"overflow {bool(self.found_inf)}", *checks.describe(self.param_groups, text)]
        check_everywhere(lines, OTHER_GRADIENTS, self.group, problem)
        if self.found_inf:
            return loss
        others = {parameter: parameter.grad for parameter in self.parameters if not self.owns(parameter)}
        for parameter in self.parameters:
            if parameter in others:
                parameter.grad = None  # so that `own` leaves it out
            elif parameter.grad is not None and self.grad_scale != 1:
                parameter.grad.div_(float(self.grad_scale))
        try:
            self.own.step()
        finally:
            for parameter, gradient in others.items():
                parameter.grad = gradient
        updated = [each for each in self.parameters if each.grad is not None or each in self.reduced]
        broadcast_shares(self.owners.shares_of(updated), self.group)
        self._mark_state()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear every gradient, not only this rank's share: any other would be averaged into the next step's."""
        for parameter in self.reduced:
            parameter.grad = None
        self.reduced.clear()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch's optimizers; all other parameters keep their owners."""
        if self.param_groups is self.own.param_groups:  # not in the constructor
            (param_group,) = self._read([param_group], {})
            self.own.add_param_group(param_group)
        self.owners.add(param_group["params"])

    def state_dict(self) -> dict[str, Any]:
        """The state of what this rank owns, under the numbers of the plain optimizer; all groups. No communication."""
        mine = super().state_dict()
        state = {number: entry for number, entry in mine["state"].items() if entry}
        return {**mine, "state": state, "share": list(self._numbers())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a whole state dict (also the plain optimizer's), or the share that it saved itself.

        Every rank calls it. So any number of ranks can load what any other number has saved. Raises ValueError on every
        rank if a state dict lacks something. The parameters may have names, as in torch's set_optimizer_state_dict.
        """
        with together(self.group):
            groups, state = state_dict["param_groups"], {}
            names = [name for group in groups for name in group["params"]]  # from torch's functions, else numbers
            share = state_dict.get("share", range(len(names)))
            if len(names) != len(self.parameters):
                raise ValueError(f"it is another model's: of {len(names)} parameters, not {len(self.parameters)}")
            for number, parameter in self._numbers().items():
                name = names[number]
                saved = state_dict["state"].get(name)
                is_missing = isinstance(name, str) and saved is None and self.state.get(parameter)
                if number not in share or is_missing:
                    raise ValueError(
                        f"the state of parameter {name!r} is missing, which this rank owns; get_state_dict() of a "
                        "sharded optimizer returns a rank's own share, also with full_state_dict=True: save it with "
                        "dcp.save() on every rank, or put the shares of all ranks together"
                    )
                if saved is not None:
                    state[name] = saved
                    for key, value in saved.items():  # of the parameter's shape, or one number for several elements
                        fits = zip(parameter.shape[::-1], torch.as_tensor(value).shape[::-1], strict=False)
                        if not all(there in (here, 1) for here, there in fits):
                            raise ValueError(f"{key!r} of parameter {name!r} has another shape: it is another model's")
            self.own.load_state_dict({"state": state, "param_groups": groups})
        self.state, self.param_groups = self.own.state, self.own.param_groups
        self._mark_state()

    def __getstate__(self) -> dict[str, Any]:
        """For copies; torch's leaves out what other optimizers lack."""
        return super().__getstate__() | {name: vars(self)[name] for name in ("group", "owners", "reduced", "own")}

    def _mark_state(self) -> None:
        """Leave an entry even on a rank that owns nothing: torch's get_state_dict has an optimizer without any step."""
        if not self.state:
            self.state[self.parameters[0]] = {}

    def _numbers(self) -> dict[int, torch.Tensor]:
        """The parameters that this rank owns, by their numbers in a state dict."""
        return {number: parameter for number, parameter in enumerate(self.parameters) if self.owns(parameter)}

    def _read(self, params: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
        """The parameters as groups. Raises on every rank unless they and their values are the same everywhere."""
        with together(self.group, complaint=OTHER_PARAMETERS) as lines:
            groups = Optimizer(params, {}).param_groups
            if any(isinstance(each, DTensor) for group in groups for each in group["params"]):
                raise ValueError("shards go to an ordinary optimizer: their state is sharded with them")
            lines += [f"options {checks.options_text(options)}", *checks.describe(groups, checksum)]
        return groups

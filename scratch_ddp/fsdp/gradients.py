"""The second half of sharded training: whole gradients become this rank's rows of their mean over the ranks.

    reduce()           start the reduce-scatter of the gradients that backward has left, and drop them
    wait_for_reduce()  wait for it; where the model has several copies, begin the all-reduce over them
    mark_pending()     put placeholders in the masters' `.grad`, at the end of backward
    drop_cleared()     forget what zero_grad() has cleared since then
    accumulate()       add the rows to the masters' `.grad`

Between passes a rank has no whole gradients, unless it accumulates micro-batches under `no_sync`. Parameters that are
not sharded are `Replicated`: their gradients are averaged as in data parallelism.
"""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.replicas import gradient_problem
from scratch_ddp.common.tensors import group_alike
from scratch_ddp.fsdp.comm import Pending
from scratch_ddp.fsdp.freed_parameter import mark_sharded
from scratch_ddp.fsdp.shard_gradients import GradientRows, PendingGradient
from scratch_ddp.fsdp.shards import Rows, Shards, lay_out


class Gradients:
    """The gradients of the parameters of a `Shards`. Messages have its compute dtype, what is kept has its dtype."""

    def __init__(self, shards: Shards):
        self.shards = shards
        self._rows: dict[str, Rows] = {}  # of each parameter that is trained, in the message
        self._part_size = 0
        self._kept: dict[str, torch.Tensor] = {}  # whole gradients of micro-batches that were not synchronised
        self._seen: set[str] = set()  # the parameters that have had a gradient here since the last `accumulate`
        self._pending_names: set[str] = set()  # the parameters whose masters have a placeholder in `.grad`
        self._refused: str | None = None  # which gradient can't be averaged, and why
        self._mean: torch.Tensor | None = None  # this rank's rows of all of them, flat
        self._pending: Pending | None = None  # a reduce-scatter that has been started
        self._over_copies: Pending | None = None  # an all-reduce of its result
        self.adopt_changes()

    def adopt_changes(self) -> None:
        """Lay out the messages for the parameters that are trained now, which are the same ones on every rank."""
        shards = self.shards
        trained = {name: each.shape for name, each in shards.parameters.items() if name in shards.trained}
        if list(self._rows) != list(trained):
            self._rows, self._part_size = lay_out(trained, shards.world_size)

    def reduce(self) -> None:
        """Start to average the whole gradients, and drop them. One reduce-scatter, of the same size every time."""
        self.wait_for_reduce()
        message = self._message()
        if message.numel():
            self._pending = self.shards.comm.reduce_scatter(message)
        else:
            self._mean = message[0]

    @property
    def is_reduced(self) -> bool:
        """True if `wait_for_reduce` would not have to wait, nor begin anything, which has its fixed place."""
        return self._pending is None or (self.shards.comm.copies == 1 and self._pending.is_completed())

    def wait_for_reduce(self) -> None:
        """Wait for the reduce-scatter, if one has been started; begin to add up its result over the model's copies."""
        if self._pending is not None:
            row, self._pending = self._pending.wait(), None
            self._wait_for_copies()
            self._over_copies = self.shards.comm.all_reduce_over_copies(row)

    def _wait_for_copies(self) -> None:
        if self._over_copies is not None:
            mean, self._over_copies = self._over_copies.wait().to(self.shards.dtype), None
            self._mean = mean if self._mean is None else self._mean.add_(mean)

    def mark_pending(self) -> None:
        """Put a placeholder in the `.grad` of each master: also where only other ranks may have a gradient."""
        for name in self._rows:
            master = self.shards.masters[name]
            if not isinstance(master.grad, PendingGradient):
                master.grad = PendingGradient.of(name, master)
            self._pending_names.add(name)

    def pending(self) -> dict[str, nn.Parameter]:
        """The masters whose gradients wait for `sync_gradients()`, by name."""
        masters = {name: self.shards.masters[name] for name in self._pending_names}
        return {name: each for name, each in masters.items() if _is_pending(each.grad)}

    def cleared(self) -> list[str]:
        """The parameters whose gradients zero_grad() has cleared since backward."""
        return sorted(self._pending_names - self.pending().keys())

    def drop_cleared(self) -> None:
        """Forget what zero_grad() has cleared since backward."""
        cleared = self.cleared()
        if cleared:
            self.wait_for_reduce()
            self._wait_for_copies()
        for name in cleared:
            self._unmark(name)
            self._take(name)
            self._seen.discard(name)
            if self._mean is not None and name in self._rows:
                self._rows[name].shard(self._mean, self.shards.rank).zero_()

    def _unmark(self, name: str) -> None:
        """Put the earlier gradient back in place of the placeholder, unless something else is there by now."""
        master = self.shards.masters[name]
        if isinstance(master.grad, PendingGradient):
            master.grad = master.grad.earlier
        self._pending_names.discard(name)

    def accumulate(self, present: set[str]) -> None:
        """Add this rank's rows of the mean to `.grad` of the masters that are `present`: had a gradient on any rank."""
        self.wait_for_reduce()
        self._wait_for_copies()
        for name in list(self._pending_names):
            self._unmark(name)
        for name, rows in self._rows.items():
            if name in present and self._mean is not None:
                master, mean = self.shards.masters[name], rows.shard(self._mean, self.shards.rank)
                master.grad = mean.as_subclass(GradientRows) if master.grad is None else master.grad.add_(mean)
        self._mean = None
        self._seen.clear()

    def keep(self) -> None:
        """Keep whole gradients for later in the shards' own dtype: a sum in half precision would lose too much."""
        if self.shards.compute_dtype != self.shards.dtype:
            for name in self._rows:
                if (gradient := self._take(name)) is not None:
                    self._kept[name] = gradient.to(self.shards.dtype)

    def are_unreduced(self) -> bool:
        """True if there are whole gradients, not cleared."""
        rows = self._rows.keys() - self.cleared()
        return any(name in self._kept or self.shards.parameters[name].grad is not None for name in rows)

    def present(self) -> set[str]:
        """The parameters that have had a gradient here since the last `accumulate`."""
        here = {name for name in self._rows if self.shards.parameters[name].grad is not None}
        return (self._seen | here).difference(self.cleared())

    def problem(self) -> str | None:
        """Say which gradient can't be averaged, or return None."""
        for name in self._rows:
            gradient = self.shards.parameters[name].grad
            if gradient is not None:
                self._refused = self._refused or gradient_problem(repr(name), gradient)
        return self._refused

    def drop(self) -> None:
        """Forget everything since the last `accumulate`."""
        for parameter in self.shards.parameters.values():
            parameter.grad = None
        for name in list(self._pending_names):
            self._unmark(name)
        self._kept.clear()
        self._seen.clear()
        self._mean = self._pending = self._over_copies = self._refused = None

    def _message(self) -> torch.Tensor:
        """The whole gradients, divided by the number of ranks; zeros where only other ranks may have one."""
        shards = self.shards
        message = shards.part.new_empty(shards.world_size, self._part_size, dtype=shards.compute_dtype)
        scale = 1 / (shards.world_size * shards.comm.copies)
        for name, rows in self._rows.items():
            gradient = self._take(name)
            if gradient is None:
                message[:, rows.offset : rows.offset + rows.size].zero_()
            else:  # divided before the sum, which could overflow in half precision
                rows.write(message, gradient, scale=scale)
        return message

    def _take(self, name: str) -> torch.Tensor | None:
        """This rank's whole gradient of a parameter, which is then no longer held; None if there is none."""
        parameter, kept = self.shards.parameters[name], self._kept.pop(name, None)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._seen.add(name)
            self._refused = self._refused or gradient_problem(repr(name), gradient)
        if gradient is None or self._refused:
            return kept
        return gradient if kept is None else kept.add_(gradient)


def _is_pending(gradient: torch.Tensor | None) -> bool:
    return isinstance(gradient, PendingGradient) and not gradient.is_cleared


class Replicated:
    """The parameters that are not sharded, by name. `masters` are what an optimizer works on.

    Useful for small parameters that are read often or need more precision, such as norms and routers. With a compute
    dtype of their own, the model's parameters are copies of the masters, made for every forward pass.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None, compute_dtype: torch.dtype | None
    ):
        self.group, self.world_size = group, dist.get_world_size(group)
        self.parameters, self.masters = parameters, dict(parameters)
        self._is_local = False  # gradients have come since they were averaged last
        for name, parameter in parameters.items():
            if compute_dtype not in (None, parameter.dtype) and parameter.is_floating_point():
                self.masters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                parameter.data = parameter.data.to(compute_dtype)
                mark_sharded(parameter, name)

    def refresh(self) -> None:
        """Give the model's parameters the masters' values."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.data.copy_(self.masters[name].detach())

    def collect(self) -> None:
        """Add the gradients that backward has left to the masters'."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.to(master.dtype), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def mark_pending(self) -> None:
        """Note that a backward pass has ended, and collect its gradients."""
        self._is_local = True
        self.collect()

    def pending(self) -> dict[str, nn.Parameter]:
        """The masters whose gradients wait for `sync_gradients()`, by name."""
        masters = self.masters.items() if self._is_local else ()
        return {name: each for name, each in masters if each.grad is not None and each.grad.any()}  # not cleared

    def reduce(self, present: set[str]) -> None:
        """Average the gradients of the masters that are `present`: one all-reduce per dtype."""
        self._is_local = False
        if not self.masters:
            return
        reduced = [master for name, master in self.masters.items() if name in present and master.numel()]
        for masters in group_alike(reduced):
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in masters]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            flat /= self.world_size
            dist.all_reduce(flat, group=self.group)
            for master, mean in zip(masters, flat.split([each.numel() for each in masters]), strict=True):
                master.grad = mean.view(master.shape)

    def present(self) -> set[str]:
        """The masters that have a gradient here."""
        return {name for name, master in self.masters.items() if master.requires_grad and master.grad is not None}

    def problem(self) -> str | None:
        """Say which gradient can't be averaged, or return None."""
        for name, master in self.masters.items():
            if master.grad is not None and (problem := gradient_problem(repr(name), master.grad)):
                return problem
        return None

    def drop(self) -> None:
        """Drop all gradients."""
        self._is_local = False
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

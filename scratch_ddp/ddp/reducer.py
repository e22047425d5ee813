"""`OverlappedDDP`: gradients are averaged from hooks, while backward goes on. `BucketedDDP` gives it larger buckets.

How a gradient travels:

1. Autograd has completed the gradient of a parameter and calls `gradient_arrived`.
2. The gradient, divided by the number of ranks, goes into its bucket. `.grad` is `OnItsWay` from now on.
3. A full bucket is all-reduced. Collectives are paired by their order, so every rank must start the same buckets in the
   same order, whatever gradients it has: a full bucket waits until the one before it in the list has started.
4. `sync_gradients` starts the buckets that did not become full, with zeros for what is missing. While they are on their
   way, the ranks exchange which of them has which gradients. Then it waits for all buckets.
5. A parameter that has a gradient on any rank gets its mean from the bucket, as its new `.grad`. One whose gradient
   arrived too late for the bucket is reduced now, by itself.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.replicas import broadcast_from_first, complete_gradient, gradient_problem
from scratch_ddp.common.wrapper import Group, OnItsWay
from scratch_ddp.ddp.base import ReplicatedModule

NOWHERE, IN_BUCKET, IN_GRAD = 0, 1, 2  # where a gradient is at `sync_gradients`; in `.grad` if its bucket had started
BACKWARD_INTERRUPTED = "backward did not reach its end, so not all gradients are complete: repeat the step"
CLEARED = "gradients were cleared between backward and sync_gradients(), and are dropped everywhere: clear them later"
GROUP_RENEWED = "the process group was renewed while gradients were on their way: repeat the step"


class Bucket:
    """Gradients of one dtype and device, one after the other in one tensor, which is allocated once."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        sizes = [parameter.numel() for parameter in parameters]
        self.tensor = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        strides = [torch.empty_like(each, device="meta").stride() for each in parameters]  # those of a transposed one
        parts = zip(parameters, self.tensor.split(sizes), strides, strict=True)
        self.views = {each: part.as_strided(each.shape, its) for each, part, its in parts}


class OverlappedDDP(ReplicatedModule):
    """A model that starts as the first rank's on every rank, each gradient averaged while backward goes on.

    `group` as for `ReplicatedModule`, which also says what is checked. Costs broadcasts of the model when it is built.
    Each step costs one asynchronous all-reduce per parameter that was not frozen when the model was wrapped (of zeros
    for one without a gradient), started in the reverse order of registration, and one small exchange of which
    parameters have a gradient.

    Whether a gradient is synchronised is read when it arrives. One that has not arrived when `sync_gradients()` is
    called, or that arrives twice, is reduced there: the result is right, but less communication is hidden. So it is if
    modules were not registered in the order in which they run.

    If one rank leaves out a whole step, its next step meets the one that it left out on the others.
    So it waits for them at the very end, and the rank cell or the process group's timeout reports that. Collectives in
    the same backward (SyncBatchNorm's, a second wrapper's) need a group of their own where ranks use other parameters.
    """

    takes_gradients = True

    def __init__(self, model: nn.Module, group: Group = None):
        super().__init__(model, group)
        broadcast_from_first([*model.parameters(), *model.buffers()], self.group)
        self._trained = [each for each in model.parameters() if each.requires_grad]
        arrived = functools.partial(OverlappedDDP.gradient_arrived, weakref.proxy(self))
        self.hook_handles += [each.register_post_accumulate_grad_hook(arrived) for each in self._trained]
        self._arrived: set[nn.Parameter] = set()
        self._forget_step()
        renewable = self.group or dist.group.WORLD
        if hasattr(renewable, "wrappers"):  # it calls `start_over` when it is renewed
            renewable.wrappers.add(self)

    def remove_hooks(self) -> None:
        """Make the model an ordinary module again. A step that has begun is given up: call it on every rank."""
        super().remove_hooks()
        self._forget_step()

    def share_buckets(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Group parameters, given in the order in which backward reaches them: here each has a bucket of its own."""
        return [[parameter] for parameter in parameters]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model. If the last backward was interrupted, or its gradients cleared, all forget that step.

        If some ranks alone do this, ValueError is raised on every rank.
        """
        cleared = self._arrived and all(each.grad is None for each in self._arrived)
        # A graph task is a backward, in which checkpointing calls this.
        if (self._in_backward or cleared) and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self.end_step(BACKWARD_INTERRUPTED if self._in_backward else CLEARED, abandoned=True)
        return super().forward(*args, **kwargs)

    def gradient_comes(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Keep apart what autograd is about to add to a gradient that is in its bucket."""
        super().gradient_comes(parameter, gradient)
        if parameter in self._arrived and gradient is not None:
            if parameter.grad is None:
                self._broken = CLEARED
            elif isinstance(parameter.grad, OnItsWay):
                parameter.grad = None

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Put a gradient that autograd has just completed into its bucket; start buckets that are full, in order.

        A gradient that is too late for its bucket, or can't be averaged, stays in `.grad`.
        """
        if not self.do_sync or parameter.grad is None:  # an autograd function may have returned none
            return
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        if not self._arrived:
            self._missing = [sum(each.requires_grad for each in bucket.views) for bucket in self.buckets]
            self._broken = None
        number = self._number_of.get(parameter, -1)
        if number >= len(self._works) and parameter not in self._arrived and not gradient_problem("", parameter.grad):
            self._put(parameter)
            self._missing[number] -= 1
            while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
                self._start_next()

    def sync_gradients(self) -> None:
        """Wait until each gradient is its mean over the ranks. Call it after every backward outside `no_sync`.

        Raises ValueError on every rank if a backward was interrupted, or gradients were cleared after it.
        """
        if self.do_sync or self._arrived:
            self.end_step(self.problem())

    def end_step(self, problem: str | None, abandoned: bool = False) -> None:
        """Hand out the means. With a `problem` on any rank raise ValueError on all, unless all `abandoned` the step.

        A step with a problem is forgotten, but takes part in what other ranks have started, or will.
        """
        empty, finished = problem is not None, False
        try:
            while len(self._works) < len(self.buckets):
                self._start_next(empty)
            mine = [NOWHERE if empty else self._where(each) for _, each in self._named]
            where = self.exchange(mine, problem, abandoned)
            if not empty:
                for work in self._works:
                    work.wait()
                self._hand_out(where)
                finished = True
        finally:  # after an interruption too
            self._begin_step() if finished else self._forget_step()

    def start_over(self) -> None:
        """Called by a group that was renewed: what was under way in it never arrives."""
        self._forget_step()
        self._broken = GROUP_RENEWED

    def problem(self) -> str | None:
        """Say what keeps this rank from averaging its gradients, or return None."""
        if any(each.grad is None for each in self._arrived):
            self._broken = CLEARED
        return BACKWARD_INTERRUPTED if self._in_backward else self._broken or super().problem()

    def _backward_ended(self) -> None:
        self._in_backward = False  # autograd does not call this if backward raised

    def _put(self, parameter: nn.Parameter) -> None:
        view = self.buckets[self._number_of[parameter]].views[parameter]
        torch.div(parameter.grad, self.world_size, out=view)  # before the sum, which could overflow
        parameter.grad = view.detach().as_subclass(OnItsWay)
        self._arrived.add(parameter)

    def _start_next(self, empty: bool = False) -> None:
        """Start the next bucket. What has not arrived: gradients from before this backward, else zeros."""
        bucket = self.buckets[len(self._works)]
        for parameter, view in bucket.views.items():
            if parameter in self._arrived:
                continue
            if parameter.grad is not None and parameter.requires_grad and not empty:
                self._put(parameter)
            else:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()  # it stays, and may be a view of this bucket
                view.zero_()
        self._works.append(dist.all_reduce(bucket.tensor, group=self.group, async_op=True))

    def _where(self, parameter: nn.Parameter) -> int:
        if parameter.requires_grad and parameter.grad is not None and not isinstance(parameter.grad, OnItsWay):
            return IN_GRAD
        return IN_BUCKET if parameter in self._arrived else NOWHERE

    def _hand_out(self, where: list[int]) -> None:
        """Give each parameter its mean. What is in `.grad` on any rank is reduced now, one by one, and added.

        Of a parameter with a bucket that happens there: a rank without such a gradient needs no memory that it may lack
        while others wait.
        """
        for (_, parameter), anywhere in zip(self._named, where, strict=True):
            if anywhere == NOWHERE:
                continue
            if parameter not in self._number_of:  # without elements, or frozen when the model was wrapped
                mean = complete_gradient(parameter).div_(self.world_size)
            else:
                mean = self.buckets[self._number_of[parameter]].views[parameter].detach()
                if anywhere == IN_GRAD and dist.get_rank(self.group) != 0:
                    mean.zero_()  # what was in the bucket counts once
                if anywhere == IN_GRAD and parameter.grad is not None and not isinstance(parameter.grad, OnItsWay):
                    mean += complete_gradient(parameter).div_(self.world_size)
            if anywhere == IN_GRAD and mean.numel():
                dist.all_reduce(mean, group=self.group)
            parameter.grad = mean

    def _forget_step(self) -> None:
        """Go on with new buckets: an all-reduce that was given up may still write into the old ones."""
        for parameter in self._arrived:
            if isinstance(parameter.grad, OnItsWay):
                parameter.grad = None
        self.buckets = [*map(Bucket, self.share_buckets([each for each in self._trained[::-1] if each.numel()]))]
        self._number_of = {each: number for number, bucket in enumerate(self.buckets) for each in bucket.views}
        self._begin_step()

    def _begin_step(self) -> None:
        self._arrived = set()  # parameters whose gradients are in their buckets
        self._works: list[dist.Work] = []  # of the buckets that have started
        self._in_backward = False  # an interrupted backward leaves it True
        self._broken: str | None = None  # why the step can't be ended

"""The reducer of the strategies that average gradients from hooks, while backward goes on.

How a gradient travels:

1. Hook. Autograd has completed the gradient of a parameter and calls its hook (`HookedModule.gradient_arrived`).
2. Bucket. The gradient, divided by the number of ranks, goes into its bucket, and `.grad` is None from then on
   (`Reduction.add`). A strategy says in `make_buckets` which gradients share a bucket.
3. All-reduce. Collectives are paired by their order, so every rank must start the same buckets in the same order,
   whatever gradients it has. That order is the list's: a full bucket waits until the one before it has started.
4. Wait. `sync_gradients` starts the buckets that did not become full, with zeros for what is missing. While they are
   on their way, the ranks exchange which of them has which gradients. Then it waits for all buckets.
5. Hand out. A parameter that has a gradient on any rank gets its mean from the bucket, as its new `.grad`. One whose
   gradient arrived too late for the bucket is reduced now, by itself.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.optimizer_steps import parameters_of
from scratch_ddp.common.replicas import complete_gradient
from scratch_ddp.common.wrapper import Group, sync_problem
from scratch_ddp.ddp.base import ReplicatedModule

NOWHERE, IN_BUCKET, IN_GRAD = 0, 1, 2  # where a gradient is at `sync_gradients`; in `.grad` if its bucket had started

BACKWARD_INTERRUPTED = "backward did not reach its end, so not all gradients are complete: repeat the step"
SYNC_FORGOTTEN = (
    "sync_gradients() was not called after the last backward, whose gradients are dropped now: call it after each "
    "backward, or run those that need no synchronisation inside no_sync()"
)
GROUP_RENEWED = "the process group was renewed while gradients were on their way: repeat the step"


class AnyBucket(Protocol):
    """Gradients that one all-reduce of `tensor` sums over the ranks."""

    parameters: Sequence[nn.Parameter]
    tensor: torch.Tensor

    def put(self, parameter: nn.Parameter, world_size: int) -> None:
        """Take `parameter.grad`, divided by the number of ranks: before the sum, which could overflow."""

    def put_zeros(self, parameter: nn.Parameter) -> None:
        """Take zeros in place of a gradient that is missing."""

    def mean(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the parameter's part of the summed `tensor`."""


class HookedModule(ReplicatedModule):
    """A replicated model whose gradients travel from gradient hooks. The base of strategies, not a strategy itself.

    Whether a gradient is synchronised is read when it arrives. From then until `sync_gradients()` it belongs to its
    bucket, and `.grad` is None. `sync_gradients()` itself reduces a gradient that has not arrived by then (this rank
    does not use the parameter, or only inside `no_sync`), and one that arrives twice: the result is right, but less
    communication is hidden behind backward. The same holds if modules were not registered in the order in which they
    run.

    A step that was begun and not synchronised is ended by the next `forward`, or the optimizer's step. It raises
    ValueError on every rank, unless backward was interrupted on all ranks, or a Stop has renewed the group: then the
    step is forgotten. If one rank leaves out a whole step, its next step meets the one that it left out on the others.
    So it waits for them at the very end, and the rank cell or the process group's timeout reports that. Collectives in
    the model's own backward (SyncBatchNorm's) need a group of their own where ranks use different parameters.

    With `sync="backward"`, `sync_gradients()` is called at the end of each backward outside `no_sync`, as in torch's
    DDP. The price: all ranks run equally many backward passes, each of which reaches a trained parameter, or the others
    wait inside backward until the time limit; what `sync_gradients()` raises, backward raises; and micro-batches
    accumulate under `no_sync` only, or each of them is synchronised.
    """

    takes_gradients = True

    def __init__(
        self,
        model: nn.Module,
        group: Group = None,
        *,
        sync: str = "call",
        settings: str = "",
        problem: str | None = None,
    ):
        self.sync = sync
        settings = ", ".join(filter(None, [settings, f"sync={sync!r}" * (sync != "call")]))
        super().__init__(model, group, settings=settings, problem=problem or sync_problem(sync))
        self.copy_from_first()
        self._trained = [each for each in model.parameters() if each.requires_grad and each.numel()]
        self._as_wrapped = {each.parameter: each for each in self._wrapped}
        self._forget_step()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"buckets": [], "_number_of": {}, "_reduction": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_step()

    def make_buckets(self, parameters: list[nn.Parameter]) -> list[AnyBucket]:
        """Divide parameters, given in the order in which backward reaches them, among buckets."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_buckets()")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model. No communication, unless the step before was not synchronised."""
        if self._reduction and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._end_unsynchronised_step()  # outside of a backward, in which checkpointing calls it too
        return super().forward(*args, **kwargs)

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Put a gradient that autograd has just completed into its bucket. One with a problem stays in `.grad`."""
        super().gradient_arrived(parameter)
        if self.do_sync:
            reduction = self._reduction_in_backward()
            if parameter in self._number_of and self._as_wrapped[parameter].problem() is None:
                reduction.add(self._number_of[parameter], parameter)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError on every rank if the optimizer would step with gradients that were not synchronised."""
        if self._reduction and not parameters_of(optimizer).isdisjoint(self._trained):
            self._end_unsynchronised_step()
        super().before_step(optimizer)

    def sync_gradients(self) -> None:
        """Wait until each gradient is its mean over the ranks. Call it after every backward outside `no_sync`."""
        if not self.do_sync and not self._reduction:
            return
        problem = GROUP_RENEWED if self._forget_if_group_was_renewed() else self._problem()
        with self._reduction_to_its_end() as reduction:
            reduction.start_rest(empty=problem is not None)
            where = self.exchange_presence(self._where(reduction), problem)  # while buckets are on their way
            reduction.wait()
            self._hand_out(where)

    def remove_hooks(self) -> None:
        """Remove the hooks from the model's parameters; `sync_gradients()` goes on averaging, after backward."""
        super().remove_hooks()
        if self._reduction:
            self._forget_step()

    def _reduction_in_backward(self) -> "Reduction":
        """The reduction of the step that the running backward belongs to; a new one at its first gradient."""
        self._reduction = self._reduction or Reduction(self.buckets, self.group)
        if not self._reduction.in_backward:
            self._reduction.in_backward = True
            ended = functools.partial(self._backward_ended, self._reduction)
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        return self._reduction

    def _backward_ended(self, reduction: "Reduction") -> None:
        reduction.backward_ended()
        if self.sync == "backward" and reduction is self._reduction:
            self.sync_gradients()

    @contextlib.contextmanager
    def _reduction_to_its_end(self) -> Iterator["Reduction"]:
        """The reduction that was begun, or a new one. It is over after the block, and given up if the block raises."""
        try:
            self._reduction = self._reduction or Reduction(self.buckets, self.group)
            yield self._reduction
            self._reduction = None
        except BaseException:  # a Stop too
            self._forget_step()
            raise

    def _where(self, reduction: "Reduction") -> list[int]:
        """Say where the gradient of each of the model's parameters is: NOWHERE, IN_BUCKET or IN_GRAD."""
        parameters = [parameter for _, parameter, *_ in self._wrapped]
        in_grad = [parameter.requires_grad and parameter.grad is not None for parameter in parameters]
        pairs = zip(parameters, in_grad, strict=True)
        return [IN_GRAD if is_there else int(each in reduction.arrived) for each, is_there in pairs]

    def _hand_out(self, where: list[int]) -> None:
        """Give each parameter its mean. What is in `.grad` on any rank is reduced now, one by one, and added."""
        for (_, parameter, *_), anywhere in zip(self._wrapped, where, strict=True):
            late = None
            if anywhere == IN_GRAD:
                late = complete_gradient(parameter)
                late /= self.world_size
                if late.numel():
                    dist.all_reduce(late, group=self.group)
            if anywhere != NOWHERE and parameter in self._number_of:
                parameter.grad = self.buckets[self._number_of[parameter]].mean(parameter)
                if late is not None:
                    parameter.grad += late

    def _problem(self) -> str | None:
        if self._reduction and self._reduction.in_backward:
            return BACKWARD_INTERRUPTED
        return super()._problem() or next(filter(None, (each.device_problem() for each in self._wrapped)), None)

    def _end_unsynchronised_step(self) -> None:
        """End a step whose `sync_gradients()` was left out. Ranks that do call it are told of the problem there."""
        try:
            if not self._forget_if_group_was_renewed():
                interrupted = self._reduction.in_backward
                self._reduction.start_rest(empty=True)
                problem = BACKWARD_INTERRUPTED if interrupted else SYNC_FORGOTTEN
                self.exchange_presence([NOWHERE] * len(self._wrapped), problem, abandoned=interrupted)
        finally:
            self._forget_step()

    def _forget_if_group_was_renewed(self) -> bool:
        """Forget a step whose buckets will never arrive, since the group has been renewed; return whether it was so."""
        renewed = self._reduction is not None and self._reduction.group_was_renewed()
        if renewed:
            self._forget_step()
        return renewed

    def _forget_step(self) -> None:
        """Go on with new buckets: an all-reduce that was given up may still write into the old ones."""
        self.buckets = self.make_buckets(self._trained[::-1])
        self._number_of = {each: number for number, bucket in enumerate(self.buckets) for each in bucket.parameters}
        self._reduction: Reduction | None = None  # from the first gradient of a step to its `sync_gradients()`


class Reduction:
    """The reduction of one step's gradients: which are in their buckets, and which buckets have started.

    Costs one asynchronous all-reduce per bucket.
    """

    def __init__(self, buckets: Sequence[AnyBucket], group: dist.ProcessGroup | None):
        self.buckets, self.group = buckets, group
        self.world_size = dist.get_world_size(group)
        self.arrived: set[nn.Parameter] = set()  # their gradients are in their buckets
        self.missing = [sum(each.requires_grad for each in bucket.parameters) for bucket in buckets]
        self.works: list[dist.Work] = []  # of the buckets that have started
        # True while gradients arrive. Autograd calls `backward_ended` only if backward did not raise, so an
        # interrupted backward leaves it True.
        self.in_backward = False
        self._renewals = _renewals_of(group)

    def add(self, number: int, parameter: nn.Parameter) -> None:
        """Put a gradient that has arrived into bucket `number`; start the buckets that are full, in their order."""
        if number < len(self.works) or parameter in self.arrived:
            return  # too late for its bucket: it stays in `.grad`
        self._put(self.buckets[number], parameter)
        self.missing[number] -= 1
        while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self._start_next()

    def start_rest(self, empty: bool = False) -> None:
        """Start all other buckets with the gradients that are there, or `empty` on a rank with a problem."""
        while len(self.works) < len(self.buckets):
            self._start_next(empty)

    def wait(self) -> None:
        """Wait until all buckets that have started have arrived."""
        for work in self.works:
            work.wait()

    def backward_ended(self) -> None:
        """Note that all gradients of the running backward have arrived."""
        self.in_backward = False

    def group_was_renewed(self) -> bool:
        """Whether a Stop has renewed the group since the step began. Buckets under way then never arrive."""
        return self._renewals != _renewals_of(self.group)

    def _put(self, bucket: AnyBucket, parameter: nn.Parameter) -> None:
        bucket.put(parameter, self.world_size)
        parameter.grad = None  # or a second backward would add to what is on its way
        self.arrived.add(parameter)

    def _start_next(self, empty: bool = False) -> None:
        bucket = self.buckets[len(self.works)]
        self._fill(bucket, empty)
        self.works.append(dist.all_reduce(bucket.tensor, group=self.group, async_op=True))

    def _fill(self, bucket: AnyBucket, empty: bool) -> None:
        """Put what has not arrived: gradients that were there before this backward, and zeros."""
        for parameter in bucket.parameters:
            if parameter not in self.arrived:
                if parameter.requires_grad and parameter.grad is not None and not empty:
                    self._put(bucket, parameter)
                else:
                    bucket.put_zeros(parameter)


def _renewals_of(group: dist.ProcessGroup | None) -> int:
    """How often a Stop has renewed the group, which rank cells count; other groups are never renewed."""
    return getattr(group or dist.group.WORLD, "renewals", 0)

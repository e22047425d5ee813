"""What the exercises of lessons 08 and 09 share: a model, the means of its gradients, a step that is observed."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference
from scratch_ddp.instruments.traffic.calls import Call
from scratch_ddp.instruments.traffic.intercept import listening


def three_layers(trial: Trial) -> nn.Module:
    """Three layers with equal values on all ranks; no two of the six gradients are equal."""
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16), nn.Linear(16, 4)).double().to(trial.device)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
    return model


def everyones_inputs(trial: Trial, step: int) -> list[torch.Tensor]:
    """Every rank's inputs, different on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.rand(trial.size, 1, 48, generator=generator, dtype=torch.float64)
    return list(inputs.to(trial.device))


def examine_means(trial: Trial, model: nn.Module, batches: list[list[torch.Tensor]]) -> None:
    """V and A: `.grad` is what one process computes from all ranks' inputs; `autograd.grad` calls no hooks."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = sum(model(each).sum() for inputs in batches for each in inputs) / trial.size
    expected = list(torch.autograd.grad(loss, parameters))
    gradients = [parameter.grad for parameter in parameters]
    trial.criterion("value", difference(gradients, expected, 1e-12), "the gradients")
    trial.agreement(gradients)


class ObservedStep:
    """Counts the messages that a step starts and waits for, in all and before backward returned.

    `buckets`: the parameters of each message. `in_order`: a message is to be started once its gradients and those of
    all messages before it are complete; otherwise once its own are.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]], in_order: bool = False):
        self.buckets, self.in_order = buckets, in_order
        self.calls, self.waits = 0, 0
        self.in_backward = 0, 0
        self.late = False  # a message could have been started earlier
        self._arrived: set[nn.Parameter] = set()

    def run(self, loss: Callable[[], torch.Tensor], finish: Callable[[], None]) -> None:
        """Backward, then `finish()`."""
        parameters = [parameter for bucket in self.buckets for parameter in bucket]
        hooks = [each.register_post_accumulate_grad_hook(self._gradient_arrived) for each in parameters]
        try:
            with listening(self):
                loss().backward()
                self.in_backward = self.calls, self.waits
                finish()
        finally:
            for hook in hooks:
                hook.remove()

    def started(self, call: Call) -> None:
        self.calls += 1

    def waited(self, call: Call) -> None:
        self.waits += 1

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Called by autograd after the answer's own hook, which was registered earlier."""
        self._arrived.add(parameter)
        complete = [self._arrived.issuperset(bucket) for bucket in self.buckets]
        self.late |= self.calls < sum(itertools.takewhile(bool, complete) if self.in_order else complete)

    def exposed(self) -> str:
        """What kept messages from hiding behind backward, as a complaint; "" if nothing did."""
        calls, waits = self.in_backward
        expected = len(self.buckets)
        if waits:
            return f"when backward returned, {waits} of {expected} messages had been waited for, should be 0"
        if calls < expected:
            return f"when backward returned, {calls} of {expected} messages were started"
        return "a bucket had all its gradients, and its message was started later" if self.late else ""

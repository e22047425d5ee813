"""Lesson 06, when ranks must talk: `no_sync` as a context manager, and an epoch whose last window is shorter."""

import contextlib

import torch
from torch import nn
from torch.nn.functional import mse_loss

from scratch_ddp.course.compare import Words
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.minimal.ddp import DataParallel, SimpleDistributedDataParallelism


def no_sync(model):
    """Return a context manager: in its `with` block, `model.do_sync` is False.

    After the block it is what it was before, however the block ends. Exceptions reach
    the caller. Use model.do_sync and model.disable_grad_sync().
    """

    @contextlib.contextmanager
    def block():
        # The caller's lines run at `yield`. What comes before, what after?
        before = model.do_sync
        model.disable_grad_sync()
        try:
            yield
        finally:
            model.do_sync = before
        # end of the answer

    return block()


def _two_blocks(answer, before, error):
    """One block inside another, which then ends with `error`."""
    model = DataParallel(nn.Identity())
    model.do_sync, raised = before, "nothing"
    try:
        with answer(model):
            yield "value", "do_sync in the block", model.do_sync
            with answer(model):
                pass
            yield "restored", "do_sync after a block inside another", model.do_sync
            if error:
                raise error
    except (ValueError, KeyboardInterrupt) as reached:
        raised = type(reached).__name__
    yield "restored", "do_sync after the block", model.do_sync
    yield "exception", "what reaches the caller", Words(raised)


def train_epoch(model, optimizer, batches, n):
    """One epoch: a step after every n micro-batches, and one for those that remain.

    A step takes the gradient of the mean loss (mse_loss) over its window. `batches` is
    a list of (inputs, targets), all of one size; each has its own forward and backward.
    `model` has no_sync() and sync_gradients().
    Cost: for each step one sync, which is one all-reduce for each trainable parameter.
    """
    # How many micro-batches does the last window have?
    for i, (inputs, targets) in enumerate(batches):
        last = (i + 1) % n == 0 or i + 1 == len(batches)
        window = min(n, len(batches) - i // n * n)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = mse_loss(model(inputs), targets) / window
            loss.backward()
            model.sync_gradients()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def _epochs(at):
    for count, n in ((8, 4), (7, 4), (2, 1), (3, 4)):
        model = SimpleDistributedDataParallelism(nn.Linear(3, 1, bias=False).double())
        batches = [each.split([3, 1], 1) for each in torch.randn(at.n, count, 2, 4).double()[at.rank]]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        yield f"{count} micro-batches in windows of {n}", (model, optimizer, batches, n)


def _counted(answer, model, optimizer, batches, n):
    weights, passes, weight = [], [], model.module.weight
    optimizer.register_step_post_hook(lambda *_: weights.append(weight.detach().clone()))
    weight.register_hook(passes.append)
    answer(model, optimizer, batches, n)
    yield "value", "the number of steps", len(weights)
    for number, each in enumerate(weights):
        yield "value", f"the weight after step {number}", each
    yield "passes", "the number of backward passes", len(passes)
    yield "restored", "do_sync after the epoch", model.do_sync


_ENDINGS = {  # do_sync before, what ends the block
    "a block": (True, None),
    "do_sync was False before, and an exception": (False, ValueError),
    "an exception in the block": (True, ValueError),
    "Stop in the block": (True, KeyboardInterrupt),
}
_GIVEN = "import contextlib\n\nfrom torch.nn.functional import mse_loss"
EXERCISES = (
    Exercise(no_sync, _ENDINGS, use=_two_blocks, given="import contextlib"),
    Exercise(train_epoch, _epochs, use=_counted, close=1e-9, given=_GIVEN),
)

"""Lesson 10, the FSDP walkthrough: a step that gathers and frees, and shards of different sizes."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

ELEMENT = 8  # bytes of a float64


def sharded_step(shards, inputs, targets, lr):
    """One step of SGD on linear layers with a relu between them. Updates `shards` in place.

    shards: this rank's rows of each layer's weight, first layer first; all ranks have equally many.
    inputs, targets: this rank's items. The loss is half the sum of the squared errors over all
    ranks' items.
    Cost: for each layer two all-gathers and one reduce-scatter.
    Memory: beside the arguments, what layers put out and the gradients of that, one whole matrix at
    once, be it a weight or a gradient, and two shards.
    """
    # Which line is the last that needs the weight? Which is the first that needs the gradient?
    # answer: begin
    n = dist.get_world_size()

    def gather(shard):
        whole = shard.new_empty(n * len(shard), shard.shape[1])
        dist.all_gather(list(whole.split(len(shard))), shard)
        return whole

    kept = [inputs]
    for shard in shards:
        outputs = kept[-1] @ gather(shard).T  # the whole weight has no name, so the line's end frees it
        kept.append(outputs.relu())
    delta = outputs - targets
    for shard, below in zip(reversed(shards), reversed(kept[:-1]), strict=True):
        whole = gather(shard)
        handed_down = delta @ whole
        del whole
        gradient = delta.T @ below
        mine = torch.empty_like(shard)
        dist.reduce_scatter(mine, list(gradient.split(len(shard))))
        del gradient
        shard -= lr * mine
        delta = handed_down * below.sign()  # relu lets through what is above 0
    # answer: end


def gather_uneven(shard, rows):
    """Return the whole weight of `rows` rows on every rank, each rank having some of them.

    With k = rows / n rounded up, rank 0 has the first k rows, rank 1 the next k, and so on until
    there are no more: the last ranks may have fewer than k, or none, shape (0, columns). The
    result may be a view.
    Cost: one all-gather, of k rows from each rank.
    Memory: beside `shard`, n·k rows and twice k rows at once.
    """
    # All ranks must send equally many rows. Where in the result is the padding?
    # answer: begin
    n = dist.get_world_size()
    k = -(-rows // n)
    padded = shard.new_zeros(k, shard.shape[1])
    padded[: len(shard)] = shard
    whole = shard.new_empty(n * k, shard.shape[1])
    dist.all_gather(list(whole.split(k)), padded)
    return whole[:rows]
    # answer: end


def _random(seed: int, *shape: int, trial: Trial) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(trial.device)


def examine_sharded_step(trial: Trial) -> None:
    """V against one process, two steps; C: the calls and their bytes on a ring; M: one whole matrix and two shards."""
    n, rank, items, lr = trial.size, trial.rank, 2, 0.125
    width = 16 * n
    whole, shard = width * width, width * width // n
    gather = ring_bytes("all_gather", shard * ELEMENT, n, rank)
    wire = 2 * gather + ring_bytes("reduce_scatter", whole * ELEMENT, n, rank)  # of a layer
    for layers in (2, 3):
        weights = [_random(layer, width, width, trial=trial) / width for layer in range(layers)]
        inputs, targets = (_random(seed, n, items, width, trial=trial) for seed in (10, 11))
        shards = [weight.chunk(n)[rank].clone() for weight in weights]
        budget = whole + 2 * shard + (layers + 5) * items * width
        for step in ("", ", second step"):
            case = f"{layers} layers{step}"
            mine = [each[rank].clone() for each in (inputs, targets)]
            trial.call_within(
                budget, shards, *mine, lr, case=case, note=f"a whole matrix has {whole:,}", changes=shards
            )
            weights = _step_alone(weights, inputs.flatten(0, 1), targets.flatten(0, 1), lr)
            for layer, weight in enumerate(weights, start=1):
                trial.value(shards[layer - 1], weight.chunk(n)[rank], f"the shard of layer {layer}", tolerance=1e-12)
            trial.cost(
                calls={"all_gather": 2 * layers, "reduce_scatter": layers}, exactly=True, max_wire_bytes=layers * wire
            )


def _step_alone(
    weights: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor, lr: float
) -> list[torch.Tensor]:
    """What one process does that holds everything."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    for weight in weights[:-1]:
        inputs = (inputs @ weight.T).relu()
    loss = (inputs @ weights[-1].T - targets).square().sum() / 2
    gradients = torch.autograd.grad(loss, weights)
    return [(weight - lr * gradient).detach() for weight, gradient in zip(weights, gradients, strict=True)]


def examine_gather_uneven(trial: Trial) -> None:
    """V and A for rows that n divides or not, fewer than n, and one; C: one all-gather of k rows; M: no second copy."""
    n, columns = trial.size, 6
    for number, rows in enumerate((2 * n, n + 1, 3 * n - 1, 1, 2 * n)):
        k = -(-rows // n)
        weight = _random(10 * number + rows, rows, columns, trial=trial)
        shard = weight[trial.rank * k : (trial.rank + 1) * k].clone()
        result = trial.call_within((n * k + 2 * k) * columns, shard, rows, case=f"{rows} rows")
        trial.value(result, weight)
        trial.agreement(result)
        wire = ring_bytes("all_gather", k * columns * ELEMENT, n, trial.rank)
        trial.cost(calls={"all_gather": 1}, max_wire_bytes=wire)


SHARDED_STEP = Exercise(sharded_step, examine_sharded_step)
GATHER_UNEVEN = Exercise(gather_uneven, examine_gather_uneven)
EXERCISES = (SHARDED_STEP, GATHER_UNEVEN)

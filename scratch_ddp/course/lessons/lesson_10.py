"""Lesson 10, the FSDP walkthrough: a step that gathers and frees, and shards of different sizes."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise, WrongAnswer
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
            trial.call_within(budget, shards, *mine, lr, case=case, note=f"a whole matrix has {whole:,}")
            weights = _step_alone(weights, inputs.flatten(0, 1), targets.flatten(0, 1), lr)
            for layer, weight in enumerate(weights, start=1):
                trial.value(shards[layer - 1], weight.chunk(n)[rank], f"the shard of layer {layer}", tolerance=1e-12)
            trial.cost(calls={"all_gather": 2 * layers, "reduce_scatter": layers}, max_wire_bytes=layers * wire)


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
    for rows in (2 * n, n + 1, 3 * n - 1, 1):
        k = -(-rows // n)
        weight = _random(rows, rows, columns, trial=trial)
        shard = weight[trial.rank * k : (trial.rank + 1) * k].clone()
        result = trial.call_within((n * k + 2 * k) * columns, shard, rows, case=f"{rows} rows")
        trial.value(result, weight)
        trial.agreement(result)
        wire = ring_bytes("all_gather", k * columns * ELEMENT, n, trial.rank)
        trial.cost(calls={"all_gather": 1}, max_wire_bytes=wire)


_FORWARD = "outputs = kept[-1] @ gather(shard).T  # the whole weight has no name, so the line's end frees it"
_HAND_DOWN = "whole = gather(shard)\n        handed_down = delta @ whole\n        del whole\n        gradient"
_SUM = "dist.reduce_scatter(mine, list(gradient.split(len(shard))))"
SHARDED_STEP = Exercise(
    sharded_step,
    examine_sharded_step,
    wrong=(
        WrongAnswer(
            "keeps every weight from the forward for the backward",
            fails="memory",
            says="Rank 0, 2 layers: holds 9,856 elements at once, budget 7,040 (a whole matrix has 4,096).",
            edits={
                "kept = [inputs]": "kept, weights = [inputs], []",
                _FORWARD: "weights.append(gather(shard))\n        outputs = kept[-1] @ weights[-1].T",
                "whole = gather(shard)\n        handed": "whole = weights.pop()\n        handed",
            },
        ),
        WrongAnswer(
            "a name keeps the last weight while the next one is gathered",
            fails="memory",
            says="Rank 0, 2 layers: holds",
            edits={_FORWARD: "whole = gather(shard)\n        outputs = kept[-1] @ whole.T"},
        ),
        WrongAnswer(
            "the weight is still there when its gradient is made",
            fails="memory",
            says="Rank 0, 2 layers: holds",
            edits={
                _HAND_DOWN: "whole = gather(shard)\n        handed_down = delta @ whole\n        gradient",
                "del gradient": "del gradient, whole",
            },
        ),
        WrongAnswer(
            "gathers everything at once, as if only the root were wrapped",
            fails="memory",
            says="Rank 0, 2 layers: holds",
            edits={
                "kept = [inputs]": "kept, weights = [inputs], [gather(shard) for shard in shards]",
                "for shard in shards:\n": "for weight in weights:\n",
                _FORWARD: "outputs = kept[-1] @ weight.T",
                "whole = gather(shard)\n        handed": "whole = weights.pop()\n        handed",
            },
        ),
        WrongAnswer(
            "steps with the gradient of its own items",
            fails="value",
            says="Rank 0, 2 layers: the shard of layer 1 is wrong in",
            edits={_SUM: "mine.copy_(gradient.split(len(shard))[dist.get_rank()])"},
        ),
        WrongAnswer(
            "all-reduces the whole gradient and takes its rows",
            fails="cost",
            says="4 ranks, 2 layers: 196,608 bytes from one rank, budget 147,456; calls all_reduce twice, budget 0.",
            edits={_SUM: "dist.all_reduce(gradient)\n        mine.copy_(gradient.split(len(shard))[dist.get_rank()])"},
        ),
        WrongAnswer(
            "hands down through the weight that has been updated already",
            fails="value",
            says="Rank 0, 2 layers: the shard of layer 1 is wrong in",
            edits={
                _HAND_DOWN: "gradient",
                "shard -= lr * mine": "shard -= lr * mine\n        handed_down = delta @ gather(shard)",
            },
        ),
        WrongAnswer(
            "uses its own rows as if they were the weight",
            fails="runs",
            says="2 layers: Ranks 0, 1, 2 and 3 raised RuntimeError",
            edits={_FORWARD: "outputs = kept[-1] @ shard.T"},
        ),
    ),
)
GATHER_UNEVEN = Exercise(
    gather_uneven,
    examine_gather_uneven,
    wrong=(
        WrongAnswer(
            "leaves the padding in",
            fails="value",
            says="Rank 0, 5 rows: the result has shape (8, 6), should have (5, 6).",
            edits={"return whole[:rows]": "return whole"},
        ),
        WrongAnswer(
            "pads at the front",
            fails="value",
            says="Rank 0, 5 rows: the result is wrong in",
            edits={"padded[: len(shard)] = shard": "padded[k - len(shard) :] = shard"},
        ),
        WrongAnswer(
            "cuts every piece and puts the pieces together: a second copy",
            fails="memory",
            says="Rank 0, 8 rows: holds 108 elements at once, budget 72.",
            edits={
                "whole = shard.new_empty(n * k, shard.shape[1])\n    dist.all_gather(list(whole.split(k)), padded)": (
                    "pieces = [torch.empty_like(padded) for _ in range(n)]\n    dist.all_gather(pieces, padded)"
                ),
                "whole[:rows]": "torch.cat([each[: max(rows - r * k, 0)] for r, each in enumerate(pieces)])",
            },
        ),
        WrongAnswer(
            "asks all ranks first how many rows they have",
            fails="cost",
            says="calls all_gather twice, budget 1.",
            edits={
                "n = dist.get_world_size()": (
                    "n = dist.get_world_size()\n"
                    "    lengths = [torch.zeros(1, dtype=torch.int64, device=shard.device) for _ in range(n)]\n"
                    "    dist.all_gather(lengths, torch.tensor([len(shard)], device=shard.device))"
                )
            },
        ),
        WrongAnswer(
            "rounds down",
            fails="runs",
            says="5 rows: Ranks 0 and 1 raised RuntimeError",
            edits={"-(-rows // n)": "max(rows // n, 1)"},
        ),
    ),
)
EXERCISES = (SHARDED_STEP, GATHER_UNEVEN)

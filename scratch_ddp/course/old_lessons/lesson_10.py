"""Lesson 10, the FSDP walkthrough: a step that gathers and frees, and shards of different sizes."""

import functools
import math

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import WIDE
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits, difference
from scratch_ddp.instruments.traffic import ring_bytes


def sharded_step(shards, inputs, targets, lr):
    """One step of SGD on one or more linear layers with a relu between them.

    shards: a list of this rank's rows of each layer's weight, first layer first; all ranks have
    equally many. They are contiguous, and updated in place. inputs, targets: this rank's items;
    other ranks may have more, fewer or none. The loss is half the sum of the squared errors over
    all ranks' items.
    Cost: for each layer two all-gathers and one reduce-scatter.
    Memory, in addition to the arguments and the layers' outputs and their gradients: at any moment at
    most as much as one whole matrix, a weight or a gradient, and two shards take together. Nothing is
    kept elsewhere, as in NumPy.
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
    """Return the whole weight of `rows` rows, which are split among the ranks, on every rank.

    With k = rows / n rounded up, rank 0 has the first k rows, rank 1 the next k, and so on until
    there are no more: the last ranks may have fewer than k, or none, shape (0, columns). There is
    at least one row. Any dtype that all_gather takes, any strides; the result equals the shards bit
    for bit, and may be a view.
    Cost: one all-gather, of k rows from each rank.
    Memory: in addition to `shard`, n·k rows and twice k rows at once.
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
    """V against one process, with odd layers and items too; C: the calls and their bytes on a ring; M."""
    n, width = trial.size, 16 * trial.size
    for layers in (2, 3) if trial.on_all_ranks else (2,):
        weights, items = [_random(layer, width, width, trial=trial) / width for layer in range(layers)], [2] * n
        _examine_steps(trial, f"{layers} layers", weights, items, (0.125, 0.125) if layers == 2 else (0.0,))
    seed = trial.seed
    rows = [n * int(size) for size in torch.randint(1, 6, (6,), generator=trial.generator())]
    ends = zip(rows, [7, *rows[:-1]], strict=True)
    weights = [_random(seed + layer, *shape, trial=trial) for layer, shape in enumerate(ends)]
    for weight in weights[:-1]:
        weight[seed % len(weight)] = 0  # puts out 0: relu lets nothing through, nor its gradient
    items = [(1, 0, 3, 2)[rank % 4] for rank in range(n)]
    drawn = f"6 layers of {rows} rows on 7 inputs, {items} items, seed {seed}"
    _examine_steps(trial, drawn, weights, items, (0.1, 0.0), views=True)
    weights = [weight.float() for weight in weights[:2]]
    _examine_steps(trial, f"2 layers of float32, {rows[:2]} rows, seed {seed}", weights, items[::-1], (0.1,))
    if trial.on_all_ranks:
        trial.end_if_wrong()  # what looks at each number takes long here
        weights = [_random(1, 2 * n, WIDE, trial=trial)]
        items = [2] * (n - 1) + [0]  # without a relu, which could hide what a rank without items adds
        _examine_steps(trial, "1 layer of many columns", weights, items, (0.1,), odd_targets=True)
        zeros = torch.zeros(n, 3, dtype=torch.float64, device=trial.device)
        _examine_steps(trial, "1 layer, all weights 0, an input of 2⁴⁰", [zeros], items, (0.1,), odd_input=2.0**40)
        _examine_steps(trial, "1 layer, an input is NaN", [zeros + 1], items, (0.1,), odd_input=math.nan)


def _examine_steps(
    trial: Trial,
    case: str,
    weights: list,
    items: list[int],
    lrs: tuple[float, ...],
    odd_targets: bool = False,
    odd_input: float | None = None,
    views: bool = False,
) -> None:
    """views: the shards are views of one tensor, in which other numbers lie between them; the items are strided."""
    n, rank, layers = trial.size, trial.rank, len(weights)
    inputs, targets = (
        _random(seed, sum(items), size, trial=trial).to(weights[0].dtype)
        for seed, size in ((10, weights[0].shape[1]), (11, len(weights[-1])))
    )
    if odd_targets:
        targets[0, 0], targets[-1, -1], targets[0, -2] = math.nan, math.inf, 1e100
    if odd_input is not None:
        inputs[0, 0] = odd_input
    shards = [weight.chunk(n)[rank].clone() for weight in weights]
    gaps = _put_into_one_tensor(shards) if views else []
    sizes = [len(inputs[0]), *map(len, weights)]
    largest = max(weight.numel() for weight in weights)
    budget = largest + 2 * largest // n + items[rank] * (sum(sizes[1:-1]) + 6 * max(sizes))
    budget += sum(map(torch.numel, shards)) if views else 0  # new shards beside the views are another complaint
    wire = sum(
        2 * ring_bytes("all_gather", weight.nbytes // n, n, rank) + ring_bytes("reduce_scatter", weight.nbytes, n, rank)
        for weight in weights
    )
    for step, lr in enumerate(lrs):
        mine = [each.split(items)[rank].clone() for each in (inputs, targets)]
        if views:
            mine = [each.t().contiguous().t() for each in mine]
        trial.call_within(
            budget,
            shards,
            *mine,
            lr,
            case=case + ", second step" * step,
            note=f"a whole matrix has {largest:,}",
            changes=shards,
        )
        weights = _step_alone(weights, inputs, targets, lr)
        if len(shards) != layers:  # that is the complaint
            shards = [weight.chunk(n)[rank].clone() for weight in weights]
        for layer, weight in enumerate(weights, start=1):
            tolerance = 1e-12 if weight.dtype == torch.float64 else 1e-5
            trial.value(shards[layer - 1], weight.chunk(n)[rank], f"the shard of layer {layer}", tolerance=tolerance)
        for gap in gaps:
            trial.untouched(gap, torch.full_like(gap, 7.0), "what lies in memory beside a shard")
        trial.cost(calls={"all_gather": 2 * layers, "reduce_scatter": layers}, exactly=True, max_wire_bytes=wire)


def _put_into_one_tensor(shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Replace the shards by views of one tensor. Returns what lies between them: two elements each, of 7.0."""
    flat = shards[0].new_full((sum(map(torch.numel, shards)) + 2 * len(shards) + 2,), 7.0)
    place, gaps = 2, [flat[:2]]
    for number, shard in enumerate(shards):
        end = place + shard.numel()
        shards[number] = flat[place:end].view_as(shard).copy_(shard)
        gaps.append(flat[end : end + 2])
        place = end + 2
    return gaps


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
    n, generator = trial.size, trial.generator()
    drawn = int(torch.randint(2, 8 * n, (1,), generator=generator))
    odd = 2 * int(torch.randint(500, 700, (1,), generator=generator)) + 1  # so no rounding up leaves it as it is
    cases = [(rows, torch.float64, 6) for rows in (2 * n, 2 * n, n + 1, 1, 2 * n, 3 * n - 1, n)]
    cases += [(3 * n, torch.float16, 1), (drawn, torch.bfloat16, 3), (3 * n - 1, torch.int64, 6)]
    cases += [(3 * n, torch.float32, 3), (3 * n, torch.complex64, 3), (3 * n, torch.bool, 3), (1, torch.int32, 1)]
    cases += [(n * odd - 1, torch.uint8, 2), (n + 1, torch.float16, odd)]  # a long one, and a wide one
    if not trial.on_all_ranks:  # the others don't depend on the number of ranks
        cases = cases[:4]
    results, shards = [], []
    for number, (rows, dtype, columns) in enumerate(cases):
        k = -(-rows // n)
        weight = _weight(trial, 10 * number + rows, rows, columns, dtype)
        shard = weight[trial.rank * k : (trial.rank + 1) * k].clone()
        of_kind = f" of {str(dtype).removeprefix('torch.')}" if dtype != torch.float64 else ""
        size = f"{rows} row{'s' if rows > 1 else ''}{f' of {columns} columns' if columns > 6 else ''}"
        case = f"{size}{of_kind}{f', seed {trial.seed}' if dtype == torch.bfloat16 else ''}"
        if strided := dtype in (torch.float32, torch.int64) or number == 4:
            shard, case = shard.t().contiguous().t(), f"{case}, strided"
        if number == 1:
            shard, case = shards[0].copy_(shard), f"{case}, the same tensor with other values"
        shards.append(shard)
        budget = (n * k + 2 * k) * columns + 16 * n // dtype.itemsize * (dtype.itemsize < 8)  # and a few numbers
        result = trial.call_within(budget, shard, rows, case=case, unit=dtype)
        trial.value(result, weight)
        for earlier in results[-1:] if not strided else results:
            trial.value(*earlier, "the result of a call before")
        trial.criterion("value", _other_bits(result, weight), "the result")
        trial.agreement(result)
        wire = ring_bytes("all_gather", k * columns * dtype.itemsize, n, trial.rank)
        trial.cost(calls={"all_gather": 1}, max_wire_bytes=wire)
        results.append((result, weight))
    if trial.on_all_ranks:
        trial.end_if_wrong()
        _examine_gathers_in_worlds(trial)


def _examine_gathers_in_worlds(trial: Trial) -> None:
    """V and C for other numbers of ranks and rows, drawn."""
    generator = trial.generator()
    dtypes = torch.float64, torch.bfloat16, torch.int16, torch.uint8
    cases, weights = {}, {}
    for number, n in enumerate((1, 2, 5, 6, 7, 8, 9, 9)):
        rows, columns = (int(torch.randint(2, most, (1,), generator=generator)) for most in (5 * n, 6))
        if number == 2:
            rows, columns = 2 * n, WIDE
        dtype = dtypes[(number + trial.seed) % len(dtypes)]
        weight = _weight(trial, trial.seed + number, rows, columns, dtype)
        laid_out = ("", ", every second row of others", ", transposed")[number % 3]
        case = f"{rows} × {columns} of {str(dtype).removeprefix('torch.')}{laid_out}, seed {trial.seed}"
        cases[case] = functools.partial(_shards_of, weight, n, laid_out)
        weights[case] = weight
    for case, world in tried_in_worlds(trial, cases):
        weight, n = weights[case], len(world.given)
        for rank, result in enumerate(world.results):
            trial.value(result, weight, f"{world.place} the result of rank {rank}", every_bit=True)
        sent = ring_bytes("all_gather", -(-len(weight) // n) * weight[0].nbytes, n, 0)
        trial.criterion("cost", world.over_budget({"all_gather": 1}, sent), world.place)


def _shards_of(weight: torch.Tensor, n: int, laid_out: str) -> list[tuple]:
    """The arguments of n ranks."""
    k = -(-len(weight) // n)
    shards = [weight[rank * k : (rank + 1) * k].clone() for rank in range(n)]
    if "second" in laid_out:
        shards = [each.repeat_interleave(2, 0)[::2] for each in shards]
    elif laid_out:
        shards = [each.t().contiguous().t() for each in shards]
    return [(each, len(weight)) for each in shards]


def _weight(trial: Trial, seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers; with many rows also rows of zeros, the last one among them, and odd numbers."""
    weight = 1000 * _random(seed, rows, columns, trial=trial)
    if dtype.is_complex:
        weight = torch.complex(weight, weight.flip(0))
    if rows > 2 * trial.size:
        weight[0], weight[-1] = 0, 0
        if dtype.is_floating_point:
            weight[1, 0], weight[-1, 0], weight[-2, -1], weight[-3, 0] = math.nan, -0.0, math.inf, 6e4
    return weight > 0 if dtype == torch.bool else weight.to(dtype)


def _other_bits(result: object, weight: torch.Tensor) -> str:
    if difference(result, weight) or bits(result) == bits(weight):
        return ""
    pairs = zip(result.flatten(), weight.flatten(), strict=True)
    number, (is_, should_be) = next(
        (number, pair) for number, pair in enumerate(pairs) if bits(pair[0]) != bits(pair[1])
    )
    which = ", with other bits in it" if should_be.isnan() else ""
    return f"has other bits than the weight: element {number} is {is_.item()!r}, should be {should_be.item()!r}{which}"


SHARDED_STEP = Exercise(sharded_step, examine_sharded_step)
GATHER_UNEVEN = Exercise(gather_uneven, examine_gather_uneven)
EXERCISES = (SHARDED_STEP, GATHER_UNEVEN)

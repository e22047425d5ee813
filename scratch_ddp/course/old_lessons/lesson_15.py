"""Lesson 15, what training will take: bytes of a rank, devices, the least batch for FSDP, and a layout."""

from fractions import Fraction
from math import ceil
from typing import Any

import torch

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference, shown
from scratch_ddp.instruments.cost import Accelerator, Cluster, Layout, ModelShape, Wire, rank_memory, step_time


def bytes_of_rank(model, dp, tp, pp, stage, tokens):
    """Return the bytes that a rank of the pipeline's first stage holds, an exact int.

    model: a dict with "blocks", the "parameters" of a block, and its "activations": the bytes that
    it saves for a token. Each of pp stages has equally many blocks, of which each of tp ranks has
    an equal part, of activations too. There are dp replicas. For a parameter: 2 bytes of weights,
    2 of gradients, 12 of master weights and Adam's state. stage 0 is DDP; 1, 2 and 3 are ZeRO's,
    over the dp replicas. tokens: of a micro-batch; there are more micro-batches than stages, in
    1F1B, so the first stage keeps the activations of pp of them. Every division leaves no rest.
    """
    # What does each rank have of the blocks, and what of that is shared out over the replicas?
    # answer: begin
    blocks = model["blocks"] // pp
    parameters = blocks * model["parameters"] // tp
    shared = (0, 12, 14, 16)[stage]
    states = (16 - shared) * parameters + shared * parameters // dp
    activations = pp * blocks * model["activations"] * tokens // tp
    return states + activations
    # answer: end


def devices_needed(parameters, memory, stage, activations):
    """Return the least number of devices, an int, on which a model can be trained; None if none is.

    Data parallelism alone: stage 0 is DDP; 1, 2 and 3 are ZeRO's. memory: the bytes of a device.
    activations: bytes that each device needs for them, however many devices there are. For a
    parameter there are 2 bytes of weights, 2 of gradients, 12 of master weights and Adam's state.
    What n devices share out is exactly one n-th of the bytes for each, also if that is no whole
    number. A device may be full to the last byte. All numbers are ints, and may be large.
    """
    # Which bytes stay on every device, and which become fewer with every device?
    # answer: begin
    shared = (0, 12, 14, 16)[stage] * parameters
    room = memory - activations - (16 * parameters - shared)
    if room < 0 or (room == 0 and shared):
        return None
    return max(1, -(-shared // room)) if shared else 1
    # answer: end


def smallest_batch(flops, bandwidth, alpha, weights, n):
    """Return the least whole number of tokens a device with which FSDP is compute-bound, an int.

    It is so if a block's forward takes at least as long as the all-gather of the next block, on a
    ring of n devices, 2 or more: alpha seconds, and a second for each `bandwidth` bytes that a
    device sends. weights: parameters of a block, all of them matrices, sent in bfloat16; in forward
    each takes two operations a token. flops: operations that a device does in a second.
    """
    # How many bytes does a device send? How many tokens can it compute with meanwhile?
    # answer: begin
    sent = 2 * weights * (n - 1) / n
    seconds = alpha + sent / bandwidth
    return ceil(seconds * flops / (2 * weights))
    # answer: end


def choose_layout(shape, cluster, devices, batch, sequence):
    """Return a Layout that no other beats by more than 5 % of its step_time; None if none fits.

    It has so many devices, and steps of `batch` sequences of `sequence` tokens; micro is 1. tp is at
    most cluster.per_node and divides shape.heads, pp is at most shape.blocks. stage is any that
    Layout allows, with checkpointing or without. It fits if rank_memory(shape, layout, sequence)
    has a total of at most 0.9 of cluster.device.memory. Others are all that keep these rules.
    """
    best = None
    # Which layouts are there? Of those that fit, which one takes least time?
    # answer: begin
    seconds = float("inf")
    for tp in range(1, min(devices, cluster.per_node) + 1):
        for pp in range(1, shape.blocks + 1):
            dp = devices // (tp * pp)
            if dp * tp * pp != devices or shape.heads % tp or batch % dp:
                continue
            for stage in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
                for again in (False, True):
                    if stage == "ZeRO-3" and pp > 1:
                        continue
                    layout = Layout(dp, tp, pp, 1, batch // dp, stage, again)
                    if rank_memory(shape, layout, sequence).total > 0.9 * cluster.device.memory:
                        continue
                    took = step_time(shape, layout, cluster, sequence).total
                    if took < seconds:
                        best, seconds = layout, took
    # answer: end
    return best


def examine_bytes_of_rank(trial: Trial) -> None:
    """V on five configurations of XXL's and other blocks, and on drawn ones, with every stage."""
    xxl = {"blocks": 126, "parameters": 2 * 16_384 * 53_248, "activations": 139_264}
    odd = {"blocks": 15, "parameters": 3 * 7 * 11 * 1_001, "activations": 7 * 3}
    for model, dp, tp, pp, stage, tokens in (
        (xxl, 64, 1, 1, 3, 4096),
        (xxl, 8, 8, 6, 1, 2048),
        (xxl, 1, 8, 63, 0, 1024),
        (odd, 11, 7, 3, 2, 5),
        (odd, 1, 1, 1, 3, 1),
    ):
        _examine_bytes(trial, model, dp, tp, pp, stage, tokens, "")
    drawn = torch.randint(2, 10, (8,), generator=trial.generator()).tolist()
    dp, tp, pp, tokens, *others = drawn
    model = {
        "blocks": pp * others[0],
        "parameters": dp * tp * (10**17 + 2 * others[1] + 1),
        "activations": tp * others[2],
    }
    for stage in range(4):
        _examine_bytes(trial, model, dp, tp, pp, stage, tokens, f", drawn with seed {trial.seed}")


def _examine_bytes(
    trial: Trial, model: dict[str, int], dp: int, tp: int, pp: int, stage: int, tokens: int, note: str
) -> None:
    split = f"dp {dp}, tp {tp}, pp {pp}, stage {stage}, {tokens} tokens"
    case = f"{model['blocks']} blocks of {model['parameters']:,}, {split}{note}"
    expected = bytes_of_rank(dict(model), dp, tp, pp, stage, tokens)
    trial.value(trial.call(dict(model), dp, tp, pp, stage, tokens, case=case), expected)
    trial.cost(calls={})


def examine_devices_needed(trial: Trial) -> None:
    """V: every stage; full to the last byte and one byte more; what fits nowhere; XXL; large numbers; drawn ones."""
    xxl, gpu = 2 * 126 * 16_384 * 53_248, 80 * 10**9
    cases = [(xxl, gpu, stage, 0) for stage in range(4)]
    cases += [(xxl, gpu, 3, 30 * 10**9), (10**9, 16 * 10**9, 0, 0), (10**9, 16 * 10**9 - 1, 0, 0)]
    cases += [(1000, 16_000, 3, 0), (1000, 15_999, 3, 0), (1000, 4_000, 1, 0), (1000, 4_001, 1, 0), (1000, 4_001, 1, 1)]
    cases += [(1000, 2_003, 2, 1), (1000, 9, 3, 10), (1000, 1, 3, 0), (1000, 10**6, 2, 999_000), (1000, 5, 3, 5)]
    cases += [(10**17 + 1, 4 * (10**17 + 1) + 7, 1, 0), (10**17 + 3, 10**17, 3, 1)]
    numbers = torch.randint(1, 5000, (4, 3), generator=trial.generator()).tolist()
    cases += [(p, 2 * p + a + extra, 2 + i % 2, a) for i, (p, a, extra) in enumerate(numbers)]
    for number, (parameters, memory, stage, activations) in enumerate(cases):
        seed = f" (seed {trial.seed})" if number >= len(cases) - len(numbers) else ""
        case = f"{parameters:,} parameters, {memory:,} bytes, stage {stage}, {activations:,} of activations{seed}"
        expected = devices_needed(parameters, memory, stage, activations)
        result = trial.call(parameters, memory, stage, activations, case=case)
        if (result is None) != (expected is None):
            trial.criterion("value", f"is {shown(result)}, should be {expected}", "the result")
        else:
            trial.value(result, expected)
        trial.cost(calls={})


def examine_smallest_batch(trial: Trial) -> None:
    """V on figures that are exact in binary, equality among them; on an H100; on drawn ones."""
    exact = (  # flops, bandwidth, alpha, weights, n
        (2.0**40, 2.0**30, 0.0, 2**20, 2),
        (2.0**40, 2.0**30, 0.0, 2**20, 8),
        (2.0**40, 2.0**30, 2.0**-10, 2**20, 8),
        (2.0**40, 2.0**30, 2.0**-10, 2**24, 8),
        (2.0**20, 2.0**30, 0.0, 2**20, 4),
        (2.0**40, 2.0**30, 2.0**-8, 2**10, 64),
        (2.0**40, 2.0**10, 2.0**-19, 2**20, 8),
    )
    for figures in exact:
        _examine_batch(trial, *figures, "")
    _examine_batch(trial, 989e12, 450e9, 11.8e-6, 12 * 4096**2, 7, " (an H100)")
    _examine_batch(trial, 989e12, 50e9, 22.4e-6, 12 * 4096**2, 1000, " (an H100)")
    for flops, bandwidth, weights, n in torch.randint(2, 100, (4, 4), generator=trial.generator()).tolist():
        alpha = flops * 1e-6
        _examine_batch(trial, flops * 1e12, bandwidth * 1e9, alpha, weights * 10**5 + 1, n, f" (seed {trial.seed})")


def _examine_batch(trial: Trial, flops: float, bandwidth: float, alpha: float, weights: int, n: int, note: str) -> None:
    sent = Fraction(2 * weights * (n - 1), n)
    tokens = (Fraction(alpha) + sent / Fraction(bandwidth)) * Fraction(flops) / (2 * weights)
    case = f"{flops:g} operations and {bandwidth:g} bytes a second, alpha={alpha:g}, {weights:,} weights, n={n}{note}"
    result = trial.call(flops, bandwidth, alpha, weights, n, case=case)
    trial.cost(calls={})
    near = ceil(tokens * (1 - Fraction(1, 10**12))), ceil(tokens * (1 + Fraction(1, 10**12)))
    if tokens.denominator > 1 and type(result) is int and result in near:  # rounding may decide
        trial.value(result, result)
    else:
        trial.value(result, ceil(tokens))


_MODELS = {
    "small": ModelShape("a small model", 6, 512, 1536, 8, 4, 64, 8000),
    "deep": ModelShape("a deep model", 12, 1024, 4096, 16, 16, 64, 32000, True, 0, 2, 2),
    "wide": ModelShape("a wide model", 4, 6144, 16384, 48, 8, 128, 32000),
}


def _cluster(per_node: int, inside: float, between: float, memory: float) -> Cluster:
    """Devices of so many bytes; bandwidths in 10⁹ bytes a second."""
    wires = (Wire(1e-5, 1e-9 / each, 1, 1e-5) for each in (inside, between))
    return Cluster("made up", Accelerator("a device", 100e12, memory, 0.0, ""), per_node, *wires, "")


def examine_choose_layout(trial: Trial) -> None:
    """V: the rules, the memory, and the time against that of the best, where there is much room, little, and none."""
    a, b, c = torch.randint(0, 1000, (3,), generator=trial.generator()).tolist()
    drawn, note = (20 + a / 5, 1 + b / 50), f" (seed {trial.seed})"
    for name, per_node, speeds, devices, batch, sequence, room, seed in (
        ("small", 4, (100, 10), 8, 32, 256, 2.0, ""),
        ("deep", 8, (100, 10), 16, 48, 1024, 0.6, ""),
        ("wide", 4, (300, 25), 16, 32, 1024, 0.45, ""),
        ("wide", 2, (300, 300), 16, 4, 512, 0.5, ""),
        ("wide", 8, (300, 25), 8, 16, 1024, 0.05, ""),
        ("small", 4, (100, 10), 1, 3, 256, 1.5, ""),
        ("deep", 3, (100, 2), 9, 27, 512, 0.8, ""),
        ("deep", 1, (100, 10), 9, 36, 256, 2.0, ""),
        ("wide", 4, (50, 1), 18, 18, 1024, 0.7, ""),
        ("wide", 1, (300, 25), 4, 16, 512, 0.6, ""),
        ("wide", 4, (300, 25), 5, 20, 512, 0.3, ""),
        ("deep", 4, drawn, 12, 24, 512, 0.3 + c / 1000, note),
        ("wide", 8, drawn, 8, 8 * (1 + c % 4), 1024, 0.2 + c / 1000, note),
    ):
        shape, unlimited = _MODELS[name], _cluster(per_node, *speeds, 1e15)
        quickest = choose_layout(shape, unlimited, devices, batch, sequence)
        memory = room * rank_memory(shape, quickest, sequence).total / 0.9
        cluster = _cluster(per_node, *speeds, memory)
        case = f"{shape.name}, {devices} devices of {memory / 1e9:.3g} GB, {batch} × {sequence} tokens{seed}"
        best = choose_layout(shape, cluster, devices, batch, sequence)
        result = trial.call(shape, cluster, devices, batch, sequence, case=case)
        trial.cost(calls={})
        trial.criterion("value", _wrong_layout(result, best, shape, cluster, devices, batch, sequence))


def _wrong_layout(
    result: Any, best: Layout | None, shape: ModelShape, cluster: Cluster, devices: int, batch: int, sequence: int
) -> str:
    """What is wrong with the answer's layout; "" if nothing is."""
    if best is None:
        return "" if result is None else f"is {result}, which does not fit; nothing does: should be None"
    if not isinstance(result, Layout):
        return f"{difference(result, best)}"
    if result.devices != devices:
        return f"{result} has {result.devices} devices, should have {devices}"
    if result.batch != batch or result.micro != 1:
        return f"{result} takes {result.batch} sequences, {result.micro} at a time, should take {batch}, 1 at a time"
    if result.chunks != 1 or result.tp > cluster.per_node or shape.heads % result.tp or result.pp > shape.blocks:
        sizes = f"{cluster.per_node} devices a node, {shape.heads} heads, {shape.blocks} blocks"
        return f"{result} is against the rules: there are {sizes}"
    over = rank_memory(shape, result, sequence).total / (0.9 * cluster.device.memory)
    if over > 1:
        return f"{result} does not fit: it needs {over:.3g} times what may be used"
    slower = step_time(shape, result, cluster, sequence).total / step_time(shape, best, cluster, sequence).total
    return f"{result} takes {slower:.3g} times as long as {best}" if slower > 1.05 else ""


BYTES_OF_RANK = Exercise(bytes_of_rank, examine_bytes_of_rank)
DEVICES_NEEDED = Exercise(devices_needed, examine_devices_needed)
SMALLEST_BATCH = Exercise(smallest_batch, examine_smallest_batch, given="from math import ceil")
CHOOSE_LAYOUT = Exercise(
    choose_layout,
    examine_choose_layout,
    given="from scratch_ddp.instruments.cost import Layout, rank_memory, step_time",
)
EXERCISES = (BYTES_OF_RANK, DEVICES_NEEDED, SMALLEST_BATCH, CHOOSE_LAYOUT)

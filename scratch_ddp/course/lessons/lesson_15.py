"""Lesson 15, what training will take: bytes of a rank, GPUs, the least batch for FSDP, seconds of a step, a layout."""

from math import ceil

from scratch_ddp.course.compare import Words
from scratch_ddp.course.exercise import Exercise, Wrong
from scratch_ddp.instruments.cost import CLUSTERS, MODELS, Layout, rank_memory

XXL = {"blocks": 126, "parameters": 2 * 16_384 * 53_248, "activations": 2 * (16_384 + 53_248)}


def bytes_of_rank(model, dp, tp, pp, stage, tokens):
    """Return the bytes that a rank of the pipeline's first stage holds, an int.

    `model` has "blocks", and of each "parameters" and "activations" in bytes a token.
    A parameter has 2 + 2 + 12 bytes; stage 0 is DDP, 1 to 3 are ZeRO's, over dp.
    tp divides parameters and activations, pp the blocks. In 1F1B this rank keeps
    the activations of pp micro-batches of `tokens` tokens. All divides evenly.
    """
    # What does a rank have of the blocks? What of that is shared out over replicas?
    blocks = model["blocks"] // pp
    parameters = blocks * model["parameters"] // tp
    shared = (0, 12, 14, 16)[stage]
    states = (16 - shared) * parameters + shared * parameters // dp
    activations = pp * blocks * model["activations"] * tokens // tp
    return states + activations


def devices_needed(parameters, memory, stage, activations):
    """Return on how many GPUs at least a model fits, with DDP (stage 0) or ZeRO 1 to 3.

    2 + 2 + 12 bytes a parameter; `activations` are bytes of each GPU, for itself.
    A GPU may be full to the last byte of `memory`. None if no number helps.
    """
    # Which bytes stay on every GPU, and which become fewer with every GPU?
    shared = (0, 12, 14, 16)[stage] * parameters
    room = memory - activations - (16 * parameters - shared)
    if room < 0 or (room == 0 and shared):
        return None
    return max(1, -(-shared // room)) if shared else 1


def smallest_batch(flops, bandwidth, alpha, weights, n):
    """Return the least number of tokens a GPU with which FSDP is compute-bound.

    A block's forward, at `flops` operations a second, then takes at least as long as
    the all-gather of the next block's `weights`: 2 bytes each, on a ring of n GPUs.
    That takes `alpha` seconds, and one for each `bandwidth` bytes that a GPU sends.
    """
    # How many bytes does a GPU send? How many tokens can it compute with meanwhile?
    sent = 2 * weights * (n - 1) / n
    seconds = alpha + sent / bandwidth
    return ceil(seconds * flops / (2 * weights))


def step_seconds(shape, layout, cluster, sequence):
    """Return the seconds of a step: shape.blocks blocks of shape.block weights each.

    A GPU does 0.55 of cluster.device.flops. Over tp, a block makes 4 all-gathers in
    forward, 4 in backward, and 4 more if checkpointing repeats the forward. Once the
    pipeline is empty, an all-reduce over dp sums the gradients. Numbers have 2 bytes.
    `cluster.wire(ranks, apart)` has `all_gather(nbytes)` and `all_reduce(nbytes)`.
    """
    # How long does a stage take for a micro-batch? How many such times has a step?
    tokens, again = layout.micro * sequence, layout.checkpointing
    weights = shape.blocks * shape.block / (layout.pp * layout.tp)
    compute = (8 if again else 6) * weights * tokens / (0.55 * cluster.device.flops)
    gather = cluster.wire(layout.tp, 1).all_gather(2 * tokens * shape.width)
    messages = shape.blocks / layout.pp * (12 if again else 8) * gather
    reduce = cluster.wire(layout.dp, layout.tp * layout.pp).all_reduce(2 * weights)
    return (layout.micro_batches + layout.pp - 1) * (compute + messages) + reduce


def choose_layout(shape, cluster, devices, batch, sequence):
    """Return the Layout of all devices with the least step_seconds; None if none fits.

    dp divides `batch`, the sequences of a step; micro is 1; pp divides shape.blocks.
    tp divides shape.kv_heads and cluster.per_node. The stage is "ZeRO-1";
    checkpointing is allowed. What fits has a rank_memory(shape, layout, sequence).total
    of at most 0.9 cluster.device.memory. Of equals, any will do.
    """
    best = None
    # Which layouts are there? Of those that fit, which one takes least time?
    least = float("inf")
    for tp in range(1, min(devices, cluster.per_node) + 1):
        for pp in range(1, min(devices, shape.blocks) + 1):
            dp = devices // (tp * pp)
            if dp * tp * pp != devices or batch % dp or shape.blocks % pp:
                continue
            if cluster.per_node % tp or shape.kv_heads % tp:
                continue
            for again in (False, True):
                layout = Layout(dp, tp, pp, 1, batch // dp, "ZeRO-1", again)
                if rank_memory(shape, layout, sequence).total > 0.9 * cluster.device.memory:
                    continue
                seconds = step_seconds(shape, layout, cluster, sequence)
                if seconds < least:
                    best, least = layout, seconds
    # end of the answer
    return best


def _problems(at):
    """Little room; a batch that few dp divide; room with checkpointing alone; none; tp that is against the rules."""
    for model, name, devices, batch, sequence in (
        ("Llama-3-8B", "H100", 8, 48, 4096),
        ("Llama-3-8B", "H100", 64, 100, 8192),
        ("Llama-3-70B", "H100", 16, 48, 4096),
        ("Llama-3-405B", "H100", 16, 48, 4096),
        ("Llama-3-8B", "H100", 12, 48, 2048),
        ("GPT-2 XL", "H100", 10, 24, 2048),
        ("GPT-2 XL", "H100", 8, 1, 2048),
        ("Llama-2-13B", "T4", 16, 1, 2048),
        ("GPT-2", "H100", 12, 1, 1024),
    ):
        shape, cluster = MODELS[model], CLUSTERS[name]
        sizes = f"{shape.blocks} blocks of {shape.block / 1e6:.0f} · 10⁶, width {shape.width}, {shape.heads} heads"
        links = " and ".join(f"{1e-9 / wire.beta:g}" for wire in (cluster.inside, cluster.between))
        gpus = f"{devices} × {name}, {cluster.per_node} a node, {links} GB/s"
        case = f"{model} ({sizes}), {gpus}, batch {batch} × {sequence} tokens"
        yield case, (shape, cluster, devices, batch, sequence)


def _as_layout(answer, shape, cluster, devices, batch, sequence):
    """Any layout that keeps the rules, fits, and is as quick as the reference's."""
    layout = answer(shape, cluster, devices, batch, sequence)
    if layout and layout.devices != devices:
        raise Wrong("value", f"{layout}: these are {layout.devices} GPUs, and there are {devices}")
    yield "value", "the result", layout and Words("a layout")
    if layout:
        left = batch % layout.dp, shape.blocks % layout.pp, shape.kv_heads % layout.tp, cluster.per_node % layout.tp
        needed, room = rank_memory(shape, layout, sequence).total, 0.9 * cluster.device.memory
        yield "value", "the rest of batch / dp, blocks / pp, heads / tp, GPUs of a node / tp", left
        yield "value", "its sequences in a step, those at a time, its stage", [layout.batch, layout.micro, layout.stage]
        yield "memory", "the bytes of a rank, or 0.9 of the GPU's if it needs less,", max(needed, room)
        yield "time", "the seconds of a step", step_seconds(shape, layout, cluster, sequence)


_SMALL = {"blocks": 12, "parameters": 11_000, "activations": 1_000}
_ALONE = (1, 1, 1, 0, 0), (4, 1, 1, 1, 0), (4, 1, 1, 2, 0), (4, 1, 1, 3, 8), (1, 4, 1, 0, 8), (1, 1, 4, 0, 8)
_SPLITS = [*((_SMALL, *each) for each in _ALONE), (_SMALL, 5, 2, 3, 2, 8), (XXL, 8, 8, 6, 1, 2048)]

_MEMORY = (16_000, 0, 0), (15_999, 0, 0), (5_000, 3, 0), (5_000, 2, 0), (5_000, 1, 0), (5_000, 2, 1_000)
_NO_ROOM = (1000, 4_000, 1, 0)  # for the rest, on any number of GPUs
_LARGE = (XXL["blocks"] * XXL["parameters"], 80 * 10**9, 3, 30 * 10**9)
_GPUS = [*((1000, *each) for each in _MEMORY), _NO_ROOM, _LARGE]

_EXACT = (0.0, 2**20, 2), (0.0, 2**20, 3), (2.0**-10, 2**20, 8), (2.0**-10, 2**24, 8)  # in binary
_WIRES = [*((2.0**40, 2.0**30, *each) for each in _EXACT), (989e12, 50e9, 22.4e-6, 12 * 4096**2, 1000)]

_COMPUTING = Layout(), Layout(micro=2), Layout(checkpointing=True)
_ONE_WAY = [Layout(*each, micro_batches=3) for each in ((4,), (1, 4), (1, 1, 4))]
_STEPS = {
    f"Llama-3-70B, H100, 4096 tokens, {layout}": (MODELS["Llama-3-70B"], layout, CLUSTERS["H100"], 4096)
    for layout in (*_COMPUTING, *_ONE_WAY, Layout(1, 4, checkpointing=True), Layout(4, 4, 4, 1, 25, "ZeRO-1", True))
}

_GIVEN = """# To search with your own step_seconds, delete the next line.
from scratch_ddp.course.lessons.lesson_15 import step_seconds
from scratch_ddp.instruments.cost import Layout, rank_memory"""
EXERCISES = (
    Exercise(bytes_of_rank, _SPLITS),
    Exercise(devices_needed, _GPUS),
    Exercise(smallest_batch, _WIRES, given="from math import ceil"),
    Exercise(step_seconds, _STEPS, close=1e-9),
    Exercise(choose_layout, _problems, _as_layout, close=1e-6, given=_GIVEN),
)

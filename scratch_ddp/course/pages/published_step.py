"""A published training step on two T4: its table, the model behind it, and a timeline that fits it.

The model is called a "medium" GPT (batch 32, context 64). Its numbers of calls are given: 1700, 980, 150 and 20 in ten
steps with buckets of 1, 10, 100 and 1000 MB. A decoder of 24 layers, width 1024 (MLP 4096, three matrices) and 10,000
tokens has exactly these buckets under the rule of torch's DDP. It has 219 parameters and 1.69 GB of gradients.

When its gradients were ready is not published, but two rows agree about it. With 1000 MB nothing is hidden, although
the first bucket holds 62 % of the bytes. With one message per parameter, 37 % of the communication is exposed. So we
assume that 38 % of the bytes arrive at the backward's end and the others evenly before it. Lesson 09 fits a link to the
naive and the flat step. So four rows are fitted, and the remaining three are forecasts.
"""

from itertools import accumulate

from scratch_ddp.instruments.cost import Backward

PUBLISHED = {  # milliseconds of a step
    "naive": 1406.7,
    "flat": 1365.2,
    "per parameter": 1075.7,
    "1 MB": 1093.4,
    "10 MB": 1120.1,
    "100 MB": 1213.4,
    "1000 MB": 1360.4,
}
CALLS = {"1 MB": 170, "10 MB": 98, "100 MB": 15, "1000 MB": 2}  # per step, as published

COMPUTE = 1.4067 - 0.4981  # seconds: the naive step without its all-reduces
_FORWARD = COMPUTE / 3  # a backward does twice the work of a forward
_AT_THE_END = 0.38  # share of the bytes that arrive at the backward's end


def gradient_bytes() -> list[int]:
    """The bytes of each gradient of the published model in float32, in the order in which a backward reaches them."""
    width, inner, tokens = 1024, 4096, 10_000
    attention, mlp, norms = 4 * [width * width], 3 * [width * inner], 2 * [width]
    registered = [tokens * width, *24 * [*attention, *mlp, *norms], width, tokens * width]
    return [4 * elements for elements in reversed(registered)]


def timeline() -> Backward:
    """The step's compute, and when each gradient is ready (see above)."""
    nbytes = gradient_bytes()
    backward, whole = COMPUTE - _FORWARD, (1 - _AT_THE_END) * sum(nbytes)
    ready = tuple(min(backward, backward * so_far / whole) for so_far in accumulate(nbytes))
    return Backward(ready, tuple(nbytes), backward, _FORWARD)

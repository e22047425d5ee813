"""A tensor for each rank, in every dtype of numbers, with numbers that answers get wrong: inputs for lessons 01 and 02.

The sum over the ranks is the same in every order, for up to eight ranks.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch

# Where an answer cuts large messages, so many elements go in pieces, and so do two rows of so many columns.
LARGE, WIDE = 300_007, 35_003
INT16 = "int16 with a sum above 2¹¹"  # the last of the further ones: gloo does not know it
_FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
_SCALES = {torch.float32: 2.0**100, torch.float64: 2.0**-800, torch.bfloat16: 2.0**100}
_INTEGERS = torch.uint8, torch.int8, torch.int32, torch.int64
_SMALLEST_HALF = 2.0**-24  # 0 in a dtype with a shorter exponent, and in a sum that starts from a large number


def parts_of_every_kind(n: int) -> dict[str, list[torch.Tensor]]:
    """By name: the n ranks' tensors, contiguous, of different shapes."""
    ranks, last = range(n), n - 1
    by_name = {
        "float32 with NaN, infinity and -0.0": lambda rank: torch.tensor(
            [
                torch.nan if rank == 0 else 1.0,
                torch.inf if rank == last else rank,
                torch.inf if rank == last else -torch.inf,
                3e38,
                -0.0,
            ]
        ),
        "float64, 2 × 2": lambda rank: (
            torch.tensor([[1 + 2.0**-40, 2.0**-800], [-1.0, 2.0**-40]], dtype=torch.float64) * (rank + 1)
        ),
        "float16 with a sum that is too large": lambda rank: torch.tensor(
            [257.0, 60000.0, -60000.0, _SMALLEST_HALF * (rank + 1), rank], dtype=torch.float16
        ),
        "bfloat16, 2 × 3": lambda rank: (torch.arange(6.0, dtype=torch.bfloat16).view(2, 3) + rank) * 2.0**100,
        "uint8 with a sum above 255": lambda rank: torch.tensor([200 + rank, rank], dtype=torch.uint8),
        "int64 above 2⁵³, a scalar, 0 on rank 0": lambda rank: torch.tensor((2**55 + 1) * rank),
        "complex64": lambda rank: torch.tensor([1 + 2j, -3j]) * (rank + 1),
        "no elements, 0 × 3": lambda rank: torch.zeros(0, 3),
    }
    return {name: [part(rank) for rank in ranks] for name, part in by_name.items()}


def odd_numbers() -> torch.Tensor:
    """Zeros, NaN and infinity; of the last NaN every operation of arithmetic changes the bits."""
    odd = torch.tensor([0.0, torch.nan, -0.0, torch.inf, 0.0, torch.nan])
    odd[-1:].view(torch.int32).fill_(0x7F800001)
    return odd


def parts_of_further_dtypes(n: int) -> dict[str, list[torch.Tensor]]:
    """By name, as above: other dtypes of numbers, and tensors of many elements."""
    by_name = {
        "int8": lambda rank: torch.tensor([100 + rank, -rank, 0 if rank else -128], dtype=torch.int8),
        "int32 above 2²⁴": lambda rank: torch.tensor([2**25 + 1, 2**30 + rank, -rank], dtype=torch.int32).view(
            1, 3, 1, 1
        ),
        "-0.0 on all ranks": lambda rank: torch.tensor([-0.0, rank]),
        "20,003 elements of float32": lambda rank: torch.arange(20_003.0) + 2**18 * rank + 1,
        "20,003 elements of float64": lambda rank: torch.arange(20_003, dtype=torch.float64) + 2.0**40 * rank + 1,
        INT16: lambda rank: torch.tensor([2**12 + 1, 30_000 * rank % 2**15], dtype=torch.int16),
    }
    return {name: [part(rank) for rank in range(n)] for name, part in by_name.items()}


def parts_drawn(n: int, generator: torch.Generator, largest: int = 66_000) -> dict[str, list[torch.Tensor]]:
    """By name, as above: one tensor of each dtype that gloo adds, of sizes of every magnitude.

    Whole numbers: integers that wrap around, and others times a power of 2, of which the sum is exact.
    """
    drawn, dtypes = {}, (*_FLOATS, *_INTEGERS)
    first = int(torch.randint(0, len(dtypes), (), generator=generator))
    for place, dtype in enumerate(dtypes):
        part = (place + first) % len(dtypes)  # of all sizes: one is 1, one is close to the largest
        size = int(largest ** ((part + float(torch.rand((), generator=generator))) / len(dtypes))) if part else 1
        size = largest if part == len(dtypes) - 1 else size
        shape = [(size,), (1, size), (size, 1, 1)][size % 3]
        least, most = (-8, 8) if dtype.is_floating_point else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        numbers = torch.randint(least, most, (n, *shape), generator=generator).to(dtype) * _SCALES.get(dtype, 1)
        drawn[f"{str(dtype).removeprefix('torch.')} of drawn size"] = list(numbers)
    return drawn


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """Their sum as torch forms it: integers wrap around."""
    return functools.reduce(torch.add, parts)


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    """In the block, float64 is the default dtype: for answers whose dtypes that should not decide.

    It stands around the trial's call, not in it: so an answer that sets another one is found.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""Meshes of hosts and ranks, and a tensor for each rank: inputs for lesson 16. The sum is the same in every order."""

import functools
import math
from dataclasses import dataclass

import torch

from scratch_ddp.course.inputs.every_kind import LARGE, parts_drawn, parts_of_every_kind, parts_of_further_dtypes

_SPLITS = [(2, 3), (3, 2), (2, 4), (4, 2), (1, 3), (3, 1), (2, 2), (1, 1), (1, 8), (7, 1)]  # hosts and their ranks
# What gloo adds, not we.
_OF_GLOO = [
    "float32 with NaN, infinity and -0.0",
    "bfloat16, 2 × 3",
    "uint8 with a sum above 255",
    "int64 above 2⁵³, a scalar, 0 on rank 0",
    "complex64",
    "20,003 elements of float32",
    "20,003 elements of float64",
]


@dataclass
class Mesh:
    """names: of the dimensions of `ranks`, "host" and "local" in either order. parts: by rank, its tensor."""

    ranks: torch.Tensor
    names: tuple[str, ...]
    parts: list[torch.Tensor]

    @property
    def hosts(self) -> int:
        return self.ranks.shape[self.names.index("host")]


def drawn_meshes(seed: int) -> dict[str, Mesh]:
    """By case: a tensor of each kind, on some mesh, and a large one."""
    generator = torch.Generator().manual_seed(seed)
    kinds = functools.cache(lambda n: _kinds(n, seed))
    drawn = {}
    for number, kind in enumerate(kinds(1)):
        hosts, local = _SPLITS[(number + seed) % len(_SPLITS)]
        turned, shuffled = torch.randint(2, (2,), generator=generator).tolist()
        n = hosts * local
        order = torch.randperm(n, generator=generator) if shuffled else torch.arange(n)
        shape, names = ((local, hosts), ("local", "host")) if turned else ((hosts, local), ("host", "local"))
        ranks = order.view(shape)
        case = f"{hosts} × {local}, mesh {ranks.tolist()} of {', '.join(names)}; {kind}, seed {seed}"
        drawn[case] = Mesh(ranks, names, kinds(n)[kind])
    large = Mesh(torch.arange(4).view(2, 2), ("host", "local"), _whole_numbers(4, LARGE))
    return drawn | {f"2 × 2, {LARGE:,} elements": large}


def parts_on_hosts(n: int, seed: int, every_kind: bool) -> dict[str, list[torch.Tensor]]:
    """By case: each rank's tensor; every_kind: of several kinds."""
    drawn = int(torch.randint(2 * n, 200, (1,), generator=torch.Generator().manual_seed(seed)))
    shapes = {"one element": (1,), f"{drawn} elements, seed {seed}": (drawn,)}
    if every_kind:
        shapes |= {
            "as many elements again": (drawn,),
            "3 × 5, every second element": (3, 5),
            f"{n - 1} × 0": (n - 1, 0),
        }
    parts = {case: _whole_numbers(n, *shape) for case, shape in shapes.items()}
    parts["5 × 3 of int64, transposed"] = [part.long() * (2**45 + 1) for part in _whole_numbers(n, 5, 3)]
    if every_kind:
        kinds = parts_of_every_kind(n) | parts_of_further_dtypes(n)
        parts |= {kind: kinds[kind] for kind in _OF_GLOO}
    return parts


def _whole_numbers(n: int, *shape: int) -> list[torch.Tensor]:
    return [torch.arange(float(math.prod(shape))).view(shape) * (rank + 3) - 5 * rank + 1 for rank in range(n)]


def _kinds(n: int, seed: int) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    kinds = parts_of_every_kind(n) | parts_drawn(n, generator, 5_000)
    for number, exponent in enumerate(torch.rand(8, generator=generator).tolist()):
        dtype = torch.float64 if number % 4 == 3 else torch.float32
        parts = [part.to(dtype) for part in _whole_numbers(n, int(4000**exponent))]
        kinds[f"elements of drawn number, {number}"] = parts
    kinds |= {"7 × 3, transposed": _whole_numbers(n, 7, 3), "2 × 3 × 4, every second": _whole_numbers(n, 2, 3, 4)}
    return kinds

"""Lesson 17, together: who is in which group of a mesh, which dimension belongs inside, one norm, missing sums."""

from itertools import permutations
from math import prod

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise


def which_ranks(mesh, dim):
    """Return the groups of a dimension: lists of ascending ranks, in a list.

    mesh: the size of each dimension, such as {"dp": 2, "pp": 2, "tp": 2}. Ranks are
    numbered as in a DeviceMesh: the last coordinate changes fastest. Ranks of a group
    have the same coordinate in every dimension but `dim`. Groups are in the order of
    their first ranks. Without torch.
    """
    # How far apart are two neighbours in a group of the last dimension? Of the first?
    names = list(mesh)
    apart = prod(mesh[name] for name in names[names.index(dim) + 1 :])
    firsts = [rank for rank in range(prod(mesh.values())) if rank // apart % mesh[dim] == 0]
    return [[first + place * apart for place in range(mesh[dim])] for first in firsts]


def best_order(mesh, sent, per_host):
    """Return a list of the dimensions' names, in an order that suits the hosts.

    In it the fewest bytes leave hosts; of equal orders, any. mesh: sizes by name.
    sent: by name, the bytes that each rank sends to the next in its group, and the last
    to the first. In your order, too, the last coordinate changes fastest. The first
    per_host ranks are a host, the next per_host another, and so on.
    """

    # which_ranks of a dict in another order gives other groups. How many bytes leave?
    def leaving(order):
        turned = {name: mesh[name] for name in order}
        total = 0
        for name in order:
            for group in which_ranks(turned, name):
                for here, there in zip(group, group[1:] + group[:1], strict=True):
                    total += sent[name] * (here // per_host != there // per_host)
        return total

    return list(min(permutations(mesh), key=leaving))


def mesh_norm(slices, whole, tp):
    """Return the norm of the model's gradient: on every rank the same float.

    It is the root of the sum of all squares in float64, where each element counts once.
    slices: this rank's gradients that no other rank has. whole: those of parameters
    that are not sliced; tp ranks have the same one, and no others. Both are lists, and
    may be empty. Cost: one all-reduce of one number, over all ranks.
    """
    # If all ranks add up all their squares, how often is an element counted?
    total = torch.zeros((), dtype=torch.float64)
    for gradient in slices:
        total += gradient.square().sum()
    for gradient in whole:
        total += gradient.square().sum() / tp
    dist.all_reduce(total)
    return total.sqrt().item()


def with_sums(block, types, rules):
    """Return the block with an f for each I that an operation takes as an R.

    Where operations take x, an I, as an R, they get "f(x)" in its place. In front of
    the first of them stands ("f(x)", "f", "x"). So for every name; the rest stays.
    types: of what is given, by name. Types of outputs come from the rules, as above.
    """
    # An input has a type, and the operation wants one. Have you put in its f already?
    types, mended = dict(types), []
    for output, operation, *inputs in block:
        takes, types[output] = rules[operation]
        for i, name in enumerate(inputs):
            if types[name] + takes[i] == "IR":
                if f"f({name})" not in types:
                    types[f"f({name})"] = "R"
                    mended.append((f"f({name})", "f", name))
                inputs[i] = f"f({name})"
        mended.append((output, operation, *inputs))
    return mended


def _gradients(at):
    several = 3 if at.n == 3 else 2
    for case, sliced, uncut, tp in (
        ("slices alone", 2, 0, several),
        ("some are whole", 2, 1, several),
        ("no tensor parallelism", 1, 2, 1),
        ("rank 0 has none", 2 if at.rank else 0, 0, several),
    ):
        slices = [torch.randn(3, 2, dtype=torch.float64) + at.rank for _ in range(sliced)]
        pair = torch.Generator().manual_seed(at.rank // tp)  # neighbours have the same
        yield case, (slices, [torch.randn(4, dtype=torch.float64, generator=pair) for _ in range(uncut)], tp)


_MESHES = ({"dp": 2, "pp": 2, "tp": 2}, {"dp": 2, "pp": 3, "tp": 4}, {"tp": 4})
_CLUSTERS = (  # each with a single best order
    ({"dp": 4, "pp": 2, "tp": 4}, {"dp": 5, "pp": 1, "tp": 80}, 8),
    ({"dp": 4, "pp": 2, "tp": 4}, {"dp": 50, "pp": 2, "tp": 8}, 8),
    ({"dp": 4, "pp": 2, "tp": 4}, {"dp": 3, "pp": 40, "tp": 2}, 4),
    ({"dp": 8, "pp": 2, "tp": 4}, {"dp": 10, "pp": 9, "tp": 8}, 4),  # what sends most does not fit a host
    ({"dp": 2, "pp": 3, "tp": 4}, {"dp": 2, "pp": 4, "tp": 3}, 4),  # another without the last rank's message
)
_RULES = {"f": ("I", "R"), "columns": ("RV", "V"), "norm": ("II", "I"), "head norm": ("VR", "V")}
_TYPES = {"x": "I", "w": "I", "a": "V", "b": "V"}
_BLOCKS = {
    "an f is there": [("all", "f", "x"), ("q", "columns", "all", "a")],
    "a weight": [("q", "columns", "a", "b"), ("n", "head norm", "q", "w")],  # a is V where R belongs: another mistake
    "used as R, I, R": [("q", "columns", "x", "a"), ("h", "norm", "x", "w"), ("k", "columns", "x", "b")],
    "an output": [("h", "norm", "x", "w"), ("q", "columns", "h", "a"), ("n", "head norm", "q", "w")],
}
_GIVEN = "from itertools import permutations\n\nfrom scratch_ddp.course.lessons.lesson_17 import which_ranks"
EXERCISES = (
    Exercise(which_ranks, [(mesh, dim) for mesh in _MESHES for dim in mesh], given="from math import prod"),
    Exercise(best_order, _CLUSTERS, given=_GIVEN),
    Exercise(mesh_norm, _gradients, close=1e-12),
    Exercise(with_sums, {case: (block, _TYPES, _RULES) for case, block in _BLOCKS.items()}),
)

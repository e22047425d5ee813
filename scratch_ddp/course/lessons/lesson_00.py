"""Lesson 00, ranks: printing as one, and another key for `get`."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial


def print_together(text):
    """Print `text` once, from rank 0, if all ranks pass the same; else each rank its own.

    In the second case rank 2's line is "rank 2: its text". Called by every rank,
    `dist.all_gather_object(texts, text)` fills the list `texts` with the texts of all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    texts = [None] * world_size
    # answer: begin
    dist.all_gather_object(texts, text)
    if len(set(texts)) > 1:
        print(f"rank {rank}: {text}")
    elif rank == 0:
        print(text)
    # answer: end


def examine_print_together(trial: Trial) -> None:
    """V: what is printed when all ranks agree, when all differ, and when only one of them does."""
    odd_one = trial.size - 1
    cases = {
        "all ranks agree": ["ready"] * trial.size,
        "all ranks differ": [f"x = {rank}" for rank in range(trial.size)],
        f"rank {odd_one} differs": ["ready"] * odd_one + ["late"],
        f"rank {odd_one} differs in a capital letter": ["ready"] * odd_one + ["Ready"],
        f"rank {odd_one} differs in a space at the end": ["ready"] * odd_one + ["ready "],
    }
    for case, texts in cases.items():
        mine = texts[trial.rank]
        trial.call(mine, case=case, may_print=True)
        once = [mine] if trial.rank == 0 else []
        trial.value(trial.printed, once if len(set(texts)) == 1 else [f"rank {trial.rank}: {mine}"], "what it prints")
        trial.criterion("value", "" if trial.line_ended else "does not end with a line break", "what it prints")


PRINT_TOGETHER = Exercise(print_together, examine_print_together)


def get(what, dm=None):
    """Look up one fact about this rank, among all ranks or in the one-dimensional mesh `dm`.

    "ws": number of ranks · "pg": the process group · "rank": this rank's number in it ·
    "grank": its number among all ranks · "next": the number, in the group, of the rank that
    follows it; after the last comes 0.
    Cost: nothing is sent.
    """
    group = dist.group.WORLD if dm is None else dm.get_group()
    if what == "ws":
        return dist.get_world_size(group)
    if what == "pg":
        return group
    if what == "rank":
        return dist.get_rank(group)
    if what == "grank":
        return dist.get_rank()
    # answer: begin
    if what == "next":
        return (dist.get_rank(group) + 1) % dist.get_world_size(group)
    # answer: end
    raise ValueError(f"get() knows ws, pg, rank, grank, next; got {what!r}")


def examine_get(trial: Trial) -> None:
    """V: "next" among all ranks and in a mesh, the other keys as before, an unknown key refused; C: nothing is sent."""
    inner = trial.size // 2 if trial.size % 2 == 0 else 1
    mesh = init_device_mesh(trial.device.type, (trial.size // inner, inner), mesh_dim_names=("outer", "inner"))["inner"]
    place = trial.rank % inner
    cases = {
        "next": [("next", None, (trial.rank + 1) % trial.size), ("next", mesh, (place + 1) % inner)],
        "ws": [("ws", None, trial.size), ("ws", mesh, inner)],
        "rank": [("rank", None, trial.rank), ("rank", mesh, place)],
        "grank": [("grank", mesh, trial.rank)],
    }
    for what, dm, expected in (entry for entries in cases.values() for entry in entries):
        where = f", in a mesh of {inner}" if dm is not None else ""
        trial.value(trial.call(what, dm, case=f'get("{what}"){where}'), expected)
        trial.cost(calls={})
    trial.call("left", case='get("left")', raises="ValueError")


GET = Exercise(get, examine_get)
EXERCISES = (PRINT_TOGETHER, GET)

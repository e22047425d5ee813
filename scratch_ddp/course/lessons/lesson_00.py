"""Lesson 00, ranks: printing as one, and another key for `get`."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.course.exercise import Exercise, WrongAnswer
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
    }
    for case, texts in cases.items():
        mine = texts[trial.rank]
        trial.call(mine, case=case, may_print=True)
        once = [mine] if trial.rank == 0 else []
        trial.value(trial.printed, once if len(set(texts)) == 1 else [f"rank {trial.rank}: {mine}"], "what it prints")


PRINT_TOGETHER = Exercise(
    print_together,
    examine_print_together,
    wrong=(
        WrongAnswer(
            "every rank prints",
            fails="value",
            says="Rank 1, all ranks agree: what it prints is ['ready'], should be []. Ranks 0, 2 and 3 too.",
            body="print(text)",
        ),
        WrongAnswer(
            "rank 0 speaks for all, whatever the others have",
            fails="value",
            says="Rank 0, all ranks differ: what it prints is ['x = 0'], should be ['rank 0: x = 0'].",
            body="if rank == 0:\n    print(text)",
        ),
        WrongAnswer(
            "compares with rank 0's text only, so rank 0 never sees a difference",
            fails="value",
            says="Rank 0, all ranks differ: what it prints is ['x = 0']",
            edits={"len(set(texts)) > 1": "text != texts[0]"},
        ),
        WrongAnswer(
            "only rank 0 asks for the texts, and waits for ever",
            fails="runs",
            says="Rank 0 did not come back: after",
            edits={"dist.all_gather_object(texts, text)": "if rank == 0:\n        dist.all_gather_object(texts, text)"},
        ),
    ),
)


def get(what, dm=None):
    """Look up one fact about this rank, among all ranks or in the one-dimensional mesh `dm`.

    "ws": number of ranks · "pg": the process group · "rank": this rank's number in it ·
    "grank": its number among all ranks · "next": the number, in the group, of the rank that
    follows it; after the last comes 0.
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
    """V: "next" among all ranks and in one dimension of a mesh, the other keys as before, an unknown key refused."""
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
    trial.call("left", case='get("left")', raises="ValueError")


GET = Exercise(
    get,
    examine_get,
    wrong=(
        WrongAnswer(
            "forgets that after the last rank comes rank 0",
            fails="value",
            says='Rank 3, get("next"): the result is 4, should be 0.',
            edits={"(dist.get_rank(group) + 1) % dist.get_world_size(group)": "dist.get_rank(group) + 1"},
        ),
        WrongAnswer(
            "counts among all ranks although a mesh is given",
            fails="value",
            says='Rank 1, get("next"), in a mesh of 2: the result is 2, should be 0.',
            edits={"dist.get_rank(group) + 1": "dist.get_rank() + 1", "% dist.get_world_size(group)": "% world_size"},
        ),
        WrongAnswer(
            "the neighbour on the other side",
            fails="value",
            says='Rank 0, get("next"): the result is 3, should be 1.',
            edits={"+ 1": "- 1"},
        ),
        WrongAnswer(
            "answers every other question with the neighbour",
            fails="value",
            says='get("left"): returned, should raise ValueError',
            edits={'    if what == "next":\n        return': "    return"},
        ),
    ),
)
EXERCISES = (PRINT_TOGETHER, GET)

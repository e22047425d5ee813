"""Lesson 00, ranks: printing as one, and another key for `get`."""

import contextlib
import io

import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise


def print_together(text):
    """Print `text` once, from rank 0, if all ranks pass the same text.

    Otherwise each rank prints its own: rank 2 prints "rank 2: " and its text.
    `dist.all_gather_object(texts, text)`, called by all, fills `texts` with all texts.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    texts = [None] * world_size
    # Who knows whether all texts are the same?
    dist.all_gather_object(texts, text)
    if len(set(texts)) > 1:
        print(f"rank {rank}: {text}")
    elif rank == 0:
        print(text)


def _texts(at):
    yield "all ranks agree", ("ready",)
    yield "all ranks differ", (f"x = {at.rank}",)
    yield "only rank 1 differs", ("Ready" if at.rank == 1 else "ready",)


def _printed(answer, text):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        answer(text)
    yield "value", "what it prints", printed.getvalue()


def get(what, dm=None):
    """Look up a fact about this rank, among all ranks or in the one-dimensional `dm`.

    "ws": number of ranks · "pg": the process group · "rank": this rank's number in it ·
    "grank": its number among all ranks · "next": the number, in the group, of the rank
    that follows it; after the last comes 0. Any other key: ValueError.
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
    # Who follows the last?
    if what == "next":
        return (dist.get_rank(group) + 1) % dist.get_world_size(group)
    # end of the answer
    raise ValueError(f"get() knows ws, pg, rank, grank, next; got {what!r}")


def _neighbours(at):
    yield "among all ranks", ("next",)
    rows = 2 if at.n % 2 == 0 else 1
    mesh = at.mesh(column=rows, row=at.n // rows)
    for name in ("row", "column"):
        yield f"in a {name} of a {rows} × {at.n // rows} mesh", ("next", mesh[name])


EXERCISES = (Exercise(print_together, _texts, use=_printed, cost=False), Exercise(get, _neighbours))

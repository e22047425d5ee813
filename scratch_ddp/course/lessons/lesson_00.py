"""Lesson 00, ranks: printing as one, and another key for `get`."""

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial


def print_together(text):
    """Print `text` once, from rank 0, if all ranks pass the same; else each rank its own.

    In the second case rank 2 prints "rank 2: " and its text. Texts are printed as they are,
    of any length and number of lines, and they are the same only if every character is.
    Called by every rank, `dist.all_gather_object(texts, text)` fills `texts` with all texts.
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
    """V: what is printed when all ranks agree, when all differ, and when one of them differs a little."""
    n, long, odd = trial.size, "the loss after 1,000 steps is 0.12345", "  100 %\n\n  %d {}  \n"
    cases = {
        "all ranks agree": ["ready"] * n,
        "all ranks differ, rank 0's text is empty": ["", *(f"x = {rank}" for rank in range(1, n))],
        "the last rank differs in a capital letter": ["ready"] * (n - 1) + ["Ready"],
        "rank 1 differs in the last digits of a long text": [long, long[:-2] + "54", *[long] * (n - 2)],
    }
    if not trial.on_all_ranks:  # an answer that is right there is tried with other texts
        cases = {
            "all ranks pass several lines, spaces and %": [odd] * n,
            "several lines and %, the last rank's ends with a space": [odd] * (n - 1) + [odd + " "],
        }
    for case, texts in cases.items():
        mine = texts[trial.rank]
        trial.call(mine, case=case, may_print=True)
        once = [mine] if trial.rank == 0 else []
        lines = once if len(set(texts)) == 1 else [f"rank {trial.rank}: {mine}"]
        trial.value(trial.printed, [part for line in lines for part in f"{line}\n".splitlines()], "what it prints")
        trial.criterion("value", "" if trial.line_ended else "does not end with a line break", "what it prints")


PRINT_TOGETHER = Exercise(print_together, examine_print_together)


def get(what, dm=None):
    """Look up one fact about this rank, among all ranks or in the one-dimensional mesh `dm`.

    "ws": number of ranks · "pg": the process group · "rank": this rank's number in it ·
    "grank": its number among all ranks · "next": the number, in the group, of the rank that
    follows it; after the last comes 0. Any other key: ValueError.
    Cost: nothing is sent, no group is made.
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
    """V: "next" among all ranks and in two meshes, the other keys as before, unknown keys; C: nothing is sent."""
    inner = trial.size // 2 if trial.size % 2 == 0 else 1
    outer = trial.size // inner
    mesh = init_device_mesh(trial.device.type, (outer, inner), mesh_dim_names=("outer", "inner"))
    cases, expected = {}, []
    for dm, keys, size, place in (
        (None, ("next", "ws", "pg", "rank", "grank"), trial.size, trial.rank),
        (mesh["inner"], ("next", "ws", "pg", "rank", "grank"), inner, trial.rank % inner),
        (mesh["outer"], ("next",), outer, trial.rank // inner),
    ):
        group = dist.group.WORLD if dm is None else dm.get_group()
        answers = {"next": (place + 1) % size, "ws": size, "pg": group, "rank": place, "grank": trial.rank}
        where = "" if dm is None else f', in the mesh "{dm.mesh_dim_names[0]}" of {size}'
        cases |= {f'get("{what}"){where}': (what, dm) for what in keys}
        expected += [answers[what] for what in keys]
    for answer, right in zip(trial.call_each(cases), expected, strict=True):
        trial.value(answer, right)
    trial.cost(calls={})

    def unknown(answer: Callable, *keys: str | None) -> list[str]:
        return [_refusal(answer, what, *given) for given in ((), (mesh["inner"],)) for what in keys]

    for complaint in trial.call("left", "NEXT", "", None, case="unknown keys", using=unknown):
        trial.criterion("value", complaint)


def _refusal(answer: Callable, what: str | None, *mesh: DeviceMesh) -> str:
    """What is wrong with how the answer refuses a key; "" if it raises ValueError."""
    key = "None" if what is None else f'"{what}"'
    asked = f"get({key}{', mesh' if mesh else ''})"
    try:
        answer(what, *mesh)
    except ValueError:
        return ""
    except Exception as error:
        return f"{asked} raised {type(error).__name__}, should raise ValueError"
    return f"{asked} returned, should raise ValueError"


GET = Exercise(get, examine_get)
EXERCISES = (PRINT_TOGETHER, GET)

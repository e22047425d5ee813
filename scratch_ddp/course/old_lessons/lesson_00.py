"""Lesson 00, ranks: printing as one, and another key for `get`."""

import functools
import io
import itertools
import os
import random
import sys
import types
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.course.attempt import in_short
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference, ranks


def print_together(text):
    """Print `text` once, from rank 0, if all ranks pass the same; otherwise each rank prints its own.

    In the second case rank 2 prints "rank 2: " and its text. A text may have any length and
    many lines, and is printed unchanged. Two are the same only if all characters are equal.
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


# What a text may hold that is easily lost, or taken for something else.
_PIECES = [*"\t\r\v\0\u200b😀", "\r\n", "\n\n", "e\u0301", "\u00e9", "  ", "%s", "{}", "\\n", "\x1b[1m", "Straße", "ﬁ"]
_NEARLY_ALIKE: dict[str, Callable[[str], str]] = {
    "in upper and lower case": str.swapcase,
    "in how é is written": functools.partial(unicodedata.normalize, "NFC"),
    "in a ligature": functools.partial(unicodedata.normalize, "NFKC"),
    "in its line ends": lambda text: text.replace("\r\n", "\n"),
    "in what ends a line": lambda text: text.replace("\v", "\n"),
    "in spaces for a tab": str.expandtabs,
    "in the number of spaces": lambda text: text.replace("  ", " "),
    "in a space at its end": lambda text: text + " ",
    "in a NUL at its end": lambda text: text + "\0",
    "in the letter n for a line break": lambda text: text.replace("\n", "n"),
    "in a line break at its end": lambda text: text + "\n",
    "in a line break at its beginning": lambda text: "\n" + text,
    "in a character without width": lambda text: text.replace("\u200b", ""),
    "in a character beyond 16 bits": lambda text: text.replace("😀", chr(ord("😀") & 0xFFFF)),
    "in the order of its characters": lambda text: text[::-1],
}


def _drawn_text(seed: int) -> str:
    """All of `_PIECES`, anywhere in 70,000 characters."""
    drawn = random.Random(seed)
    text = drawn.randbytes(35_000).hex()
    places = sorted(drawn.sample(range(len(text)), len(_PIECES)))
    parts = [text[begin:end] for begin, end in itertools.pairwise([0, *places, len(text)])]
    return parts[0] + "".join(f"{piece}b{part}" for piece, part in zip(_PIECES, parts[1:], strict=True))


def _with_another_character(text: str, place: int) -> str:
    return f"{text[:place]}{chr(ord(text[place]) ^ 1)}{text[place + 1 :]}"


def examine_print_together(trial: Trial) -> None:
    """V: what is printed when all ranks agree, when all differ, and when one of them differs a little."""
    n = trial.size
    cases = {
        "all ranks agree": ["ready"] * n,
        "all ranks differ, rank 0's text is empty": ["", *(f"x = {rank}" for rank in range(1, n))],
    }
    if not trial.on_all_ranks:
        cases = {"the last rank differs in a capital letter": ["ready"] * (n - 1) + ["Ready"]}
    mine = {case: (texts[trial.rank],) for case, texts in cases.items()}
    for case, printed in zip(mine, trial.call_each(mine, using=_printed_by), strict=True):
        trial.criterion("value", _difference_of_texts(printed, _expected(cases[case], trial.rank)), "what it prints")
    if trial.on_all_ranks:
        trial.end_if_wrong()
        makers = {case: functools.partial(_as_arguments, texts) for case, texts in _odd_texts(trial).items()}
        for _, world in tried_in_worlds(trial, makers):
            for rank, printed in enumerate(world.printed):
                wrong = _difference_of_texts(printed, _expected([text for (text,) in world.given], rank))
                trial.criterion("value", wrong, f"{world.place} what rank {rank} prints")


def _odd_texts(trial: Trial) -> dict[str, list[str]]:
    """By case: every rank's text, in worlds of 1 to 5 ranks."""
    generator, by_seed = trial.generator(), f"a text drawn with seed {trial.seed}"
    drawn, short = _drawn_text(trial.seed), "".join(f"a{piece}b" for piece in _PIECES)
    changes = {f"differs {how}": (short, change(short)) for how, change in _NEARLY_ALIKE.items()}
    long = "the loss after 1,000 steps is 0.12345"
    changes["differs in all letters, and not in its CRC-32"] = "plumless", "buckeroo"
    changes["differs in the last digits of a long text"] = long, f"{long[:-2]}54"
    for where, begin in (("", 0), ("the end of ", 66_000)):
        place = int(torch.randint(begin, len(drawn), (), generator=generator))
        changes[f"differs in one character of {where}{by_seed}"] = drawn, _with_another_character(drawn, place)
    place = int(torch.randint(0, len(short), (), generator=generator))
    changes["differs in one character of a short text"] = short, _with_another_character(short, place)
    changes["differs: there is a line break or nothing"] = "\n", ""
    cases = {"all pass what was printed before": ["ready"] * 2}  # the first case is rank 0's
    cases |= {f"all pass {by_seed}": [drawn] * 3, "all pass nothing": [""] * 3, "there is no other": [f"\n {short} \n"]}
    cases["all pass spaces at both ends"] = [f" \n{short}\n "] * 2
    cases["all pass spaces only"] = ["  "] * 2
    cases["each begins with its number"] = [f"rank {rank}: ready" for rank in range(3)]
    for case, (text, other) in changes.items():
        n = int(torch.randint(2, 4, (), generator=generator))
        some = int(torch.randint(1, n, (), generator=generator))
        who = torch.randperm(n, generator=generator)[:some].tolist()
        if "long" in case:
            n, who = 11, [10]
        if "short" in case:
            n, who = 6, [1, 3, 4]
        passed = f"what {ranks(who).lower()} pass{'' if len(who) > 1 else 'es'}"
        cases[f"{passed} {case}"] = [other if rank in who else text for rank in range(n)]
    return cases


def _as_arguments(texts: list[str]) -> list[tuple[str]]:
    return [(text,) for text in texts]


def _expected(texts: list[str], rank: int) -> str:
    if len(set(texts)) > 1:
        return f"rank {rank}: {texts[rank]}\n"
    return f"{texts[rank]}\n" if rank == 0 else ""


def _printed_by(answer: Callable, text: str) -> str:
    before, sys.stdout = sys.stdout, io.StringIO()
    printed = sys.stdout
    try:
        answer(text)
    finally:
        if sys.stdout is printed:  # else it stays, and `call` complains
            sys.stdout = before
    return printed.getvalue()


def _difference_of_texts(printed: str, expected: str) -> str:
    if printed == expected:
        return ""
    if f"{printed}\n" == expected:
        last = "with two line breaks: the text's own and the line's" if printed.endswith("\n") else "with a line break"
        return f"does not end {last}"
    if len(repr(printed.splitlines())) < 80 and printed.splitlines() != expected.splitlines():
        return difference(printed.splitlines(), expected.splitlines())
    same = len(os.path.commonprefix([printed, expected]))
    there, should = printed[same : same + 20], expected[same : same + 20]
    return f"differs from character {same:,} on: is {there!r}, should be {should!r}"


PRINT_TOGETHER = Exercise(print_together, examine_print_together)


def get(what, dm=None):
    """Look up one fact about this rank, among all ranks or in the one-dimensional mesh `dm`.

    "ws": number of ranks · "pg": the process group · "rank": this rank's number in it ·
    "grank": its number among all ranks · "next": the number, in the group, of the rank that
    follows it; after the last comes 0. Any other (hashable) key: ValueError.
    A mesh of more dimensions: the RuntimeError that get_group raises.
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


_UNKNOWN = (
    *("left", "right", "prev", "previous", "n", "nex", "NEXT", "next ", ""),
    *("size", "world_size", "lrank", "ranks", "group", b"next", ("next",), ("ws", "rank"), (), None, 0, 1),
)
_SQUARE = ("next", "in a square mesh")
_OF_A_SQUARE = {"ndim": 2, "shape": (2, 2), "mesh": torch.tensor([[0, 1], [2, 3]]), "mesh_dim_names": ("row", "column")}


class _Square(DeviceMesh):
    """As a mesh of two dimensions answers who asks for its group. That of one dimension is the default group."""

    def __init__(self) -> None:
        """Without groups, which would have to be made."""

    def __getitem__(self, name: str) -> Any:
        return types.SimpleNamespace(ndim=1, get_group=lambda mesh_dim=None: dist.group.WORLD)

    def _group_of(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        if mesh_dim is None:
            raise RuntimeError("this mesh has two dimensions: name one of them")
        return dist.group.WORLD

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)
        if name in _OF_A_SQUARE:
            return _OF_A_SQUARE[name]
        if name == "get_group":
            return functools.partial(_Square._group_of, self)
        raise RuntimeError("this mesh has two dimensions: name one of them")


def examine_get(trial: Trial) -> None:
    """V: "next" among all ranks and in meshes of any order, the other keys, unknown keys; C: nothing is sent."""
    # Keys made at run time: whoever compares them with `is` does not find them.
    everyone, keys = list(range(trial.size)), [*map("".join, map(list, ("next", "ws", "pg", "rank", "grank")))]
    answers = {"next": (trial.rank + 1) % trial.size, "ws": trial.size, "pg": dist.group.WORLD}
    answers |= {"rank": trial.rank, "grank": trial.rank}
    for key, answer in zip(keys, trial.call_each({f'get("{key}")': (key,) for key in keys}), strict=True):
        trial.value(answer, answers[key])
    trial.cost(calls={})
    trial.end_if_wrong()
    gap = _with_gaps(trial) or everyone
    meshes = [_mesh(trial, gap if trial.on_all_ranks else everyone)]
    if not trial.on_all_ranks and trial.size > 1:
        meshes.append(_mesh_of_one(trial))
    cases, expected = {}, []
    for dm, members in meshes:
        given, right = (), {}
        if trial.rank in members:
            place, given = members.index(trial.rank), (dm,)
            right = {"next": (place + 1) % len(members), "ws": len(members), "rank": place, "grank": trial.rank}
            right["pg"] = dm.get_group()
        where = f", in a mesh of {len(members)}: ranks {dm.mesh.tolist()}"
        cases |= {f'get("{key}"){where}': (key, *given) for key in keys}
        expected += [right.get(key) for key in keys]
    cases |= {f'get("{key}"), after calls with a mesh': (key, None) for key in keys}
    expected += [answers[key] for key in keys]
    own = (dm,) if trial.rank in members else ()  # a mesh that this rank is in
    cases["unknown keys"] = (_UNKNOWN,)
    cases["a square mesh"] = (_SQUARE,)

    def asked(answer: Callable, what: object, *mesh: DeviceMesh | None) -> object:
        if what is _UNKNOWN:
            return _refusals(answer, _UNKNOWN) or _refusals(answer, _UNKNOWN, *own)
        if what is _SQUARE:
            return _refusals(answer, keys, _Square(), error=RuntimeError)
        return answer(what, dm=mesh[0]) if mesh else None  # this rank is not in the mesh

    for (what, *_), answer, right in zip(
        cases.values(), trial.call_each(cases, using=asked), [*expected, None, None], strict=True
    ):
        if what is _UNKNOWN or what is _SQUARE:
            trial.criterion("value", answer)
        else:
            trial.value(answer, right)
    trial.cost(calls={})
    if trial.on_all_ranks:
        trial.end_if_wrong()
        numbers = range(5 + trial.seed % 2, 13, 2)
        many = {f'get("next") among {number}': ["next"] * number for number in numbers}
        many["unknown keys"] = [_UNKNOWN] * 3
        makers = {case: functools.partial(_as_arguments, given) for case, given in many.items()}
        for case, world in tried_in_worlds(trial, makers, using=_refused_or_answered):
            for rank, answer in enumerate(world.results):
                if case == "unknown keys":
                    trial.criterion("value", answer, world.place)
                else:
                    trial.value(answer, (rank + 1) % len(world.results), f"{world.place} rank {rank}'s result")


def _refused_or_answered(answer: Callable, what: object) -> object:
    """In one process, where the store of a real group is out of bounds."""
    return _refusals(answer, _UNKNOWN) if what is _UNKNOWN else answer(what)


def _with_gaps(trial: Trial) -> list[int]:
    """Every second rank, as in a column of a square; of two ranks, the second."""
    return list(range(trial.size))[::2] if trial.size > 2 else list(range(trial.size))[1:]


def _mesh(trial: Trial, members: list[int]) -> tuple[DeviceMesh, list[int]]:
    """Of these ranks in falling order, rotated: what follows a rank in its list does not follow it in the group."""
    first = trial.seed % len(members)
    listed = [trial.peer(rank) for rank in (members[first:] + members[:first])[::-1]]
    return DeviceMesh(trial.device.type, listed), members


def _mesh_of_one(trial: Trial) -> tuple[DeviceMesh, list[int]]:
    """Of this rank alone. Each rank makes its own, without the others."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(group, trial.device.type), [trial.rank]


def _refusals(answer: Callable, keys: Iterable, *mesh: DeviceMesh, error: type[Exception] = ValueError) -> str:
    """What is wrong with how the answer refuses the first of these keys that it does not refuse rightly, or ""."""
    return next(filter(None, (_refusal(answer, key, *mesh, error=error) for key in keys)), "")


def _refusal(answer: Callable, what: object, *mesh: DeviceMesh, error: type[Exception]) -> str:
    """What is wrong with how the answer refuses a key or a mesh; "" if it raises this kind of error."""
    key = f'"{what}"' if isinstance(what, str) else repr(what)
    asked = f"get({key}{', mesh' if mesh else ''})"
    try:
        answer(what, *mesh)
    except error:
        return ""
    except Exception as other:
        return f"{asked} raised {in_short(other)}, should raise {error.__name__}"
    return f"{asked} returned, should raise {error.__name__}"


GET = Exercise(get, examine_get)
EXERCISES = (PRINT_TOGETHER, GET)
